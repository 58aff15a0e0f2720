"""Sampling spread over the ranks of a run: each is asked for its share, and all know all responses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from opsd.ranks import Ranks, share
from opsd.rollouts.base import Sampler
from opsd.types import Request, Response, Sampling


class Spread(Sampler):
    """A sampler on every rank, asked as one: all ranks call it with the same requests.

    Args:
        whole: what is entered around sampling, `TrainingEngine.whole` for a sampler that calls the trainer's own module.
    """

    def __init__(self, own: Sampler, ranks: Ranks, *, whole: Callable[[], AbstractContextManager[None]]) -> None:
        self.own, self.ranks, self.whole = own, ranks, whole
        assert ranks.size % own.ranks_together == 0, "config refuses a number of processes that cannot be grouped"

    def generate(self, requests: list[Request], *, sampling: Sampling) -> list[Response]:
        together = self.own.ranks_together
        mine = share(len(requests), part=self.ranks.rank // together, parts=self.ranks.size // together)
        with self.whole():
            own = self.own.generate([requests[place] for place in mine], sampling=sampling)
        gathered = self.ranks.gather(own)
        return [response for responses in gathered[::together] for response in responses]

    def sync(self, *, weights_version: int) -> dict[str, float]:
        """Of what is measured the largest over all ranks."""
        measured = self.ranks.gather(self.own.sync(weights_version=weights_version))
        return {name: max(each[name] for each in measured) for name in measured[0]}

    def rest(self) -> None:
        self.own.rest()

    @property
    def ranks_together(self) -> int:
        return self.own.ranks_together

    @property
    def notes(self) -> list[str]:
        return self.own.notes

    def close(self) -> None:
        self.own.close()
