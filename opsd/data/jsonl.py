"""Problems from a local file with one JSON object a line."""

from __future__ import annotations

from opsd.data.base import Rows
from opsd.problems import read_jsonl
from opsd.registry import register
from opsd.sieve import Sieve
from opsd.types import Problem


@register("data", "jsonl")
class Jsonl(Rows):
    """Every row needs a problem, and a solution unless `columns.solution` is null."""

    path: str

    def read(self, *, columns: dict[str, str], required: tuple[str, ...], sieve: Sieve) -> list[Problem]:
        return read_jsonl(self.path, key="data.path", columns=columns, required=required, max_rows=self.max_rows, sieve=sieve)
