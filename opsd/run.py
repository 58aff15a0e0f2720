"""The training loop, and the only job entry: `python -m opsd.run RUN_DIR`, here or on a cluster.

A job reads its frozen config, goes on from the latest checkpoint it finds (there is none at first), and ends with result.json.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import batching, checkpoints, config, records
from opsd.checkpoints import Progress
from opsd.config import Run, Schedule, Train
from opsd.endings import INTERRUPTED, RESULT, Interrupt, NonFinite, attempt, explain, fail, only_job
from opsd.engines.base import AdamW
from opsd.files import write_json
from opsd.milestones import (
    evaluate_if_due,
    is_evaluation_due,
    out_of_time,
    rollouts_file,
    save,
    summary,
    tell_data,
    upload_rollouts,
    warn,
)
from opsd.preflight.start import announce
from opsd.scorers import Scorers, load, restore, with_analyses
from opsd.seeding import derive
from opsd.signals import Signals
from opsd.stream import digest
from opsd.terminal import Terminal
from opsd.timing import Clock, peak_memory
from opsd.token_kinds import TokenKinds
from opsd.tracking import OBJECTIVE, Tracker, TrackingError, recorded_in
from opsd.types import Prompt, Request, Rollout, StepReport

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.engines.base import TrainingEngine


@dataclass(kw_only=True, slots=True)
class Parts(Scorers):
    """What a run is made of once it is in memory."""

    run_dir: Path
    kinds: TokenKinds
    engine: TrainingEngine
    tracker: Tracker
    signals: Signals
    terminal: Terminal
    progress: Progress
    interrupt: Interrupt
    began: float  # monotonic seconds; what came before is in progress.elapsed_s


def main(run_dir: Path) -> int:
    """The job of a run directory; the exit status."""
    try:
        with only_job(run_dir):
            return run_job(run_dir)
    except ValueError as error:  # held by another job, whose records are left alone
        fail(str(error))
        return 1


def run_job(run_dir: Path) -> int:
    """Runs the job to whatever end it comes to, and records that."""
    interrupt = Interrupt()
    parts, result = None, None
    try:
        parts = build(config.load(run_dir), run_dir, interrupt)
        result = train(parts)
        parts.tracker.close("FINISHED" if result else "KILLED")
    except KeyboardInterrupt:
        result = None
        if parts is not None:
            attempt(partial(parts.tracker.close, "KILLED"))
    except Exception as error:  # the one place where a job's failures end: each is told and recorded, none is swallowed
        return record_failure(run_dir, error, parts)
    if result is not None:
        write_json(run_dir / RESULT, result)
        return 0
    latest = checkpoints.latest(run_dir)
    fail("interrupted; " + ("" if latest is None else f"{latest.name} is saved: ") + checkpoints.go_on(run_dir))
    return INTERRUPTED


def build(run: Run, run_dir: Path, interrupt: Interrupt) -> Parts:
    """Everything in memory, as it was at the latest checkpoint."""
    began, terminal = time.monotonic(), Terminal(every=run.train.log_every)
    store, run_id = recorded_in(run_dir)
    scorers = load(run)
    scorers.loaded.model.train()
    optimizer = AdamW(betas=run.train.betas, weight_decay=run.train.weight_decay, max_grad_norm=run.train.max_grad_norm)
    engine = run.engine.build(scorers.objective, optimizer=optimizer)
    progress = Progress(
        step=0,
        position=scorers.stream.position,
        elapsed_s=0.0,
        mlflow_run_id=run_id,
        engine=run.engine.name,
        problems=digest(scorers.data.problems),
    )
    found = checkpoints.latest(run_dir)
    if found is not None:
        progress = checkpoints.read_progress(found, expected=progress)
        engine.load_state(restore(scorers, found).get("optimizer", {}))
        scorers.stream.position = progress.position
        terminal.say(f"going on from {found}")
    scorers.sampler.sync(weights_version=progress.step)
    tracker = Tracker(run_dir, store, run_id, step=progress.step, system_metrics=run.tracking.system_metrics)
    signals = Signals(
        rollouts=run.train.batch,
        sampled=run.rollout.samples_anew,
        clipping=None if run.clip is None else run.clipping.name,
        earlier=[line for line in tracker.lines if OBJECTIVE in line],
    )
    return Parts(
        **{field.name: getattr(scorers, field.name) for field in fields(Scorers)},
        run_dir=run_dir,
        kinds=TokenKinds(scorers.loaded.tokenizer, vocabulary=scorers.loaded.head_VH.shape[0]),
        engine=engine,
        tracker=tracker,
        signals=signals,
        terminal=terminal,
        progress=progress,
        interrupt=interrupt,
        began=began,
    )


def train(parts: Parts) -> dict[str, Any] | None:
    """The loop. The run's result, or None where it was interrupted and can go on."""
    run, progress = parts.run, parts.progress
    parts.interrupt.at_once = False
    parts.tracker.artifact(parts.run_dir / "config.yaml")
    parts.tracker.artifact(parts.run_dir / "launch.json")
    tell_data(parts)
    announce(parts)
    if progress.step == 0:
        save(parts)
    evaluate_if_due(parts, last=False)
    with parts.terminal.steps(first=progress.step, total=run.train.steps):
        while progress.step < run.train.steps and not out_of_time(parts) and not parts.interrupt.requested:
            report = take_step(parts, progress.step + 1)
            flags, warnings = parts.signals.see(report.metrics)
            parts.tracker.log(report.step, report.metrics | flags, timings=report.seconds)
            upload_rollouts(parts, report.step)
            warn(parts, report.step, warnings)
            parts.terminal.step(report.step, run.train.steps, report.metrics, report.seconds["time/tokens_per_s"])
            if report.step % run.train.save_every == 0 or is_evaluation_due(run, report.step):
                save(parts)
            if not parts.interrupt.requested:
                evaluate_if_due(parts, last=False)
    save(parts)
    if parts.interrupt.requested:
        return None
    evaluate_if_due(parts, last=True)
    return summary(parts)


def take_step(parts: Parts, step: int) -> StepReport:
    """One optimizer step: sample, score with both sides, pull the student to the teacher."""
    run, clock = parts.run, Clock()
    prompts, dropped = parts.stream.take(run.train.batch // run.rollout.samples)
    prompts, analyses = with_analyses(parts, prompts, step)
    clock.lap("time/analysis_s")
    rollouts = sample(parts, prompts, step)
    clock.lap("time/rollout_s")
    weights = batching.token_weights(rollouts, run.train.reduction)
    want_cosine = step == 1 or step % run.train.log_every == 0
    batches, diagnostics = [], []
    for rows in batching.cut(rollouts, micro_tokens=run.train.micro_tokens):
        batch = batching.collate([rollouts[row] for row in rows], [weights[row] for row in rows], parts.loaded.device)
        teacher_TH, teacher_head_VH = None, None
        if parts.teacher is not None and batch.teacher is not None:
            teacher_TH, teacher_head_VH = parts.teacher.hidden(batch.teacher), parts.teacher.head_VH
        clock.lap("time/teacher_s")
        diagnostics.append(parts.engine.accumulate(batch, teacher_TH, teacher_head_VH, want_cosine=want_cosine))
        batches.append(batch)
        clock.lap("time/student_s")
    lr = learning_rate(run.train, step)
    norm = parts.engine.step(lr=lr)
    if parts.teacher is not None:
        parts.teacher.after_step(step)
    clock.lap("time/optimizer_s")
    parts.sampler.sync(weights_version=step)
    clock.lap("time/sync_s")
    metrics = describe(parts, step, rollouts, batches, diagnostics) | analyses
    metrics |= {"train/grad_norm": norm, "train/lr": lr, "rollout/dropped": float(dropped)}
    metrics["rollout/shortened"] = float(sum(prompt.shortened for prompt in prompts))
    parts.progress.step, parts.progress.position = step, parts.stream.position
    timings = {**clock.laps, "time/step_s": clock.total_s, "time/tokens_per_s": metrics["train/response_tokens"] / clock.total_s}
    return StepReport(step=step, metrics=metrics, seconds=timings | peak_memory())


def sample(parts: Parts, prompts: list[Prompt], step: int) -> list[Rollout]:
    """The step's rollouts: all prompts sampled in one call, or what was recorded. Draws are decided by (seed, step, problem,
    sample); a problem that comes twice in a step goes on counting its samples."""
    run, counts = parts.run, Counter[str]()
    asked = [prompt for prompt in prompts for _ in range(run.rollout.samples)]
    if parts.recorded is not None:
        responses = parts.recorded.responses(asked, step=step)
    else:
        requests = []
        for prompt in asked:
            seed = derive(run.seed, "rollout", step, prompt.problem.id, counts[prompt.problem.id])
            counts[prompt.problem.id] += 1
            requests.append(Request(prompt_ids=prompt.student_ids, seed=seed))
        assert run.rollout.sampling is not None
        responses = parts.sampler.generate(requests, sampling=run.rollout.sampling)
        stale = {response.weights_version for response in responses} - {step - 1}
        assert not stale, f"step {step} was sampled from the weights after steps {stale}"
    texts = parts.loaded.tokenizer.batch_decode([response.token_ids for response in responses])
    return [
        Rollout(prompt=prompt, response=response, text=text) for prompt, response, text in zip(asked, responses, texts, strict=True)
    ]


def describe(parts: Parts, step: int, rollouts: list[Rollout], batches: list[Any], diagnostics: list[Tensor]) -> dict[str, float]:
    """The step's metrics; its rollouts are saved, and written out for people every `train.log_every` steps."""
    from opsd.evaluation.answers import final_box, is_right
    from opsd.metrics import kind_metrics, pool_metrics, rollout_metrics, token_metrics

    records.save(parts.run_dir, step, rollouts)
    boxes = [final_box(rollout.text) for rollout in rollouts]
    golds = [rollout.prompt.problem.answer for rollout in rollouts]
    correct = [None if gold is None else is_right(box, gold) for box, gold in zip(boxes, golds, strict=True)]
    metrics = token_metrics(batches, diagnostics, columns=parts.objective.columns, teacher=parts.teacher is not None)
    metrics |= kind_metrics(batches, diagnostics, columns=parts.objective.columns, kinds=parts.kinds)
    metrics |= rollout_metrics(rollouts, boxed=[box is not None for box in boxes], correct=correct)
    if len(parts.data.pools) > 1:
        pools = [parts.stream.pool_of[rollout.prompt.problem.id] for rollout in rollouts]
        metrics |= pool_metrics(pools, correct, names=[pool.name for pool in parts.data.pools])
    if step == 1 or step % parts.run.train.log_every == 0:
        file = rollouts_file(parts.run_dir, step)
        file.parent.mkdir(exist_ok=True)
        rows = [
            {
                "problem_id": rollout.prompt.problem.id,
                "problem": rollout.prompt.problem.text,
                "response": rollout.text,
                "tokens": len(rollout.response.token_ids),
                "finish_reason": rollout.response.finish_reason.value,
                "answer": rollout.prompt.problem.answer,
                "correct": verdict,
            }
            for rollout, verdict in zip(rollouts, correct, strict=True)
        ]
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return metrics


def learning_rate(train: Train, step: int) -> float:
    """Of the step that is about to be taken, from 1."""
    if step <= train.warmup:
        return train.lr * step / train.warmup
    if train.schedule is Schedule.constant:
        return train.lr
    done = (step - 1 - train.warmup) / (train.steps - train.warmup)
    return train.lr * 0.5 * (1 + math.cos(math.pi * done))


def record_failure(run_dir: Path, error: Exception, parts: Parts | None = None) -> int:
    """Says what happened, marks the run FAILED and keeps the last good state; the exit status."""
    spoilt = isinstance(error, (NonFinite, FloatingPointError))
    message = explain(error)
    if parts is not None:
        message = f"after step {parts.progress.step}: {message}"
        if spoilt:
            attempt(partial(keep_finite, parts))
        elif isinstance(error, TrackingError):  # between two steps: the training itself is sound
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
