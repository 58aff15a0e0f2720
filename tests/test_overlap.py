"""Problems that training and evaluation share: planted copies are found, phrases of the trade are not, on real problem sets."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from opsd.overlap import MOST, shared_problems, whole_of, words_of
from opsd.problems import read_jsonl
from opsd.types import Problem

COPIES = {
    "as it is": lambda text: text,
    "after a prefix": lambda text: "Problem: Solve this one. " + text,
    "before an instruction": lambda text: text + "\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "in other LaTeX": lambda text: re.sub(r"\$([^$]*)\$", r"\\( \1 \\)", text).replace("\\frac", "\\dfrac").replace(",", "\\,,"),
    "in another case": str.upper,
    "in other lines": lambda text: text.replace(" ", "\n  "),
    "one word in twenty left out": lambda text: " ".join(word for i, word in enumerate(text.split()) if i % 20 != 19),
    "its last quarter cut off": lambda text: text[: len(text) * 3 // 4],
}


def problem(text: str, name: str = "x") -> Problem:
    return Problem(id=name, text=text, solution=None, answer=None)


def read(shared: Path, name: str) -> list[Problem]:
    path = str(shared / "data" / f"{name}.jsonl")
    return read_jsonl(path, key="data.path", columns={"id": "id", "problem": "problem"}, required=(), max_rows=None)


def test_words_and_characters() -> None:
    text = "Let $x = \\left(\\dfrac{1}{2}\\right)^{n}$,\\quad and\u00a0\\text{odd} \\(y\\)."
    assert words_of(text) == ["let", "x", "frac", "1", "2", "n", "and", "odd", "y"]
    assert whole_of(text) == "letx=(frac12)^nandoddy" == whole_of("LET $x=(\\frac{1}{2})^n$, and odd $y$")
    assert whole_of("Find $3.5-x$.") == "find3.5-x" == whole_of("find 3.5 \u2212 x")


@pytest.mark.parametrize(
    ("one", "other"), [("x+1", "x-1"), ("3.5", "35"), ("\\sin 30", "\\cos 30"), ("5!", "5"), ("x<2", "x>2"), ("10", "1 01")]
)
def test_short_problems_differ_by_one_character(one: str, other: str) -> None:
    evaluation = [problem(f"Compute ${one}$.", "e")]
    assert shared_problems([problem(f"Compute ${other}$.")], evaluation, words=13) == []
    (found,) = shared_problems([problem(f"compute  \\({one}\\)")], evaluation, words=None)
    assert (found.problem_id, found.evaluation_id, found.share) == ("x", "e", 1.0)


def test_the_share_is_of_the_evaluation_problem_and_runs_are_counted_once() -> None:
    told = [f"w{number}" for number in range(20)]
    evaluation = [problem(" ".join(told), "e")]
    for count in range(21):
        shared = shared_problems([problem(" ".join([*told[:count], "else"] * 2))], evaluation, words=5)
        assert len(shared) == (count >= max(5, 20 * MOST))
        if shared:
            assert shared[0].share == count / 20 and shared[0].words == " ".join(told[:count])
    both = [*told[:6], "else", *told[10:16]]  # two runs add up
    assert [pair.share for pair in shared_problems([problem(" ".join(both))], evaluation, words=5)] == [12 / 20]
    assert shared_problems([problem(" ".join(both))], evaluation, words=7) == []
    assert shared_problems([problem(" ".join(both))], evaluation, words=None) == []


def test_the_closest_evaluation_problem_is_named_once_for_each_training_problem() -> None:
    told = [f"w{number}" for number in range(20)]
    evaluation = [problem(" ".join(told[:15] + ["a"] * 5), "near"), problem(" ".join(told[:18] + ["b"] * 2), "nearer")]
    found = shared_problems([problem(" ".join(told), str(number)) for number in range(30)], evaluation, words=4)
    assert [pair.problem_id for pair in found] == [str(number) for number in range(30)]  # also where the copies are many
    assert {(pair.evaluation_id, pair.share) for pair in found} == {("nearer", 18 / 20)}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("benchmark", ["aime24", "aime25"])
def test_every_planted_copy_is_found(shared: Path, benchmark: str, copy: str) -> None:
    evaluation = read(shared, benchmark)
    planted = [problem(COPIES[copy](asked.text), asked.id) for asked in evaluation]
    found = shared_problems(planted, evaluation, words=13)
    assert [(pair.problem_id, pair.evaluation_id) for pair in found] == [(asked.id, asked.id) for asked in evaluation]


def test_one_changed_number_hides_only_the_shortest(shared: Path) -> None:
    evaluation = read(shared, "aime24")

    def changed(text: str) -> str:
        numbers = list(re.finditer(r"\d+", text))
        middle = numbers[len(numbers) // 2]
        return text[: middle.start()] + "9" + text[middle.start() :]

    planted = [problem(changed(asked.text), asked.id) for asked in evaluation if re.search(r"\d", asked.text)]
    assert len(shared_problems(planted, evaluation, words=13)) >= len(planted) - 1


@pytest.mark.parametrize("benchmark", ["aime24", "aime25"])
def test_phrases_of_the_trade_are_no_copies(shared: Path, benchmark: str) -> None:
    """Of 969 earlier AIME problems 194 have 13 words in a row with one of these 60; none is one of them."""
    evaluation = read(shared, benchmark)
    for training in ("aime_1983_2023", "gsm8k_train", "math500"):
        assert shared_problems(read(shared, training), evaluation, words=13) == []


def test_real_repetitions_are_found(shared: Path) -> None:
    """MATH-500 asks two earlier AIME problems with an ending of its own."""
    found = shared_problems(read(shared, "aime_1983_2023"), read(shared, "math500"), words=13)
    assert {pair.problem_id: (pair.evaluation_id, round(pair.share, 2)) for pair in found} == {
        "aime-2002-1-12": ("test/intermediate_algebra/1063.json", 0.9),
        "aime-2016-1-10": ("test/intermediate_algebra/345.json", 0.98),
    }


def test_thirty_thousand_problems_take_seconds(shared: Path) -> None:
    evaluation, earlier = read(shared, "aime24"), read(shared, "aime_1983_2023")
    many = [problem(asked.text, str(number)) for number, asked in enumerate(earlier * 31)]
    places = sorted(random.Random(0).sample(range(len(many)), 5))
    for place, asked in zip(places, evaluation, strict=False):
        many[place].text = "Consider: " + asked.text
    began = time.process_time()
    found = shared_problems(many, evaluation, words=13)
    assert [pair.problem_id for pair in found] == [str(place) for place in places]
    assert time.process_time() - began < 20  # 3 s on an idle core
