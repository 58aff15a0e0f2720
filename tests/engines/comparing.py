"""Starts several ranks, and holds what they found against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCRIPT = Path(__file__).parent / "ranks_training.py"
# One process adds up a step's gradients in another order than two ranks do: 1e-6 of the largest. AdamW then divides each entry by
# its own size, so that one that is nearly nothing may go the other way by as much as the learning rate, 1e-3.
FIGURES = 1e-4  # relative, of losses and norms; measured 3e-5
GRADIENT = 3e-6  # of the largest entry; measured 9e-7
WORST, MEAN = 5e-4, 1e-7  # of a weight after 10 steps; measured 2e-4 and 2e-8


def run_ranks(directory: Path, engines: list[str], *, ranks: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(SCRIPT), str(directory), *engines],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done


def read(directory: Path, engine: str) -> dict[Any, Any]:
    return torch.load(directory / f"{engine}.pt", weights_only=False)


def assert_close_figures(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=FIGURES, atol=0.0)


def assert_close_weights(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    far = torch.cat([(found[name] - value).abs().flatten() for name, value in wanted.items()])
    assert float(far.max()) < WORST and float(far.mean()) < MEAN, (float(far.max()), float(far.mean()))


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and found
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def assert_same_training(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Losses, norms, the first step's gradient, the weights and the teacher's, and the layout of the optimizer's state."""
    assert_close_figures(found["figures"], wanted["figures"])
    assert found["first"].keys() == wanted["first"].keys()
    largest = max(float(value.abs().max()) for value in wanted["first"].values())
    for name, value in wanted["first"].items():
        assert float((found["first"][name] - value).abs().max()) < GRADIENT * largest, name
    assert_close_weights(found["weights"], wanted["weights"])
    assert found["before"] == wanted["before"] == {}
    assert {name: (value.shape, value.dtype) for name, value in found["state"].items()} == {
        name: (value.shape, value.dtype) for name, value in wanted["state"].items()
    }
    assert found["teacher"].keys() == wanted["teacher"].keys()
    for name, value in wanted["teacher"].items():
        torch.testing.assert_close(found["teacher"][name], value, rtol=0.0, atol=WORST)


def assert_resumed(found: dict[str, Any]) -> None:
    """To the last bit: ten steps, and five, a checkpoint and five more."""
    assert found["figures"][5:] == found["again"]["figures"]
    for part in ("weights", "state", "teacher"):
        assert_equal(found["again"][part], found[part])
