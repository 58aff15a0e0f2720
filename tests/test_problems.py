"""Reading problem sets: what is accepted, what each mistake says, and a hub that does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opsd.problems import FIELDS, read_jsonl

COLUMNS = {field: field for field in FIELDS}
ROW = {"id": "a", "problem": "1+1?", "solution": "2", "answer": "2"}
REVISION = "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: str, **changes):
    settings = {"key": "data.path", "columns": COLUMNS, "required": ("problem", "solution"), "max_rows": None} | changes
    return read_jsonl(path, **settings)


def message(path: str, **changes) -> str:
    with pytest.raises(ValueError) as caught:
        read(path, **changes)
    return str(caught.value)


@pytest.mark.parametrize(("file", "rows"), [("gsm8k_train", 1500), ("aime24", 30), ("math500", 200)])
def test_real_problem_sets_are_read_whole(shared: Path, file: str, rows: int):
    problems = read(str(shared / "data" / f"{file}.jsonl"))
    raw = [json.loads(line) for line in (shared / "data" / f"{file}.jsonl").read_text().splitlines()]
    assert len(problems) == rows
    assert [problem.text for problem in problems] == [row["problem"] for row in raw]
    assert [problem.solution for problem in problems] == [row["solution"] for row in raw]
    assert [problem.answer for problem in problems] == [str(row["answer"]) for row in raw]  # AIME's are JSON integers


def test_values_blank_lines_byte_order_mark_and_line_separators(tmp_path: Path):
    rows = ['\ufeff{"q": "a\u2028b", "answer": 73}', "", "  ", '{"q": "c", "answer": 0.5, "id": 9}', '{"q": "d", "answer": " "}']
    problems = read(write(tmp_path / "x", *rows), columns={"id": "id", "problem": "q", "answer": "answer"}, required=("problem",))
    assert [(p.id, p.text, p.solution, p.answer) for p in problems] == [
        ("line-1", "a\u2028b", None, "73"),
        ("9", "c", None, "0.5"),
        ("line-5", "d", None, None),
    ]


def test_rows_after_the_limit_are_not_looked_at(tmp_path: Path):
    path = write(tmp_path / "x", ROW, ROW | {"id": "b"}, "broken")
    assert [problem.id for problem in read(path, max_rows=2)] == ["a", "b"]
    assert "line 3" in message(path, max_rows=3)


def test_each_mistake_is_one_message_with_place_and_remedy(tmp_path: Path):
    def file(*rows: object) -> str:
        return write(tmp_path / "x.jsonl", *rows)

    good = [ROW | {"id": str(i)} for i in range(6)]
    at = f"data.path={tmp_path / 'x.jsonl'}: "
    missing = message(str(tmp_path / "missing.jsonl"))
    assert missing.startswith(f"data.path={tmp_path / 'missing.jsonl'}: there is no such file")
    assert message(str(tmp_path)) == f"data.path={tmp_path}: is a directory; give the JSONL file itself."
    assert message(file(*good, '{"id": "x", "problem": "y"')) == (
        f"{at}line 7 is not valid JSON (Expecting ',' delimiter: column 27 (char 26)); "
        "every line must be one complete JSON object; correct or remove it."
    )
    assert message(file(*good, "[" * 100_000)).startswith(f"{at}line 7 is not valid JSON (")
    assert message(file(*good, [1])) == f"{at}line 7 is a JSON list, not an object; write {{...}} with one value a column."
    assert message(file({"question": "x", "answer": 2})) == (
        f"{at}line 1 has no column 'problem' (it has: question, answer); "
        "set data.columns.problem to the column that holds the problem."
    )
    assert message(file(ROW, ROW | {"id": "b", "solution": " \n"})) == (
        f"{at}line 2 has an empty solution (column 'solution'); "
        "fill it in, remove the row, or set data.columns.solution to another column."
    )
    assert "line 1 has an empty problem" in message(file(ROW | {"problem": None}))
    assert "line 1: column 'solution' is a list; the solution must be text" in message(file(ROW | {"solution": ["2"]}))
    assert "line 1: column 'answer' is a boolean" in message(file(ROW | {"answer": True}))
    assert "half of a surrogate pair" in message(file('{"problem": "\\ud800", "solution": "x"}'))
    assert message(file("", " ")) == f"{at}holds no rows; give a file with at least one problem (data.path=FILE)."
    assert message(file(ROW, "", ROW)) == f"{at}line 3 has the id 'a' of line 1; ids must differ: correct or remove one."
    assert message(file(ROW), columns=COLUMNS | {"quesion": "q"}) == (
        "data.columns.quesion=q: no such field; the fields are id, problem, solution, answer."
    )
    assert message(file(ROW), columns={"id": "id"}) == "data.columns.problem: is not set; say which column holds the problem."
    (tmp_path / "latin").write_bytes('{"problem": "x", "solution": "é"}\n'.encode("latin-1"))
    assert "line 1 is not UTF-8" in message(str(tmp_path / "latin"))
    (tmp_path / "wide").write_bytes('{"problem": "x", "solution": "y"}\n'.encode("utf-16"))
    assert "line 1 is not UTF-8" in message(str(tmp_path / "wide"))
    assert "eval.columns.answer" in message(file({"problem": "x"}), key="eval.path", required=("answer",))


def run_read_hub(endpoint: str, home: Path) -> tuple[str, float]:
    code = (
        "from opsd.problems import read_hub\n"
        "try:\n"
        f"    rows = read_hub('HuggingFaceH4/aime_2024', key='eval.path', revision={REVISION!r}, split='train',\n"
        "        columns={'id': 'id', 'problem': 'problem', 'answer': 'answer'}, required=('problem', 'answer'), max_rows=None)\n"
        "    print([(row.id, row.text, row.answer) for row in rows])\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), time.monotonic() - began


def test_hub_out_of_reach_is_one_message_within_20_s(endpoint: str, tmp_path: Path):
    pytest.importorskip("datasets")
    said, seconds = run_read_hub(endpoint, tmp_path)
    assert said.startswith(f"eval.repo=HuggingFaceH4/aime_2024 (revision {REVISION}): the hub cannot be reached (")
    assert said.endswith("and the local cache does not hold it; set eval.path=FILE to a local JSONL file.")
    assert seconds < 20


def test_hub_out_of_reach_is_answered_from_the_cache_of_that_revision(tmp_path: Path):
    pytest.importorskip("datasets")
    snapshots = tmp_path / "hub" / "datasets--HuggingFaceH4--aime_2024" / "snapshots"
    for revision, problem in ((REVISION, "right"), ("0" * 40, "another revision")):
        (snapshots / revision).mkdir(parents=True)
        write(snapshots / revision / "train.jsonl", {"id": 60, "problem": problem, "answer": "204"})
    said, _ = run_read_hub("http://127.0.0.1:9", tmp_path)
    assert said == "[('60', 'right', '204')]"
