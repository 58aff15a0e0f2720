"""Directories, MLflow runs, dispatch, the last lines and resume, against a real store; the job alone is a few lines of script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from opsd import tracking
from opsd.checkpoints import Progress
from opsd.config import load
from opsd.inputs import training_problems
from opsd.launch import plan, resume
from opsd.launch.compose import Point, compose
from opsd.launch.local import dispatch
from opsd.launch.main import exit_status
from opsd.launch.plan import Job, check_points, create
from opsd.launch.table import report
from opsd.stream import digest
from opsd.tracking import client

CONF = Path(__file__).parents[2] / "conf"
JOB = """
import json, os, sys, time
from pathlib import Path
import opsd.registry, yaml
run_dir = Path(sys.argv[1])
seed = yaml.safe_load((run_dir / "config.yaml").read_text())["seed"]
if seed == 7:
    sys.exit("no result")
if seed == 8:
    (run_dir / "result.json").write_text(json.dumps({"status": "failed", "step": 3, "message": "step 4: the loss is not a number"}))
    sys.exit(1)
if seed == 9:
    try:
        (run_dir / "started").touch()
        time.sleep(20)
    except KeyboardInterrupt:
        (run_dir / "saved").touch()
        sys.exit(130)
result = {"status": "finished", "step": 100, "benchmark": "arithmetic", "metric": "avg_at_12", "before": 21.25, "message": None}
result |= {"after": 70.0 + seed, "difference": {"mean": 48.75 + seed, "low": 40.0, "high": 57.5, "p_value": 1e-9}}
result["threads"] = os.environ["OMP_NUM_THREADS"]
(run_dir / "result.json").write_text(json.dumps(result))
"""


def command(run_dir: Path, *, processes: int) -> list[str]:
    return [sys.executable, "-c", JOB, str(run_dir)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real tracking store, made once: its migrations take seconds."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        return tracking.prepare("opsd").uri


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return tmp_path


def points_of(*argv: str) -> list[Point]:
    return compose(CONF, "config", list(argv))


def jobs_of(*argv: str) -> list[Job]:
    points = points_of(*argv)
    return create(points, check_points(points), argv=list(argv))


def test_a_run_directory_tells_where_it_comes_from(somewhere: Path, store: str) -> None:
    (job,) = jobs_of("loss=jsd", "clip=0.1", "threads=2")
    assert job.run_dir.parent == somewhere / "outputs"
    assert job.run_dir.name.endswith("-loss-jsd_clip-0.1_threads-2")
    assert sorted(path.name for path in job.run_dir.iterdir()) == ["config.yaml", "launch.json"]
    run = load(job.run_dir)
    assert (run.name, run.loss.name, run.clip, run.output_root) == (
        "loss-jsd_clip-0.1_threads-2",
        "jsd",
        0.1,
        str(somewhere / "outputs"),
    )
    launch = json.loads((job.run_dir / "launch.json").read_text())
    assert launch["overrides"] == launch["argv"] == ["loss=jsd", "clip=0.1", "threads=2"]
    assert launch["mlflow"]["run_id"] == job.run_id and launch["mlflow"]["uri"] == store and launch["sweep"] is None
    assert launch["packages"]["hydra-core"].startswith("1.3") and launch["python"].startswith("3.")
    recorded = client(store).get_run(job.run_id)
    assert recorded.data.params["clip"] == "0.1" and recorded.data.params["loss.beta"] == "0.5"
    assert recorded.data.tags["run_dir"] == str(job.run_dir) and recorded.info.run_name == "loss-jsd_clip-0.1_threads-2"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "default"),
        (["loss=jsd", "clip=0.1"], "loss-jsd_clip-0.1"),
        (["data.path=/long/way/to/rows.jsonl", "do=run", "output_root=x", "+loss.beta=0.3"], "data.path-rows.jsonl_loss.beta-0.3"),
        (["model.lora.targets=[q_proj,v_proj]"], "model.lora.targets-_q_proj_v_proj"),
        (["prompt.student='Say: {problem}/x'"], "prompt.student-x"),
    ],
)
def test_labels_need_no_quoting(overrides: list[str], name: str) -> None:
    assert plan.label(overrides) == name


def test_paths_with_characters_that_hydra_takes_apart(somewhere: Path) -> None:
    (point,) = points_of("output_root=a b/c=d(e)", "data=jsonl", "data.path=x=1.jsonl")
    assert (point.cfg.output_root, point.cfg.data.path) == ("a b/c=d(e)", "x=1.jsonl")
    swept = points_of("-m", "data=jsonl", "data.path=a.jsonl,b.jsonl")
    assert [point.cfg.data.path for point in swept] == ["a.jsonl", "b.jsonl"]


def test_two_launches_in_one_second_never_share_a_directory(somewhere: Path) -> None:
    made = [plan.claim(somewhere / "outputs", "2026-01-01_00-00-00-x") for _ in range(3)]
    assert [path.name for path in made] == ["2026-01-01_00-00-00-x", "2026-01-01_00-00-00-x-2", "2026-01-01_00-00-00-x-3"]


def test_what_cannot_be_finished_is_taken_back(somewhere: Path, store: str) -> None:
    points = points_of("-m", "seed=1,2")
    runs = check_points(points)
    OmegaConf.set_struct(points[1].cfg, False)
    points[1].cfg.broken = "${nowhere}"  # the second config cannot be frozen, after the first run was made
    before = {run.info.run_id for run in client(store).search_runs(["1"])}
    with pytest.raises(ValueError, match="broken: its interpolation cannot be resolved"):
        create(points, runs, argv=[])
    assert list(somewhere.iterdir()) == []
    assert {run.info.run_id for run in client(store).search_runs(["1"])} == before


def test_a_sweep(somewhere: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = jobs_of("-m", "seed=1,7,2,8", "threads=3")
    top = jobs[0].run_dir.parent
    assert top.parent == somewhere / "multirun" and top.name.endswith("-seed")
    assert [job.run_dir.name for job in jobs] == ["000", "001", "002", "003"]
    assert [load(job.run_dir).name for job in jobs] == ["seed-1", "seed-7", "seed-2", "seed-8"]
    assert {client(store).get_run(job.run_id).data.tags["sweep"] for job in jobs} == {top.name}
    outcomes = dispatch(jobs, command=command)
    assert [outcome.status for outcome in outcomes] == ["finished", "failed", "finished", "failed"]
    assert [outcome.message for outcome in outcomes] == [
        None,
        "exit status 1, and no result.json; before the first checkpoint: start the run anew",
        None,
        "step 4: the loss is not a number",
    ]
    assert outcomes[0].result["threads"] == "3"
    assert [client(store).get_run(job.run_id).info.status for job in jobs] == ["RUNNING", "FAILED", "RUNNING", "FAILED"]
    assert exit_status(outcomes) == 1
    capsys.readouterr()
    report(jobs, outcomes, swept=True)
    out, err = capsys.readouterr()
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    told = [[cell.strip() for cell in row] for row in rows]
    assert told[0] == ["002", "seed=2", "arithmetic/avg_at_12", "21.2", "72.0", "+50.8 [+40.0, +57.5]", "finished"]
    assert [row[0] for row in told] == ["002", "000", "001", "003", "all points"]
    assert told[4][1:5] == ["2 of 4", "arithmetic/avg_at_12", "71.5", "0.7"]  # the mean of 71 and 72, and their spread
    assert f"{jobs[3].run_dir}: failed: step 4: the loss is not a number" in err


def test_one_run_ends_with_one_line(somewhere: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = jobs_of("seed=3", "output_root=elsewhere")
    outcomes = dispatch(jobs, command=command)
    report(jobs, outcomes, swept=False)
    *_, serve, last = capsys.readouterr().out.splitlines()
    assert serve == f"mlflow ui --backend-store-uri {store}"
    where, score, url = last.split("  ")
    assert where == str(jobs[0].run_dir) and jobs[0].run_dir.parent == somewhere / "elsewhere"
    assert score == "arithmetic/avg_at_12 21.2 -> 73.0 (+51.8 [+40.0, +57.5] paired, 95%)"
    assert url.endswith(f"/runs/{jobs[0].run_id}")
    assert exit_status(outcomes) == 0


def test_ctrl_c_reaches_the_job_which_saves_and_no_further_one_starts(somewhere: Path, store: str) -> None:
    jobs = jobs_of("-m", "seed=9,1")
    started = jobs[0].run_dir / "started"

    def press() -> None:
        while not started.exists():
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=press).start()
    outcomes = dispatch(jobs, command=command)
    assert [outcome.status for outcome in outcomes] == ["interrupted", "not started"]
    assert outcomes[0].message == "before the first checkpoint: start the run anew"
    assert (jobs[0].run_dir / "saved").exists() and not (jobs[1].run_dir / "result.json").exists()
    assert signal.getsignal(signal.SIGINT) is before
    assert exit_status(outcomes) == 130
    assert [client(store).get_run(job.run_id).info.status for job in jobs] == ["KILLED", "KILLED"]  # none goes on RUNNING for ever


def test_ctrl_c_before_there_is_a_process_ends_the_run_too(somewhere: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of("seed=9")
    start = subprocess.Popen

    def press_then_start(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        return start(*arguments, **settings)

    monkeypatch.setattr("opsd.launch.local.subprocess.Popen", press_then_start)
    (outcome,) = dispatch(jobs, command=command)
    assert outcome.status == "interrupted"
    assert client(store).get_run(jobs[0].run_id).info.status == "KILLED"


def at_step(job: Job, step: int) -> None:
    """A checkpoint's record of how far it is; what resume reads of it."""
    folder = job.run_dir / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    came = {"position": [[32 * step, 32 * step]], "elapsed_s": 1.0, "problems": digest(training_problems(job.run).problems)}
    progress = Progress(step=step, mlflow_run_id=job.run_id, engine="torch", processes=1, **came)
    (folder / "state.json").write_text(json.dumps(asdict(progress)))


def goes_on(*argv: str) -> tuple[Job, DictConfig]:
    composed, changes = resume.split(list(argv))
    return resume.resumed(points_of(*composed), changes)


def test_resume_changes_what_it_may_and_refuses_the_rest(somewhere: Path, store: str) -> None:
    (job,) = jobs_of("loss=jsd", "seed=3")
    here = f"resume={job.run_dir}"
    with pytest.raises(ValueError, match=r"^resume=.*: holds no checkpoint to go on from"):
        goes_on(here)
    at_step(job, 100)
    frozen = (job.run_dir / "config.yaml").read_text()
    for bad in ("loss=forward_kl", "seed=4", "train.lr=1", "clip=0.1", "debug=smoke", "threads=2", "rollout.max_len=3"):
        with pytest.raises(ValueError, match=rf"^{bad}: would make .* another experiment; only train.steps, "):
            goes_on(here, bad)
    with pytest.raises(ValueError, match=r"^train.steps=50: the run has taken 100 steps already"):
        goes_on(here, "train.steps=50")
    (job.run_dir / "result.json").write_text('{"status": "finished"}')
    with pytest.raises(ValueError, match=r"^resume=.*: finished, all 100 steps are taken; add train.steps=N"):
        goes_on(here)
    with pytest.raises(ValueError, match="sync"):  # a key that the run's own rollout does not have
        goes_on(here, "train.steps=200", "rollout.sync=merged")
    with pytest.raises(ValueError, match="goes on with one run"):
        goes_on("-m", here, "train.steps=200,300")
    assert (job.run_dir / "config.yaml").read_text() == frozen
    again, cfg = goes_on(here, "train.steps=200", "train.max_time=2h", "launcher=local")
    assert (job.run_dir / "config.yaml").read_text() == frozen
    resume.apply(again, cfg)
    before, after = frozen.splitlines(), (job.run_dir / "config.yaml").read_text().splitlines()
    assert [line.strip() for line in after if line not in before] == ["steps: 200", "max_time: 2h"]
    assert len(before) == len(after) and load(job.run_dir).train.max_time_s == 7200.0
    changes = json.loads((job.run_dir / "launch.json").read_text())["changes"]
    assert [change["overrides"] for change in changes] == [["train.steps=200", "train.max_time=2h", "launcher=local"]]
    recorded = client(store).get_run(job.run_id)
    assert recorded.data.tags["resumed.train.steps"] == "200" and recorded.data.params["steps"] == "100"
    assert [outcome.status for outcome in dispatch([again], command=command)] == ["finished"]
    assert json.loads((job.run_dir / "result.json").read_text())["after"] == 73.0  # written anew


def test_a_cosine_keeps_its_length(somewhere: Path) -> None:
    (job,) = jobs_of("train.schedule=cosine")
    at_step(job, 25)
    with pytest.raises(ValueError, match=r"^train.steps=200: the learning rate of .* follows a cosine over train.steps=100"):
        goes_on(f"resume={job.run_dir}", "train.steps=200")
    assert goes_on(f"resume={job.run_dir}", "train.keep=5")[0].run.train.keep == 5
