"""The record: nothing lost when a job dies, nothing twice, no password anywhere, FAILED where nobody said otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import tracking
from opsd.tracking import EVALUATION, Tracker


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracking")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        yield tracking.prepare("opsd")


@pytest.fixture
def run_id(store):
    return tracking.create_run(store, name="x", params={f"p{i}": "v" for i in range(130)}, tags={})


def values(store, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(entry.step, entry.value) for entry in tracking.client(store.uri).get_metric_history(run_id, key)]


def test_an_evaluation_that_only_reached_the_disk_is_sent_by_the_next_job(store, run_id, tmp_path):
    score = {"step": 0, "arithmetic/avg_at_12": 31.0, "timings": {EVALUATION: 2.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(score) + "\n")
    for _ in range(2):  # and once only
        tracker = Tracker(tmp_path, store, run_id, step=0, system_metrics=False)
        tracker.close("FINISHED")
    assert values(store, run_id, "arithmetic/avg_at_12") == [(0, 31.0)]


def test_steps_that_are_taken_again_are_not_logged_twice(store, run_id, tmp_path):
    tracker = Tracker(tmp_path, store, run_id, step=0, system_metrics=False)
    for step in range(1, 6):
        tracker.log(step, {"train/objective": 1 / step}, timings={"time/step_s": 0.1})
    tracker.close("KILLED")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/obj')  # torn by a kill
    tracker = Tracker(tmp_path, store, run_id, step=3, system_metrics=False)
    assert [line["step"] for line in tracker.lines] == [1, 2, 3]
    for step in range(4, 8):
        tracker.log(step, {"train/objective": 1 / step}, timings={"time/step_s": 0.1})
    tracker.close("FINISHED")
    assert values(store, run_id, "train/objective") == [(step, 1 / step) for step in range(1, 8)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))


def test_a_process_that_just_ends_leaves_a_failed_run(store, run_id, tmp_path):
    code = (
        "import sys; from pathlib import Path; from opsd.tracking import Store, Tracker\n"
        f"Tracker(Path({str(tmp_path)!r}), Store(uri={store.uri!r}, experiment_id={store.experiment_id!r}), {run_id!r}, "
        "step=0, system_metrics=False); sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False, capture_output=True)
    assert tracking.client(store.uri).get_run(run_id).info.status == "FAILED"


def test_passwords_stay_in_the_environment(monkeypatch):
    uri = "http://ann:secret@127.0.0.1:9"
    store = tracking.Store(uri=uri, experiment_id="1")
    entry = tracking.store_entry(store, "r")
    assert "secret" not in json.dumps(entry) + tracking.run_url(store, "r")
    assert "secret" not in str(tracking.ui_command(tracking.Store(uri="postgresql://ann:secret@host/db", experiment_id="1")))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking.store_from({"mlflow": entry})[0].uri == uri
    with pytest.raises(tracking.TrackingError) as told:
        tracking.prepare("opsd")
    assert "secret" not in str(told.value)


def test_a_plain_directory_is_no_store(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(tracking.TrackingError, match="MLFLOW_TRACKING_URI=mlruns: .*sqlite"):
        tracking.prepare("opsd")
