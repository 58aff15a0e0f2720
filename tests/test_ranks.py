"""Several processes of one run, started as a user starts them: the same numbers, one record, one word when one of them fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import psutil
import pytest
from safetensors.torch import load_file
from whole_runs import ROOT, environment, final_bytes, launch, lines, the_run

from opsd.endings import INTERRUPTED, LOST, REFUSED
from opsd.ranks import share
from opsd.torchrun import Ending, ending

SHORT = ("train.steps=10", "train.batch=7", "eval.in_run=false", "train.micro_tokens=400")
LONG = ("launcher.processes=2", "train.steps=400", "eval.in_run=false", "train.save_every=3", "train.batch=8")
ROUNDING = {"weights": 2e-5, "curve": 2e-4}  # of ten steps of AdamW in float32, sums cut otherwise; measured 2e-7 and 4e-6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, store: str) -> Path:
    cwd = tmp_path_factory.mktemp("alone")
    done = launch(cwd, store, *SHORT)
    assert done.returncode == 0, done.stderr
    return the_run(cwd)


def test_shares_cover_everything_once() -> None:
    for count in range(12):
        for parts in range(1, 6):
            blocks = [share(count, part=part, parts=parts) for part in range(parts)]
            assert [place for block in blocks for place in block] == list(range(count))
            assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@pytest.mark.parametrize("processes", [2, 4])
def test_more_processes_learn_the_same(tmp_path: Path, store: str, alone: Path, processes: int) -> None:
    """On identical text: seven rollouts on four ranks, so that shares differ and some micro-batches are empty."""
    replay = ("rollout=replay", f"rollout.path={alone}", f"launcher.processes={processes}")
    done = launch(tmp_path, store, *SHORT, *replay)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert done.stdout.count("step 10/10") == 1  # one rank speaks
    one, several = lines(alone), lines(the_run(tmp_path))
    assert [line["step"] for line in several] == list(range(1, 11))
    for here, there in zip(several, one, strict=True):
        assert here["train/response_tokens"] == there["train/response_tokens"]
        for key in ("train/objective", "train/divergence", "train/grad_norm", "train/student_entropy", "train/teacher_gap"):
            assert here[key] == pytest.approx(there[key], rel=ROUNDING["curve"]), (key, here["step"])
    weights, expected = (
        load_file(run_dir / "checkpoints" / "step_000010" / "model" / "model.safetensors") for run_dir in (the_run(tmp_path), alone)
    )
    for name, tensor in expected.items():
        assert (weights[name] - tensor).abs().max() < ROUNDING["weights"], name


def test_a_resumed_run_of_two_ends_bitwise_the_same(tmp_path: Path, store: str) -> None:
    """Sampled, with dropout and an evaluation, so that whatever each rank draws counts."""
    recipe = ("launcher.processes=2", "model=tiny_lora", "model.lora.dropout=0.1", "train.batch=8", "teacher=ema", "debug=smoke")
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    done = launch(tmp_path / "whole", store, *recipe, "train.steps=4")
    assert done.returncode == 0, done.stderr
    done = launch(tmp_path / "cut", store, *recipe, "train.steps=2")
    assert done.returncode == 0, done.stderr
    run_dir = the_run(tmp_path / "cut")
    done = launch(tmp_path / "cut", store, f"resume={run_dir}", "launcher.processes=1", "train.steps=4")
    assert done.returncode == REFUSED
    assert "launcher.processes=1" in done.stderr and "is trained by 2" in done.stderr
    done = launch(tmp_path / "cut", store, f"resume={run_dir}", "train.steps=4")
    assert done.returncode == 0, done.stderr
    whole = the_run(tmp_path / "whole")
    assert final_bytes(run_dir) == final_bytes(whole)
    by_step = [{line["step"]: line for line in lines(each) if "train/objective" in line} for each in (run_dir, whole)]
    assert by_step[0] == by_step[1]


@pytest.fixture
def running(tmp_path: Path, store: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of two that has taken some steps."""
    command = [sys.executable, str(ROOT / "launch.py"), *LONG]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(store), stdout=log, stderr=log, text=True)
    deadline = time.monotonic() + 240
    while not (found := list(tmp_path.glob("outputs/*/checkpoints/step_000003"))):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    yield process, found[0].parents[1]
    if process.poll() is None:
        for part in [*psutil.Process(process.pid).children(recursive=True), process]:
            part.kill()
    process.wait()


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return {
        int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ() and "opsd.run" in child.cmdline()
    }


def status_of(store: str, run_dir: Path) -> str:
    run_id = json.loads((run_dir / "launch.json").read_text())["mlflow"]["run_id"]
    return mlflow.MlflowClient(tracking_uri=store).get_run(run_id).info.status


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_takes_the_other_along(running: tuple, store: str, tmp_path: Path, rank: int) -> None:
    process, run_dir = running
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1]
    ranks[rank].kill()
    began = time.monotonic()
    assert process.wait(60) == 1
    assert time.monotonic() - began < 30
    assert not any(child.is_running() for child in ranks.values())
    message = json.loads((run_dir / "result.json").read_text())["message"]
    assert f"process {rank} was killed by SIGKILL" in message and f"resume={run_dir}" in message
    log = (tmp_path / "log").read_text()
    assert log.count("error:") == 1 and message in log and "Traceback" not in log
    assert status_of(store, run_dir) == "FAILED"


def test_the_rank_that_fails_says_why(running: tuple, store: str, tmp_path: Path) -> None:
    """Out of memory in one rank alone: its message, once, and no rank's about lost connections."""
    process, run_dir = running
    ranks_of(process)[1].rlimit(psutil.RLIMIT_AS, (2**28, 2**28))
    began = time.monotonic()
    assert process.wait(60) == 1
    assert time.monotonic() - began < 30
    message = json.loads((run_dir / "result.json").read_text())["message"]
    assert "process 1 of 2" in message and "memory" in message and "is saved" in message
    log = (tmp_path / "log").read_text()
    assert log.count("error:") == 1 and "peer" not in log
    assert status_of(store, run_dir) == "FAILED"


def test_ctrl_c_saves_and_can_be_gone_on_from(running: tuple, store: str, tmp_path: Path) -> None:
    process, run_dir = running
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED
    log = (tmp_path / "log").read_text()
    assert log.count("finishing this step") == 1 and log.count("go on with") == 1
    assert status_of(store, run_dir) == "KILLED"
    last = lines(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / f"step_{last:06d}").is_dir()
    done = launch(tmp_path, store, f"resume={run_dir}", "train.max_time=1s")
    assert done.returncode == 0, done.stderr
    assert status_of(store, run_dir) == "FINISHED"


def test_a_stuck_rank_does_not_keep_the_run_from_ending(running: tuple, store: str) -> None:
    """It hears nothing, and the other waits for it: the first Ctrl-C can do nothing, the second ends all."""
    process, run_dir = running
    ranks = ranks_of(process)
    ranks[1].suspend()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == INTERRUPTED
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in ranks.values())
    assert status_of(store, run_dir) == "KILLED"


def test_ranks_do_not_outlive_torchrun(running: tuple) -> None:
    process, run_dir = running
    ranks = ranks_of(process)
    ranks[0].parent().kill()
    assert process.wait(60) == 1
    gone, alive = psutil.wait_procs(list(ranks.values()), timeout=30)
    assert not alive


def test_a_second_job_of_the_directory_is_refused_and_spoils_nothing(running: tuple) -> None:
    _, run_dir = running
    command = [sys.executable, "-m", "opsd.torchrun", "--standalone", "--nproc-per-node", "2", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, env=environment(""), capture_output=True, text=True, timeout=120)
    assert done.returncode == REFUSED
    assert "is being run by process" in done.stderr and "Traceback" not in done.stderr
    assert not (run_dir / "result.json").exists() and not (run_dir / "failed").exists()


def test_another_number_of_ranks_than_the_config_says_is_refused(alone: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "opsd.run", str(alone)]
    done = subprocess.run(command, cwd=ROOT, env=environment(""), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "launcher.processes=1: torchrun has started 2 here" in done.stderr


def test_points_of_a_sweep_have_several_processes_too(tmp_path: Path, store: str) -> None:
    done = launch(tmp_path, store, "-m", "loss=forward_kl,jsd", "debug=smoke", "launcher.processes=2", "eval.in_run=false")
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("multirun/*/*/result.json"))]
    assert [result["status"] for result in results] == ["finished"] * 2


def test_several_processes_score_as_one(tmp_path: Path, store: str) -> None:
    reports = []
    for processes in (1, 2):
        command = [sys.executable, str(ROOT / "evaluate.py"), "model=tiny", "eval.samples=1", f"processes={processes}", "seed=3"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(store), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("samples:") == 1
        reports.append(Path(done.stdout.split("samples:")[1].strip()).read_text())
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("codes", "interrupted", "expected"),
    [
        ({1: 1, 0: LOST}, False, Ending(status=1, message=None)),
        ({0: LOST, 2: -11}, False, Ending(status=1, message="process 2 was killed by SIGSEGV")),
        ({0: REFUSED, 1: LOST}, False, Ending(status=REFUSED, message=None)),
        ({0: -2}, True, Ending(status=INTERRUPTED, message=None)),
        ({1: LOST, 0: INTERRUPTED}, False, Ending(status=INTERRUPTED, message=None)),
        ({1: 1, 0: INTERRUPTED}, False, Ending(status=1, message=None)),
        ({0: LOST, 1: LOST}, False, Ending(status=1, message="the processes lost their connection to each other")),
    ],
)
def test_exit_codes_are_read(codes: dict[int, int], interrupted: bool, expected: Ending) -> None:
    assert ending(codes, interrupted=interrupted) == expected
