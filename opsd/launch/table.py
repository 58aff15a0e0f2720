"""The last lines: where the run is, what it scored, where it is recorded; for a sweep, the points ranked by score."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from opsd.launch.local import Outcome
    from opsd.launch.plan import Job

TABLE_COLUMNS = 160  # characters, where the output is no terminal


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


def report(jobs: list[Job], outcomes: list[Outcome], *, swept: bool) -> None:
    """Prints the last lines."""
    from rich.console import Console

    from opsd.tracking import run_url, ui_command

    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS, highlight=False)
    if swept:
        console.print(table(jobs, outcomes))
    for job, outcome in zip(jobs, outcomes, strict=True):
        told = not swept and (outcome.status == "interrupted" or outcome.result.get("message"))  # by the job itself, just above
        if outcome.message and not told:
            print(f"{job.run_dir}: {outcome.status}: {outcome.message}", file=sys.stderr, flush=True)
    serve = ui_command(jobs[0].store)
    if serve:
        print(serve)
    if not swept:
        print(line(jobs[0], outcomes[0], run_url(jobs[0].store, jobs[0].run_id)), flush=True)
