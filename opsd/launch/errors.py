"""Hydra's and OmegaConf's exceptions in one message that names the argument, the reason and what to write."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

HELP = "`--help` lists groups, options and values"


def explain(error: Exception, argv: list[str], conf: Path) -> str:
    """One message for an exception that composing raised. `conf` holds the config groups."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}: line {error.problem_mark.line + 1} is not YAML ({error.problem}); correct the file."
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = error.__cause__
    if isinstance(error, MissingConfigException):
        return missing_option(error, argv, conf)
    if isinstance(error, OverrideParseException):
        reason = next(line for line in lines if not line.startswith("Error parsing override"))
        return (
            f"{error.override}: cannot be read ({reason}); write KEY=VALUE, and put quotes around a value with spaces or brackets."
        )
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        return unknown_key(str(cause.full_key), cause.parent_node, argv, conf)
    if lines[0].startswith("Ambiguous value for argument"):
        return f"{lines[0].split(chr(39))[1]}: several values; add -m to run each, or write KEY=[a,b] for a list."
    if lines[0].startswith("Sweep parameters"):
        return f"{lines[0].split(chr(39))[1]}: a sweep; add -m to run each of its values."
    if lines[0].startswith("Could not override"):
        group = lines[0].split(chr(39))[1]
        given = next((argument for argument in argv if argument.partition("=")[0] == group), group)
        if "@" in group:
            return f"{given}: nothing is composed at {group.partition('@')[2]} yet; add it with a plus sign: +{given}."
        return f"{given}: this command has no group {group}; leave it out. {HELP}."
    if lines[0].startswith("Multiple values for"):
        group = lines[0].split()[3].rstrip(".")
        return f"+{group}=...: {group} has an option already; replace it, {group}=OPTION without the plus sign."
    if lines[0].startswith("Config group override must be"):
        groups = [argument for argument in argv if "=" in argument and "." not in argument.split("=")[0]]
        return f"{' '.join(groups)}: a group takes the name of one of its options; {HELP}."
    mapped = re.match(r"Error merging override ((\S+?)=.*)", lines[0])
    if mapped and "DictConfig with ListConfig" in str(cause):
        return f"{mapped[1]}: must be a mapping, no list, as in '{mapped[2]}={{KEY: VALUE}}'."
    if isinstance(cause, OmegaConfBaseException):
        lines.append(str(cause).splitlines()[0])
    said = " ".join(line.strip() for line in lines[:2] if "full_key:" not in line and "object_type=" not in line)
    return f"{said.rstrip('.')}; {HELP}."


def missing_option(error: Any, argv: list[str], conf: Path) -> str:
    """A group has no such option, or there is no such root config."""
    name = error.missing_cfg_file or str(error).splitlines()[0]
    name = str(name).removesuffix(".yaml")
    top, _, below = name.partition("/")
    nested = (
        sorted(path.relative_to(conf / top).with_suffix("").as_posix() for path in (conf / top).glob("*/*.yaml")) if below else []
    )
    group, option = (top, below) if nested else (name.rpartition("/")[0], name.rpartition("/")[2])
    if not group:
        return f"{str(error).splitlines()[0].rstrip('.')}; {HELP}."
    known = sorted(error.options or [line.strip() for line in str(error).splitlines() if line.startswith("\t") and "=" not in line])
    known += nested
    close = difflib.get_close_matches(option, known, n=len(known) or 1, cutoff=0.0)
    written = re.compile(rf"\+*{group}(@[\w.-]+)?=(.*,)?{re.escape(option)}(,.*)?")
    given = next((argument for argument in argv if written.fullmatch(argument)), f"{group}={option}")
    if not known:
        return f"{given}: there is no conf/{group}/{option}.yaml; {HELP}."
    best = difflib.get_close_matches(option, known, n=1)
    hint = f", did you mean {group}={best[0]}?" if best else "."
    return f"{given}: {group} has no option {option}{hint} Its options: {', '.join(close or known)}."


def unknown_key(key: str, parent: Any, argv: list[str], conf: Path) -> str:
    """A key that the config, or one of its groups, does not have."""
    given = next((argument for argument in argv if argument.lstrip("+~").split("=")[0] == key), key)
    where, _, name = key.rpartition(".")
    prefix = f"{where}." if where else ""
    keys = sorted(str(item) for item in parent) if hasattr(parent, "keys") and parent else []
    if not keys:
        having = options_with(where, r" *(#.*)?$", conf)
        choose = f", or choose an option that has them: {', '.join(having)}" if having else ""
        return f"{given}: {where} is null or a single value here, without keys; set it whole: {where}={{KEY: VALUE, ...}}{choose}."
    owner = f"{where}={parent['name']}" if where and "name" in keys else where or "the config"
    best = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    having = options_with(key, "", conf)
    hint = f", did you mean {prefix}{best[0]}?" if best else "."
    if having:
        hint = f", unlike {', '.join(having)}: add {'that' if len(having) == 1 else 'one of them'} to use it."
    return f"{given}: {owner} has no key {name}{hint} Its keys: {', '.join(keys)}."


def options_with(key: str, value: str, conf: Path) -> list[str]:
    """The options of a group whose files set `group.name`, as `group=option`. `value`: a pattern for what follows the colon."""
    group, _, name = key.partition(".")
    line = re.compile(rf"^{re.escape(name)}:{value}", re.M)
    files = sorted((conf / group).glob("*.yaml")) if name else []
    return [f"{group}={path.stem}" for path in files if line.search(path.read_text(encoding="utf-8"))]


def of_system(error: OSError, argv: list[str]) -> str:
    """A path that the system refuses, named by the argument that holds it."""
    path = str(error.filename or "")
    given = next((argument for argument in argv if (value := argument.partition("=")[2]) and path.endswith(value)), path)
    return f"{given}: {error.strerror or error}; give another path."
