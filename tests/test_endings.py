"""What a run that cannot go on says, and that it says it early."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from opsd.checkpoints import read_progress
from opsd.endings import explain
from opsd.stream import ProblemStream
from opsd.types import Pool, Problem, Prompt

PROBLEMS = [Problem(id=str(n), text="?" * n, solution="!", answer="!") for n in range(4)]
POOLS = [Pool(name="all", share=1.0, problems=PROBLEMS)]


def rendered(problem: Problem, *, least: int) -> Prompt | None:
    return (
        Prompt(problem=problem, student_ids=[1], teacher_ids=[1], shortened=False, analysis_ids=None)
        if int(problem.id) >= least
        else None
    )


def test_the_first_prompt_that_fits_is_found_without_drawing_one() -> None:
    stream = ProblemStream(pools=POOLS, render=lambda problem: rendered(problem, least=2), seed=0)
    assert stream.first().problem.id == "2" and stream.position == [[0, 0]]


def test_problems_that_are_all_too_long_are_refused() -> None:
    stream = ProblemStream(pools=POOLS, render=lambda problem: rendered(problem, least=9), seed=0)
    said = r"^data: all 4 problems of all are too long for the context beside rollout.max_len, or for prompt.max_teacher_tokens"
    with pytest.raises(ValueError, match=said):
        stream.first()
    with pytest.raises(ValueError, match=said):
        stream.take(1)


def test_a_full_disk_is_told_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    message = explain(OSError(errno.ENOSPC, "No space left on device"))
    assert message == "the run directory: cannot be written (No space left on device); free space there"
    assert capsys.readouterr().err == ""


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=rf"^checkpoint={tmp_path}: is damaged \(.*; remove it, and the one before it is used"):
        read_progress(tmp_path)
