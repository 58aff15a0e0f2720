"""`python evaluate.py`: scores a checkpoint or a model. Exit status 0, 1 (failed), 2 (refused)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.launch.help import HELP_FLAGS, help_text

if TYPE_CHECKING:
    from opsd.engines.base import Engine
    from opsd.evaluation.base import Benchmark
    from opsd.models.base import Model
    from opsd.rollouts.base import RolloutEngine
    from opsd.types import EvalReport

EXAMPLES = """\
  python evaluate.py checkpoint=outputs/RUN                                 the latest checkpoint on the embedded benchmark
  python evaluate.py checkpoint=outputs/RUN/checkpoints/step_000050 eval.samples=32
  python evaluate.py model=qwen3_1_7b eval=aime24
  python evaluate.py model=hf model.path=DIR eval=aime24 eval.path=aime24.jsonl"""


@dataclass(kw_only=True, slots=True)
class Root:
    """The values that belong to no group; described in conf/evaluate.yaml."""

    checkpoint: str | None
    seed: int
    output_root: str
    threads: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or above.")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}: must be at least 1.")


@dataclass(kw_only=True, slots=True)
class Scoring:
    """What is scored, on what, and where the result goes."""

    root: Root
    model: Model
    eval: Benchmark
    rollout: RolloutEngine
    engine: Engine
    checkpoint: Path | None
    parent: Path  # of the directory that will hold the report
    name: str


def main(conf: Path, argv: list[str]) -> int:
    """The whole command; the exit status."""
    if set(HELP_FLAGS) & set(argv):
        print(help_text(conf, "evaluate", argv, script="evaluate.py", examples=EXAMPLES))
        return 0
    from opsd.launch.compose import compose

    try:
        points = compose(conf, "evaluate", argv)
        if not points:
            return 0
        if points[0].swept:
            raise ValueError("-m: evaluate.py scores one model at a time; call it once for each.")
        scoring = to_scoring(points[0].cfg)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        score(scoring)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def to_scoring(cfg: Any) -> Scoring:
    """The typed objects behind a composed config, inputs checked.

    Raises:
        ValueError: a value is wrong, not exactly one of model and checkpoint is given, or an input cannot be read.
    """
    from opsd import checkpoints, config
    from opsd.launch.plan import check_root, label, stem
    from opsd.typed import typed

    values = config.resolved(cfg)
    groups = {key: values.pop(key) for key in ("model", "eval", "rollout", "engine") if key in values}
    root = typed(Root, values, where="", option="the root config")
    options = {key: config.to_option(key, value) for key, value in groups.items()}
    if ("model" in options) == (root.checkpoint is not None):
        raise ValueError(f"checkpoint={root.checkpoint or 'null'}: give exactly one of checkpoint=RUN_DIR and model=NAME.")
    if not options["eval"].enabled:
        raise ValueError("eval=none: there is nothing to score; choose a benchmark, see `python evaluate.py --help`.")
    checkpoint, parent = None, Path(root.output_root).expanduser().absolute()
    if root.checkpoint is not None:
        checkpoint = find_checkpoint(Path(root.checkpoint).expanduser().absolute())
        run_dir = checkpoint.parents[1]
        options["model"] = config.load(run_dir).model
        checkpoints.weights(checkpoint)
        parent = run_dir / "evaluations"
    check_root(parent)
    context = options["model"].check()
    options["eval"].check()
    config.check_length("eval", options["eval"].max_len, options["model"].name, context)
    name = options["eval"].name if checkpoint else label([f"eval-{options['model'].name}-{options['eval'].name}"])
    return Scoring(root=root, checkpoint=checkpoint, parent=parent, name=stem(name), **options)


def find_checkpoint(path: Path) -> Path:
    """One checkpoint: the path itself, or the latest of a run directory."""
    from opsd import checkpoints

    if (path / "state.json").is_file():
        return path
    latest = checkpoints.latest(path)
    if latest is None:
        raise ValueError(
            f"checkpoint={path}: neither a checkpoint nor a run directory that holds one; give RUN_DIR or one of its checkpoints."
        )
    return latest


def score(scoring: Scoring) -> None:
    """Evaluates, writes the report into a directory of its own, records a checkpoint's score with its run, prints the table."""
    from opsd.evaluate import evaluate_weights, metrics_of, save_report
    from opsd.launch.plan import claim

    report = evaluate_weights(
        scoring.eval,
        model=scoring.model,
        checkpoint=scoring.checkpoint,
        rollout=scoring.rollout,
        seed=scoring.root.seed,
        threads=scoring.root.threads,
        device=scoring.engine.device,
    )
    out_dir = claim(scoring.parent, scoring.name)
    save_report(report, out_dir)
    if scoring.checkpoint is not None:
        record(scoring.checkpoint.parents[1], report.step, metrics_of(report))
    show(report, scoring, out_dir)


def record(run_dir: Path, step: int, metrics: dict[str, float]) -> None:
    """Logs a score into the MLflow run that trained the checkpoint."""
    import json

    from opsd.tracking import log_metrics, store_from

    store, run_id = store_from(json.loads((run_dir / "launch.json").read_text()))
    log_metrics(store, run_id, step, metrics)


def show(report: EvalReport, scoring: Scoring, out_dir: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{scoring.checkpoint or scoring.model.name} on {report.benchmark}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for metric, value in report.metrics.items():
        table.add_row(f"{report.benchmark}/{metric}", f"{value:.2f}")
    Console(highlight=False, soft_wrap=True).print(table)
    print(f"samples: {out_dir / 'samples.jsonl'}")
