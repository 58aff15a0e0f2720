"""Problems from a local file with one JSON object a line."""

from __future__ import annotations

from opsd.data.base import Source
from opsd.problems import read_jsonl
from opsd.registry import register
from opsd.types import Pool, Problem, ProblemSet


@register("data", "jsonl")
class Jsonl(Source):
    """Every row needs a problem, and a solution unless `columns.solution` is null."""

    path: str
    columns: dict[str, str | None]  # field (id, problem, solution, answer) -> its column; null: the file has none
    max_rows: int | None  # the first n rows; null: all

    def __post_init__(self) -> None:
        Source.__post_init__(self)
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"data.max_rows={self.max_rows}: must be at least 1, or null for all rows.")

    def check(self, *, needs: frozenset[str]) -> None:
        for field in sorted(needs):
            if self.columns.get(field) is None:
                raise ValueError(
                    f"data.columns.{field}=null: the run reads the {field} of every problem; say which column holds it, or set "
                    "prompt.privileged to the field that the file has."
                )
        self.read(needs=needs)

    def load(self, *, seed: int) -> ProblemSet:
        problems = self.read(needs=frozenset())
        return ProblemSet(pools=[Pool(name=self.name, share=1.0, problems=problems)], counts={"read": len(problems)})

    def read(self, *, needs: frozenset[str]) -> list[Problem]:
        columns = {field: column for field, column in self.columns.items() if column is not None}
        required = {"problem", "solution", *needs} & columns.keys()
        return read_jsonl(self.path, key="data.path", columns=columns, required=tuple(sorted(required)), max_rows=self.max_rows)
