"""Hydra's and OmegaConf's exceptions in one message that names the argument, the reason and what to write."""

from __future__ import annotations

import difflib
from typing import Any

HELP = "`--help` lists groups, options and values"


def explain(error: Exception, argv: list[str]) -> str:
    """One message for an exception that composing raised."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = error.__cause__
    if isinstance(error, MissingConfigException):
        return missing_option(error, argv)
    if isinstance(error, OverrideParseException):
        reason = next(line for line in lines if not line.startswith("Error parsing override"))
        return (
            f"{error.override}: cannot be read ({reason}); write KEY=VALUE, and put quotes around a value with spaces or brackets."
        )
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        return unknown_key(str(cause.full_key), cause.parent_node, argv)
    if lines[0].startswith("Ambiguous value for argument"):
        return f"{lines[0].split(chr(39))[1]}: several values; add -m to run each, or write KEY=[a,b] for a list."
    if lines[0].startswith("Sweep parameters"):
        return f"{lines[0].split(chr(39))[1]}: a sweep; add -m to run each of its values."
    if lines[0].startswith("Multiple values for"):
        group = lines[0].split()[3].rstrip(".")
        return f"+{group}=...: {group} has an option already; replace it, {group}=OPTION without the plus sign."
    if lines[0].startswith("Config group override must be"):
        groups = [argument for argument in argv if "=" in argument and "." not in argument.split("=")[0]]
        return f"{' '.join(groups)}: a group takes the name of one of its options; {HELP}."
    if isinstance(cause, OmegaConfBaseException):
        lines.append(str(cause).splitlines()[0])
    said = " ".join(line.strip() for line in lines[:2] if "full_key:" not in line and "object_type=" not in line)
    return f"{said.rstrip('.')}; {HELP}."


def missing_option(error: Any, argv: list[str]) -> str:
    """A group has no such option, or there is no such root config."""
    name = error.missing_cfg_file or str(error).splitlines()[0]
    group, _, option = str(name).removesuffix(".yaml").rpartition("/")
    if not group:
        return f"{str(error).splitlines()[0].rstrip('.')}; {HELP}."
    known = sorted(error.options or [line.strip() for line in str(error).splitlines() if line.startswith("\t") and "=" not in line])
    close = difflib.get_close_matches(option, known, n=len(known) or 1, cutoff=0.0)
    given = next((argument for argument in argv if argument.lstrip("+").startswith(f"{group}=")), f"{group}={option}")
    if not known:
        return f"{given}: there is no conf/{group}/{option}.yaml; {HELP}."
    best = difflib.get_close_matches(option, known, n=1)
    hint = f", did you mean {group}={best[0]}?" if best else "."
    return f"{given}: {group} has no option {option}{hint} Its options: {', '.join(close or known)}."


def unknown_key(key: str, parent: Any, argv: list[str]) -> str:
    """A key that the config, or one of its groups, does not have."""
    given = next((argument for argument in argv if argument.lstrip("+~").split("=")[0] == key), key)
    where, _, name = key.rpartition(".")
    prefix = f"{where}." if where else ""
    keys = sorted(str(item) for item in parent) if hasattr(parent, "keys") and parent else []
    if not keys:
        return f"{given}: {where} is null or a single value here, without keys; set it whole: {where}={{KEY: VALUE, ...}}."
    owner = f"{where}={parent['name']}" if where and "name" in keys else where or "the config"
    best = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    hint = f", did you mean {prefix}{best[0]}?" if best else "."
    return f"{given}: {owner} has no key {name}{hint} Its keys: {', '.join(keys)}."
