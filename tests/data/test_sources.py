"""Training problems: from a file, and the embedded ones."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from opsd.arithmetic import SYMBOLS, chains, draw, is_eval, num_texts
from opsd.data.arithmetic import Arithmetic
from opsd.data.base import MaxChars, Overlap
from opsd.data.jsonl import Jsonl

COLUMNS: dict[str, str | None] = {"id": "id", "problem": "problem", "solution": "solution", "answer": "answer"}

OVERLAP = {"overlap": Overlap.refuse, "overlap_words": None}
UNFILTERED = {"keep": None, "max_chars": MaxChars(problem=None, solution=None)}


def jsonl(path: Path | str, **changes) -> Jsonl:
    values = {"name": "jsonl", "kind": "jsonl", "path": str(path), "columns": COLUMNS, "max_rows": None}
    return Jsonl(**(values | OVERLAP | UNFILTERED | changes))


def arithmetic(**changes) -> Arithmetic:
    values = {"name": "x", "kind": "arithmetic", "max_rows": 300, "kinds": ["dial", "cards"], "min_steps": 2, "max_steps": 4}
    return Arithmetic(**(values | OVERLAP | changes))


def test_gsm8k(shared: Path):
    source = jsonl(shared / "data" / "gsm8k_train.jsonl", max_rows=5)
    source.check(needs=frozenset({"solution"}))
    problems = source.load(seed=3).problems
    assert [problem.id for problem in problems] == [f"gsm8k-train-{i}" for i in range(5)]
    assert problems[0].answer == "72"
    assert (
        problems == jsonl(shared / "data" / "gsm8k_train.jsonl").load(seed=0).problems[:5]
    )  # the run shuffles, the source does not


def test_a_solution_is_needed_unless_the_config_says_there_is_none(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"q": "1+1?", "answer": 2}))
    with pytest.raises(ValueError, match=r"line 1 has no column 'solution' .* set data.columns.solution to the column"):
        jsonl(file, columns=COLUMNS | {"problem": "q"}).check(needs=frozenset({"solution"}))
    (problem,) = jsonl(file, columns=COLUMNS | {"problem": "q", "solution": None}).load(seed=0).problems
    assert (problem.text, problem.solution, problem.answer) == ("1+1?", None, "2")
    with pytest.raises(ValueError, match="data.max_rows=0: must be at least 1"):
        jsonl(file, max_rows=0)


def test_what_the_teacher_reads_must_be_there_before_the_run_starts(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    rows = [{"problem": "1+1?", "solution": "It is 2.", "answer": 2}, {"problem": "1+2?", "solution": "It is 3."}]
    file.write_text("\n".join(map(json.dumps, rows)))
    jsonl(file).check(needs=frozenset({"solution"}))
    with pytest.raises(ValueError, match=r"line 2 has no column 'answer'"):
        jsonl(file).check(needs=frozenset({"answer"}))
    with pytest.raises(ValueError, match=r"^data.columns.solution=null: .* say which column"):
        jsonl(file, columns=COLUMNS | {"solution": None}).check(needs=frozenset({"solution"}))


def test_embedded_problems_are_seeded_distinct_and_never_held_out():
    problems = arithmetic().load(seed=1).problems
    assert len(problems) == len({problem.text for problem in problems}) == len({problem.id for problem in problems}) == 300
    assert problems == arithmetic().load(seed=1).problems
    assert problems[:50] == arithmetic(max_rows=50).load(seed=1).problems
    others = {problem.text for problem in arithmetic().load(seed=2).problems}
    assert len(others & {problem.text for problem in problems}) < 30
    assert not any(is_eval(problem.text) for problem in problems)
    held_out = chains(0, kinds=("dial", "cards"), split="eval", min_steps=2, max_steps=4)
    assert not others & {chain.text for chain in islice(held_out, 300)}


def test_embedded_solutions_are_right():
    """Worked again from the written text alone."""
    compute = {"+": lambda a, b: (a + b) % 10, "-": lambda a, b: (a - b) % 10, ">": max, "<": min}
    for problem in arithmetic().load(seed=5).problems:
        assert problem.solution is not None
        digits = [int(digit) for digit in re.findall(r"(?<!\w)\d(?!\w)", problem.text.replace("digits 0 to 9", ""))]
        steps = re.findall(r"(\d)([-+<>])(\d)=(\d)\.", problem.solution)
        value = digits[0]
        for (left, symbol, right, result), digit in zip(steps, digits[1:], strict=True):
            assert (int(left), int(right)) == (value, digit)
            value = compute[symbol](value, digit)
            assert int(result) == value
        assert problem.answer == str(value)
        assert problem.solution.endswith(f"\\boxed{{{value}}}.")


def test_how_many_texts_there_are():
    rng, texts = random.Random(0), set()
    for _ in range(60_000):
        texts.add(draw(rng, kind="cards", min_steps=1, max_steps=1).text)
    assert len(texts) == num_texts("cards", min_steps=1, max_steps=1) == 10 * 7 * 10 * len(SYMBOLS["cards"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_rows": 0}, "data.max_rows=0: must be at least 1."),
        ({"kinds": []}, "data.kinds=[]: must name one or more of dial, cards."),
        ({"kinds": ["dials"]}, "data.kinds=['dials']: must name one or more of dial, cards."),
        ({"min_steps": 3, "max_steps": 2}, "data.min_steps=3 with data.max_steps=2: must both be at least 1"),
        ({"max_rows": 701, "kinds": ["cards"], "min_steps": 1, "max_steps": 1}, "data.max_rows=701: at most 700 distinct problems"),
    ],
)
def test_refusals(changes: dict, said: str):
    with pytest.raises(ValueError) as caught:
        arithmetic(**changes)
    assert str(caught.value).startswith(said)
