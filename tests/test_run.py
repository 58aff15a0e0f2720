"""Whole runs, as a user starts them: what they leave, that they repeat, that they go on after a kill, and how they end badly."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from whole_runs import ROOT, environment, final_bytes, killed, launch, lines, the_run, wait_for_step

from opsd.checkpoints import FORMAT

GOLDEN = Path(__file__).parent / "golden" / "smoke.json"
SMALL = ["debug=smoke"]
BUSY = ["train.batch=8", "rollout.max_len=32", "eval.max_rows=4", "eval.samples=2", "eval.max_len=32", "train.log_every=2"]
ADAPTERS = ["model=tiny_lora", "model.lora.dropout=0.1"]


@pytest.fixture(scope="session")
def smoke(tmp_path_factory, store):
    cwd = tmp_path_factory.mktemp("smoke")
    done = launch(cwd, store, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd, done


def test_what_a_run_leaves(smoke, store):
    cwd, done = smoke
    run_dir = the_run(cwd)
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "launch.json", "metrics.jsonl", "checkpoints", "evaluations", "rollouts", "result.json"} <= names
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished"
    last = done.stdout.strip().splitlines()[-1]
    assert run_dir.name in last
    assert f"{result['before']:.1f}" in last
    assert f"{result['after']:.1f}" in last
    assert "mlflow ui" in done.stdout

    from opsd.tracking import client

    entry = json.loads((run_dir / "launch.json").read_text())["mlflow"]
    mlflow = client(store)
    record = mlflow.get_run(entry["run_id"])
    assert record.info.status == "FINISHED"
    shown = {"model": "tiny", "loss": "forward_kl", "clipping": "rescale", "clip": "0.05", "teacher": "initial", "seed": "0"}
    assert shown.items() <= record.data.params.items()
    assert record.data.params["rollout.max_len"] == "32"
    steps = [metric.step for metric in mlflow.get_metric_history(entry["run_id"], "train/divergence")]
    assert steps == [1, 2]
    scores = mlflow.get_metric_history(entry["run_id"], "arithmetic/avg_at_1")
    assert [(m.step, m.value) for m in scores] == [(0, result["before"]), (2, result["after"])]
    assert "aime24" not in record.data.metrics
    assert record.data.tags["student_prompt_is_eval_prompt"] == "true"
    assert "token for token" in done.stdout
    artifacts = {item.path for item in mlflow.list_artifacts(entry["run_id"])}
    assert {"config.yaml", "launch.json", "rollouts", "evaluations"} <= artifacts


def test_every_metric_is_a_number_that_makes_sense(smoke):
    first = lines(the_run(smoke[0]))[1]
    assert first["step"] == 1
    assert 0 < first["train/objective"] <= 0.05
    assert first["train/divergence"] >= first["train/objective"]
    assert first["train/cosine_median"] == pytest.approx(1, abs=1e-5)
    assert first["rollout/sampler_gap_max"] < 1e-4
    assert first["rollout/weights_version"] == 0
    for name in ("clipped_entries", "clipped_tokens", "clipped_mass", "negative_tokens", "agreement"):
        assert 0 <= first[f"train/{name}"] <= 1


def test_the_golden_curve(smoke):
    """Two steps of the embedded default, as they were when the embedded model was committed. Another processor may round otherwise
    in the last digits, never in the third; a change that is meant writes the file anew: OPSD_GOLDEN=write pytest -k golden."""
    rows = [row for row in lines(the_run(smoke[0])) if "train/objective" in row]
    if os.environ.get("OPSD_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(rows, indent=1) + "\n")
    wanted = json.loads(GOLDEN.read_text())
    assert [row.keys() for row in rows] == [row.keys() for row in wanted]
    for row, right in zip(rows, wanted, strict=True):
        exact = {key: value for key, value in right.items() if key.startswith("rollout/") and "gap" not in key}
        assert exact.items() <= row.items()
        for key in right:
            if "gap" not in key:
                assert row[key] == pytest.approx(right[key], rel=1e-3, abs=1e-6), key


def test_checkpoints_load_without_this_project(smoke):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    last = sorted((the_run(smoke[0]) / "checkpoints").glob("step_*"))[-1]
    model = AutoModelForCausalLM.from_pretrained(last / "model", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(last / "model")
    ids = tokenizer("A dial", return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.isfinite().all()


def test_the_same_command_gives_the_same_curve(smoke, store, tmp_path):
    assert launch(tmp_path, store, *SMALL).returncode == 0
    assert lines(the_run(tmp_path)) == lines(the_run(smoke[0]))
    assert final_bytes(the_run(tmp_path)) == final_bytes(the_run(smoke[0]))


@pytest.mark.parametrize("adapters", [[], ADAPTERS], ids=["full", "lora"])
def test_killed_at_a_random_step_and_resumed_is_bitwise_the_same(adapters, store, tmp_path):
    """kill -9 somewhere in training; the resumed run ends with the weights, optimizer and curve of an uninterrupted one."""
    settings = [*BUSY, *adapters, "train.steps=12", "train.save_every=3", "eval.every=6"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    assert launch(whole, store, *settings).returncode == 0
    kill_after = random.SystemRandom().randint(1, 11)
    run_dir = killed(cut, store, *settings, after=kill_after)
    resumed = launch(cut, store, f"resume={run_dir}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(run_dir) == lines(the_run(whole)), f"killed after step {kill_after}"
    for row in lines(run_dir):
        if "train/objective" in row:  # each step was sampled from the weights after the step before it, also right after the resume
            assert row["rollout/weights_version"] == row["step"] - 1
            assert row["rollout/sampler_gap_max"] < (5e-2 if adapters else 1e-4), (
                "the trainer's adapters have dropout, the sampler's not"
            )
    assert final_bytes(run_dir) == final_bytes(the_run(whole)), f"killed after step {kill_after}"

    from opsd.tracking import client

    entry = json.loads((run_dir / "launch.json").read_text())["mlflow"]
    history = client(store).get_metric_history(entry["run_id"], "train/objective")
    assert sorted(metric.step for metric in history) == list(range(1, 13)), "a step is missing from MLflow or logged twice"


def test_ctrl_c_ends_with_a_checkpoint(store, tmp_path):
    settings = [*BUSY, "train.steps=5000", "train.save_every=5000"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *settings],
        cwd=tmp_path,
        env=environment(store),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(tmp_path, 3, process)
    twice = launch(tmp_path, store, f"resume={the_run(tmp_path)}")
    assert twice.returncode == 2
    assert "is being run by process" in twice.stderr, "one directory, two jobs"
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    run_dir = the_run(tmp_path)
    assert f"resume={run_dir}" in output
    last = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    assert json.loads((last / "state.json").read_text())["step"] == lines(run_dir)[-1]["step"] >= 3


def test_a_time_budget_ends_with_a_checkpoint_and_an_evaluation(store, tmp_path):
    done = launch(tmp_path, store, *BUSY, "train.steps=100000", "train.max_time=12s", "train.save_every=100000", "data.max_rows=4")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((the_run(tmp_path) / "result.json").read_text())
    assert result["status"] == "finished"
    assert 0 < result["step"] < 1000
    rows = [json.loads(line) for line in (the_run(tmp_path) / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len({row["problem_id"] for row in rows}) == 4, "eight rollouts of four problems"
    assert len({(row["problem_id"], row["response"]) for row in rows}) > 6, "a problem's second rollout is another one"
    last = sorted((the_run(tmp_path) / "checkpoints").glob("step_*"))[-1]
    assert last.name == f"step_{result['step']:06d}"
    assert (the_run(tmp_path) / "evaluations" / last.name / "report.json").exists()


def test_more_steps_for_a_finished_run(smoke, store, tmp_path):
    """`resume=RUN train.steps=3` equals a run of three steps from the start; what would change the experiment is refused."""
    assert launch(tmp_path, store, *SMALL).returncode == 0
    run_dir = the_run(tmp_path)
    refused = launch(tmp_path, store, f"resume={run_dir}", "train.lr=1")
    assert refused.returncode == 2
    assert "train.lr" in refused.stderr
    assert launch(tmp_path, store, f"resume={run_dir}", "train.steps=3").returncode == 0
    longer = tmp_path / "longer"
    longer.mkdir()
    assert launch(longer, store, *SMALL, "train.steps=3").returncode == 0
    assert final_bytes(run_dir) == final_bytes(the_run(longer))
    assert json.loads((run_dir / "result.json").read_text())["step"] == 3


def test_a_run_that_blows_up_keeps_its_last_good_state(store, tmp_path):
    done = launch(tmp_path, store, *BUSY, "train.steps=20", "train.lr=1e30", "train.max_grad_norm=1e30")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "train.lr" in done.stderr
    run_dir = the_run(tmp_path)
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "failed"
    from safetensors.torch import load_file

    last = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    assert all(tensor.isfinite().all() for tensor in load_file(last / "model" / "model.safetensors").values())


def test_a_disk_that_fills_up(store, tmp_path):
    """On a file system of 14 MB: one message, the earlier checkpoint whole, nothing of the later one."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        done = launch(tmp_path, store, *BUSY, "train.steps=6", "train.save_every=2", "train.keep=9", f"output_root={small}")
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stdout + done.stderr
        assert "No space left" in done.stderr
        (run_dir,) = small.iterdir()
        assert not list(run_dir.glob("checkpoints/.*"))
        kept = sorted(run_dir.glob("checkpoints/step_*"))
        assert kept
        from safetensors.torch import load_file

        for checkpoint in kept:
            assert load_file(checkpoint / "model" / "model.safetensors")
            assert json.loads((checkpoint / "state.json").read_text())["format"] == FORMAT
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_unreachable_tracking_server_is_refused_at_once(tmp_path):
    began = time.monotonic()
    done = launch(tmp_path, "http://127.0.0.1:9", *SMALL)
    assert done.returncode != 0
    assert time.monotonic() - began < 30
    assert "MLFLOW_TRACKING_URI=http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_student_learns(store, tmp_path):
    """The end-to-end proof on a shortened run: the held-out score rises by far more than noise, and to near the teacher's."""
    done = launch(tmp_path, store, "train.steps=40", "eval.samples=6", "train.save_every=40")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((the_run(tmp_path) / "result.json").read_text())
    assert 15 < result["before"] < 50, "the untrained student has the ability and is often wrong"
    assert result["after"] - result["before"] >= 30
    assert result["difference"]["low"] > 25
    rows = lines(the_run(tmp_path))
    assert rows[-2]["train/divergence"] < rows[1]["train/divergence"] / 5


def test_a_store_that_goes_away_costs_no_step(tmp_path):
    """The run stops rather than train unrecorded, saves the step it is at, and the next job sends what MLflow missed."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *BUSY, "train.steps=5000", "train.save_every=5000", "name=r"],
        cwd=tmp_path,
        env=environment(store),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(tmp_path, 3, process)
    holder = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None, timeout=30)
    holder.execute("BEGIN EXCLUSIVE")
    run_dir = the_run(tmp_path)
    result = run_dir / "result.json"
    deadline = time.monotonic() + 150
    while not result.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    holder.execute("ROLLBACK")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    step = lines(run_dir)[-1]["step"]
    last = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    assert last.name == f"step_{step:06d}"
    resumed = launch(tmp_path, store, f"resume={run_dir}", f"train.steps={step + 2}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    from opsd.tracking import client

    entry = json.loads((run_dir / "launch.json").read_text())["mlflow"]
    history = client(store).get_metric_history(entry["run_id"], "train/objective")
    assert sorted(metric.step for metric in history) == list(range(1, step + 3))
