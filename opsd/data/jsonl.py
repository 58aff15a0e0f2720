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

    def check(self, *, needs: str | None) -> None:
        if needs is not None and self.columns.get(needs) is None:
            raise ValueError(
                f"data.columns.{needs}=null with prompt.privileged={needs}: the teacher reads the {needs} of every problem; say "
                "which column holds it, or set prompt.privileged to the field that the file has."
            )
        self.read(needs=needs)

    def load(self, *, seed: int) -> list[Problem]:
        return self.read(needs=None)

    def read(self, *, needs: str | None) -> list[Problem]:
        columns = {field: column for field, column in self.columns.items() if column is not None}
        required = {"problem", "solution", needs} & columns.keys()
        return read_jsonl(self.path, key="data.path", columns=columns, required=tuple(sorted(required)), max_rows=self.max_rows)
