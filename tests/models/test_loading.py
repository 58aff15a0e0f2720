"""Loading: what is trainable in which dtype, where logits come from, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from opsd.models.base import Lora
from opsd.models.hf import Hf
from opsd.models.tiny import Tiny
from opsd.pretrained import Dtype, require_plain_head

TARGETS = ["q_proj", "v_proj", "down_proj"]
CONF = Path(__file__).parents[2] / "conf" / "model"


def lora(**changes) -> Lora:
    return Lora(**({"r": 4, "alpha": 8.0, "dropout": 0.0, "targets": TARGETS} | changes))


def hf(path: Path | str, **changes) -> Hf:
    values = {"name": "x", "kind": "hf", "path": str(path), "revision": None, "dtype": Dtype.float32, "context": None, "lora": None}
    return Hf(**(values | changes))


def refusal(model: Hf) -> str:
    with pytest.raises(ValueError) as caught:
        model.check()
    return str(caught.value)


@pytest.fixture
def copied(model_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory, tmp_path / "model"))


def logits(model, ids_BL: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids_BL).logits.float()


IDS_BL = torch.tensor([[5, 9, 200, 33, 17, 4]])


def test_full_fine_tuning(model_directory: Path, random_model):
    assert hf(model_directory).check() == 512
    state = torch.random.get_rng_state()
    loaded = hf(model_directory).load(seed=0, device="auto" if not torch.cuda.is_available() else "cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (loaded.context, loaded.lora, loaded.device.type) == (512, False, "cpu")
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.model.parameters())
    assert not any(module.training for module in loaded.model.modules())
    assert torch.equal(logits(loaded.model, IDS_BL), logits(random_model.model, IDS_BL))
    hidden_BLH = loaded.body(input_ids=IDS_BL).last_hidden_state
    torch.testing.assert_close(hidden_BLH @ loaded.head_VH.T, loaded.model(input_ids=IDS_BL).logits)
    assert loaded.head_VH is loaded.model.get_input_embeddings().weight  # tied, and one parameter
    assert loaded.stop_ids == [loaded.tokenizer.eos_token_id] == [loaded.tokenizer.pad_token_id]
    assert hf(model_directory, context=100).check() == hf(model_directory, context=100).load(seed=0, device="cpu").context == 100


def test_adapters_are_fp32_over_a_frozen_bf16_base_and_start_from_nothing(model_directory: Path):
    bare = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
    state = torch.random.get_rng_state()
    loaded = hf(model_directory, dtype=Dtype.bfloat16, lora=lora(dropout=0.5)).load(seed=7, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    trained = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert all(p.dtype == torch.bfloat16 for name, p in loaded.model.named_parameters() if name not in trained)
    # two layers: q 32->32, v 32->16, down 64->32, each r * (in + out)
    assert sum(p.numel() for p in trained.values()) == 2 * 4 * ((32 + 32) + (32 + 16) + (64 + 32))
    assert torch.equal(logits(loaded.model, IDS_BL), logits(bare, IDS_BL))
    with torch.no_grad():
        for name, p in trained.items():
            if "lora_B" in name:
                p.fill_(0.5)
    changed = logits(loaded.model, IDS_BL)
    assert (changed - logits(bare, IDS_BL)).abs().max() > 0.1
    hidden_BLH = loaded.body(input_ids=IDS_BL).last_hidden_state  # the body holds the adapters too
    assert torch.equal((hidden_BLH @ loaded.head_VH.T).float(), changed)
    with loaded.model.disable_adapter():
        assert torch.equal(logits(loaded.model, IDS_BL), logits(bare, IDS_BL))
    assert torch.equal(logits(loaded.model, IDS_BL), changed)  # eval mode: no dropout
    loaded.model.train()
    assert not torch.equal(logits(loaded.model, IDS_BL), changed)  # model.lora.dropout acts in training


def test_the_seed_decides_the_adapters(model_directory: Path):
    def first(seed: int) -> torch.Tensor:
        loaded = hf(model_directory, lora=lora()).load(seed=seed, device="cpu")
        return next(p for name, p in loaded.model.named_parameters() if "lora_A" in name)

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def test_an_adapter_checkpoint_goes_on_training(model_directory: Path, tmp_path: Path):
    model = hf(model_directory, lora=lora())
    assert model.has_adapters
    loaded = model.load(seed=0, device="cpu")
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    loaded.model.save_pretrained(tmp_path / "adapter")
    again = model.load(seed=99, device="cpu", checkpoint=str(tmp_path / "adapter"))
    assert torch.equal(logits(again.model, IDS_BL), logits(loaded.model, IDS_BL))
    names = [name for name, p in again.model.named_parameters() if p.requires_grad]
    assert names == [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="adapter: holds no adapter_model.safetensors; an adapter is needed"):
        model.load(seed=0, device="cpu", checkpoint=str(tmp_path / "adapter"))


def test_a_whole_checkpoint_stands_in_for_the_weights(model_directory: Path, tmp_path: Path):
    model = hf(model_directory)
    assert not model.has_adapters
    loaded = model.load(seed=0, device="cpu")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.mul_(1.5)
    loaded.model.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    assert len(list((tmp_path / "whole").glob("model-*.safetensors"))) > 1
    again = model.load(seed=0, device="cpu", checkpoint=str(tmp_path / "whole"))
    assert torch.equal(logits(again.model, IDS_BL), logits(loaded.model, IDS_BL))
    assert again.head_VH is again.model.get_input_embeddings().weight
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: holds no config.json and no model\*.safetensors; a whole model is needed"):
        model.load(seed=0, device="cpu", checkpoint=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="whole: holds no adapter_config.json and no adapter_model.safetensors"):
        hf(model_directory, lora=lora()).load(seed=0, device="cpu", checkpoint=str(tmp_path / "whole"))


def test_the_embedded_model_is_a_whole_one():
    values = yaml.safe_load((CONF / "tiny.yaml").read_text())
    tiny = Tiny(**(values | {"dtype": Dtype[values["dtype"]]}))
    assert tiny.check() >= 4096
    loaded = tiny.load(seed=0, device="cpu")
    assert sum(p.numel() for p in loaded.model.parameters()) < 2_000_000


def test_a_head_that_is_no_plain_product_is_refused(random_model):
    tiny: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    capped = Gemma2Config(**tiny, num_key_value_heads=1, head_dim=8, final_logit_softcapping=1.0, initializer_range=0.5)
    with pytest.raises(
        ValueError, match="model.path=g: the logits of Gemma2ForCausalLM are not hidden states times output embedding"
    ):
        require_plain_head(Gemma2ForCausalLM(capped), "model.path=g")
    biased = PhiForCausalLM(PhiConfig(**tiny))
    require_plain_head(biased, "model.path=p")  # its bias starts at zero
    torch.nn.init.constant_(biased.lm_head.bias[:1], 1.0)
    with pytest.raises(ValueError, match="PhiForCausalLM"):
        require_plain_head(biased, "model.path=p")
    require_plain_head(random_model.model, "model.path=q")


def test_targets_without_a_layer_name_those_that_exist(model_directory: Path):
    with pytest.raises(ValueError) as caught:
        hf(model_directory, lora=lora(targets=["q_proj", "query"])).load(seed=0, device="cpu")
    assert str(caught.value) == (
        "model.lora.targets: x has no linear layer 'query' to adapt; "
        "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj."
    )


def test_refusals_of_values(model_directory: Path):
    with pytest.raises(
        ValueError, match="^model.dtype=bfloat16 with model.lora=null: .* set model.dtype=float32, or train adapters"
    ):
        hf(model_directory, dtype=Dtype.bfloat16)
    with pytest.raises(ValueError, match="^model.context=0: must be at least 1"):
        hf(model_directory, context=0)
    for changes in ({"r": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"targets": []}):
        with pytest.raises(ValueError, match=f"^model.lora.{next(iter(changes))}="):
            lora(**changes)
    assert refusal(hf(model_directory, context=513)).startswith("model.context=513: exceeds the 512 positions")


def test_refusals_of_directories(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    here = f"model.path={copied}: "
    for missing in ("missing", "./missing", "~/a/b", "/a/b", "a/b/c"):
        assert refusal(hf(missing)) == (
            f"model.path={missing}: there is no such directory; give a local model directory, or a hub model as owner/name."
        )
    assert refusal(hf(copied / "config.json")).endswith("is a file; give the directory that holds config.json and the weights.")
    (copied / "tokenizer.json").unlink()
    (copied / "tokenizer_config.json").unlink()
    assert refusal(hf(copied)).startswith(f"{here}{copied} holds no tokenizer")
    weights = (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert refusal(hf(copied)).startswith(f"{here}has only pickled weights (pytorch_model.bin), and unpickling can run any code; ")
    weights.unlink()
    assert refusal(hf(copied)).startswith(f"{here}{copied} holds no weights (model*.safetensors)")
    (copied / "config.json").write_text("{}")
    (copied / "model.safetensors").touch()
    (copied / "tokenizer.json").touch()
    assert refusal(hf(copied)) == f"{here}its config.json has no max_position_embeddings; set model.context."
    (copied / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(hf(copied))
    (copied / "config.json").unlink()
    assert "holds no config.json" in refusal(hf(copied))


def test_weights_that_are_broken_or_incomplete_are_refused(copied: Path):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if "norm" not in name}, copied / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights \(.*norm.weight, ...\)"):
        hf(copied).load(seed=0, device="cpu")
    (copied / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="^model.path=.*: transformers cannot load"):
        hf(copied).load(seed=0, device="cpu")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(
        json.dumps(config | {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}})
    )
    with pytest.raises(ValueError, match="^model.path=.*: transformers cannot load"):
        hf(copied).load(seed=0, device="cpu")


def test_hub_out_of_reach_is_one_message_within_20_s(endpoint: str, tmp_path: Path):
    code = (
        "import sys\n"
        "from opsd.models.hf import Hf\n"
        "from opsd.pretrained import Dtype\n"
        "model = Hf(name='x', kind='hf', path='Qwen/Qwen3-1.7B', revision=None, dtype=Dtype.float32, context=None, lora=None)\n"
        "try:\n"
        "    model.check()\n"
        "except ValueError as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("model.path=Qwen/Qwen3-1.7B: the hub cannot be reached (")
    assert done.stdout.strip().endswith("set model.path=DIRECTORY to a local model. False")  # and torch was not needed
    assert time.monotonic() - began < 20


def test_hub_out_of_reach_is_answered_from_the_cache(model_directory: Path, tmp_path: Path):
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model_directory, repository / "snapshots" / ("0" * 40))
    code = (
        "from opsd.models.hf import Hf\n"
        "from opsd.pretrained import Dtype\n"
        "model = Hf(name='x', kind='hf', path='some/model', revision=None, dtype=Dtype.float32, context=None, lora=None)\n"
        "print(model.check(), model.load(seed=0, device='cpu').context)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["512", "512"]
