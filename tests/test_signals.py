"""Signals: each holds where its rule says, warns once, keeps still on runs that learn, and is the same after a resume."""

from __future__ import annotations

import math
import random

import pytest

from opsd.signals import RATE_ERRORS, RULES, START, WINDOW, Signals

HEALTHY = {
    "rollout/mean_len": 400.0,
    "rollout/truncated": 0.3,
    "rollout/repeated": 0.02,
    "rollout/boxed": 0.7,
    "rollout/correct": 0.5,
    "train/objective": 0.01,
    "train/divergence": 0.2,
    "train/student_entropy": 0.4,
    "train/teacher_entropy": 0.2,
}


def steps(count: int, **changed: float) -> list[dict[str, float]]:
    return [HEALTHY | {name.replace("__", "/"): value for name, value in changed.items()} for _ in range(count)]


def watch(rows: list[dict[str, float]], **settings) -> tuple[list[dict[str, float]], list[tuple[int, str]]]:
    """The signals' metrics of each step, and the warnings with the step they came at, from 1."""
    signals = Signals(**{"rollouts": 32, "sampled": True, "clipping": "entry"} | settings)
    flags, warnings = [], []
    for step, row in enumerate(rows, start=1):
        flag, said = signals.see(row)
        flags.append(flag)
        warnings += [(step, text) for text in said]
    return flags, warnings


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("length_collapse", {"rollout__mean_len": 199.0}, "from 400 to 199 tokens"),
        ("length_explosion", {"rollout__truncated": 0.51}, "51% of the rollouts are cut at rollout.max_len, at the start 30%"),
        ("entropy_collapse", {"train__student_entropy": 0.039}, "from 0.4 to 0.039 nats, its teacher's was 0.2"),
        ("repetition", {"rollout__repeated": 0.13}, "13% of a response"),
        ("boxed_falls", {"rollout__boxed": 0.5}, "of the rollouts reach a boxed answer, it has been 70%"),
        ("correct_falls", {"rollout__correct": 0.3}, "of the rollouts are right, it has been 50%"),
        ("divergence_rises", {"train__divergence": 0.26}, "went from 0.2 to 0.253 while the objective"),
        ("divergence_rises", {"train__divergence": 0.19, "train__objective": 0.0049}, "went from 0.01 to 0.0049"),
    ],
)
def test_each_signal_holds_when_its_level_has_got_there(name, changed, says):
    """The new level fills the window WINDOW steps after the change; a rate's best level was that of the steps before."""
    before = START + WINDOW
    flags, warnings = watch(steps(before) + steps(2 * WINDOW, **changed))
    assert flags[before - 2] == {}, "too young to judge"
    assert flags[before - 1] == {f"signal/{rule}": 0.0 for rule in RULES if rule != "turned_gradients"}
    assert flags[before + WINDOW - 1][f"signal/{name}"] == 1.0
    (said,) = [text for _, text in warnings]
    assert says in said
    assert sum(flags[-1].values()) == 1.0, "no other signal"


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout__mean_len": 201.0},
        {"rollout__truncated": 0.49},
        {"train__student_entropy": 0.041},
        {"train__student_entropy": 0.101, "train__teacher_entropy": 0.01},  # as sure as the teacher was
        {"rollout__repeated": 0.119},
        {"rollout__boxed": 0.6},
        {"train__divergence": 0.249},
        {"train__divergence": 0.17, "train__objective": 0.004},
        {"train__divergence": 0.001, "train__objective": 0.0},
    ],
)
def test_just_this_side_of_a_threshold_nothing_is_said(changed):
    assert watch(steps(20) + steps(20, **changed))[1] == []


def test_a_student_that_becomes_as_sure_as_its_teacher_has_not_collapsed():
    """What every run of the embedded model does: from 0.136 nats to the teacher's 0.0015."""
    start = steps(START, train__student_entropy=0.136, train__teacher_entropy=0.0015)
    assert watch(start + steps(20, train__student_entropy=0.0012, train__teacher_entropy=0.0015))[1] == []
    _, warnings = watch(start + steps(20, train__student_entropy=0.0007, train__teacher_entropy=0.0007))
    assert len(warnings) == 1, "a live teacher that collapses with its student is no excuse"


def test_cut_from_the_start():
    flags, warnings = watch(steps(20, rollout__truncated=0.9))
    assert [step for step, _ in warnings] == [START + WINDOW]
    assert "rollout.max_len" in warnings[0][1]
    assert flags[-1]["signal/length_explosion"] == 0.0, "it did not rise"
    assert watch(steps(20, rollout__truncated=0.52))[1] == [], "the paper's own set-up"


def test_turned_gradients_are_told_at_once_and_held_between_two_measurements():
    measured = HEALTHY | {"train/cosine_clipped_negative": 0.7}
    flags, warnings = watch([measured, *steps(8), HEALTHY | {"train/cosine_clipped_negative": 0.5}, *steps(1)])
    assert [step for step, _ in warnings] == [1]
    assert "clipping=entry turns the gradient of 70%" in warnings[0][1]
    assert [row["signal/turned_gradients"] for row in flags] == [1.0] * 9 + [0.0] * 2
    assert watch([measured], clipping=None)[1] == []


def test_a_signal_warns_once_and_its_metric_follows_the_run():
    rows = steps(20) + steps(20, rollout__repeated=0.5) + steps(20) + steps(20, rollout__repeated=0.5)
    flags, warnings = watch(rows)
    assert len(warnings) == 1
    told = [row.get("signal/repetition") for row in flags]
    assert told[19] == told[59] == 0.0
    assert told[39] == told[79] == 1.0


@pytest.mark.parametrize(("rollouts", "right"), [(32, 0.4), (2, 0.3)])
def test_chance_is_not_a_fall(rollouts, right):
    """A model that is right with probability p for ever: the best of 400 windows lies above the last one by luck alone."""
    draw = random.Random(0)
    rows = [HEALTHY | {"rollout/correct": sum(draw.random() < right for _ in range(rollouts)) / rollouts} for _ in range(400)]
    assert watch(rows, rollouts=rollouts)[1] == []


def test_a_fall_is_held_against_its_standard_error():
    """From p to q over windows of n rollouts: the error of the difference is sqrt(2 m (1 - m) / n), m their middle."""
    n, best = 4 * WINDOW, 0.8
    low = next(
        q / 1000
        for q in range(800, 0, -1)
        if best - q / 1000 > RATE_ERRORS * math.sqrt(2 * (m := (best + q / 1000) / 2) * (1 - m) / n)
    )
    assert best - low > 0.1
    assert watch(steps(20, rollout__correct=best) + steps(20, rollout__correct=low + 0.002), rollouts=4)[1] == []
    assert len(watch(steps(20, rollout__correct=best) + steps(20, rollout__correct=low), rollouts=4)[1]) == 1


def test_without_clipping_the_objective_is_the_divergence():
    fell = steps(20) + steps(20, train__objective=0.001)  # weights by sequence: not the divergence's mean
    assert watch(fell, clipping=None)[1] == []
    ((_, said),) = watch(steps(20) + steps(20, train__divergence=0.3), clipping=None)[1]
    assert said.endswith("lower train.lr")


def test_recorded_rollouts_say_nothing_about_the_student():
    rows = steps(20) + steps(20, rollout__mean_len=10.0, rollout__correct=0.0, rollout__repeated=0.9)
    flags, warnings = watch(rows, sampled=False)
    assert warnings == []
    assert set(flags[-1]) == {"signal/entropy_collapse", "signal/divergence_rises"}


def test_what_is_not_measured_is_not_judged():
    """No teacher, no known answers; and steps without a single token have no means."""
    bare = {"train/objective": 1.0, "train/divergence": 1.0, "train/student_entropy": 1.0, "rollout/boxed": 0.5}
    rows = [row for _ in range(30) for row in (bare, {"train/objective": 0.0})]
    flags, warnings = watch(rows)
    assert set(flags[-1]) == {"signal/boxed_falls", "signal/divergence_rises"}
    assert [text for _, text in warnings] == []


@pytest.mark.parametrize("cut", [0, 1, 11, 12, 17, 33])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(cut):
    draw = random.Random(1)
    rows = [{name: value * draw.uniform(0.2, 1.8) for name, value in HEALTHY.items()} for _ in range(40)]
    for step in range(0, 40, 5):
        rows[step]["train/cosine_clipped_negative"] = draw.random()
    flags, warnings = watch(rows)
    assert len(warnings) >= 3, "the test says something"
    logged = [row | flag for row, flag in zip(rows, flags, strict=True)]
    resumed = Signals(rollouts=32, sampled=True, clipping="entry", earlier=logged[:cut])
    again = [resumed.see(row) for row in rows[cut:]]
    assert [flag for flag, _ in again] == flags[cut:]
    assert [text for _, said in again for text in said] == [text for step, text in warnings if step > cut]
