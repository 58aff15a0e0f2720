"""What the engines' options refuse, and how a DeepSpeed that is missing or broken is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opsd.registry import lookup

SCRIPT = Path(__file__).parent / "ranks_training.py"
KEYS: dict[str, Any] = {"device": "cpu", "gradient_checkpointing": False, "zero": 2, "keep_whole": 0}


def deepspeed(**keys: Any) -> Any:
    return lookup("engine", "deepspeed")(name="deepspeed", kind="deepspeed", **(KEYS | keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"zero": 0}, "engine.zero=0: must be 1 (optimizer states are split), 2 (gradients too) or 3 (weights too)"),
        ({"keep_whole": -1}, "engine.keep_whole=-1: must be at least 0."),
        ({"device": "gpu"}, "engine.device=gpu: must be auto, cpu, cuda or cuda:N."),
    ],
)
def test_values_out_of_range(keys: dict[str, Any], message: str):
    with pytest.raises(ValueError) as refused:
        deepspeed(**keys)
    assert str(refused.value).startswith(message)


def test_a_missing_library_is_refused_without_torch():
    code = f"""
import sys
sys.modules["deepspeed"] = None  # as where it is not installed
from opsd.registry import lookup
try:
    lookup("engine", "deepspeed")(name="deepspeed", kind="deepspeed", **{KEYS}).check()
except ValueError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "engine=deepspeed: DeepSpeed is not installed; run `pip install -e '.[deepspeed]'` in the project's directory, or set "
        "engine=torch. False\n"
    )


def test_a_broken_library_is_one_message(tmp_path: Path):
    broken = tmp_path / "deepspeed"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('built for CUDA 12, found 13\\nand a long story')\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "zero2"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SCRIPT.parents[2]}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "opsd.endings.EngineFailure: engine=deepspeed does not start: built for CUDA 12, found 13; mend that, or set engine=torch."
    )
