"""The training loop, and the only job entry: `python -m opsd.run RUN_DIR`, here or on a cluster.

A job reads its frozen config, goes on from the latest checkpoint it finds (there is none at first), and ends with result.json.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import batching, checkpoints, records
from opsd.checkpoints import Progress
from opsd.config import Run, Schedule, Train
from opsd.endings import Interrupt
from opsd.engines.base import AdamW
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
    write_rollouts,
)
from opsd.preflight.start import announce
from opsd.ranks import Ranks
from opsd.rollouts.spread import Spread
from opsd.scorers import Scorers, load, restore, with_analyses
from opsd.seeding import derive
from opsd.signals import Signals
from opsd.stream import digest
from opsd.terminal import Terminal
from opsd.timing import Clock, gpu_memory, peak_memory
from opsd.token_kinds import TokenKinds
from opsd.tracking import OBJECTIVE, Tracker, Unrecorded, recorded_in
from opsd.types import Prompt, Request, Rollout, StepReport

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.engines.base import TrainingEngine
    from opsd.rollouts.base import Sampler
    from opsd.types import MicroBatch


@dataclass(kw_only=True, slots=True)
class Parts(Scorers):
    """What a run is made of once it is in memory."""

    run_dir: Path
    kinds: TokenKinds
    sampler: Sampler
    engine: TrainingEngine
    tracker: Tracker
    signals: Signals
    terminal: Terminal
    progress: Progress
    interrupt: Interrupt
    began: float  # monotonic seconds; what came before is in progress.elapsed_s
    interrupted: bool = False  # as all ranks have agreed, see `agree`
    out_of_time: bool = False


def build(run: Run, run_dir: Path, interrupt: Interrupt, me: Ranks) -> Parts:
    """Everything in memory, as it was at the latest checkpoint."""
    if me.local_size != run.launcher.processes:
        raise ValueError(
            f"launcher.processes={run.launcher.processes}: torchrun has started {me.local_size} here; give it --nproc-per-node "
            f"{run.launcher.processes}, or start the run with launch.py."
        )
    began, terminal = time.monotonic(), Terminal(every=run.train.log_every, quiet=not me.first)
    store, run_id = recorded_in(run_dir)
    scorers = load(run, me)
    kinds = TokenKinds(scorers.loaded.tokenizer, vocabulary=scorers.loaded.head_VH.shape[0])
    progress = Progress(
        step=0,
        position=scorers.stream.position,
        elapsed_s=0.0,
        mlflow_run_id=run_id,
        engine=run.engine.name,
        processes=me.size,
        problems=digest(scorers.data.problems),
    )
    found, optimizer_state = me.agreed(lambda: checkpoints.latest(run_dir)), {}
    if found is not None:
        progress = checkpoints.read_progress(found, expected=progress)
        optimizer_state = restore(scorers, found).get("optimizer", {})
        scorers.stream.position = progress.position
        terminal.say(f"going on from {found}")
    scorers.loaded.model.train()
    optimizer = AdamW(betas=run.train.betas, weight_decay=run.train.weight_decay, max_grad_norm=run.train.max_grad_norm)
    engine = run.engine.build(scorers.objective, optimizer=optimizer, ranks=me)
    engine.load_state(optimizer_state)
    own = run.rollout.build(scorers.loaded, processed=run.loss.needs_sampler)
    sampler = Spread(own, me, whole=engine.whole if run.rollout.reads_module else nullcontext)
    if scorers.analyst is not None:
        scorers.analyst = Spread(scorers.analyst, me, whole=engine.whole)
    with engine.whole():
        synced = sampler.sync(weights_version=progress.step)
    if synced:
        terminal.say(f"rollout={run.rollout.name}: " + ", ".join(f"{name} {value:.2g}" for name, value in synced.items()))
    for note in sampler.notes:
        terminal.say(f"note: {note}")
    tracker = None
    if me.first:
        tracker = Tracker(run_dir, store, run_id, step=progress.step, system_metrics=run.tracking.system_metrics)
    lines = me.agreed(lambda: tracker.lines if tracker else [])
    signals = Signals(
        rollouts=run.train.batch,
        sampled=run.rollout.samples_anew,
        clipping=None if run.clip is None else run.clipping.name,
        earlier=[line for line in lines if OBJECTIVE in line],
    )
    return Parts(
        **{field.name: getattr(scorers, field.name) for field in fields(Scorers)},
        run_dir=run_dir,
        kinds=kinds,
        sampler=sampler,
        engine=engine,
        tracker=tracker or Unrecorded(lines),
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
    agree(parts)
    with parts.terminal.steps(first=progress.step, total=run.train.steps):
        while progress.step < run.train.steps and not parts.interrupted and not parts.out_of_time:
            report = take_step(parts, progress.step + 1)
            flags, warnings = parts.signals.see(report.metrics)
            parts.tracker.log(report.step, report.metrics | flags, timings=report.seconds)
            upload_rollouts(parts, report.step)
            warn(parts, report.step, warnings)
            parts.terminal.step(report.step, run.train.steps, report.metrics, report.seconds["time/tokens_per_s"])
            if report.step % run.train.save_every == 0 or is_evaluation_due(run, report.step):
                save(parts)
            agree(parts)
            if not parts.interrupted:
                evaluate_if_due(parts, last=False)
    save(parts)
    agree(parts)
    if parts.interrupted:
        return None
    evaluate_if_due(parts, last=True)
    return summary(parts)


def take_step(parts: Parts, step: int) -> StepReport:
    """One optimizer step: sample, score with both sides, pull the student to the teacher."""
    import torch

    run, me, clock = parts.run, parts.ranks, Clock()
    torch.manual_seed(derive(run.seed, "dropout", step, me.rank))
    prompts, dropped = parts.stream.take(run.train.batch // run.rollout.samples)
    if parts.analyst is not None:
        parts.sampler.rest()
    prompts, analyses = with_analyses(parts, prompts, step)
    clock.lap("time/analysis_s")
    rollouts = sample(parts, prompts, step)
    clock.lap("time/rollout_s")
    weights = batching.token_weights(rollouts, run.train.reduction)
    want_cosine = step == 1 or step % run.train.log_every == 0
    dealt = batching.plan(rollouts, micro_tokens=run.train.micro_tokens, ranks=me.size)
    mine, diagnostics = dealt[me.rank], []
    for place, rows in enumerate(mine, start=1):
        batch = batching.nothing(parts.loaded.device, teacher=parts.teacher is not None)
        if rows:
            batch = batching.collate([rollouts[row] for row in rows], [weights[row] for row in rows], parts.loaded.device)
        teacher_TH, teacher_head_VH = None, None
        if parts.teacher is not None and batch.teacher is not None:
            teacher_TH, teacher_head_VH = parts.teacher.hidden(batch.teacher), parts.teacher.head_VH
        clock.lap("time/teacher_s")
        scored = parts.engine.accumulate(batch, teacher_TH, teacher_head_VH, want_cosine=want_cosine, last=place == len(mine))
        diagnostics.append(scored.cpu())
        clock.lap("time/student_s")
    memory = gpu_memory()
    lr = learning_rate(run.train, step)
    norm = parts.engine.step(lr=lr)
    clock.lap("time/optimizer_s")
    with parts.engine.whole():
        if parts.teacher is not None:
            parts.teacher.after_step(step)
        synced = parts.sampler.sync(weights_version=step)
    clock.lap("time/sync_s")
    order = [row for micro_batches in dealt for rows in micro_batches for row in rows]
    tokens = batching.collate([rollouts[row] for row in order], [weights[row] for row in order], torch.device("cpu"))
    scores_TD = torch.cat(me.gather(torch.cat(diagnostics)))
    metrics = describe(parts, step, rollouts, tokens, scores_TD) | analyses | synced
    metrics |= {"train/grad_norm": norm, "train/lr": lr, "rollout/dropped": float(dropped)}
    metrics["rollout/shortened"] = float(sum(prompt.shortened for prompt in prompts))
    parts.progress.step, parts.progress.position = step, parts.stream.position
    timings = {**clock.laps, "time/step_s": clock.total_s, "time/tokens_per_s": metrics["train/response_tokens"] / clock.total_s}
    return StepReport(step=step, metrics=metrics, seconds=timings | peak_memory() | memory)


def agree(parts: Parts) -> None:
    """Whether to stop is decided together: signals and clocks do not reach all ranks at one moment."""
    found = parts.ranks.gather((parts.interrupt.requested, out_of_time(parts)))
    parts.interrupted = any(interrupted for interrupted, _ in found)
    parts.out_of_time = found[0][1]


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


def describe(parts: Parts, step: int, rollouts: list[Rollout], tokens: MicroBatch, scores_TD: Tensor) -> dict[str, float]:
    """The step's metrics; its rollouts are saved, and written out for people every `train.log_every` steps.

    Args:
        tokens: of all rollouts, in the order of their diagnostics.
    """
    from opsd.evaluation.answers import final_box, is_right
    from opsd.metrics import kind_metrics, pool_metrics, rollout_metrics, token_metrics

    boxes = [final_box(rollout.text) for rollout in rollouts]
    golds = [rollout.prompt.problem.answer for rollout in rollouts]
    correct = [None if gold is None else is_right(box, gold) for box, gold in zip(boxes, golds, strict=True)]
    metrics = token_metrics([tokens], [scores_TD], columns=parts.objective.columns, teacher=parts.teacher is not None)
    metrics |= kind_metrics([tokens], [scores_TD], columns=parts.objective.columns, kinds=parts.kinds)
    metrics |= rollout_metrics(rollouts, boxed=[box is not None for box in boxes], correct=correct)
    if len(parts.data.pools) > 1:
        pools = [parts.stream.pool_of[rollout.prompt.problem.id] for rollout in rollouts]
        metrics |= pool_metrics(pools, correct, names=[pool.name for pool in parts.data.pools])
    if parts.ranks.first:
        records.save(parts.run_dir, step, rollouts)
        if step == 1 or step % parts.run.train.log_every == 0:
            write_rollouts(rollouts_file(parts.run_dir, step), rollouts, correct)
    return metrics


def learning_rate(train: Train, step: int) -> float:
    """Of the step that is about to be taken, from 1."""
    if step <= train.warmup:
        return train.lr * step / train.warmup
    if train.schedule is Schedule.constant:
        return train.lr
    done = (step - 1 - train.warmup) / (train.steps - train.warmup)
    return train.lr * 0.5 * (1 + math.cos(math.pi * done))


if __name__ == "__main__":
    from opsd.job import main

    sys.exit(main(Path(sys.argv[1]).absolute()))
