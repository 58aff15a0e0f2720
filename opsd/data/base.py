"""Data: the problems that a run trains on."""

from __future__ import annotations

from opsd.registry import Option
from opsd.types import Problem


class Source(Option):
    """A finite list of problems in a fixed order; the run shuffles it anew every epoch."""

    def check(self, *, needs: str | None) -> None:
        """Refuses what cannot be read, before anything is written. Needs no torch.

        Args:
            needs: the field that the prompt shows the teacher; no problem may lack it.

        Raises:
            ValueError: names the key, the file, the line and what to do.
        """
        raise NotImplementedError

    def load(self, *, seed: int) -> list[Problem]:
        """Every problem, solutions included. Raises ValueError as `check` does."""
        raise NotImplementedError
