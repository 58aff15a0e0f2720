"""Checked points to run directories: all is checked before anything is written, and what could not be finished is removed."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.config import Run, freeze, params, to_run
from opsd.endings import attempt
from opsd.files import write_json
from opsd.inputs import check_inputs
from opsd.launch.compose import Point
from opsd.launch.prompt_file import inline
from opsd.preflight.baseline import check_baseline

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from opsd.tracking import Store

PACKAGES = ("opsd", "torch", "transformers", "peft", "safetensors", "mlflow", "hydra-core", "omegaconf", "math-verify", "numpy")
UNNAMED = ("do", "resume", "baseline", "name", "output_root", "sweep", "launcher", "tracking")  # overrides that no name shows
MAX_NAME_CHARS = 60


@dataclass(kw_only=True, slots=True)
class Job:
    """One run that is ready to be started."""

    run_dir: Path
    run: Run
    overrides: list[str]
    store: Store
    run_id: str


def check_points(points: list[Point]) -> list[Run]:
    """The typed run of every point, inputs checked.

    Raises:
        ValueError: at least one point is broken; every broken one is listed.
    """
    seen: dict[str, Any] = {}
    runs, broken = [], []
    for point in points:
        try:
            inline(point.cfg)
            run = to_run(point.cfg)
            check_inputs(run, seen)
            check_root(root_of(point, run))
            check_baseline(run.baseline)
            runs.append(run)
        except ValueError as error:
            broken.append(f"{' '.join(point.overrides)}\n    {error}")
            if not point.swept:
                raise
    if broken:
        listed = "\n  ".join(broken)
        raise ValueError(f"{len(broken)} of {len(points)} points cannot run, so none was started:\n  {listed}")
    return runs


def root_of(point: Point, run: Run) -> Path:
    """Where the point's directory, or its sweep's, is made."""
    chosen = any(override.lstrip("+").startswith("output_root=") for override in point.overrides)
    return Path("multirun" if point.swept and not chosen else run.output_root).expanduser().absolute()


def check_root(root: Path) -> None:
    """Refuses a directory that cannot be made or written."""
    standing = next(path for path in (root, *root.parents) if path.exists())
    if not standing.is_dir():
        raise ValueError(f"output_root={root}: {standing} is a file; give a directory that exists or can be made.")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise ValueError(f"output_root={root}: {standing} cannot be written; give a directory of your own.")


def label(overrides: list[str]) -> str:
    """A short name out of overrides, in characters that neither a file system nor Hydra reads as its own: `loss-jsd_clip-0.1`."""
    told = [item.lstrip("+~") for item in overrides]
    told = [item for item in told if re.split(r"[=.]", item)[0] not in UNNAMED]
    text = "_".join(re.sub(r"=(.*/)?", "-", item, count=1) for item in told)
    return re.sub(r"[^\w.+-]+", "_", text)[:MAX_NAME_CHARS].strip("._-") or "default"


def names(points: list[Point], runs: list[Run]) -> tuple[str, list[str]]:
    """The name of the sweep (of the run, where there is one alone), and each run's."""
    own = [run.name or label(varying(point, points)) for point, run in zip(points, runs, strict=True)]
    if not points[0].swept:
        return own[0], own
    given = runs[0].name or next((item.partition("=")[2] for item in points[0].overrides if item.startswith("sweep=")), None)
    if len(set(own)) < len(own):
        own = [f"{name}_{label(varying(point, points))}"[: MAX_NAME_CHARS * 2] for name, point in zip(own, points, strict=True)]
    keys = [item.partition("=")[0] for item in varying(points[0], points)]
    return given or (label(keys) if keys else "sweep"), own


def varying(point: Point, points: list[Point]) -> list[str]:
    """The point's overrides that not every point has; all of them where nothing varies."""
    shared = set(points[0].overrides).intersection(*(other.overrides for other in points)) if len(points) > 1 else set()
    return [item for item in point.overrides if item not in shared]


def stem(name: str) -> str:
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{name}"


def preview(points: list[Point], runs: list[Run]) -> list[Path]:
    """The directories that `create` would make if it were called now."""
    whole, _ = names(points, runs)
    top = root_of(points[0], runs[0]) / stem(whole)
    return [top / f"{number:03d}" for number in range(len(points))] if points[0].swept else [top]


def claim(root: Path, name: str) -> Path:
    """Makes a directory that did not exist before: two launches in one second never share one."""
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ValueError(f"output_root={root}: holds a thousand directories called {name}; set name=... or another output_root.")


def create(points: list[Point], runs: list[Run], *, argv: list[str]) -> list[Job]:
    """Makes the MLflow runs and the run directories, each with its frozen config and launch.json.

    Raises:
        ValueError: the tracking store cannot be reached, or the directory not be written; nothing is left behind.
    """
    from opsd import tracking

    root = root_of(points[0], runs[0])
    whole, own = names(points, runs)
    missing = [path for path in (root, *root.parents) if not path.exists()]
    tops: list[Path] = []
    jobs: list[Job] = []
    try:
        store = tracking.prepare(runs[0].tracking.experiment)
        tops.append(claim(root, stem(whole)))
        sweep = tops[0].name if points[0].swept else None
        facts = provenance(argv, sweep)
        for number, (point, run, name) in enumerate(zip(points, runs, own, strict=True)):
            run_dir = claim(tops[0], f"{number:03d}") if points[0].swept else tops[0]
            point.cfg.name = run.name = name
            freeze(point.cfg, run_dir / "config.yaml")
            tags = {"run_dir": str(run_dir), "git_commit": str(facts["git"]["commit"])} | ({"sweep": sweep} if sweep else {})
            run_id = tracking.create_run(store, name=name, params=params(point.cfg), tags=tags)
            jobs.append(Job(run_dir=run_dir, run=run, overrides=varying(point, points), store=store, run_id=run_id))
            launch = {**facts, "overrides": point.overrides, "mlflow": tracking.store_entry(store, run_id), "changes": []}
            write_json(run_dir / "launch.json", launch)
    except BaseException as error:
        for top in tops:
            shutil.rmtree(top)
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        for job in jobs:
            attempt(partial(tracking.delete_run, job.store, job.run_id))
        if isinstance(error, OSError):
            raise ValueError(f"output_root={root}: cannot be written ({error.strerror}); give another directory.") from error
        raise
    return jobs


def provenance(argv: list[str], sweep: str | None) -> dict[str, Any]:
    """Where a run comes from: command, code, versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "argv": argv,
        "sweep": sweep,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))},
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": versions,
    }


def git(*arguments: str) -> str | None:
    """What git says of the code's own repository; None where it is none, or git is not installed."""
    source = Path(__file__).parents[2]
    try:
        done = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def resolved_tree(cfg: DictConfig) -> Any:
    """The resolved config as a rich tree."""
    from rich.tree import Tree

    from opsd.config import resolved

    def grow(tree: Tree, values: dict[str, Any]) -> Tree:
        for key, value in values.items():
            if isinstance(value, dict):
                grow(tree.add(str(key)), value)
            else:
                tree.add(f"{key}: {json.dumps(value, ensure_ascii=False)}".replace("[", r"\["))
        return tree

    return grow(Tree("config"), resolved(cfg))
