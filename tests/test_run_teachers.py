"""Whole runs under every teacher that moves or comes from elsewhere: killed and resumed they end as if they had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import ROOT, final_bytes, killed, launch, lines, the_run

BUSY = ["train.batch=4", "rollout.max_len=24", "train.lr=1e-3", "train.log_every=2", "eval.in_run=false"]
TEACHERS = {
    # speaks before it scores, on a mix: all that has a state of its own at once
    "ema": ["teacher=ema", "teacher.rate=0.3", "prompt=reason_first", "prompt.analysis_len=24", "data=arithmetic_mix"],
    "sync": ["teacher=sync", "teacher.every=2"],  # a checkpoint after step 3 holds the copy of step 2
    "live": ["teacher=live"],
    "external": ["teacher=external", f"teacher.path={ROOT / 'opsd' / 'assets' / 'tiny'}"],
}


def last(run_dir: Path) -> Path:
    return sorted((run_dir / "checkpoints").glob("step_*"))[-1]


@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_killed_and_resumed_is_bitwise_the_same(model, teacher, store, tmp_path):
    """kill -9 between two checkpoints; the resumed run has the curve, weights, optimizer and teacher of an uninterrupted one."""
    settings = [*BUSY, *TEACHERS[teacher], f"model={model}", "train.steps=8", "train.save_every=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    done = launch(whole, store, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = killed(cut, store, *settings, after=4)
    state = {name: value for name, value in load_file(last(run_dir) / "state.safetensors").items() if name.startswith("teacher/")}
    assert bool(state) == (teacher != "live")
    resumed = launch(cut, store, f"resume={run_dir}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(run_dir) == lines(the_run(whole))
    assert final_bytes(run_dir) == final_bytes(the_run(whole))
    moved = load_file(last(run_dir) / "state.safetensors")
    if teacher in ("ema", "sync"):
        assert all(not torch.equal(moved[name], value) for name, value in state.items() if "norm" not in name)
