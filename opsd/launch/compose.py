"""Command line to composed configs, through Hydra, with one message for whatever is wrong.

Hydra parses, composes and answers its own switches (`--cfg`, `--info`, `-sc`, ...); it never runs anything here: the task function
only collects the points, and what Hydra would write lands in a temporary directory.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opsd.launch.errors import explain
from opsd.launch.help import config_dirs

if TYPE_CHECKING:
    from omegaconf import DictConfig

PATHS = re.compile(  # values that Hydra would take apart
    r"(resume|checkpoint|baseline|output_root|name|[\w.]+\.(?:path|experiment))="
    r"([^'\"\\,\[{]*(?:[=() ~#;&!]|[^\x00-\x7f])[^'\"\\,]*)"
)
TAKE_A_VALUE = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--info",
    "-i",
)
COMPLETION = ("-sc", "--shell-completion", "--shell_completion")
ALONE = ("--resolve", "--multirun", "-m", "--run", "-r", "--hydra-help", "--version", "--experimental-rerun")
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
PLACES = re.compile(r"\+{0,2}hydra\.(run\.dir|sweep\.(dir|subdir)|output_subdir|job\.chdir)=.*")  # what Hydra alone would write
FULL_ERROR = "HYDRA_FULL_ERROR"


@dataclass(kw_only=True, slots=True)
class Point:
    """One composed config and the overrides that made it."""

    cfg: DictConfig
    overrides: list[str]
    swept: bool  # one of several points of a command


def compose(conf: Path, root: str, argv: list[str]) -> list[Point]:
    """The points that a command line spells: one, several with `-m`, or none where Hydra was only asked for information.

    Args:
        conf: the directory of config groups.
        root: the root config's name.

    Raises:
        ValueError: the command line does not compose; says which argument and what to write instead.
        SystemExit: Hydra's own switches, answered or misspelt.
    """
    arguments = sanitized(argv, conf, root)
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    points: list[Point] = []

    def collect(cfg: DictConfig) -> None:
        settings = HydraConfig.get()
        overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        points.append(Point(cfg=cfg, overrides=[str(item) for item in overrides], swept=settings.mode == RunMode.MULTIRUN))

    wants_tracebacks = FULL_ERROR in os.environ
    saved_argv = sys.argv
    with tempfile.TemporaryDirectory(prefix="opsd-") as scratch:
        if not set(COMPLETION) & set(arguments):
            arguments = [*overrides_last(arguments), f"hydra.sweep.dir={scratch}"]
        try:
            os.environ.setdefault(FULL_ERROR, "1")  # Hydra then raises instead of printing and exiting
            sys.argv = [saved_argv[0], *arguments]
            hydra.main(version_base="1.3", config_path=str(conf.absolute()), config_name=root)(collect)()
        except Exception as error:
            if wants_tracebacks:
                raise
            raise ValueError(explain(error, argv, conf)) from error
        finally:
            sys.argv = saved_argv
            if not wants_tracebacks:
                del os.environ[FULL_ERROR]
    return points


def sanitized(argv: list[str], conf: Path, root: str) -> list[str]:
    """The arguments as Hydra can read them: without `experiment=null` and its like, paths quoted that hold `=`, spaces or brackets.

    Raises:
        ValueError: a group that every run needs is set to nothing, a switch is misspelt, or Hydra's own output is asked for.
    """
    check_switches(argv)
    for folder in config_dirs(argv):
        for file in sorted(folder.rglob("*.yaml")):
            if (conf / file.relative_to(folder)).exists():
                raise ValueError(
                    f"--config-dir={folder}: its {file.relative_to(folder)} would never be read, conf/ has one of that name; "
                    "give it another name."
                )
    optional = re.findall(r"^  - (\w+): null", (conf / f"{root}.yaml").read_text(), re.M)
    kept = []
    for argument in argv:
        match = re.fullmatch(r"\+{0,2}([a-z_]+)=(null|None|)", argument)
        group = match.group(1) if match else None
        if group in optional:
            continue
        if group is not None and (conf / group).is_dir():
            options = ", ".join(sorted(path.stem for path in (conf / group).glob("*.yaml")))
            raise ValueError(f"{argument}: every run needs a {group}; set {group} to one of: {options}.")
        path = PATHS.fullmatch(argument)
        kept.append(f"{path.group(1)}='{path.group(2)}'" if path else argument)
    return kept


def check_switches(argv: list[str]) -> None:
    """Refuses what Hydra would answer with its whole usage, or obey to no effect."""
    for argument, after in zip(argv, [*argv, ""][1:], strict=True):
        switch, joined, value = argument.partition("=")
        if PLACES.fullmatch(argument):
            raise ValueError(f"{argument}: Hydra only composes here; say with output_root=DIR and name=NAME where runs land.")
        if not argument.startswith("-"):
            continue
        if not any(known.startswith(switch) for known in (*ALONE, *TAKE_A_VALUE, *COMPLETION)):
            written = argument.lstrip("-") if joined else f"{argument.lstrip('-')}=VALUE"
            raise ValueError(f"{argument}: there is no such switch; keys and groups are written without dashes: {written}.")
        for name, choices in CHOICES.items():
            if switch in (name, name[1:3]) and (value if joined else after) not in choices:
                raise ValueError(
                    f"{argument}{'' if joined else f' {after}'.rstrip()}: write {name} with one of {', '.join(choices)}."
                )


def overrides_last(arguments: list[str]) -> list[str]:
    """Switches first: Hydra's parser reads overrides in one piece only, and `seed=1,2 -m loss=jsd` is two."""
    switches, overrides = [], []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in TAKE_A_VALUE and (before.startswith("--config") or before.startswith("-c") or "=" not in argument)
        (switches if argument.startswith("-") or is_value else overrides).append(argument)
    return [*switches, *overrides]
