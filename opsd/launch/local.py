"""`launcher=local`: runs here, one after another, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import checkpoints
from opsd.endings import INTERRUPTED, RESULT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opsd.launch.plan import Job


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    status: str  # finished, failed, interrupted, not started
    message: str | None
    result: dict[str, Any]  # result.json; empty where the run left none


def command(run_dir: Path, *, processes: int) -> list[str]:
    """The job: the same here, under torchrun and on a cluster."""
    if processes == 1:
        return [sys.executable, "-m", "opsd.run", str(run_dir)]
    return [sys.executable, "-m", "opsd.torchrun", *torchrun_options(processes), str(run_dir)]


def torchrun_options(processes: int) -> list[str]:
    """All ranks on this machine."""
    return ["--standalone", "--nproc-per-node", str(processes)]


def rank_environment() -> dict[str, str]:
    """Ranks of one machine talk over its loopback, which needs no name that resolves."""
    loopback = [name for _, name in socket.if_nameindex() if name == "lo"]
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback[0])} if loopback else {}


def dispatch(jobs: list[Job], *, command: Callable[..., list[str]] = command) -> list[Outcome]:
    """Runs the jobs one after another. One that fails does not take the others with it; after Ctrl-C no further one is started."""
    outcomes: list[Outcome] = []
    for job in jobs:
        if any(outcome.status == "interrupted" for outcome in outcomes):
            outcome = Outcome(status="not started", message=None, result={})
        else:
            place = f"\n[{len(outcomes) + 1}/{len(jobs)}] {' '.join(job.overrides)}  " if len(jobs) > 1 else ""
            print(f"{place}{job.run_dir}", flush=True)
            outcome = start(job, command(job.run_dir, processes=job.run.launcher.processes))
        record_end(job, outcome)
        outcomes.append(outcome)
    return outcomes


def start(job: Job, arguments: list[str]) -> Outcome:
    """One job, to its end. Ctrl-C, SIGTERM and the end of the terminal reach it once, as Ctrl-C: it saves, exits, is waited for."""
    result = job.run_dir / RESULT
    result.unlink(missing_ok=True)  # of the run before a resume
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
    environment = os.environ | rank_environment() | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(job.run.threads)}
    with passing_on() as (signals, started):
        # a group of its own, so that a terminal's Ctrl-C does not reach it a second time, beside the one passed on
        process = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        started.append(process)
        if signals:  # before there was anything to pass them on to
            process.send_signal(signal.SIGINT)
        status = process.wait()
    left = json.loads(result.read_text()) if result.exists() else {}
    go_on = checkpoints.go_on(job.run_dir)
    if signals or status == INTERRUPTED:
        if left.get("status") == "finished":
            return Outcome(status="finished", message=None, result=left)
        return Outcome(status="interrupted", message=go_on, result=left)
    if status == 0 and left.get("status") == "finished":
        return Outcome(status="finished", message=None, result=left)
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}, and no result.json"
    return Outcome(status="failed", message=left.get("message") or f"{how}; {go_on}", result=left)


@contextmanager
def passing_on() -> Iterator[tuple[list[int], list[subprocess.Popen[bytes]]]]:
    """While inside, Ctrl-C, SIGTERM and the end of the terminal go to what is started; gives those that came, and what to tell."""
    came: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        for process in started:
            process.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield came, started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def record_end(job: Job, outcome: Outcome) -> None:
    """Ends the MLflow run of a job that may not have got to say so itself."""
    from opsd.tracking import TrackingError, end_run

    if outcome.status == "finished":
        return
    try:
        end_run(job.store, job.run_id, "FAILED" if outcome.status == "failed" else "KILLED")
    except TrackingError as error:
        print(f"error: {job.run_dir}: {error}", file=sys.stderr)
