"""The last lines: where the run is, what it scored, where it is recorded; for a sweep its points, and its settings ranked.

A setting is what points that differ by their seeds alone have in common. It is held against the sweep's first one, seed by seed and
problem by problem. Where they share two seeds or more the seed is the unit: d_s is seed s's mean difference over the problems, the
interval Student's t over the d_s. With one seed it is Student's t over that run's problems, and says nothing of other seeds.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from opsd.evaluate import compare, load_report
from opsd.evaluation.statistics import seed_difference
from opsd.files import write_json, write_whole
from opsd.milestones import evaluation_dir

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from opsd.evaluation.statistics import Difference
    from opsd.launch.local import Outcome
    from opsd.launch.plan import Job
    from opsd.types import EvalReport

TABLE_COLUMNS = 160  # characters, where the output is no terminal
SUMMARY = "sweep"  # .json and .md, in the sweep's directory
COLUMNS = ("setting", "seeds", "score", "after", "spread", "against the first (95%)", "over", "p", "reading")
CAPTION = (
    "after: mean over the seeds; spread: their standard deviation. Differences to the first setting are paired by seed and by "
    "problem; over: what the interval speaks of, other seeds or, with one seed, other problems. Each stands alone: of many, "
    "some leave zero out by chance."
)


@dataclass(kw_only=True, slots=True)
class Setting:
    """The points of a sweep that differ by their seeds alone."""

    name: str  # the overrides without the seed
    points: list[str]  # all of them, by directory
    not_counted: list[str]  # those without a score
    score: str | None  # what was scored, e.g. arithmetic/avg_at_12; None: no point was
    after: dict[int, float]  # the score of each seed, in percent
    difference: Difference | None  # to the sweep's first setting; None: it is the first, or `reading` says why there is none
    reading: str

    @property
    def mean(self) -> float | None:
        return fmean(self.after.values()) if self.after else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, in points; None with fewer than two."""
        return stdev(self.after.values()) if len(self.after) > 1 else None


def score(result: dict[str, Any], key: str) -> str:
    value = result.get(key)
    return "-" if value is None else f"{value:.1f}"


def difference(result: dict[str, Any]) -> str:
    """The paired difference in points with its 95% interval."""
    paired = result.get("difference")
    return f"{paired['mean']:+.1f} [{paired['low']:+.1f}, {paired['high']:+.1f}]" if paired else ""


def line(job: Job, outcome: Outcome, url: str) -> str:
    """One run in one line."""
    result = outcome.result
    parts = [str(job.run_dir)]
    if outcome.status != "finished":
        parts.append(outcome.status)
    if result.get("benchmark"):
        change = f" ({difference(result)} paired, 95%)" if difference(result) else ""
        parts.append(f"{result['benchmark']}/{result['metric']} {score(result, 'before')} -> {score(result, 'after')}{change}")
    if "baseline" in result:
        base = result["baseline"]
        parts.append(f"vs baseline {base['name']} {difference(base) or '(' + base['why'] + ')'}")
    return "  ".join([*parts, url])


def table(jobs: list[Job], outcomes: list[Outcome]) -> Table:
    """A sweep's points, best first."""
    from rich.table import Table

    shown = Table(title=f"{jobs[0].run_dir.parent}", title_justify="left")
    for column in ("", "overrides", "score", "before", "after", "difference (95%)", "status"):
        shown.add_column(column, overflow="fold")
    pairs = list(zip(jobs, outcomes, strict=True))

    def rank(pair: tuple[Job, Outcome]) -> float:
        after = pair[1].result.get("after")
        return float("inf") if after is None else -after

    for job, outcome in sorted(pairs, key=rank):
        result = outcome.result
        name = f"{result['benchmark']}/{result['metric']}" if result.get("benchmark") else "-"
        row = (job.run_dir.name, " ".join(job.overrides), name, score(result, "before"), score(result, "after"), difference(result))
        shown.add_row(*(text.replace("[", r"\[") for text in row), outcome.status)
    return shown


def settings_of(jobs: list[Job], outcomes: list[Outcome]) -> list[Setting]:
    """A sweep's settings, best first, those without a score last. A point that did not finish is named and not counted."""
    groups: dict[str, list[tuple[Job, Outcome]]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        name = " ".join(item for item in job.overrides if item.lstrip("+").partition("=")[0] != "seed")
        groups.setdefault(name, []).append((job, outcome))
    first = scored(next(iter(groups.values())))
    settings = []
    for name, points in groups.items():
        own = scored(points)
        counted = [job.run_dir.name for job, _ in own.values()]
        names = [job.run_dir.name for job, _ in points]
        results = [outcome.result for _, outcome in own.values()]
        found, why = (None, "the first") if not settings else against(first, own)
        settings.append(
            Setting(
                name=name or "all points",
                points=names,
                not_counted=[point for point in names if point not in counted],
                score=f"{results[0]['benchmark']}/{results[0]['metric']}" if results else None,
                after={seed: outcome.result["after"] for seed, (_, outcome) in own.items()},
                difference=found,
                reading=why,
            )
        )
    return sorted(settings, key=lambda setting: float("inf") if setting.mean is None else -setting.mean)


def scored(points: list[tuple[Job, Outcome]]) -> dict[int, tuple[Job, Outcome]]:
    """The points that finished with a score, by seed."""
    return {
        job.run.seed: (job, outcome)
        for job, outcome in points
        if outcome.status == "finished" and outcome.result.get("after") is not None
    }


def against(first: dict[int, tuple[Job, Outcome]], own: dict[int, tuple[Job, Outcome]]) -> tuple[Difference | None, str]:
    """How much a setting is above the first one, over the seeds that both have, and what to make of it."""
    shared = sorted(first.keys() & own.keys())
    if not shared:
        return None, "no score" if not own else "no seed in common with the first"
    try:
        paired = [compare(report_of(*first[seed]), report_of(*own[seed])) for seed in shared]
    except ValueError as error:
        return None, str(error)
    found = paired[0] if len(paired) == 1 else seed_difference([each.mean for each in paired])
    if found.low <= 0 <= found.high:
        return found, "within noise"
    return found, "better" if found.mean > 0 else "worse"


def report_of(job: Job, outcome: Outcome) -> EvalReport:
    return load_report(evaluation_dir(job.run_dir, outcome.result["step"]))


def cells(setting: Setting) -> tuple[str, ...]:
    """A setting's row."""
    found, mean, spread = setting.difference, setting.mean, setting.spread
    return (
        setting.name,
        f"{len(setting.after)} of {len(setting.points)}" if setting.not_counted else f"{len(setting.after)}",
        setting.score or "-",
        "-" if mean is None else f"{mean:.1f}",
        "-" if spread is None else f"{spread:.1f}",
        f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]" if found else "-",
        found.over if found else "-",
        f"{found.p_value:.2g}" if found else "-",
        setting.reading,
    )


def ranking(settings: list[Setting]) -> Table:
    """A sweep's settings for the terminal."""
    from rich.table import Table

    shown = Table(title="settings, best first", title_justify="left", caption=CAPTION, caption_justify="left")
    for column in COLUMNS:
        shown.add_column(column, overflow="fold")
    for setting in settings:
        shown.add_row(*(text.replace("[", r"\[") for text in cells(setting)))
    return shown


def write_summary(sweep: Path, settings: list[Setting]) -> None:
    """`sweep.json` and `sweep.md` in the sweep's directory, so that the ranking outlives the terminal."""
    values = [asdict(setting) | {"mean": setting.mean, "spread": setting.spread} for setting in settings]
    write_json(sweep / f"{SUMMARY}.json", {"sweep": sweep.name, "settings": values})
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, settings)]
    lines = ["| " + " | ".join(text.replace("|", r"\|") for text in row) + " |" for row in rows]
    missing = [f"- not counted, of {each.name}: {', '.join(each.not_counted)}" for each in settings if each.not_counted]
    write_whole(sweep / f"{SUMMARY}.md", "\n".join([f"# {sweep.name}", "", *lines, "", CAPTION, *missing]) + "\n")


def report(jobs: list[Job], outcomes: list[Outcome], *, swept: bool) -> None:
    """Prints the last lines; a sweep's ranking is written into its directory too."""
    from rich.console import Console

    from opsd.tracking import run_url, ui_command

    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS, highlight=False)
    if swept:
        settings = settings_of(jobs, outcomes)
        write_summary(jobs[0].run_dir.parent, settings)
        console.print(table(jobs, outcomes))
        console.print(ranking(settings))
    for job, outcome in zip(jobs, outcomes, strict=True):
        told = not swept and (outcome.status == "interrupted" or outcome.result.get("message"))  # by the job itself, just above
        if outcome.message and not told:
            print(f"{job.run_dir}: {outcome.status}: {outcome.message}", file=sys.stderr, flush=True)
    serve = ui_command(jobs[0].store)
    if serve:
        print(serve)
    if not swept:
        print(line(jobs[0], outcomes[0], run_url(jobs[0].store, jobs[0].run_id)), flush=True)
