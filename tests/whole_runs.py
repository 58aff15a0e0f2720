"""Whole runs, started as a user starts them, and what they leave: for the tests that look at one from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def environment(store: str) -> dict[str, str]:
    return {**os.environ, "MLFLOW_TRACKING_URI": store, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def launch(cwd: Path, store: str, *overrides: str, timeout_s: int = 300, **more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch.py"), *overrides]
    return subprocess.run(command, cwd=cwd, env=environment(store) | more, capture_output=True, text=True, timeout=timeout_s)


def the_run(cwd: Path) -> Path:
    (run_dir,) = (cwd / "outputs").iterdir()
    return run_dir


def lines(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what differs between two runs of one command."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["timings"]
    return rows


def final_bytes(run_dir: Path) -> dict[str, bytes]:
    """Every tensor file of the last checkpoint."""
    last = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}


def wait_for_step(cwd: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        found = list(cwd.glob("outputs/*/metrics.jsonl"))
        if found and any(f'"step": {step},' in line for line in found[0].read_text().splitlines()):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never reached")


def killed(cwd: Path, store: str, *overrides: str, after: int) -> Path:
    """The directory of a run whose job and launcher get kill -9 once metrics.jsonl holds step `after`."""
    command = [sys.executable, str(ROOT / "launch.py"), *overrides]
    process = subprocess.Popen(command, cwd=cwd, env=environment(store), start_new_session=True)
    wait_for_step(cwd, after, process)
    for part in [*psutil.Process(process.pid).children(recursive=True), process]:
        part.kill()
    process.wait()
    assert not (the_run(cwd) / "result.json").exists()
    return the_run(cwd)
