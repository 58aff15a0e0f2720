"""Which rows of a problem set are left out, and how many of them for which reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opsd.typed import spelled

SHOWN = 5  # values of a column in a message


@dataclass(kw_only=True, slots=True)
class Sieve:
    """Lets a row through where each column of `keep` holds one of its values and no text is longer than `max_chars`.

    Values are compared as they are written, without quotes: `true` keeps true and "true", `5` keeps 5, 5.0 and "5"; case counts. A
    row without the column counts as null.
    """

    group: str  # the config key of the source, e.g. `data`; it starts every message
    keep: Mapping[str, Iterable[Any]]  # column -> the values that are kept
    max_chars: Mapping[str, int]  # field (problem, solution) -> the most characters it may have
    counts: Counter[str] = field(default_factory=Counter)  # `read`, and rows left out: `keep`, `max_chars`
    held: dict[str, dict[str, None]] = field(default_factory=dict)  # column -> the first values that rows had there
    matched: set[str] = field(default_factory=set)  # columns in which some row had a wanted value

    def keeps(self, row: Mapping[str, Any], *, place: str) -> bool:
        """Whether the row's columns are wanted. `place` names the row in messages.

        Raises:
            ValueError: a column holds a list or an object, which no value equals.
        """
        self.counts["read"] += 1
        wanted = True
        for column, values in self.keep.items():
            value = row.get(column)
            if isinstance(value, list | dict):
                kind = "list" if isinstance(value, list) else "object"
                raise ValueError(f"{place}: column {column!r} is a {kind}; {self.group}.keep compares single values only.")
            if column in row:
                held = self.held.setdefault(column, {})
                if len(held) < SHOWN:
                    held[quoted(value)] = None
            if written(value) in map(written, values):
                self.matched.add(column)
            else:
                wanted = False
        self.counts["keep"] += not wanted
        return wanted

    def fits(self, texts: Mapping[str, str | None]) -> bool:
        """Whether no text is too long."""
        fits = all(len(texts[name] or "") <= most for name, most in self.max_chars.items())
        self.counts["max_chars"] += not fits
        return fits

    def check(self, *, kept: int) -> None:
        """Refuses what left nothing, or never looked at anything.

        Raises:
            ValueError: a column of `keep` that no row has; or no row was let through.
        """
        rows = f"{self.counts['read']} rows"
        for column, values in self.keep.items():
            said = f"{self.group}.keep.{column}={', '.join(map(spelled, values))}"
            if column not in self.held:
                raise ValueError(f"{said}: none of the {rows} read has such a column; correct its name.")
            if kept == 0 and column not in self.matched:
                raise ValueError(f"{said}: no row has that; the column holds {', '.join(self.held[column])}; set one of those.")
        if kept == 0 and self.counts["keep"] == self.counts["read"]:
            raise ValueError(f"{self.group}.keep: none of {rows} has all of {', '.join(self.keep)} as wanted; leave one out.")
        if kept == 0 and self.counts["max_chars"]:
            limits = ", ".join(f"{self.group}.max_chars.{name}={most}" for name, most in self.max_chars.items())
            others = f" ({self.counts['keep']} are left out by {self.group}.keep)" if self.keep else ""
            raise ValueError(f"{limits}: leaves none of {rows}{others}; raise it.")


def written(value: Any) -> str:
    """A single value as it is compared."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return spelled(value)


def quoted(value: Any) -> str:
    """A single value as JSON would show it."""
    return f'"{value[:40]}"' if isinstance(value, str) else spelled(value)
