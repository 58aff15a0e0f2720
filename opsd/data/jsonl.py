"""Problems from a local file with one JSON object a line."""

from __future__ import annotations

from opsd.data.base import Source
from opsd.problems import read_jsonl
from opsd.registry import register
from opsd.types import Problem


@register("data", "jsonl")
class Jsonl(Source):
    """Every row needs a problem, and a solution unless `columns.solution` is null."""

    path: str
    columns: dict[str, str | None]  # field (id, problem, solution, answer) -> its column; null: the file has none
    max_rows: int | None  # the first n rows; null: all

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"data.max_rows={self.max_rows}: must be at least 1, or null for all rows.")

    def check(self) -> None:
        self.read()

    def load(self, *, seed: int) -> list[Problem]:
        return self.read()

    def read(self) -> list[Problem]:
        columns = {field: column for field, column in self.columns.items() if column is not None}
        required = ("problem", "solution") if "solution" in columns else ("problem",)
        return read_jsonl(self.path, key="data.path", columns=columns, required=required, max_rows=self.max_rows)
