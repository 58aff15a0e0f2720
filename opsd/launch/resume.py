"""`resume=RUN_DIR`: the frozen config with the few keys that leave the experiment as it is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from opsd.config import Schedule, freeze, frozen, to_run
from opsd.endings import RESULT, only_job
from opsd.files import write_json
from opsd.inputs import check_inputs
from opsd.launch.compose import Point
from opsd.launch.plan import Job
from opsd.stream import digest

RESUMABLE = ("train.steps", "train.max_time", "train.save_every", "train.keep", "train.log_every")
ROUNDING = (
    *("train.micro_tokens", "train.chunk_tokens", "engine.gradient_checkpointing"),
    *(
        f"rollout.{key}"
        for key in ("max_rows", "cache_tokens", "kv_cache_gb", "gpu_memory", "cuda_graphs", "sleep", "sync", "max_gap")
    ),
)
BESIDE = ("resume", "do")


def resumed(points: list[Point], changes: list[str]) -> tuple[Job, DictConfig]:
    """The run to go on with and its config, changes applied. Writes nothing.

    Args:
        changes: overrides for its own frozen config.

    Raises:
        ValueError: the directory is no run, holds no checkpoint, is finished, or an override would change the experiment.
    """
    from opsd import checkpoints
    from opsd.tracking import recorded_in

    point = points[0]
    run_dir = Path(point.cfg.resume).expanduser().absolute()
    if point.swept:
        raise ValueError(f"resume={run_dir}: goes on with one run; leave -m and sweep=... out.")
    if not (run_dir / "config.yaml").is_file():
        raise ValueError(f"resume={run_dir}: is not a run directory, it holds no config.yaml; give the one that a launch printed.")
    cfg = frozen(run_dir)
    asked = to_run(cfg)
    composed = [item for item in point.overrides if key_of(item) not in BESIDE]
    for item in changes + composed:
        refuse_unless_resumable(item, asked.train.schedule, asked.train.steps, run_dir)
        value = OmegaConf.select(point.cfg, key_of(item)) if item in composed else value_of(item)
        OmegaConf.update(cfg, key_of(item), value, merge=False)
    cfg.do = point.cfg.do
    run = to_run(cfg)
    data = check_inputs(run, {})
    latest = checkpoints.latest(run_dir)
    if latest is None:
        raise ValueError(f"resume={run_dir}: holds no checkpoint to go on from; start the run anew.")
    progress, done = checkpoints.read_progress(latest), run_dir / RESULT
    step = progress.step
    if progress.processes != run.launcher.processes:
        raise ValueError(
            f"launcher.processes={run.launcher.processes}: {run_dir} is trained by {progress.processes}, and another number would "
            "give other roundings; leave it out, or start a new run."
        )
    if run.train.steps < step:
        raise ValueError(f"train.steps={run.train.steps}: the run has taken {step} steps already; give more.")
    if run.train.steps == step and done.exists() and json.loads(done.read_text())["status"] == "finished":
        raise ValueError(f"resume={run_dir}: finished, all {step} steps are taken; add train.steps=N with a larger N to go on.")
    if progress.problems != digest(data.problems):
        raise ValueError(
            f"data={run.data.name}: its problems are no longer those that {run_dir} is trained on; put back the data that it read, "
            "or start a new run."
        )
    with only_job(run_dir):  # refuses while another job holds the directory
        store, run_id = recorded_in(run_dir)
    return Job(run_dir=run_dir, run=run, overrides=changes + composed, store=store, run_id=run_id), cfg


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments to be composed, and those that change a run that is resumed: its own options have other keys than the defaults.
    A launcher is composed anew.

    Raises:
        ValueError: says what may stand beside `resume`.
    """
    given = next((item for item in argv if key_of(item) == "resume"), None)
    run_dir = "" if given is None else given.partition("=")[2]
    if run_dir in ("", "null"):
        return argv, []
    if run_dir.startswith("["):
        raise ValueError(f"{given}: give one run directory.")
    others = [item for item in argv if not item.startswith("-") and key_of(item) not in BESIDE]
    for item in others:
        refuse_unless_resumable(item, Schedule.constant, 0, Path(run_dir))
    changes = [item for item in others if key_of(item).partition(".")[0] != "launcher"]
    return [item for item in argv if item not in changes], changes


def value_of(override: str) -> Any:
    """What an override sets, as Hydra reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override():
            raise ValueError(f"{override}: a run that goes on takes one value.")
        return parsed.value()
    except HydraException as error:
        raise ValueError(f"{override}: cannot be read ({str(error).splitlines()[0]}); write KEY=VALUE.") from error


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def refuse_unless_resumable(override: str, schedule: Schedule, steps: int, run_dir: Path) -> None:
    key = key_of(override)
    if key == "train.steps" and schedule is Schedule.cosine:
        raise ValueError(
            f"{override}: the learning rate of {run_dir} follows a cosine over train.steps={steps}, so that another number would "
            "change the steps already taken; start a new run."
        )
    if key not in RESUMABLE + ROUNDING and key.partition(".")[0] != "launcher":
        raise ValueError(
            f"{override}: would make {run_dir} another experiment; only {', '.join(RESUMABLE)}, launcher.* and what changes "
            f"roundings alone ({', '.join(ROUNDING)}) may change beside resume. Start a new run for the rest."
        )


def apply(job: Job, cfg: DictConfig) -> None:
    """Records the change: an MLflow tag, launch.json, and the new config in place of the old."""
    from opsd.tracking import tag_run

    path = job.run_dir / "launch.json"
    launch: dict[str, Any] = json.loads(path.read_text())
    launch["changes"].append({"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "overrides": job.overrides})
    tags = {"resumed": str(len(launch["changes"]))} | {f"resumed.{key_of(item)}": item.partition("=")[2] for item in job.overrides}
    tag_run(job.store, job.run_id, tags)
    write_json(path, launch)
    freeze(cfg, job.run_dir / "config.yaml")
