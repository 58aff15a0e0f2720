"""The two graders on hard answers with known verdicts, against math-verify itself, and under answers that never end."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from opsd.evaluation.answers import canonical, final_box, integer, released_box
from opsd.evaluation.grading import LIMIT_S, Grade, Grader
from opsd.evaluation.worker import compare

BOMBS = ("tower-9", "tower-py", "tower-ten", "factorial-bomb", "binom-bomb", "long-digits", "unclosed-spam", "nested-braces")


@pytest.fixture(scope="module")
def cases(shared) -> dict[str, dict]:
    rows = map(json.loads, (shared / "cases" / "grader_cases.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["id"]: row for row in rows}


@pytest.fixture(scope="module")
def graded(cases) -> dict[str, tuple[Grade, float]]:
    """Every case with the seconds that it took."""
    done = {}
    with Grader() as grader:
        for name, row in cases.items():
            began = time.perf_counter()
            grade = grader.grade(row["response"], row["gold"])
            done[name] = (grade, time.perf_counter() - began)
    return done


@pytest.fixture(scope="module")
def clear(cases) -> dict[str, bool]:
    """The right verdict of every unambiguous case with an AIME answer."""
    return {name: row["correct"] for name, row in cases.items() if row["kind"] == "aime" and not row["ambiguous"]}


def test_strict_is_right_on_every_clear_case(clear, graded):
    assert len(clear) == 85
    assert [name for name, correct in clear.items() if graded[name][0].strict != correct] == []


def test_frozen_is_the_released_rule_faults_included(clear, graded):
    """The clear cases that the released rule gets wrong, and some others: as run through the released evaluator's own functions."""
    wrong = {name for name, correct in clear.items() if graded[name][0].frozen != correct}
    assert wrong == {"pmod", "wrap-01-AoPS", "wrap-02-mathbf", "wrap-08-underline", "wrap-09-spacing", "fbox", "boxed-space-brace"}
    assert graded["think-box-only"][0].frozen  # the whole text is read, thinking included
    assert graded["long-leading-zeros"][0].frozen
    assert graded["percent-sign"][0].frozen
    assert graded["g-tiny"][0].frozen  # equal after rounding to 15 digits
    assert not graded["rtl"][0].frozen


def test_no_answer_takes_long(graded):
    for name in BOMBS:
        grade, seconds = graded[name]
        assert not grade.frozen
        assert seconds < LIMIT_S + 6  # a new worker may have to start first, on a busy machine


def test_an_answer_that_takes_too_long_is_wrong_and_marked():
    with Grader() as grader:
        grader.grade("\\boxed{1/2}", "0.5")
        first = grader.worker
        began = time.perf_counter()
        grade = grader.grade("\\boxed{\\binom{10^{9}}{10^{8}}}", "73")
        assert LIMIT_S <= time.perf_counter() - began < LIMIT_S + 2
        assert not grade.frozen and grade.boxed and grade.unread and first.returncode is not None
        assert grader.grade("\\boxed{1/3}", "\\frac{2}{6}").frozen  # and grading goes on


def test_whole_numbers_need_no_worker():
    """The embedded benchmark's 720 samples."""
    rng = random.Random(0)
    texts = [f"3+4=7. 7-9={digit}. It shows \\boxed{{{digit}}}." for digit in (rng.randrange(10) for _ in range(720))]
    with Grader() as grader:
        began = time.perf_counter()
        grades = [grader.grade(text, "7") for text in texts]
        seconds = time.perf_counter() - began
        assert grader.worker is None
    assert sum(grade.frozen for grade in grades) == sum("{7}" in text for text in texts) > 0
    assert all(grade.frozen == grade.strict and grade.boxed and not grade.unread for grade in grades)
    assert seconds < 1.0  # some 10 ms on an idle core


def test_the_short_way_agrees_with_math_verify():
    rng = random.Random(1)
    grader = Grader()
    for _ in range(400):
        gold = rng.choice(["", "-", "0", "00"]) + str(rng.randrange(10 ** rng.choice([1, 2, 3, 9, 15])))
        answer = rng.choice([gold, f"0{gold.lstrip('-')}", str(-int(gold)), str(int(gold) * 100), str(int(gold) + 1), "0", "-0"])
        assert grader.compare(answer, gold) == compare(answer, gold), (answer, gold)
    assert grader.worker is None


def test_the_worker_is_bare_and_serves_threads():
    with Grader() as grader:
        verdicts = []
        thread = threading.Thread(target=lambda: verdicts.append(grader.compare("\\frac12", "0.5")))
        thread.start()
        thread.join()
        assert verdicts == [(True, True)]
        mapped = Path(f"/proc/{grader.worker.pid}/maps").read_text()
        assert "torch" not in mapped
        grader.worker.kill()  # by the system, say, for its memory
        grader.worker.wait()
        assert grader.compare("\\frac13", "0.5") == (False, True)


@pytest.mark.parametrize(
    ("text", "released", "final"),
    [
        ("\\boxed{1} then \\boxed{2}", "2", "2"),
        ("\\boxed{1} then \\boxed{2", None, None),
        ("\\boxed{1} then \\boxed 2", None, None),
        ("\\boxed{1} then \\boxed {2}", None, "2"),
        ("\\boxed{1} then \\fbox{2}", "1", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{3}}", "3", "3"),
        ("\\boxed{a\\}b}", "a\\", "a\\}b"),
        ("\\boxed{}", "", None),
        ("<think>\\boxed{1}</think> so 1.", "1", None),
        ("<think>\\boxed{1}", "1", None),
        ("<think>\\boxed{1}</think>\\boxed{2}<think>\\boxed{3}", "3", "3"),
        ("no box", None, None),
    ],
)
def test_which_box(text, released, final):
    assert released_box(text) == released
    assert final_box(text) == final


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("1,234,567", 1234567),
        ("1,234,56", None),
        ("12,3456", None),
        ("(1,037)", 1037),
        ("73\\text{ m}", 73),
        ("73\\text{ cm}^2", 73),
        ("73 m", None),  # a variable
        ("73\\mathrm{e}", None),
        ("73\\text{ thousand}", None),
        ("\\text{not } 73", None),
        ("73^2", None),
        ("7^{2}", None),
        ("\\text{7}^2", None),
        ("x=1, y=73", None),
        ("x=1 \\text{ or } x=73", None),
        ("m+n=70+3=73", 73),
        ("x \\ge 73", None),
        ("x >= 73", None),
        ("7.3\\cdot10^1", 73),
        ("7.35\\times10^1", None),
        ("1.0000000000000000000000000000000000001\\times 10^{37}", 10**37 + 1),
        ("2 73", None),
        ("\\frac{73}{1}", None),
        ("73\\%", None),
        ("\N{MINUS SIGN}73", -73),
        ("- 73", -73),
        ("9" * 2000, int("9" * 2000)),
    ],
)
def test_integer_rule(answer, value):
    assert integer(answer) == value


def test_votes_have_one_form():
    assert {canonical(answer) for answer in ("073", "73", "73.0", "\\text{73}", "n = 73", "73^\\circ")} == {"73"}
    assert canonical("\\dfrac{1}{2}") == canonical(" \\frac{1}{2} .") == "\\frac{1}{2}"
    assert canonical("70+3") == "70+3"


def test_a_gold_equation_is_no_integer():
    grader = Grader()
    assert not grader.grade("\\boxed{3x+4y+14=0}", "3x-y+13=0").strict
    assert grader.grade("\\boxed{3x - y + 13 = 0}", "3x-y+13=0").strict
    grader.stop()


def test_command_line(tmp_path):
    rows = [
        {"id": "a", "gold": "73", "response": "\\boxed{073}"},
        {"id": "b", "gold": "73", "response": "\\boxed{\\mathbf{073}}"},
        {"id": "c", "gold": "73", "response": "<think>\\boxed{73}"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "opsd.evaluation.grading", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    graded = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row.pop("seconds") < LIMIT_S + 30 for row in graded)
    assert graded == [
        {"id": "a", "strict": True, "frozen": True, "extracted": "073", "canonical": "73"},
        {"id": "b", "strict": True, "frozen": False, "extracted": "\\mathbf{073}", "canonical": "73"},
        {"id": "c", "strict": False, "frozen": True, "extracted": None, "canonical": None},
    ]
