"""How long a run will take, by the measured pace of another: seconds a token there times the tokens expected here."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from opsd.config import Run
from opsd.inputs import problem_stream, training_problems
from opsd.preflight.baseline import Measured
from opsd.preflight.survey import Tokens, num_evaluations, survey, tokens

BASELINE_PROBLEMS = 64  # for the mean length of its prompts


@dataclass(kw_only=True, slots=True)
class Pace:
    """Seconds that are to be expected."""

    step_s: float
    evaluation_s: float | None  # of each; None: the baseline was not scored, or this run is not
    total_s: float


def lengths(run: Run, base: Measured | None, response: float | None) -> tuple[tuple[float, float] | None, str]:
    """Tokens to be expected of a rollout and of an evaluation's sample, or None, and in words where they are from.

    An evaluation of another benchmark, or one whose limit cut samples off that could go on here, says nothing: its limit stands in.

    Args:
        response: mean length of responses that are there already; None: they will be sampled.
    """
    if response is not None:
        return (response, run.eval.max_len), f"the responses are there already, {response:.0f} tokens on average"
    if base is None:
        return None, "no lengths to go by: give baseline=RUN_DIR, whose measured ones are then expected here"
    evaluated: float = run.eval.max_len
    if run.eval.enabled and base.report is not None and base.run.eval.name == run.eval.name:
        cut = base.report.metrics["truncated_rate"] > 0 and run.eval.max_len > base.run.eval.max_len
        evaluated = evaluated if cut else min(base.report.metrics["mean_tokens"], run.eval.max_len)
    length = min(base.mean("rollout/mean_len"), run.rollout.max_len)
    source = f"at the baseline's lengths, {length:.0f} tokens a response"
    if base.mean("rollout/truncated") > 0 and run.rollout.max_len > base.run.rollout.max_len:
        source += f"; its limit of {base.run.rollout.max_len} cut some off, so that more will come here"
    return (length, evaluated), source


def pace(run: Run, base: Measured, expected: Tokens) -> Pace:
    """The baseline's seconds, scaled by tokens.

    Raises:
        ValueError: the baseline trained another model, or what it read is gone.
    """
    if repr(base.run.model) != repr(run.model):
        raise ValueError(f"the baseline trained model={base.run.model.name} in other settings, whose seconds say nothing of this")
    tokenizer, context = base.run.model.tokenizer(), base.run.model.check()
    found = survey(
        problem_stream(base.run, training_problems(base.run), tokenizer=tokenizer, context=context), most=BASELINE_PROBLEMS
    )
    there = tokens(base.run, found, response=base.mean("rollout/mean_len"), evaluation=0, num_evaluated=0)
    step_s = base.step_s * expected.step / there.step
    evaluation_s = None
    if base.report is not None and base.evaluations_s and expected.evaluation:
        sampled = base.report.metrics["mean_tokens"] * base.report.metrics["samples"]
        evaluation_s = median(base.evaluations_s) * expected.evaluation / sampled
    total_s = run.train.steps * step_s + num_evaluations(run) * (evaluation_s or 0)
    return Pace(step_s=step_s, evaluation_s=evaluation_s, total_s=total_s)
