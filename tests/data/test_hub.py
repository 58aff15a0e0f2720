"""Problems of a dataset on the hub: from its local cache, by subset and split, and what each mistake says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CODE = """
import json, sys
from pathlib import Path
from opsd.config import to_run
from opsd.launch.compose import compose
try:
    data = to_run(compose(Path("conf"), "config", sys.argv[1:])[0].cfg).data
    data.check(needs=frozenset({"solution"}))
    found = data.load(seed=0)
    rows = [[row.id, row.text, row.solution, row.answer] for row in found.problems]
    print(json.dumps([rows, {reason: count for reason, count in found.counts.items() if count}]))
except ValueError as error:
    print(json.dumps(str(error)))
"""
ROOT = Path(__file__).parents[2]
REPO = "siyanzhao/Openthoughts_math_30k_opsd"
REVISION = "1" * 40
CONFIGS = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main.jsonl
- config_name: other
  data_files:
  - split: train
    path: other.jsonl
---
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache that holds the paper's set at its main branch, and a set with two subsets at one commit."""
    pytest.importorskip("datasets")
    columns = {"conversations": [{"from": "user"}], "correct": True}
    cached(
        tmp_path,
        REPO,
        {
            "data/train.jsonl": [
                columns | {"problem": "1+1?", "solution": "2"},
                columns | {"problem": "1+2?", "solution": "", "correct": False},
                columns | {"problem": "1+3?", "solution": "4" * 50},
                columns | {"problem": "1+4?", "solution": "5"},
            ]
        },
    )
    subsets = {f"{name}.jsonl": [{"question": name, "answer": f"{name} answer"}] for name in ("main", "other")}
    cached(tmp_path, "openai/gsm8k", subsets, readme=CONFIGS)
    return tmp_path


def cached(home: Path, repo: str, files: dict[str, list[dict[str, Any]]], readme: str = "") -> None:
    directory = home / "hub" / f"datasets--{repo.replace('/', '--')}"
    (directory / "refs").mkdir(parents=True)
    (directory / "refs" / "main").write_text(REVISION)
    for name, rows in files.items():
        file = directory / "snapshots" / REVISION / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "snapshots" / REVISION / "README.md").write_text(readme)


def load(home: Path, *overrides: str, endpoint: str = "http://127.0.0.1:9") -> Any:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", CODE, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_papers_set_from_the_cache(home: Path) -> None:
    assert load(home, "data=openthoughts_math").startswith(f"data.repo={REPO}: row 2 has an empty solution (column 'solution'); ")
    rows, counts = load(home, "data=openthoughts_math", "data.keep={correct: true}", "data.max_chars.solution=49")
    assert rows == [["row-1", "1+1?", "2", None], ["row-4", "1+4?", "5", None]]
    assert counts == {"read": 4, "keep": 1, "max_chars": 1}
    assert load(home, "data=openthoughts_math", "data.max_rows=1")[0] == rows[:1]


def test_a_subset_is_chosen_by_name(home: Path) -> None:
    gsm8k = ("data=hub", "data.repo=openai/gsm8k", "data.columns.problem=question", "data.columns.solution=answer")
    assert load(home, *gsm8k, "data.subset=other")[0] == [["row-1", "other", "other answer", "other answer"]]
    assert load(home, *gsm8k, "data.subset=main", f"data.revision={REVISION}")[0][0][1] == "main"
    said = load(home, *gsm8k)
    assert said.startswith("data.repo=openai/gsm8k: its split 'train' cannot be read (Config name is missing.")
    assert "['main', 'other']" in said and said.endswith("or set data.path=FILE to a local JSONL file.")
    said = load(home, *gsm8k, "data.subset=mian")
    assert said.startswith("data.repo=openai/gsm8k: its subset 'mian', split 'train' cannot be read (")
    assert load(home, *gsm8k, "data.subset=main", "data.split=test").startswith(
        "data.repo=openai/gsm8k: its subset 'main', split 'test' cannot be read ("
    )


def test_a_local_file_takes_the_hubs_place(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"problem": "1+1?", "solution": "2", "answer": 2}))
    assert load(tmp_path, "data=openthoughts_math", f"data.path={file}") == [[["line-1", "1+1?", "2", None]], {"read": 1}]


def test_another_revision_or_no_cache_is_one_message_within_20_s(home: Path, endpoint: str) -> None:
    began = time.monotonic()
    said = load(home, "data=openthoughts_math", f"data.revision={'2' * 40}", endpoint=endpoint)
    assert said.startswith(f"data.repo={REPO} (revision {'2' * 40}): the hub cannot be reached (")
    assert said.endswith("and the local cache does not hold it; set data.path=FILE to a local JSONL file.")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("repo", ["gsm8k", "./somewhere/x", "a/b/c"])
def test_what_is_no_hub_name_is_refused(tmp_path: Path, repo: str) -> None:
    assert load(tmp_path, "data=hub", f"data.repo={repo}") == (
        f"data.repo={repo}: is no hub name; give owner/name, or set data.path=FILE to a local JSONL file."
    )
