"""`python evaluate.py`: scores a checkpoint or a model. Exit status 0, 1 (failed), 2 (refused)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import ranks
from opsd.endings import INTERRUPTED, REFUSED, explain, fail
from opsd.launch.errors import of_system
from opsd.launch.help import HELP_FLAGS, help_text
from opsd.ranks import Ranks

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


SAMPLING = ("max_len", "temperature", "top_p", "top_k", "samples")


@dataclass(kw_only=True, slots=True)
class Root:
    """The values that belong to no group; described in conf/evaluate.yaml."""

    checkpoint: str | None
    seed: int | None
    output_root: str
    threads: int
    processes: int

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"processes={self.processes}: must be at least 1.")
        if self.seed is not None and self.seed < 0:
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
        refuse_idle(points[0].overrides)
        scoring = to_scoring(points[0].cfg)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"error: {of_system(error, argv)}", file=sys.stderr)
        return REFUSED
    if scoring.root.processes > 1 and "WORLD_SIZE" not in os.environ:
        return spread(conf.parent / "evaluate.py", argv, processes=scoring.root.processes, threads=scoring.root.threads)
    try:
        score(scoring, ranks.start())
        ranks.end()
    except Exception as error:  # told in one message, or with its traceback where it is ours to mend
        if not ranks.lost(error):
            several = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
            fail(several + explain(error))
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def spread(script: Path, argv: list[str], *, processes: int, threads: int) -> int:
    """The same command on several ranks; the exit status."""
    from opsd.launch.local import rank_environment, torchrun_options
    from opsd.torchrun import torchrun

    os.environ |= rank_environment() | {"OMP_NUM_THREADS": str(threads)}
    end = torchrun(torchrun_options(processes), [str(script), *argv])
    if end.message is not None:
        fail(end.message)
    return end.status


def refuse_idle(overrides: list[str]) -> None:
    """Refuses values that belong to training: the benchmark's own decide how it is sampled."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        group, _, name = key.partition(".")
        if group == "rollout" and name in SAMPLING:
            raise ValueError(f"{override}: a score is sampled as its benchmark says; set eval.{name}.")
        if group == "engine" and name != "device" and override != "engine=torch":
            raise ValueError(f"{override}: nothing is trained here; leave it out.")


def to_scoring(cfg: Any) -> Scoring:
    """The typed objects behind a composed config, inputs checked.

    Raises:
        ValueError: a value is wrong, not exactly one of model and checkpoint is given, or an input cannot be read.
    """
    from opsd import checkpoints, config
    from opsd.inputs import check_length
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
    if not options["rollout"].samples_anew:
        raise ValueError(
            f"rollout={options['rollout'].name}: a score is sampled from the weights, and this samples nothing; set "
            "rollout=transformers."
        )
    checkpoint, parent = None, Path(root.output_root).expanduser().absolute()
    if root.checkpoint is not None:
        checkpoint = find_checkpoint(Path(root.checkpoint).expanduser().absolute())
        run_dir = checkpoint.parents[1]
        trained = config.load(run_dir)
        options["model"], root.seed = trained.model, trained.seed if root.seed is None else root.seed
        checkpoints.weights(checkpoint)
        parent = run_dir / "evaluations"
    root.seed = root.seed or 0
    check_root(parent)
    options["engine"].check()
    options["rollout"].check()
    reason = options["rollout"].refuses(adapters=options["model"].has_adapters)
    if reason is not None:
        raise ValueError(reason)
    together = options["rollout"].processes_together
    if root.processes % together:
        raise ValueError(f"processes={root.processes} with rollout.tensor_parallel={together}: must be a multiple of it.")
    context = options["model"].check()
    options["eval"].check()
    check_length("eval", options["eval"].max_len, options["model"].name, context)
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


def score(scoring: Scoring, me: Ranks) -> None:
    """Evaluates, writes the report into a directory of its own, records a checkpoint's score with its run, prints the table."""
    from opsd.evaluate import evaluate_weights, save_report
    from opsd.launch.plan import claim

    report = evaluate_weights(
        scoring.eval,
        model=scoring.model,
        checkpoint=scoring.checkpoint,
        rollout=scoring.rollout,
        seed=scoring.root.seed or 0,
        threads=scoring.root.threads,
        device=scoring.engine.device,
        ranks=me,
    )
    if not me.first:
        return
    out_dir = claim(scoring.parent, scoring.name)
    save_report(report, out_dir)
    if scoring.checkpoint is not None:
        record(scoring, report)
    show(report, scoring, out_dir)


def record(scoring: Scoring, report: EvalReport) -> None:
    """Logs the score into the MLflow run that trained the checkpoint; never over one of the run's own, nor of another protocol."""
    from opsd import config
    from opsd.evaluate import metrics_of
    from opsd.tracking import has_metric, log_metrics, recorded_in

    assert scoring.checkpoint is not None
    run_dir = scoring.checkpoint.parents[1]
    store, run_id = recorded_in(run_dir)
    own = config.load(run_dir).eval
    if own.name == scoring.eval.name and replace(own, every=0) != replace(scoring.eval, every=0):
        print(f"not logged to MLflow: eval={own.name} has other values here than in the run's own evaluations")
    elif has_metric(store, run_id, f"{report.benchmark}/avg_at_{report.k}", report.step):
        print(f"not logged to MLflow: it has this score of step {report.step} already")
    else:
        log_metrics(store, run_id, report.step, metrics_of(report))


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
