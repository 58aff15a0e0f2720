"""Whole runs on recorded responses: a replay of the same loss is the same run, another loss sees the same text, and SFT learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import final_bytes, killed, launch, lines, the_run

from opsd import records

SMALL = ["train.steps=4", "train.batch=8", "rollout.max_len=48", "rollout.top_p=0.95", "train.save_every=2", "train.log_every=2"]
SCORED = ["eval.max_rows=4", "eval.samples=2", "eval.max_len=32"]
REPLAYED = ["train.steps=4", "train.batch=8", "train.save_every=2", "train.log_every=2", "rollout=replay"]


def started(folder: Path, store: str, *overrides: str) -> Path:
    folder.mkdir()
    done = launch(folder, store, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return the_run(folder)


def texts(run_dir: Path, steps: int = 4) -> list[list[list[int]]]:
    return [[record.response.token_ids for record in records.load(run_dir, step)] for step in range(1, steps + 1)]


@pytest.fixture(scope="module")
def source(store, tmp_path_factory) -> Path:
    return started(tmp_path_factory.mktemp("source") / "run", store, *SMALL, *SCORED)


def test_every_steps_rollouts_are_saved(source):
    assert records.num_steps(source) == 4
    for step in range(1, 5):
        saved = records.load(source, step)
        assert len(saved) == 8
        assert {record.response.weights_version for record in saved} == {step - 1}


def test_a_replay_of_the_same_loss_is_the_same_run(source, store, tmp_path):
    """Killed on the way, too: objective, gradient norms, scores and final weights are bit for bit those of the recorded run."""
    settings = [*REPLAYED, *SCORED, f"rollout.path={source}"]
    again = started(tmp_path / "again", store, *settings)
    assert lines(again) == lines(source)
    assert final_bytes(again) == final_bytes(source)
    assert texts(again) == texts(source)
    (tmp_path / "cut").mkdir()
    cut = killed(tmp_path / "cut", store, *settings, after=3)
    resumed = launch(tmp_path / "cut", store, f"resume={cut}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(cut) == lines(source)
    assert final_bytes(cut) == final_bytes(source)


def test_other_losses_see_the_same_text(source, store, tmp_path):
    settings = [*REPLAYED, "eval.in_run=false", f"rollout.path={source}"]
    runs = [started(tmp_path / loss, store, *settings, f"loss={loss}") for loss in ("sampled_token", "jsd", "nll")]
    for run_dir in runs:
        assert texts(run_dir) == texts(source)
    sampled, jsd, nll = (lines(run_dir) for run_dir in runs)
    assert sampled[0]["train/ratio"] == pytest.approx(1, abs=0.06), "step 1: the sampler is the student, top_p its only change"
    assert sampled[0]["rollout/sampler_gap_max"] < 1e-4
    assert sampled[-1]["rollout/sampler_gap_max"] > 1e-4, "later the text is another policy's"
    assert sampled[0]["train/divergence"] > 0 > sampled[0]["train/advantage"]
    assert len({rows[-1]["train/objective"] for rows in (sampled, jsd, nll)}) == 3
    assert not [name for name in nll[0] if "teacher" in name]


def test_fine_tuning_on_solutions(store, tmp_path):
    """`rollout=dataset loss=nll`: the objective falls, nothing speaks of a sampler or a teacher, and no problem is cut."""
    run_dir = started(
        tmp_path / "sft",
        store,
        "rollout=dataset",
        "loss=nll",
        "train.steps=12",
        "train.batch=8",
        "train.lr=1e-3",
        "eval.in_run=false",
    )
    rows = lines(run_dir)
    assert rows[-1]["train/objective"] < 0.7 * rows[0]["train/objective"]
    assert rows[0]["train/objective"] == pytest.approx(rows[0]["train/divergence"])
    assert rows[0]["rollout/correct"] == rows[0]["rollout/boxed"] == 1
    assert rows[0]["rollout/truncated"] == 0
    assert not [name for name in rows[0] if "sampler" in name or "teacher" in name or name == "rollout/weights_version"]
