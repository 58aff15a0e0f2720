"""Plain values to an object of a dataclass, with one message that names key, value and what was expected."""

from __future__ import annotations

import difflib
import math
import re
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf, ValidationError
from omegaconf.errors import InterpolationResolutionError


def typed(cls: type, values: dict[str, Any], *, where: str, option: str) -> Any:
    """`values` as an object of the dataclass `cls`. `where` is put before its keys, `option` is who has them."""
    check_keys(cls, values, where, option)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    except ValidationError as error:
        key = str(error.full_key) or next(name for name in values if not accepts(cls, name, values[name]))
        value = OmegaConf.select(OmegaConf.create(values), key)
        raise ValueError(f"{where}{key}={spelled(value)}: must be {expected(hint_of(cls, key))}.") from error


def accepts(cls: type, key: str, value: Any) -> bool:
    """Whether one key of a class takes a value."""
    try:
        OmegaConf.merge(OmegaConf.structured(cls), {key: value})
    except ValidationError:
        return False
    return True


def check_keys(cls: type, values: dict[str, Any], where: str, option: str) -> None:
    """Every key known, every field set, every number finite."""
    hints = {field.name: get_type_hints(cls)[field.name] for field in fields(cls)}
    for key, value in values.items():
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f", did you mean {where}{close[0]}?" if close else "."
            raise ValueError(f"{where}{key}={spelled(value)}: {option} has no such key{hint} Its keys: {', '.join(hints)}.")
        nested = [part for part in parts(hints[key]) if isinstance(part, type) and is_dataclass(part)]
        if nested and isinstance(value, dict):
            check_keys(nested[0], value, f"{where}{key}.", option)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}{key}={value}: must be finite.")
        if isinstance(value, str) and "${" in value:  # all that refer to something have been resolved
            raise ValueError(f"{where}{key}: holds `${{`, which a config reads as a reference to another value; write `$ {{`.")
    for key in hints:
        unset = key if key not in values else missing_in(values[key], key)
        if unset is not None:
            raise ValueError(f"{where}{unset} is not set: {option} needs it; add {where}{unset}=VALUE to the command line.")


def missing_in(value: Any, key: str) -> str | None:
    """The dotted key of the first `???` in a value, the value's own where it is one."""
    if isinstance(value, dict):
        return next((unset for name, item in value.items() if (unset := missing_in(item, f"{key}.{name}")) is not None), None)
    return key if value == "???" else None


def spelled(value: Any) -> str:
    """A value as it is written in YAML and on the command line."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def hint_of(cls: type, key: str) -> Any:
    """The declared type behind a dotted key, e.g. `lora.r`; of an item of a list or a mapping, the whole one's."""
    hint: Any = cls
    for name in filter(None, key.split("[")[0].split(".")):
        classes = [part for part in parts(hint) if is_dataclass(part)]
        if not classes:
            break
        hint = get_type_hints(classes[0])[name]
    return hint


def unresolved(error: InterpolationResolutionError, cfg: DictConfig) -> str:
    """What is wrong with a reference to another value of the config, most often to one that only some options of a group have."""
    missing = re.search(r"Interpolation key '(\w+)\.([\w.]+)' not found", str(error))
    option = missing and OmegaConf.select(cfg, f"{missing[1]}.name")
    if missing is None or option is None:
        return f"{error.full_key}: its interpolation cannot be resolved ({str(error).splitlines()[0]})."
    group = missing[1]
    unscored = " (eval.in_run=false: it then lends its words alone, and the run is not scored)" if group == "eval" else ""
    return (
        f"{error.full_key}: takes its value from {group}.{missing[2]}, which {group}={option} does not have; choose another "
        f"{group}{unscored}, or set {error.full_key} itself."
    )


def parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of another type, itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def expected(hint: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
    said = []
    for part in parts(hint):
        if get_origin(part) is list:
            said.append(f"a list, each item {expected(get_args(part)[0])}")
        elif get_origin(part) is dict:
            value = get_args(part)[1]
            said.append("a mapping" if value is Any else f"a mapping, each value {expected(value)}")
        elif is_dataclass(part):
            said.append(f"a group of the keys {', '.join(field.name for field in fields(part))}")
        elif isinstance(part, type) and issubclass(part, Enum):
            said.append(f"one of {', '.join(part.__members__)}")
        else:
            said.append(words.get(part, str(part)))
    return " or ".join(said)
