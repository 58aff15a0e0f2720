"""The only global: which class stands behind a `kind` of a config group. Looking one up imports that one module and no other."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

FOLDERS = {
    "model": "models",
    "data": "data",
    "prompt": "prompts",
    "rollout": "rollouts",
    "teacher": "teachers",
    "loss": "losses",
    "clipping": "clipping",
    "engine": "engines",
    "eval": "evaluation",
}
_TABLE: dict[tuple[str, str], type] = {}


@dataclass(kw_only=True, slots=True)
class Option:
    """What every option of every group holds."""

    name: str  # what tables and MLflow show: the config file's own name
    kind: str  # which class: the module of the group's folder that registers it


def register(group: str, kind: str) -> Callable[[type], type]:
    """Turns a class with annotated fields into the typed config of `conf/<group>/*.yaml` files of that `kind`."""

    def mark(cls: type) -> type:
        option = dataclass(kw_only=True, slots=True)(cls)
        assert issubclass(option, Option), f"{cls.__name__} does not derive from Option"
        lost = {key for base in cls.__mro__ for key in vars(base).get("__annotations__", {})} - {
            field.name for field in fields(option)
        }
        assert not lost, f"{cls.__name__} inherits {sorted(lost)} from a class without @dataclass(kw_only=True, slots=True)"
        assert (group, kind) not in _TABLE, f"{group} kind {kind} is registered twice"
        _TABLE[group, kind] = option
        return option

    return mark


def kinds(group: str) -> list[str]:
    """Every kind that the group's folder offers, without importing one."""
    folder = Path(__file__).parent / FOLDERS[group]
    return sorted(path.stem for path in folder.glob("*.py") if f'@register("{group}", "{path.stem}")' in path.read_text("utf-8"))


def lookup(group: str, kind: str) -> type:
    """The class behind a kind.

    Raises:
        ValueError: no module of that name stands in the group's folder.
    """
    if (group, kind) not in _TABLE:
        known = kinds(group)
        if kind not in known:
            close = difflib.get_close_matches(kind, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"set one of: {', '.join(known)}."
            raise ValueError(f"{group}.kind={kind}: there is no opsd/{FOLDERS[group]}/{kind}.py; {hint}")
        importlib.import_module(f"opsd.{FOLDERS[group]}.{kind}")
    return _TABLE[group, kind]
