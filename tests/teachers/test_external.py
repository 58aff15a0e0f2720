"""Another model as teacher: its own log-probs over the student's vocabulary, and what is refused with what to give instead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from opsd import checkpoints
from opsd.models.base import Lora
from opsd.models.hf import Hf
from opsd.pretrained import Dtype
from opsd.registry import lookup
from opsd.types import LoadedModel, Sequences

SIDE = Sequences(
    ids_BL=torch.tensor([[40, 41, 42, 43, 44, 0, 0], [50, 51, 52, 53, 54, 55, 56]]),
    rows_T=torch.tensor([0, 0, 1, 1]),
    at_T=torch.tensor([3, 4, 4, 5]),
)


def external(path: Path | str, *, dtype: Dtype = Dtype.float32) -> Any:
    return lookup("teacher", "external")(name="external", kind="external", path=str(path), revision=None, dtype=dtype)


def student(directory: Path, *, lora: bool = False) -> tuple[Hf, LoadedModel]:
    adapters = Lora(r=4, alpha=8.0, dropout=0.0, targets=["q_proj"]) if lora else None
    values: dict[str, Any] = {"path": str(directory), "revision": None, "dtype": Dtype.float32, "context": None, "lora": adapters}
    model = Hf(name="x", kind="hf", **values)
    return model, model.load(seed=0, device="cpu")


def refusal(path: Path | str, *, context: int = 512) -> str:
    with pytest.raises(ValueError) as caught:
        external(path).check(context=context)
    return str(caught.value)


def build_refusal(path: Path, loaded: LoadedModel) -> str:
    with pytest.raises(ValueError) as caught:
        external(path).build(loaded)
    return str(caught.value)


@pytest.fixture
def copied(wider: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wider, tmp_path / "teacher"))


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_log_probs_are_the_model_s_own_over_the_student_s_vocabulary(model_directory: Path, wider: Path, lora: bool, dtype: Dtype):
    _, loaded = student(model_directory, lora=lora)
    external(wider).check(context=loaded.context)
    generator = torch.random.get_rng_state()
    teacher = external(wider, dtype=dtype).build(loaded)
    assert torch.equal(torch.random.get_rng_state(), generator)
    found = teacher.hidden(SIDE)
    assert (found.shape[1], found.dtype, found.requires_grad) == (48, getattr(torch, dtype.value), False)
    plain = AutoModelForCausalLM.from_pretrained(wider, dtype=getattr(torch, dtype.value)).eval()
    assert plain.config.vocab_size > len(loaded.head_VH) == len(teacher.head_VH)
    with torch.no_grad():
        for row, length in ((0, 5), (1, 7)):  # each row alone, without padding
            mine = SIDE.rows_T == row
            hidden_TH = plain.get_decoder()(input_ids=SIDE.ids_BL[row : row + 1, :length]).last_hidden_state[0, SIDE.at_T[mine]]
            logits_TV = hidden_TH.double() @ plain.lm_head.weight.double().T
            wanted = logits_TV[:, : len(loaded.head_VH)].log_softmax(-1)
            logps_TV = (found[mine].double() @ teacher.head_VH.double().T).log_softmax(-1)
            torch.testing.assert_close(
                logps_TV, wanted, **({"rtol": 1e-5, "atol": 1e-5} if dtype is Dtype.float32 else {"rtol": 0.05, "atol": 0.1})
            )
    teacher.load_state(teacher.state())
    with torch.no_grad():
        next(teacher.model.parameters())[0, 0] += 0.5
    with pytest.raises(ValueError, match=r"^teacher.path=.*: holds other weights than those this run began with"):
        type(teacher)(teacher.model, origin=f"teacher.path={wider}").load_state(teacher.state())


def test_the_student_s_own_directory_is_the_initial_teacher(model_directory: Path):
    _, loaded = student(model_directory)
    initial = lookup("teacher", "initial")(name="initial", kind="initial").build(loaded)
    teacher = external(model_directory).build(loaded)
    with torch.no_grad():
        loaded.head_VH.add_(1)
    assert torch.equal(teacher.hidden(SIDE), initial.hidden(SIDE))
    assert torch.equal(teacher.head_VH, initial.head_VH)


def test_refusals_of_directories(copied: Path, tmp_path: Path):
    here = f"teacher.path={copied}: "
    assert refusal("./missing") == (
        "teacher.path=./missing: there is no such directory; give a local model directory, or a hub model as owner/name."
    )
    assert refusal(copied / "config.json").endswith("is a file; give the directory that holds config.json and the weights.")
    assert refusal(copied, context=513) == (
        f"{here}attends to 512 tokens, and prompt and response may take model.context=513; set model.context=512, or give a model "
        "with a longer context."
    )
    external(copied).check(context=512)
    weights = (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert refusal(copied).startswith(f"{here}has only pickled weights (pytorch_model.bin)")
    weights.unlink()
    assert refusal(copied) == f"{here}{copied} holds no weights (model*.safetensors); give a complete model directory."
    (copied / "config.json").unlink()
    assert refusal(copied).startswith(f"{here}{copied} holds no config.json, so it is no model")


def test_adapters_runs_and_checkpoints_say_what_to_give_instead(model_directory: Path, tmp_path: Path):
    """Saved as runs save them."""
    merge = "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(NEW), its tokenizer beside it."
    for lora, inner in ((False, "model"), (True, "adapter")):
        run_dir = tmp_path / inner
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text("format: 2\n")
        assert refusal(run_dir) == f"teacher.path={run_dir}: is a run directory without a checkpoint; give a model directory."
        _, loaded = student(model_directory, lora=lora)
        facts = {"elapsed_s": 0.0, "mlflow_run_id": "", "engine": "torch", "processes": 1, "problems": ""}
        progress = checkpoints.Progress(step=7, position=[[0, 0]], **facts)
        checkpoint = checkpoints.save(run_dir, progress, loaded=loaded, groups={}, keep=1)
        for path, kind in ((run_dir, "a run directory"), (checkpoint, "a checkpoint")):
            if lora:
                assert refusal(path) == (
                    f"teacher.path={path}: is {kind} with the adapter {checkpoint / inner}; merge that into its base once and give "
                    f"the result: {merge}"
                )
            else:
                assert refusal(path) == f"teacher.path={path}: is {kind}, no model; set teacher.path={checkpoint / inner}."
        if not lora:
            external(checkpoint / inner).check(context=512)
            assert torch.equal(external(checkpoint / inner).build(loaded).head_VH, loaded.head_VH)
    adapter = tmp_path / "adapter" / "checkpoints" / "step_000007" / "adapter"
    assert (
        refusal(adapter)
        == f"teacher.path={adapter}: is an adapter, no whole model; merge it into its base once and give that: {merge}"
    )


def test_a_merged_adapter_is_a_teacher(model_directory: Path, tmp_path: Path):
    """What the refusal says to do, done: it scores as the adapted student did."""
    from peft import AutoPeftModelForCausalLM

    _, loaded = student(model_directory, lora=True)
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    loaded.model.save_pretrained(str(tmp_path / "adapter"))
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(model_directory).save_pretrained(tmp_path / "merged")
    live = lookup("teacher", "live")(name="live", kind="live").build(loaded)
    merged = external(tmp_path / "merged").build(loaded)
    torch.testing.assert_close(merged.hidden(SIDE), live.hidden(SIDE), rtol=1e-4, atol=1e-5)


def test_another_vocabulary_is_refused_with_counts_and_examples(model_directory: Path, copied: Path):
    _, loaded = student(model_directory)
    size = len(loaded.tokenizer.get_vocab())
    tail = "; the teacher reads the student's token ids, so give a model with the student's tokenizer."
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.add_tokens(["<tool>", "<more>"])
    tokenizer.save_pretrained(copied)
    external(copied).check(context=512)
    assert build_refusal(copied, loaded) == (
        f"teacher.path={copied}: its vocabulary is not the student's: of {size} tokens here and {size + 2} there, 2 unknown to the "
        f"student (such as '<tool>'){tail}"
    )
    written = json.loads((copied / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    one, other = [token for token, place in vocabulary.items() if place in (50, 51)]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    written["added_tokens"] = [
        token for token in written["added_tokens"] if token["content"] not in ("<tool>", "<more>", "<think>")
    ]
    for token in written["added_tokens"]:
        token["id"] -= token["content"] == "</think>"
    (copied / "tokenizer.json").write_text(json.dumps(written))
    message = build_refusal(copied, loaded)
    assert (
        f"of {size} tokens here and {size - 1} there, 1 missing there (such as '<think>'), 3 under another id (such as " in message
    )
    assert "unknown" not in message


def test_a_head_that_is_too_small_is_refused(model_directory: Path, copied: Path):
    _, loaded = student(model_directory)
    weights = load_file(copied / "model.safetensors")
    rows = len(loaded.head_VH) - 1
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:rows].clone()
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    assert build_refusal(copied, loaded) == (
        f"teacher.path={copied}: its embeddings have {rows} rows and the student's head has {rows + 1}, so that it cannot score "
        "all that the student can say; give a model with at least as many."
    )


def test_a_context_that_only_the_loaded_model_tells(model_directory: Path, tmp_path: Path):
    """GPT-2's config.json calls it n_positions, so that the launch cannot see it; building does."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _, loaded = student(model_directory)
    for positions in (511, 512):
        directory = tmp_path / str(positions)
        config = GPT2Config(vocab_size=len(loaded.head_VH), n_positions=positions, n_embd=16, n_layer=1, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(directory)
        for file in model_directory.glob("*token*"):
            shutil.copy(file, directory)
        external(directory).check(context=512)
    assert "attends to 511 tokens, and prompt and response may take model.context=512" in build_refusal(tmp_path / "511", loaded)
    assert external(tmp_path / "512").build(loaded).hidden(SIDE).shape == (4, 16)


def test_a_capped_head_is_refused(model_directory: Path, tmp_path: Path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    _, loaded = student(model_directory)
    config = Gemma2Config(
        vocab_size=len(loaded.head_VH),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=1.0,
        initializer_range=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    for file in model_directory.glob("*token*"):
        shutil.copy(file, tmp_path)
    assert build_refusal(tmp_path, loaded).startswith(f"teacher.path={tmp_path}: the logits of Gemma2ForCausalLM are not")


def test_a_hub_out_of_reach_is_one_message(endpoint: str, tmp_path: Path):
    code = (
        "import sys\n"
        "from opsd.pretrained import Dtype\n"
        "from opsd.teachers.external import External\n"
        "try:\n"
        "    External(name='x', kind='external', path='Qwen/Qwen3-8B', revision='v1', dtype=Dtype.float32).check(context=8)\n"
        "except ValueError as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("teacher.path=Qwen/Qwen3-8B (revision v1): the hub cannot be reached (")
    assert done.stdout.strip().endswith("set teacher.path=DIRECTORY to a local model. False")


def test_another_vocabulary_is_refused_before_anything_is_written(wider: Path, tmp_path: Path, tokenizer):
    external(wider).check_vocabulary(tokenizer)
    copied = tmp_path / "copied"
    shutil.copytree(wider, copied)
    other = AutoTokenizer.from_pretrained(copied)
    other.add_tokens(["<tool>"])
    other.save_pretrained(copied)
    with pytest.raises(ValueError, match=r"^teacher.path=.*1 unknown to the student \(such as '<tool>'\)"):
        external(copied).check_vocabulary(tokenizer)
