"""What happens between a run's steps: checkpoints, evaluations, notices, and the summary at its end."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import chat, checkpoints
from opsd.evaluate import compare, evaluate, load_report, metrics_of, save_report
from opsd.tracking import EVALUATION

if TYPE_CHECKING:
    from opsd.config import Run
    from opsd.run import Parts
    from opsd.types import StepReport


def compare_prompts(parts: Parts) -> None:
    """Says once, and tags the run with, whether the student trains on the very prompt that the evaluation asks with.

    Where it does not, a gain in training need not show in the score: long rollouts have turned it into a loss.

    Raises:
        ValueError: no problem fits the context, which shows here before anything is sampled.
    """
    run, tokenizer = parts.run, parts.loaded.tokenizer
    if not run.eval.enabled:
        return
    prompt = parts.stream.first()
    asked = chat.render(tokenizer, run.eval.prompt_text(prompt.problem), thinking=run.eval.thinking)
    same = prompt.student_ids == asked
    parts.tracker.tag({"student_prompt_is_eval_prompt": str(same).lower()})
    if same:
        parts.terminal.say(f"prompt={run.prompt.name}: the student's prompt is token for token that of eval={run.eval.name}")
    else:
        parts.terminal.say(f"prompt={run.prompt.name}: the student's prompt DIFFERS from that of eval={run.eval.name}")
    if not chat.has_thinking_switch(tokenizer):
        parts.terminal.say(f"model={run.model.name}: its chat template has no thinking switch, so thinking on and off are the same")


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


def upload_rollouts(parts: Parts, step: int) -> None:
    """The rollouts of a step into MLflow, where they were kept."""
    file = rollouts_file(parts.run_dir, step)
    if file.exists():
        parts.tracker.artifact(file, "rollouts")


def save(parts: Parts, *, recorded: bool = True) -> None:
    """A checkpoint of the step at hand, unless it exists. MLflow has all that came before it, unless the store is gone (`recorded`
    false): the job that goes on sends the rest from metrics.jsonl."""
    latest = checkpoints.latest(parts.run_dir)
    if latest is not None and checkpoints.step_of(latest) == parts.progress.step:
        return
    if recorded:
        parts.tracker.flush()
    now = time.monotonic()
    parts.progress.elapsed_s, parts.began = parts.progress.elapsed_s + now - parts.began, now
    groups = {"optimizer": parts.engine.state(), "teacher": {} if parts.teacher is None else parts.teacher.state()}
    checkpoints.save(parts.run_dir, parts.progress, loaded=parts.loaded, groups=groups, keep=parts.run.train.keep)


def summary(parts: Parts) -> dict[str, Any]:
    """What becomes result.json: what the launcher prints and tables rank."""
    run, step = parts.run, parts.progress.step
    result: dict[str, Any] = {"status": "finished", "step": step, "message": None}
    if run.eval.in_run:
        before, after = (load_report(evaluation_dir(parts.run_dir, at)) for at in (0, step))
        metric = f"avg_at_{after.k}"
        result |= {"benchmark": after.benchmark, "metric": metric, "before": before.metrics[metric], "after": after.metrics[metric]}
        result["difference"] = asdict(compare(before, after))
    return result


def out_of_time(parts: Parts) -> bool:
    limit_s = parts.run.train.max_time_s
    return limit_s is not None and parts.progress.elapsed_s + time.monotonic() - parts.began >= limit_s


def warn_of_turned_gradients(parts: Parts, report: StepReport) -> None:
    """Once: clipping turns the gradient of most of the tokens it touches (arXiv 2601.18734's pointwise clipping can)."""
    share = report.metrics.get("train/cosine_clipped_negative", 0.0)
    if share > 0.5 and not parts.warned:
        parts.warned = True
        parts.terminal.say(
            f"warning: at step {report.step} clipping={parts.run.clipping.name} turns the gradient of {share:.0%} of the tokens "
            "that it caps against their unclipped one: the model may be trained away from its teacher; set clipping=rescale, or a "
            "larger clip"
        )
