"""docs/extending.md, done as it says: the two files of its loss, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_loss_of_the_docs_in_two_files(tmp_path):
    for part in ("opsd", "conf", "tests/losses", "tests/prompts", "tests/rollouts/recorded"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    for part in ("launch.py", "pyproject.toml", "tests/conftest.py", "tests/test_conf.py", "tests/test_architecture.py"):
        shutil.copy(ROOT / part, tmp_path / part)
    (tmp_path / "opsd" / "assets" / "tiny").symlink_to(ROOT / "opsd" / "assets" / "tiny")
    (tmp_path / "evaluate.py").symlink_to(ROOT / "evaluate.py")
    blocks = re.findall(r"`((?:opsd|conf)/[\w/.]+)`:\n\n```\w+\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
    assert [name for name, _ in blocks] == ["opsd/losses/renyi.py", "conf/loss/renyi.yaml"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "renyi" in run("launch.py", "--help")
    run("launch.py", "do=check", "loss=renyi", "loss.alpha=0.3")
    told = run("-m", "pytest", "-vv", "-p", "no:cacheprovider", "tests/losses", "tests/test_conf.py", "tests/test_architecture.py")
    assert len(re.findall(r"renyi.*PASSED", told)) >= 6
