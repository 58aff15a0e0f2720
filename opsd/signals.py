"""Signals that a run goes wrong, read off the metrics of its steps while it can still be stopped.

A level is a mean over WINDOW steps and is held against the mean of the first START steps, so that nothing is judged before step
START + WINDOW; only turned gradients show from step 1 on. Each signal is a metric, `signal/<name>`, 1 while it holds, from the step
at which it can be judged; and one warning in a run, when it first holds. A pure function of the metrics: a resumed run that is
shown its earlier steps goes on as if it had never stopped.

The thresholds are loose on purpose. On the embedded model, no run that learns reaches one of them; docs/signals.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from statistics import fmean

START, WINDOW = 4, 8  # steps; a batch of 32 is too noisy alone, and a run of 100 steps should be told early
SHRUNK = 0.5  # of the length: a response that loses half of itself has lost its reasoning
CUT = 0.5  # of the rollouts: most are cut at the limit ...
CUT_RISE = 0.2  # ... and more than at the start, by this share
CUT_FROM_START = 0.75  # of the first steps' rollouts: hardly an answer is ever reached
SHARPENED = 0.1  # of the student's own entropy at the start ...
SHARPER = 0.5  # ... and of the teacher's: a student that follows a sure teacher becomes as sure, and no surer
REPETITION_RISE = 0.1  # of the 8-token pieces of a response; near 0 in prose
RATE_FALL = 0.1  # of the rollouts, and ...
RATE_ERRORS = 4.0  # ... so many standard errors of a difference of two windows' rates: the best of many windows is a lucky one
TURNED = 0.5  # of the capped tokens
DIVERGENCE_RISE = 1.25  # times the start's; without learning it wanders by 12%
OBJECTIVE_FALL = 0.5  # of the objective at the start, while the divergence keeps ...
DIVERGENCE_KEPT = 0.9  # ... this much of its own

SAMPLED = ("rollout/mean_len", "rollout/truncated", "rollout/repeated", "rollout/boxed", "rollout/correct")
TRAINED = ("train/objective", "train/divergence", "train/student_entropy", "train/teacher_entropy")
TURNS = "train/cosine_clipped_negative"  # not of every step


class Signals:
    """What has been seen of a run's steps, and what it tells.

    Args:
        rollouts: of a step; how far rates wander by chance depends on it.
        sampled: whether the student writes the rollouts; of recorded ones length, boxes and answers say nothing about it.
        clipping: its name; None where nothing is clipped, and the objective cannot part from the divergence.
        earlier: the metrics of the steps that an earlier job of the run has taken.
    """

    def __init__(self, *, rollouts: int, sampled: bool, clipping: str | None, earlier: Iterable[Mapping[str, float]] = ()) -> None:
        self.rollouts, self.clipping = rollouts, clipping
        self.seen: dict[str, list[float]] = {name: [] for name in (*(SAMPLED if sampled else ()), *TRAINED, TURNS)}
        self.best: dict[str, float] = {}  # highest level so far
        self.told: list[str] = []  # names of the signals that have held
        for metrics in earlier:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """One step's metrics in; the signals' own metrics and what to warn of now out."""
        for name, values in self.seen.items():
            if name in metrics:
                values.append(metrics[name])
                self.best[name] = max(
                    self.best.get(name, -math.inf), fmean(values[-WINDOW:]) if len(values) >= WINDOW else -math.inf
                )
        flags: dict[str, float] = {}
        warnings: list[str] = []
        for name, judge in RULES.items():
            said = judge(self)
            if said is None:
                continue
            flags[f"signal/{name}"] = float(bool(said))
            if said and name not in self.told:
                self.told.append(name)
                warnings.append(said)
        return flags, warnings

    def levels(self, name: str) -> tuple[float, float] | None:
        """A metric at the start and now; None where it is not watched or too young."""
        values = self.seen.get(name, [])
        return (fmean(values[:START]), fmean(values[-WINDOW:])) if len(values) >= START + WINDOW else None


# Each rule gives None where it cannot judge yet, an empty text where all is well, and otherwise what to say.


def judging(metric: str) -> Callable[[Callable[[Signals, float, float], str]], Callable[[Signals], str | None]]:
    """A rule over one metric's level at the start and now, which cannot judge before there are both."""

    def rule_of(judge: Callable[[Signals, float, float], str]) -> Callable[[Signals], str | None]:
        @wraps(judge)
        def rule(signals: Signals) -> str | None:
            levels = signals.levels(metric)
            return None if levels is None else judge(signals, *levels)

        return rule

    return rule_of


@judging("rollout/mean_len")
def length_collapse(signals: Signals, start: float, now: float) -> str:
    if now >= SHRUNK * start:
        return ""
    return (
        f"responses have shrunk from {start:.0f} to {now:.0f} tokens: the student learns to stop early; look at rollouts/ in the "
        f"run directory; {remedy(signals)}"
    )


@judging("rollout/truncated")
def length_explosion(_: Signals, start: float, now: float) -> str:
    if now <= CUT or now <= start + CUT_RISE:
        return ""
    return (
        f"{now:.0%} of the rollouts are cut at rollout.max_len, at the start {start:.0%} were: the student no longer ends its "
        "responses; look at rollouts/ in the run directory and lower train.lr"
    )


@judging("rollout/truncated")
def cut_from_start(_: Signals, start: float, now: float) -> str:
    if min(start, now) <= CUT_FROM_START:
        return ""
    return (
        f"{start:.0%} of the first rollouts were cut at rollout.max_len and {now:.0%} are now: the student is hardly ever trained "
        "on how an answer ends; raise rollout.max_len"
    )


def entropy_collapse(signals: Signals) -> str | None:
    student, teacher = signals.levels("train/student_entropy"), signals.levels("train/teacher_entropy")
    if student is None or teacher is None:
        return None
    start, now = student
    taught = teacher[0]  # at the start: a live teacher collapses with its student
    if now >= SHARPENED * start or now >= SHARPER * taught:
        return ""
    return (
        f"the student's entropy fell from {start:.3g} to {now:.3g} nats, its teacher's was {taught:.3g}: rollouts hardly differ "
        "any more, and mistakes in them are sure ones; lower train.lr, or set loss=forward_kl, which keeps all the teacher allows"
    )


@judging("rollout/repeated")
def repetition(_: Signals, start: float, now: float) -> str:
    if now <= start + REPETITION_RISE:
        return ""
    return (
        f"{now:.0%} of a response repeats what stood in it before, at the start {start:.0%} did: the student falls into loops; "
        "look at rollouts/ in the run directory and lower train.lr"
    )


def boxed_falls(signals: Signals) -> str | None:
    return fall(signals, "rollout/boxed", "reach a boxed answer")


def correct_falls(signals: Signals) -> str | None:
    return fall(signals, "rollout/correct", "are right")


def fall(signals: Signals, name: str, what: str) -> str | None:
    """Whether a share of the rollouts stands below its best level by more than chance."""
    levels = signals.levels(name)
    if levels is None:
        return None
    best, now = signals.best[name], levels[1]
    middle = (best + now) / 2
    error = math.sqrt(2 * middle * (1 - middle) / (signals.rollouts * WINDOW))
    if best - now <= max(RATE_FALL, RATE_ERRORS * error):
        return ""
    return (
        f"{now:.0%} of the rollouts {what}, it has been {best:.0%}: the student gets worse; take an earlier checkpoint, or "
        f"{remedy(signals)}"
    )


def turned_gradients(signals: Signals) -> str | None:
    """As pointwise clipping does (opsd/clipping/entry.py). Held between two measurements."""
    if signals.clipping is None or not signals.seen[TURNS]:
        return None
    share = signals.seen[TURNS][-1]
    if share <= TURNED:
        return ""
    return (
        f"clipping={signals.clipping} turns the gradient of {share:.0%} of the tokens that it caps against their unclipped one: "
        "the model may be trained away from its teacher; set clipping=rescale, or a larger clip"
    )


def divergence_rises(signals: Signals) -> str | None:
    divergence, objective = signals.levels("train/divergence"), signals.levels("train/objective")
    if divergence is None or objective is None:
        return None
    (start, now), (objective_start, objective_now) = divergence, objective
    told = f"the divergence went from {start:.3g} to {now:.3g}"
    if signals.clipping is None:
        return "" if now <= DIVERGENCE_RISE * start else f"{told}: the student moves away from its teacher; {remedy(signals)}"
    fallen = objective_now < objective_start - OBJECTIVE_FALL * abs(objective_start)  # it can be negative
    if now <= DIVERGENCE_RISE * start and not (fallen and now > DIVERGENCE_KEPT * start):
        return ""
    return (
        f"{told} while the objective, which is what clipping={signals.clipping} leaves of it, went from {objective_start:.3g} to "
        f"{objective_now:.3g}: the student does not move to its teacher; {remedy(signals)}"
    )


def remedy(signals: Signals) -> str:
    """What to set against training that goes astray; a clipping that turns gradients is the first suspect."""
    if signals.clipping in (None, "rescale"):
        return "lower train.lr"
    return "set clipping=rescale, a larger clip, or a lower train.lr"


RULES = {
    rule.__name__: rule
    for rule in (
        length_collapse,
        length_explosion,
        cut_from_start,
        entropy_collapse,
        repetition,
        boxed_falls,
        correct_falls,
        turned_gradients,
        divergence_rises,
    )
}
