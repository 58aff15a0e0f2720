"""The embedded model is what its script makes, small, and an honest miniature of the method."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from opsd import chat
from opsd.arithmetic import chains
from opsd.config import to_option
from opsd.evaluation.answers import final_box
from opsd.types import Problem, Request, Sampling

ROOT = Path(__file__).parents[1]
TINY = ROOT / "opsd" / "assets" / "tiny"


@pytest.fixture(scope="module")
def tiny():
    return option("model", "tiny").load(seed=0, device="cpu")


def option(group: str, name: str):
    """The typed object of one of conf's files."""
    return to_option(group, yaml.safe_load((ROOT / "conf" / group / f"{name}.yaml").read_text()))


def test_it_is_small_and_safe():
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 8_000_000
    assert {path.suffix for path in TINY.iterdir()} == {".json", ".jinja", ".safetensors"}


def test_the_script_makes_this_tokenizer(tiny):
    from opsd.assets.make_tiny import make_tokenizer, templates

    made = make_tokenizer(templates())
    assert made.get_vocab() == tiny.tokenizer.get_vocab()
    assert made.chat_template == tiny.tokenizer.chat_template
    text = "A dial with the digits 0 to 9 shows 7: caf\u00e9 \\boxed{8}"
    assert made.encode(text) == tiny.tokenizer.encode(text)
    assert made.decode(made.encode(text)) == text


def rate(tiny, prompts: list[list[int]], answers: list[str]) -> float:
    """Percent right over four samples a prompt."""
    sampler = option("rollout", "transformers").build(tiny, processed=False)
    requests = [Request(prompt_ids=ids, seed=4 * i + j) for i, ids in enumerate(prompts) for j in range(4)]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_len=64)
    boxes = [final_box(tiny.tokenizer.decode(r.token_ids)) for r in sampler.generate(requests, sampling=sampling)]
    return 100 * sum(box == answers[i // 4] for i, box in enumerate(boxes)) / len(boxes)


@pytest.mark.parametrize("kind", ["dial", "cards"])
def test_often_wrong_alone_and_right_with_the_solution(tiny, kind):
    drawn = chains(1, kinds=(kind,), split="eval", min_steps=3, max_steps=5)
    problems = [next(drawn) for _ in range(50)]
    answers = [problem.answer for problem in problems]
    plain = option("prompt", "plain")
    both = [
        plain.render(
            Problem(id="x", text=problem.text, solution=problem.solution, answer=problem.answer),
            tokenizer=tiny.tokenizer,
            max_prompt_tokens=4000,
            teacher=True,
        )
        for problem in problems
    ]
    alone = rate(tiny, [prompt.student_ids for prompt in both], answers)
    told = rate(tiny, [prompt.teacher_ids for prompt in both], answers)
    thinking = rate(tiny, [chat.render(tiny.tokenizer, problem.text, thinking=True) for problem in problems], answers)
    assert 15 < alone < 65
    assert told > 95
    assert alone + 8 < thinking < told, "thinking makes it more careful, and the solution more so"
