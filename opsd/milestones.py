"""What happens between a run's steps: checkpoints, evaluations, notices, and the summary at its end."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import checkpoints
from opsd.evaluate import compare, evaluate, load_report, metrics_of, save_report
from opsd.inputs import told
from opsd.preflight.baseline import versus
from opsd.tracking import EVALUATION

if TYPE_CHECKING:
    from opsd.config import Run
    from opsd.run import Parts
    from opsd.types import Rollout


def tell_data(parts: Parts) -> None:
    """Says what the run trains on and what was left out of it; the run's tags `data.*` hold the counts."""
    parts.terminal.say(told(parts.run.data.name, parts.data))
    parts.tracker.tag({f"data.{reason}": str(count) for reason, count in parts.data.counts.items()})


def is_evaluation_due(run: Run, step: int) -> bool:
    return run.eval.in_run and run.eval.every > 0 and step % run.eval.every == 0


def evaluate_if_due(parts: Parts, *, last: bool) -> None:
    """Before the first step, every `eval.every` steps and after the last; once for a step, also after a resume."""
    run, step = parts.run, parts.progress.step
    if not run.eval.in_run or not (last or step == 0 or is_evaluation_due(run, step)):
        return
    if parts.tracker.has(step, EVALUATION):
        return
    began = time.perf_counter()
    parts.interrupt.at_once = True
    report = evaluate(
        run.eval, loaded=parts.loaded, sampler=parts.sampler, seed=run.seed, step=step, on_progress=parts.terminal.say
    )
    parts.interrupt.at_once = False
    directory = evaluation_dir(parts.run_dir, step)
    if parts.ranks.first:
        save_report(report, directory)
    parts.tracker.artifact(directory / "samples.jsonl", f"evaluations/{directory.name}")
    parts.tracker.log(step, metrics_of(report), timings={EVALUATION: time.perf_counter() - began})
    parts.tracker.flush()
    headline = f"avg_at_{report.k}"
    parts.terminal.say(f"step {step}: {report.benchmark}/{headline} {report.metrics[headline]:.1f}")


def evaluation_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "evaluations" / checkpoints.step_name(step)


def rollouts_file(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"{checkpoints.step_name(step)}.jsonl"


def write_rollouts(file: Path, rollouts: list[Rollout], correct: list[bool | None]) -> None:
    """A step's rollouts for people to read."""
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


def upload_rollouts(parts: Parts, step: int) -> None:
    """The rollouts of a step into MLflow, where they were kept."""
    file = rollouts_file(parts.run_dir, step)
    if file.exists():
        parts.tracker.artifact(file, "rollouts")


def save(parts: Parts, *, recorded: bool = True) -> None:
    """A checkpoint of the step at hand, unless it exists. MLflow has all that came before it, unless the store is gone (`recorded`
    false): the job that goes on sends the rest from metrics.jsonl."""
    if parts.ranks.agreed(lambda: is_saved(parts)):
        return
    if recorded:
        parts.tracker.flush()
    now = time.monotonic()
    parts.progress.elapsed_s, parts.began = parts.progress.elapsed_s + now - parts.began, now
    groups = {"optimizer": parts.engine.state(), "teacher": {} if parts.teacher is None else parts.teacher.state()}
    with parts.engine.whole():
        if parts.ranks.first:
            checkpoints.save(parts.run_dir, parts.progress, loaded=parts.loaded, groups=groups, keep=parts.run.train.keep)


def is_saved(parts: Parts) -> bool:
    latest = checkpoints.latest(parts.run_dir)
    return latest is not None and checkpoints.step_of(latest) == parts.progress.step


def summary(parts: Parts) -> dict[str, Any]:
    """What becomes result.json: what the launcher prints and tables rank. Of other ranks than the first it is never read."""
    if not parts.ranks.first:
        return {"status": "finished"}
    run, step = parts.run, parts.progress.step
    result: dict[str, Any] = {"status": "finished", "step": step, "message": None}
    if run.eval.in_run:
        before, after = (load_report(evaluation_dir(parts.run_dir, at)) for at in (0, step))
        metric = f"avg_at_{after.k}"
        result |= {"benchmark": after.benchmark, "metric": metric, "before": before.metrics[metric], "after": after.metrics[metric]}
        result["difference"] = asdict(compare(before, after))
        if run.baseline is not None:
            result["baseline"] = versus(run.baseline, after)
    elif run.baseline is not None:
        result["baseline"] = versus(run.baseline, None)
    return result


def out_of_time(parts: Parts) -> bool:
    limit_s = parts.run.train.max_time_s
    return limit_s is not None and parts.progress.elapsed_s + time.monotonic() - parts.began >= limit_s


def warn(parts: Parts, step: int, warnings: list[str]) -> None:
    """Says what the signals of a step warn of; the run's tag `warnings` holds the names of all so far."""
    for warning in warnings:
        parts.terminal.say(f"warning: at step {step} {warning}")
    if warnings:
        parts.tracker.tag({"warnings": ", ".join(parts.signals.told)})
