"""`--help`: groups with their options, root values, examples. Read off the yaml files' comments, without importing Hydra."""

from __future__ import annotations

import re
from pathlib import Path

HELP_FLAGS = ("-h", "--help")
SWITCHES = """\
  -m, --multirun        every combination of comma-separated values, e.g. -m loss=jsd,forward_kl seed=0,1,2
  --cfg job --resolve   print the composed config and stop
  --info defaults-tree  print which file brings what
  --config-dir DIR      a directory with groups of your own, beside conf/
  -sc install=bash      shell completion: eval "$(python {script} -sc install=bash)"
  --hydra-help          Hydra's own switches"""


def help_text(conf: Path, root: str, argv: list[str], *, script: str, examples: str) -> str:
    """The whole page.

    Args:
        conf: the directory of config groups; one given with --config-dir comes on top.
        root: the root config's name.
    """
    directories = [conf, *config_dirs(argv)]
    text = (conf / f"{root}.yaml").read_text()
    defaults = dict(re.findall(r"^  - (\w+): (\w+)", text, re.M))
    summary = re.match(r"# (.*)", text)
    parts = [
        f"{summary.group(1) if summary else script}\n\nusage: python {script} [GROUP=OPTION ...] [KEY=VALUE ...] [switches]",
        "groups (*: the default)",
    ]
    for group in defaults:
        options = {
            path.relative_to(directory / group).with_suffix("").as_posix(): path
            for directory in directories
            for path in sorted((directory / group).rglob("*.yaml"))
        }
        if options:
            parts.append("\n".join(f"  {line}" for line in group_lines(group, options, defaults[group])))
    values = re.findall(r"^(\w+): +(.*?) +# (.*)$", text, re.M)
    parts.append("values\n" + "\n".join(f"  {f'{key}={value}':22}{said}" for key, value, said in values))
    parts.append("every option's own values stand in conf/GROUP/OPTION.yaml and are set as GROUP.KEY=VALUE")
    parts.append("switches\n" + SWITCHES.format(script=script))
    parts.append("examples\n" + examples)
    return "\n\n".join(parts)


def group_lines(group: str, options: dict[str, Path], default: str) -> list[str]:
    """A group's options, one a line."""
    return [group, *(f"  {'*' if name == default else ' '} {name:22}{first_comment(path)}" for name, path in options.items())]


def first_comment(path: Path) -> str:
    """The first sentence of a yaml file's first comment line, Hydra's package line aside."""
    for line in path.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        return re.split(r"(?<=[.:]) ", line.removeprefix("# "))[0].rstrip(".:") if line.startswith("#") else ""
    return ""


def config_dirs(argv: list[str]) -> list[Path]:
    """The directories given with --config-dir."""
    joined = [argument.partition("=")[2] for argument in argv if argument.startswith("--config-dir=")]
    return [Path(text) for text in [*joined, *(argv[i + 1] for i, item in enumerate(argv[:-1]) if item in ("--config-dir", "-cd"))]]
