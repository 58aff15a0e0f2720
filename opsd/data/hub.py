"""Problems from a dataset on the hub, or from a local file with the same columns."""

from __future__ import annotations

from opsd.data.base import Rows
from opsd.hub import is_hub_id
from opsd.problems import read_hub, read_jsonl
from opsd.registry import register
from opsd.sieve import Sieve
from opsd.types import Problem


@register("data", "hub")
class Hub(Rows):
    """`path`, a JSONL file, where it is set; otherwise `repo` at `revision`, its `subset` and `split`."""

    path: str | None
    repo: str
    revision: str | None
    subset: str | None
    split: str

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        if not is_hub_id(self.repo):
            raise ValueError(
                f"data.repo={self.repo}: is no hub name; give owner/name, or set data.path=FILE to a local JSONL file."
            )

    def read(self, *, columns: dict[str, str], required: tuple[str, ...], sieve: Sieve) -> list[Problem]:
        if self.path is not None:
            return read_jsonl(self.path, key="data.path", columns=columns, required=required, max_rows=self.max_rows, sieve=sieve)
        return read_hub(
            self.repo,
            key="data.path",
            revision=self.revision,
            split=self.split,
            columns=columns,
            required=required,
            max_rows=self.max_rows,
            subset=self.subset,
            sieve=sieve,
        )
