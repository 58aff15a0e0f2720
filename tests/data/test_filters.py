"""Rows left out by `keep` and `max_chars`: which, counted for which reason, and what each mistake says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from opsd.data.base import MaxChars, Overlap
from opsd.data.jsonl import Jsonl

COLUMNS: dict[str, str | None] = {"id": "id", "problem": "problem", "solution": "solution", "answer": "answer"}


def rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"problem": "1+1?", "solution": "2"} | row) + "\n" for row in rows))
    return path


def jsonl(path: Path, *, keep: dict[str, Any] | None = None, problem: int | None = None, solution: int | None = None, **changes):
    limits = MaxChars(problem=problem, solution=solution)
    values = {"name": "jsonl", "kind": "jsonl", "path": str(path), "columns": COLUMNS, "max_rows": None, "max_chars": limits}
    return Jsonl(**(values | {"overlap": Overlap.refuse, "overlap_words": 13, "keep": keep} | changes))


def loaded(source: Jsonl) -> tuple[list[str], dict[str, int]]:
    source.check(needs=frozenset({"solution"}))
    found = source.load(seed=0)
    return [problem.id for problem in found.problems], {reason: count for reason, count in found.counts.items() if count}


def refused(source: Jsonl) -> str:
    with pytest.raises(ValueError) as caught:
        source.check(needs=frozenset({"solution"}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (True, [1, 2]),
        ("true", [1, 2]),
        ("True", [3]),
        (5, [4, 5, 6]),
        ("5", [4, 5, 6]),
        (5.0, [4, 5, 6]),
        (1, [7]),
        (None, [8, 9]),
        ([True, None, "True"], [1, 2, 3, 8, 9]),
    ],
)
def test_values_are_compared_as_they_are_written(tmp_path: Path, wanted: Any, kept: list[int]) -> None:
    cells = [{"c": True}, {"c": "true"}, {"c": "True"}, {"c": 5}, {"c": "5"}, {"c": 5.0}, {"c": 1}, {"c": None}, {}]
    file = rows(tmp_path / "x", *cells)
    assert loaded(jsonl(file, keep={"c": wanted})) == (
        [f"line-{line}" for line in kept],
        {"read": 9, "keep": 9 - len(kept)},
    )


def test_every_column_has_to_fit_and_each_row_is_counted_once(tmp_path: Path) -> None:
    file = rows(
        tmp_path / "x",
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y", "problem": "?" * 99},
        {"a": 2, "b": "z", "problem": "?" * 99},
        {"a": 1, "b": "x", "problem": "?" * 11},
        {"a": 1, "b": "x", "problem": "?" * 10, "solution": "!" * 21},
        {"a": 1, "b": "x", "problem": "?" * 11, "solution": "!" * 21},
        {"a": 1, "b": "y", "problem": "?" * 10, "solution": "!" * 20},
    )
    found = loaded(jsonl(file, keep={"a": 1, "b": ["x", "y"]}, problem=10, solution=20))
    assert found == (["line-1", "line-7"], {"read": 7, "keep": 1, "max_chars": 4})


def test_a_row_that_is_left_out_may_lack_what_others_need(tmp_path: Path) -> None:
    file = rows(
        tmp_path / "x",
        {"ok": False, "solution": None},
        {"ok": False, "problem": ["no", "text"]},
        {"ok": False, "id": "twice"},
        {"ok": True, "problem": "?" * 99, "solution": " "},
        {"ok": True, "id": "twice"},
    )
    assert loaded(jsonl(file, keep={"ok": True}, problem=50)) == (["twice"], {"read": 5, "keep": 3, "max_chars": 1})
    assert "line 1 has an empty solution" in refused(jsonl(file))


def test_max_rows_are_rows_that_are_kept_and_the_rest_is_not_looked_at(tmp_path: Path) -> None:
    file = rows(tmp_path / "x", *({"even": number % 2 == 0} for number in range(10)))
    with file.open("a") as stream:
        stream.write("broken\n")
    assert loaded(jsonl(file, keep={"even": True}, max_rows=3)) == (["line-1", "line-3", "line-5"], {"read": 5, "keep": 2})
    assert "line 11 is not valid JSON" in refused(jsonl(file, keep={"even": True}, max_rows=6))


def test_lengths_of_real_problems(shared: Path) -> None:
    file = shared / "data" / "gsm8k_train.jsonl"
    raw = [json.loads(line) for line in file.read_text().splitlines()]
    short = [row["id"] for row in raw if len(row["problem"]) <= 200 and len(row["solution"]) <= 150]
    assert 100 < len(short) < 1000
    assert loaded(jsonl(file, problem=200, solution=150)) == (short, {"read": 1500, "max_chars": 1500 - len(short)})
    answers = Counter(row["answer"] for row in raw)
    kept, counts = loaded(jsonl(file, keep={"answer": [8, 20]}))
    assert len(kept) == answers["8"] + answers["20"] > 10 and counts == {"read": 1500, "keep": 1500 - len(kept)}


def test_what_leaves_nothing_or_means_nothing_is_refused(tmp_path: Path) -> None:
    file = rows(tmp_path / "x", {"ok": "True", "level": 3, "tags": [1]}, {"ok": "False", "level": 4})
    assert refused(jsonl(file, keep={"correct": True})) == (
        "data.keep.correct=true: none of the 2 rows read has such a column; correct its name."
    )
    assert refused(jsonl(file, keep={"ok": True})) == (
        'data.keep.ok=true: no row has that; the column holds "True", "False"; set one of those.'
    )
    assert refused(jsonl(file, keep={"ok": "True", "level": [4, 5]})) == (
        "data.keep: none of 2 rows has all of ok, level as wanted; leave one out."
    )
    assert refused(jsonl(file, problem=3)) == "data.max_chars.problem=3: leaves none of 2 rows; raise it."
    assert refused(jsonl(file, keep={"level": 3}, problem=3, solution=5)) == (
        "data.max_chars.problem=3, data.max_chars.solution=5: leaves none of 2 rows (1 are left out by data.keep); raise it."
    )
    assert refused(jsonl(file, keep={"tags": 1})) == (
        f"data.path={file}: line 1: column 'tags' is a list; data.keep compares single values only."
    )
    for value in ([], {"a": 1}, [[1]]):
        with pytest.raises(ValueError, match=r"^data.keep.ok=.*: must be one value or a list of values\.$"):
            jsonl(file, keep={"ok": value})
    with pytest.raises(ValueError, match=r"^data.max_chars.solution=0: must be at least 1, or null for any length\.$"):
        jsonl(file, solution=0)
    with pytest.raises(
        ValueError, match=r"^data.max_chars.solution=5 with data.columns.solution=null: there is nothing to measure"
    ):
        jsonl(file, solution=5, columns=COLUMNS | {"solution": None})
