"""Lint, format and types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["basedpyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_static(tool):
    command = [str(Path(sys.executable).parent / TOOLS[tool][0]), *TOOLS[tool][1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
