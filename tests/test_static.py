"""Lint, format and types."""

from __future__ import annotations

import importlib.util
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
    if tool == "types" and not all(importlib.util.find_spec(engine) for engine in ("vllm", "deepspeed")):
        pytest.skip("types of vLLM and DeepSpeed are needed; docs/gpu.md has the command that checks with them")
    command = [str(Path(sys.executable).parent / TOOLS[tool][0]), *TOOLS[tool][1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
