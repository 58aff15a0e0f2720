"""A run's job, or one rank of it, from start to whatever end it comes to: `python -m opsd.run RUN_DIR` calls `main`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from opsd import checkpoints, config, ranks
from opsd.endings import (
    FAILED,
    INTERRUPTED,
    LOST,
    PARTED,
    REFUSED,
    RESULT,
    Interrupt,
    NonFinite,
    attempt,
    explain,
    fail,
    first_to_fail,
    has_failed,
    only_job,
)
from opsd.files import write_json
from opsd.milestones import save
from opsd.ranks import Ranks
from opsd.run import Parts, build, train
from opsd.tracking import TrackingError


def main(run_dir: Path) -> int:
    """The job of a run directory, or one rank of it; the exit status."""
    me = ranks.start()
    try:
        with only_job(run_dir) if me.first else nullcontext():
            if me.first:
                for name in (RESULT, FAILED, PARTED):  # of the job that this one goes on from
                    (run_dir / name).unlink(missing_ok=True)
            me.gather(None)
            status = run_job(run_dir, me)
    except ValueError as error:  # held by another job, whose records are left alone
        fail(str(error))
        status = REFUSED
    except RuntimeError as error:
        if not ranks.lost(error):
            raise
        status = LOST
    if me.size > 1 and status != 0:
        # a group that may have lost a member cannot be taken apart in order: NCCL would wait for it, gloo aborts
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    ranks.end()
    return status


def run_job(run_dir: Path, me: Ranks) -> int:
    """Runs the job to whatever end it comes to, and records that."""
    interrupt = Interrupt(run_dir, me)
    parts, result = None, None
    try:
        parts = build(config.load(run_dir), run_dir, interrupt, me)
        result = train(parts)
        parts.tracker.close("FINISHED" if result else "KILLED")
        if result is not None and me.first:
            write_json(run_dir / RESULT, result)
        me.gather(None)  # nobody leaves before the record is closed
    except KeyboardInterrupt:
        result = None
        interrupt.ignore()
        if parts is not None:
            attempt(partial(parts.tracker.close, "FAILED" if has_failed(run_dir) else "KILLED"))
    except Exception as error:  # the one place where a job's failures end: each is told and recorded, none is swallowed
        interrupt.ignore()
        return record_failure(run_dir, error, me, parts)
    if parts is not None:
        attempt(parts.sampler.close)
    if result is not None:
        return 0
    if has_failed(run_dir):
        return LOST
    if me.first:
        latest = checkpoints.latest(run_dir)
        fail("interrupted; " + ("" if latest is None else f"{latest.name} is saved: ") + checkpoints.go_on(run_dir))
    return INTERRUPTED


def record_failure(run_dir: Path, error: Exception, me: Ranks, parts: Parts | None) -> int:
    """Says what happened, marks the run FAILED and keeps the last good state; the exit status. Of several ranks the one that fails
    first has the word."""
    if ranks.lost(error) or not first_to_fail(run_dir):
        if ranks.lost(error):  # told only where nobody has a better word
            attempt(partial((run_dir / PARTED).write_text, str(error).splitlines()[0]))
        if parts is not None:
            attempt(partial(parts.tracker.close, "FAILED"))
        return LOST
    spoilt = isinstance(error, (NonFinite, FloatingPointError))
    message = explain(error)
    if me.size > 1:
        message = f"process {me.rank} of {me.size}: {message}"
    if parts is not None:
        message = f"after step {parts.progress.step}: {message}"
        if spoilt and me.size == 1:
            attempt(partial(keep_finite, parts))
        elif isinstance(error, TrackingError) and me.size == 1:  # between two steps: the training itself is sound
            attempt(partial(save, parts, recorded=False))
    latest = checkpoints.latest(run_dir)
    if latest is not None:
        remedy = "start a new run with a lower train.lr or train.max_grad_norm" if spoilt else checkpoints.go_on(run_dir)
        message = f"{message.rstrip('.')}; {latest.name} is saved; {remedy}"
    fail(message)
    attempt(partial(write_json, run_dir / RESULT, {"status": "failed", "message": message}))
    if parts is not None:
        attempt(partial(parts.tracker.close, "FAILED"))
    return 1


def keep_finite(parts: Parts) -> None:
    """Saves the state before the step that failed, unless its weights are spoilt."""
    if all(bool(parameter.isfinite().all()) for parameter in parts.loaded.model.parameters()):
        save(parts)
