"""Data: the problems that a run trains on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from opsd.registry import Option
from opsd.types import ProblemSet


class Overlap(Enum):
    """What happens to problems that the run's evaluation asks too. Member names are what a config says."""

    refuse = "refuse"
    drop = "drop"
    allow = "allow"


@dataclass(kw_only=True, slots=True)
class Source(Option):
    """A finite list of problems in a fixed order; the run shuffles it anew every epoch."""

    overlap: Overlap
    overlap_words: int | None  # words in a row that make two problems one; null: only whole texts are compared

    def __post_init__(self) -> None:
        if self.overlap_words is not None and self.overlap_words < 2:
            raise ValueError(f"data.overlap_words={self.overlap_words}: must be at least 2, or null to compare whole texts alone.")

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
