"""`baseline=RUN_DIR`: another run to hold this one against, before it starts by its pace and lengths, at its end by its score."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from opsd import config
from opsd.config import Run
from opsd.evaluate import compare, load_report
from opsd.tracking import EVALUATION, OBJECTIVE
from opsd.types import EvalReport


@dataclass(kw_only=True, slots=True)
class Measured:
    """What another run's record says."""

    run_dir: Path
    run: Run
    steps: list[dict[str, Any]]  # its lines of metrics.jsonl, one an optimizer step
    evaluations_s: list[float]  # seconds of each evaluation
    report: EvalReport | None  # of its last evaluation

    @property
    def step_s(self) -> float:
        """The median: the first steps are slow, and others may have waited for something."""
        return median(line["timings"]["time/step_s"] for line in self.steps)

    def mean(self, metric: str) -> float:
        return fmean(line[metric] for line in self.steps)


def check_baseline(path: str | None) -> None:
    """Refuses what is no run directory."""
    if path is not None and not (Path(path).expanduser() / "config.yaml").is_file():
        raise ValueError(
            f"baseline={path}: is not a run directory, it holds no config.yaml; give one that a launch printed, or baseline=null."
        )
    if path is not None:
        config.frozen(Path(path).expanduser())  # refuses what cannot be read


def measured(path: str) -> Measured:
    """The record of a run directory.

    Raises:
        ValueError: it is none, or has not taken a step.
    """
    check_baseline(path)
    run_dir = Path(path).expanduser()
    try:
        run = config.load(run_dir)
    except ValueError as error:
        raise ValueError(f"baseline={path}: its config cannot be read ({error}); give another run, or baseline=null.") from error
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines() if text.endswith("}")] if file.is_file() else []
    steps = [line for line in lines if OBJECTIVE in line]
    if not steps:
        raise ValueError(f"baseline={path}: has not taken a step, so that there is nothing to go by; give another run.")
    return Measured(
        run_dir=run_dir,
        run=run,
        steps=steps,
        evaluations_s=[line["timings"][EVALUATION] for line in lines if EVALUATION in line["timings"]],
        report=last_report(run_dir),
    )


def last_report(run_dir: Path) -> EvalReport | None:
    """Of the run's own evaluations; None where it has none."""
    found = sorted((run_dir / "evaluations").glob("step_*/report.json"))
    return load_report(found[-1].parent) if found else None


def versus(path: str, after: EvalReport | None) -> dict[str, Any]:
    """How far a run's final score (None: it was not scored) is above the baseline's, for result.json; where they cannot be
    compared, why."""
    told: dict[str, Any] = {"run_dir": path, "name": Path(path).name, "after": None, "difference": None, "why": None}
    if after is None:
        return told | {"why": "not compared: this run was not scored (eval.in_run)"}
    before = last_report(Path(path))
    if before is None:
        return told | {"why": "not compared: it was not scored"}
    try:
        return told | {"after": before.metrics[f"avg_at_{before.k}"], "difference": asdict(compare(before, after))}
    except ValueError as error:
        return told | {"why": f"not compared: {error}"}
