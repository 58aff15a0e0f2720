"""Several sources at once, each with its share of every batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from opsd.data.base import SinglePool, Source
from opsd.registry import lookup, register
from opsd.typed import typed
from opsd.types import Pool, ProblemSet

KEY = re.compile(r"(?<![^\s(])data\.(?=(?!sources\.)[a-z])")  # of a source, in a message; not the end of a path
NAME = re.compile(r"[A-Za-z_][\w-]{0,39}")  # becomes part of problem ids and of metrics; a number would be no text in YAML
MOST = 1e9  # a share; only ratios count


@register("data", "mix")
class Mix(Source):
    """The sources keep their own columns, filters and rule on overlap. A problem's id is `<source>/<its id there>`."""

    sources: dict[str, Any]  # name -> the values of any other data option
    shares: dict[str, float] | None  # name -> of the rollouts; only their ratios count

    def __post_init__(self) -> None:
        if len(self.sources) < 2:
            raise ValueError(
                f"data.sources: holds {len(self.sources)} of the two or more sources that a mix has; add one with "
                "+data@data.sources.NAME=OPTION."
            )
        shares = self.shares or {}
        for name in self.sources:
            if not NAME.fullmatch(name):
                raise ValueError(f"data.sources.{name}: use up to 40 letters, digits, _ and - for a source's name, a letter first.")
            if name not in shares:
                told = ", ".join(f"{other}: {shares.get(other, 1):g}" for other in self.sources)
                raise ValueError(f"data.shares.{name}: is not set; give every source a share, e.g. 'data.shares={{{told}}}'.")
        for name, share in shares.items():
            if name not in self.sources:
                raise ValueError(f"data.shares.{name}={share}: there is no such source; the sources are {', '.join(self.sources)}.")
            if not 0 < share <= MOST:
                raise ValueError(
                    f"data.shares.{name}={share}: must be above 0 and at most {MOST:g}; leave a source out that gives nothing."
                )
        self.parts()

    def parts(self) -> dict[str, SinglePool]:
        return {f"data.sources.{name}": self.source(name) for name in self.sources}

    def source(self, name: str) -> SinglePool:
        values, where = self.sources[name], f"data.sources.{name}"
        if not isinstance(values, dict) or "kind" not in values:
            raise ValueError(f"{where}={values}: must be a data option; add it with +data@{where}=OPTION.")
        if values["kind"] == "mix":
            raise ValueError(f"{where}.kind=mix: a mix holds no other mix; list that one's sources themselves.")
        with told_at(where):
            option = f"{where}={values.get('name', '?')}"
            return typed(lookup("data", str(values["kind"])), values, where=f"{where}.", option=option)

    def check(self, *, needs: frozenset[str]) -> None:
        for where, source in self.parts().items():
            with told_at(where):
                source.check(needs=needs)

    def load(self, *, seed: int) -> ProblemSet:
        assert self.shares is not None
        total = sum(self.shares.values())
        pools: list[Pool] = []
        counts: dict[str, int] = {}
        for name, (where, source) in zip(self.sources, self.parts().items(), strict=True):
            with told_at(where):
                found = source.load(seed=seed)
            problems = [replace(problem, id=f"{name}/{problem.id}") for problem in found.problems]
            pools.append(Pool(name=name, share=self.shares[name] / total, problems=problems))
            counts |= {f"{name}/{reason}": count for reason, count in found.counts.items()}
        refuse_twins(pools)
        return ProblemSet(pools=pools, counts=counts)


@contextmanager
def told_at(where: str) -> Iterator[None]:
    """A source's messages speak of its keys as `data.KEY`; here they stand under `where`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(KEY.sub(f"{where}.", str(error))) from error


def refuse_twins(pools: list[Pool]) -> None:
    """Two pools of the same problems are one pool: their shares would say nothing."""
    texts: dict[frozenset[str], str] = {}
    for pool in pools:
        other = texts.setdefault(frozenset(problem.text for problem in pool.problems), pool.name)
        if other != pool.name:
            raise ValueError(
                f"data.sources.{pool.name}: holds the very problems of data.sources.{other}; give it others, or leave one of the "
                "two out."
            )
