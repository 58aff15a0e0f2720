"""Data: the problems that a run trains on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

from opsd.registry import Option
from opsd.sieve import Sieve
from opsd.types import Pool, Problem, ProblemSet


class Overlap(Enum):
    """What happens to problems that the run's evaluation asks too. Member names are what a config says."""

    refuse = "refuse"
    drop = "drop"
    allow = "allow"


@dataclass(kw_only=True, slots=True)
class Source(Option):
    """Finite lists of problems, each in a fixed order; the run shuffles them anew every epoch."""

    def check(self, *, needs: frozenset[str]) -> None:
        """Refuses what cannot be read, before anything is written. Needs no torch.

        Args:
            needs: the fields that prompt and rollout read; no problem may lack one.

        Raises:
            ValueError: names the key, the file, the line and what to do.
        """
        raise NotImplementedError

    def load(self, *, seed: int) -> ProblemSet:
        """Every problem, solutions included, before it is held against the evaluation. Raises ValueError as `check` does."""
        raise NotImplementedError

    def parts(self) -> dict[str, SinglePool]:
        """The source of each pool that `load` gives, in its order, under the config key where the source's own keys stand."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class SinglePool(Source):
    """One list of problems, and what happens to those of them that the evaluation asks."""

    overlap: Overlap
    overlap_words: int | None  # length of the runs of words that are compared; null: only whole texts are

    def __post_init__(self) -> None:
        if self.overlap_words is not None and self.overlap_words < 2:
            raise ValueError(f"data.overlap_words={self.overlap_words}: must be at least 2, or null to compare whole texts alone.")

    def parts(self) -> dict[str, SinglePool]:
        return {"data": self}


@dataclass(kw_only=True, slots=True)
class MaxChars:
    """Characters that a text may have; null: any number."""

    problem: int | None
    solution: int | None

    def __post_init__(self) -> None:
        for name, most in self.limits().items():
            if most < 1:
                raise ValueError(f"data.max_chars.{name}={most}: must be at least 1, or null for any length.")

    def limits(self) -> dict[str, int]:
        return {name: most for name in ("problem", "solution") if (most := getattr(self, name)) is not None}


@dataclass(kw_only=True, slots=True)
class Rows(SinglePool):
    """Problems in rows with columns. Subclasses say where the rows are."""

    columns: dict[str, str | None]  # field (id, problem, solution, answer) -> its column; null: there is none
    keep: dict[str, Any] | None  # column -> the value, or list of values, of the rows to keep; null: all rows
    max_chars: MaxChars
    max_rows: int | None  # the first n rows that are kept; null: all

    def __post_init__(self) -> None:
        SinglePool.__post_init__(self)
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"data.max_rows={self.max_rows}: must be at least 1, or null for all rows.")
        for field, column in self.columns.items():
            if column is not None and not isinstance(column, str):
                raise ValueError(f"data.columns.{field}={column}: must be the name of a column, or null for none.")
        for column, values in self.wanted().items():
            if not values or any(isinstance(value, list | dict) for value in values):
                raise ValueError(f"data.keep.{column}={(self.keep or {})[column]}: must be one value or a list of values.")
        for name, most in self.max_chars.limits().items():
            if self.columns.get(name) is None:
                raise ValueError(
                    f"data.max_chars.{name}={most} with data.columns.{name}=null: there is nothing to measure; set one of them."
                )

    def wanted(self) -> dict[str, list[Any]]:
        return {column: value if isinstance(value, list) else [value] for column, value in (self.keep or {}).items()}

    def check(self, *, needs: frozenset[str]) -> None:
        for field in sorted(needs):
            if self.columns.get(field) is None:
                raise ValueError(
                    f"data.columns.{field}=null: the run reads the {field} of every problem (prompt.privileged, rollout=dataset); "
                    "say which column holds it, or set those to what the file has."
                )
        self.problems(needs=needs)

    def load(self, *, seed: int) -> ProblemSet:
        problems, counts = self.problems(needs=frozenset())
        return ProblemSet(pools=[Pool(name=self.name, share=1.0, problems=problems)], counts=dict(counts))

    def problems(self, *, needs: frozenset[str]) -> tuple[list[Problem], Counter[str]]:
        columns = {field: column for field, column in self.columns.items() if column is not None}
        required = tuple(sorted({"problem", "solution", *needs} & columns.keys()))
        sieve = Sieve(group="data", keep=self.wanted(), max_chars=self.max_chars.limits())
        return self.read(columns=columns, required=required, sieve=sieve), sieve.counts

    def read(self, *, columns: dict[str, str], required: tuple[str, ...], sieve: Sieve) -> list[Problem]:
        """The problems that the sieve lets through. Raises ValueError as `check` does."""
        raise NotImplementedError
