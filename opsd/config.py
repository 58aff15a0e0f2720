"""Typed objects out of a composed or a frozen config, the checks that concern several groups, and the frozen config itself.

conf/ owns values, dataclasses own names, types and ranges. Whatever is wrong is one ValueError that names key, value, reason and
remedy. Importing this module, or calling `to_run`, imports neither torch nor any other heavy library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from opsd.batching import Reduction
from opsd.cross_checks import check_together
from opsd.files import write_whole
from opsd.hub import is_hub_id
from opsd.records import as_recorded
from opsd.registry import FOLDERS, lookup
from opsd.typed import spelled, typed, unresolved

if TYPE_CHECKING:
    from opsd.clipping.base import Clipping
    from opsd.data.base import Source
    from opsd.engines.base import Engine
    from opsd.evaluation.base import Benchmark
    from opsd.losses.base import Loss
    from opsd.models.base import Model
    from opsd.prompts.base import PromptTemplate
    from opsd.rollouts.base import RolloutEngine
    from opsd.teachers.base import Teacher

FORMAT = 3  # of a frozen config; raised when an older one would be read wrongly
HELP = "`python launch.py --help` lists groups and options"
DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
SECRET_KEY = re.compile(r"(^|[._])(password|passwd|secret|token|api_?key|access_?key|credentials?)$", re.I)
SECRET_VALUE = re.compile(r"^(hf_|sk-)\w{16,}$|://[^/@\s]+:[^/@\s]+@")
SHORT = {  # the columns that MLflow shows first, and the config key behind each
    **{group: f"{group}.name" for group in ("model", "data", "prompt", "rollout")},
    "rollout.max_len": "rollout.max_len",
    **{group: f"{group}.name" for group in ("teacher", "loss", "clipping")},
    "clip": "clip",
    "lr": "train.lr",
    "seed": "seed",
    "steps": "train.steps",
    "batch": "train.batch",
}
NOT_PARAMS = ("do", "resume", "baseline", "name", "output_root", "format", "clipping.clip")  # not what it computes
MAX_PARAM_CHARS = 6000  # MLflow refuses longer values


class Do(Enum):
    run = "run"
    check = "check"
    dry_run = "dry_run"


class Schedule(Enum):
    constant = "constant"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class Train:
    """The optimizer's side of a run. What each key means stands beside its value in conf/train/default.yaml."""

    name: str
    steps: int
    batch: int  # rollouts
    micro_tokens: int
    lr: float
    schedule: Schedule
    warmup: int  # steps
    betas: list[float]
    weight_decay: float
    max_grad_norm: float
    reduction: Reduction
    chunk_tokens: int
    max_time: str | None
    save_every: int  # steps
    keep: int
    log_every: int  # steps

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "micro_tokens", "chunk_tokens", "save_every", "keep", "log_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key}={getattr(self, key)}: must be at least 1.")
        for key in ("lr", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ValueError(f"train.{key}={getattr(self, key)}: must be above 0.")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"train.warmup={self.warmup}: must lie between 0 and train.steps={self.steps}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={self.betas}: must be two numbers from 0 to below 1.")
        if self.weight_decay < 0:
            raise ValueError(f"train.weight_decay={self.weight_decay}: must be 0 or above.")
        if self.max_time is not None:
            seconds(self.max_time)

    @property
    def max_time_s(self) -> float | None:
        return None if self.max_time is None else seconds(self.max_time)


@dataclass(kw_only=True, slots=True)
class Launcher:
    """Where runs are dispatched to."""

    name: str
    processes: int  # ranks of one run

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"launcher.processes={self.processes}: must be at least 1.")


@dataclass(kw_only=True, slots=True)
class Tracking:
    """Where runs are recorded."""

    name: str
    experiment: str
    system_metrics: bool

    def __post_init__(self) -> None:
        if not self.experiment.strip():
            raise ValueError("tracking.experiment='': must name an MLflow experiment, e.g. opsd.")


PLAIN = {"train": Train, "launcher": Launcher, "tracking": Tracking}  # groups with one class whatever the option
GROUPS = (*FOLDERS, *PLAIN)
RECIPES = ("experiment", "sweep", "debug")  # whose files set values of other groups


@dataclass(kw_only=True, slots=True)
class Root:
    """The values that belong to no group; described in conf/config.yaml."""

    seed: int
    name: str | None
    clip: float | None
    do: Do
    resume: str | None
    baseline: str | None
    output_root: str
    threads: int
    format: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or above.")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}: must be at least 1.")
        if self.name is not None and not re.fullmatch(r"[\w.+-]{1,120}", self.name):
            raise ValueError(
                f"name={self.name}: it becomes part of a directory's name; use up to 120 letters, digits and . + - _ only."
            )
        if self.format != FORMAT:
            raise ValueError(
                f"format={self.format}: this version of opsd reads format {FORMAT}; use the version that froze this config."
            )


@dataclass(kw_only=True, slots=True)
class Run(Root):
    """Everything a run is made of."""

    model: Model
    data: Source
    prompt: PromptTemplate
    rollout: RolloutEngine
    teacher: Teacher
    loss: Loss
    clipping: Clipping
    engine: Engine
    eval: Benchmark
    train: Train
    launcher: Launcher
    tracking: Tracking
    warnings: list[str]  # what is allowed and yet hardly meant

    @property
    def loss_temperature(self) -> float:
        """What both sides' logits are divided by before the softmax: that of the sampling unless the loss has its own."""
        if self.loss.temperature is not None:
            return self.loss.temperature
        return 1.0 if self.rollout.sampling is None else self.rollout.sampling.temperature

    @property
    def needs(self) -> frozenset[str]:
        """The fields of a problem, beside its text, that every problem of the run must have."""
        return self.rollout.needs | (self.prompt.needs if self.teacher.exists else frozenset())


def to_run(cfg: DictConfig) -> Run:
    """The run that a composed or frozen config describes.

    Raises:
        ValueError: a key is unknown, missing, of the wrong type or out of range, or two groups contradict each other.
    """
    values = resolved(cfg)
    for group in GROUPS:
        if values.get(group) is None:
            raise ValueError(f"{group}=null: every run needs a {group}; {HELP}.")
    check_clip(values.get("clip"))
    own = {key: value for key, value in values.items() if key not in GROUPS}
    for group in RECIPES:
        if isinstance(own.get(group), dict):
            first = "# @package _global_"
            raise ValueError(
                f"{group}={', '.join(own[group])}: changes nothing where it stands; begin the {group}'s file with `{first}`."
            )
    root = typed(Root, own, where="", option="the root config")
    options = {group: to_option(group, values[group]) for group in GROUPS}
    run = Run(**{field.name: getattr(root, field.name) for field in fields(Root)}, **options, warnings=[])
    check_together(run)
    return run


def to_option(group: str, values: Any) -> Any:
    """The typed object of one group's values."""
    if not isinstance(values, dict):
        raise ValueError(f"{group}={values}: must be an option of the group with its keys; {HELP}.")
    name = values.get("name", "?")
    if group in PLAIN:
        return typed(PLAIN[group], values, where=f"{group}.", option=f"{group}={name}")
    if "kind" not in values:
        raise ValueError(f"{group}.kind is not set: {group}={name} must say which class it configures.")
    return typed(lookup(group, str(values["kind"])), values, where=f"{group}.", option=f"{group}={name}")


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The plain values of a config, interpolations resolved; `???` stays."""
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except InterpolationResolutionError as error:
        raise ValueError(unresolved(error, cfg)) from error
    assert isinstance(values, dict)
    if isinstance(values.get("rollout"), dict):
        values["rollout"] = as_recorded(values["rollout"])
    return {str(key): value for key, value in values.items()}


def check_clip(clip: Any) -> None:
    """The top-level clip is a positive finite number or null."""
    if clip is None:
        return
    try:
        good = not isinstance(clip, bool) and 0 < float(clip) < math.inf
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"clip={spelled(clip)}: must be a positive number or null.")


def seconds(text: str) -> float:
    """Seconds of a duration such as 6h, 90m, 45s or 1h30m."""
    match = DURATION.fullmatch(text.replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ValueError(f"train.max_time={text}: must be a duration such as 6h, 90m, 45s or 1h30m, or null.")
    hours, minutes, rest = (int(part or 0) for part in match.groups())
    total_s = float(hours * 3600 + minutes * 60 + rest)
    if total_s <= 0:
        raise ValueError(f"train.max_time={text}: must be longer than nothing, or null.")
    return total_s


def freeze(cfg: DictConfig, path: Path) -> None:
    """Writes the resolved config with absolute paths, whole or not at all."""
    values = resolved(cfg)
    values["output_root"] = absolute(values["output_root"])
    if values["baseline"] is not None:
        values["baseline"] = absolute(values["baseline"])
    for option in (*(values[group] for group in FOLDERS), *values["data"].get("sources", {}).values()):
        if isinstance(option.get("path"), str):
            option["path"] = absolute(option["path"])
    write_whole(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120))


def absolute(path: str) -> str:
    """A local path made absolute; what exists nowhere here and looks like a hub id stays."""
    local = Path(path).expanduser()
    if not local.exists() and is_hub_id(path):
        return path
    return str(local.absolute())


def frozen(run_dir: Path) -> DictConfig:
    """The config that a run directory holds.

    Raises:
        ValueError: the directory is no run, or another version of opsd froze its config.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_dir}: is not a run directory, it holds no config.yaml; give the directory that a launch printed.")
    try:
        cfg = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not YAML ({str(error).splitlines()[0]}).") from error
    found = cfg.get("format") if isinstance(cfg, DictConfig) else None
    if not isinstance(cfg, DictConfig) or found != FORMAT:
        age = "a newer" if isinstance(found, int) and found > FORMAT else "an older or unknown"
        raise ValueError(f"{path}: format={found} is {age} form of a frozen config, this version of opsd reads format {FORMAT}.")
    return cfg


def load(run_dir: Path) -> Run:
    """The run that a run directory holds. Raises ValueError as `frozen` and `to_run` do."""
    return to_run(frozen(run_dir))


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; lists are leaves."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def params(cfg: DictConfig) -> dict[str, str]:
    """A run's flat parameters as MLflow shows them: the short ones first, then every other leaf, no secrets."""
    flat = dict(leaves(resolved(cfg)))
    named = {short: flat[key] for short, key in SHORT.items()}
    rest = {key: value for key, value in flat.items() if key not in SHORT.values() and key not in NOT_PARAMS}
    shown = {}
    for key, value in (named | rest).items():
        text = spelled(value)
        if not SECRET_KEY.search(key) and not SECRET_VALUE.search(text):
            shown[key] = text if len(text) <= MAX_PARAM_CHARS else text[: MAX_PARAM_CHARS - 40] + f" ... ({len(text)} characters)"
    return shown
