"""A sweep's ranking: what is compared with what, over what the interval is, what is left out, and the files that keep it."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import sqrt
from pathlib import Path

import pytest

from opsd.evaluate import compare, save_report
from opsd.evaluation.statistics import PairedDifference, SeedDifference, paired_difference
from opsd.launch.compose import compose
from opsd.launch.local import Outcome
from opsd.launch.plan import Job, check_points, varying
from opsd.launch.table import Setting, report, settings_of
from opsd.milestones import evaluation_dir
from opsd.tracking import Store
from opsd.types import EvalReport

CONF = Path(__file__).parents[2] / "conf"
T_2 = 4.302652729911275  # Student's t with 2 degrees of freedom, at 97.5%


def scores(rates: list[float], *, step: int, k: int = 10) -> EvalReport:
    """An evaluation of problems p0, p1, ... with these shares of right samples."""
    return EvalReport(
        benchmark="arithmetic",
        step=step,
        k=k,
        metrics={f"avg_at_{k}": 100 * sum(rates) / len(rates)},
        solve_rates={f"p{number}": rate for number, rate in enumerate(rates)},
        samples=[],
        canonical=True,
    )


def sweep(where: Path, argv: list[str], after: list[EvalReport | None]) -> tuple[list[Job], list[Outcome]]:
    """A sweep's points as they stand when the last has ended; None: that one failed."""
    points = compose(CONF, "config", argv)
    jobs, outcomes = [], []
    for number, (point, run, scored) in enumerate(zip(points, check_points(points), after, strict=True)):
        run_dir = where / "2026-01-01_00-00-00-sweep" / f"{number:03d}"
        run_dir.mkdir(parents=True)
        store = Store(uri=f"sqlite:///{where}/mlflow.db", experiment_id="1")
        jobs.append(Job(run_dir=run_dir, run=run, overrides=varying(point, points), store=store, run_id=f"run{number}"))
        if scored is None:
            outcomes.append(Outcome(status="failed", message="step 3: the loss is not a number", result={"status": "failed"}))
            continue
        before = scores([0.1] * len(scored.solve_rates), step=0, k=scored.k)
        for each in (before, scored):
            save_report(each, evaluation_dir(run_dir, each.step))
        metric = f"avg_at_{scored.k}"
        result = {"status": "finished", "step": scored.step, "benchmark": scored.benchmark, "metric": metric, "message": None}
        result |= {"before": before.metrics[metric], "after": scored.metrics[metric], "difference": asdict(compare(before, scored))}
        outcomes.append(Outcome(status="finished", message=None, result=result))
    return jobs, outcomes


def named(settings: list[Setting]) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings}


def test_the_seed_is_the_unit_where_there_are_several(tmp_path: Path) -> None:
    """Mean differences 10, 20, 30 points in the three seeds, made of problems that differ by far more than the seeds do."""
    first = [[0.2, 0.4], [0.3, 0.3], [0.4, 0.2]]
    other = [[0.8, 0.0], [0.2, 0.8], [0.9, 0.3]]
    argv = ["-m", "loss=forward_kl,jsd", "seed=0,1,2"]
    jobs, outcomes = sweep(tmp_path, argv, [scores(rates, step=100) for rates in first + other])
    best, last = settings_of(jobs, outcomes)
    assert (best.name, best.reading, last.name, last.reading) == ("loss=jsd", "within noise", "loss=forward_kl", "the first")
    assert best.after == pytest.approx({0: 40, 1: 50, 2: 60})
    assert (best.mean, best.spread, best.score) == (pytest.approx(50), pytest.approx(10), "arithmetic/avg_at_10")
    assert (last.mean, last.spread, last.difference) == (pytest.approx(30), pytest.approx(0), None)
    found = best.difference
    assert isinstance(found, SeedDifference) and found.num_seeds == 3
    reach, t = T_2 * 10 / sqrt(3), 2 * sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((20, 20 - reach, 20 + reach))
    assert found.p_value == pytest.approx(1 - t / sqrt(t * t + 2))


def test_seeds_are_paired_so_that_what_they_share_cancels(tmp_path: Path) -> None:
    """Scores from 20 to 80 by seed, one 10, 11 and 12 points above the other: 11 +- 4.30 / sqrt(3), far from zero."""
    first = [[0.2, 0.2], [0.5, 0.5], [0.8, 0.8]]
    other = [[0.1, 0.1], [0.39, 0.39], [0.68, 0.68]]
    argv = ["-m", "loss=forward_kl,jsd", "seed=0,1,2"]
    jobs, outcomes = sweep(tmp_path, argv, [scores(rates, step=100, k=100) for rates in first + other])
    best, last = settings_of(jobs, outcomes)
    assert (best.name, best.spread, last.reading) == ("loss=forward_kl", pytest.approx(30), "worse")
    assert last.difference is not None
    assert (last.difference.mean, last.difference.low) == pytest.approx((-11, -11 - T_2 / sqrt(3)))


def test_with_one_seed_the_interval_is_over_its_problems(tmp_path: Path) -> None:
    rates = [[0.1, 0.2, 0.3], [0.2, 0.4, 0.6], [0.1, 0.2, 0.3]]
    jobs, outcomes = sweep(tmp_path, ["-m", "loss=forward_kl,jsd,reverse_kl"], [scores(each, step=100) for each in rates])
    settings = settings_of(jobs, outcomes)
    assert [setting.name for setting in settings] == ["loss=jsd", "loss=forward_kl", "loss=reverse_kl"]
    assert settings[0].difference == paired_difference(rates[0], rates[1])
    assert isinstance(settings[0].difference, PairedDifference) and settings[0].spread is None
    assert (settings[2].difference.mean, settings[2].reading) == (0, "within noise")


def test_a_failed_point_is_named_and_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the second setting only seeds 0 and 2 are left: they are held against seeds 0 and 2 of the first."""
    after = [scores([rate], step=100) for rate in (0.1, 0.9, 0.3)]
    jobs, outcomes = sweep(
        tmp_path,
        ["-m", "loss=forward_kl,jsd,reverse_kl", "seed=0,1,2"],
        [*after, scores([0.3], step=100), None, scores([0.9], step=100), None, None, None],
    )
    settings = settings_of(jobs, outcomes)
    assert [setting.name for setting in settings] == ["loss=jsd", "loss=forward_kl", "loss=reverse_kl"]
    jsd, reverse = settings[0], settings[2]
    assert (jsd.after, jsd.not_counted) == ({0: 30, 2: 90}, ["004"])
    assert isinstance(jsd.difference, SeedDifference)
    assert (jsd.difference.num_seeds, jsd.difference.mean) == (2, pytest.approx(40))  # 20 and 60, not 60 - 43.3
    assert (reverse.after, reverse.mean, reverse.difference, reverse.reading) == ({}, None, None, "no score")
    report(jobs, outcomes, swept=True)
    told = capsys.readouterr()
    assert told.err.count("failed: step 3: the loss is not a number") == 4
    ranked = [line.split("│") for line in told.out.splitlines() if "loss=jsd" in line]
    assert [cell.strip() for cell in ranked[-1]][1:8] == (
        ["loss=jsd", "2 of 3", "arithmetic/avg_at_10", "60.0", "42.4", "+40.0 [-214.1, +294.1]", "2 seeds"]
    )
    kept = (jobs[0].run_dir.parent / "sweep.md").read_text()
    assert "| loss=reverse_kl | 0 of 3 | - | - | - | - | - | - | no score |" in kept
    assert "- not counted, of loss=reverse_kl: 006, 007, 008" in kept


def test_scores_of_two_protocols_are_not_compared(tmp_path: Path) -> None:
    after = [scores([0.5], step=100, k=10), scores([0.6], step=100, k=20)]
    settings = named(settings_of(*sweep(tmp_path, ["-m", "eval.samples=10,20"], after)))
    assert settings["eval.samples=20"].difference is None
    assert "only scores of one protocol can be compared" in settings["eval.samples=20"].reading


def test_the_ranking_outlives_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = [[0.1, 0.2, 0.3], [0.2, 0.4, 0.6]]
    jobs, outcomes = sweep(tmp_path, ["-m", "clip=0.05,0.1"], [scores(each, step=100) for each in rates])
    report(jobs, outcomes, swept=True)
    where = jobs[0].run_dir.parent
    kept = json.loads((where / "sweep.json").read_text())
    assert kept["sweep"] == where.name
    best = kept["settings"][0]
    assert (best["name"], best["points"]) == ("clip=0.1", ["001"])
    assert best["after"] == pytest.approx({"0": 40}) and best["mean"] == pytest.approx(40)
    assert best["difference"] == asdict(paired_difference(*rates))
    row = "| clip=0.1 | 1 | arithmetic/avg_at_10 | 40.0 | - | +20.0 [-4.8, +44.8] | 3 problems | 0.074 | within noise |"
    assert row in (where / "sweep.md").read_text()


def test_a_sweep_without_scores_has_no_ranking_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, outcomes = sweep(tmp_path, ["-m", "clip=0.05,0.1"], [None, None])
    report(jobs, outcomes, swept=True)
    assert [setting.reading for setting in settings_of(jobs, outcomes)] == ["the first", "no score"]
    assert "not counted, of clip=0.05: 000" in (jobs[0].run_dir.parent / "sweep.md").read_text()
