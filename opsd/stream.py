"""The order in which a run sees its problems: shuffled anew every epoch, a pure function of the seed and the position."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opsd.seeding import derive
from opsd.types import Pool, Problem, Prompt


def digest(problems: Sequence[Problem]) -> str:
    """Sixteen hex digits that change when a problem, its solution, its answer or the order does."""
    state = hashlib.sha256()
    for problem in problems:
        state.update(repr((problem.id, problem.text, problem.solution, problem.answer)).encode())
    return state.hexdigest()[:16]


@dataclass(kw_only=True, slots=True)
class ProblemStream:
    """Prompts without end. `position` counts the problems drawn, dropped ones included; setting it goes on from there.

    Pools take turns by their shares, not by chance: a pool of share 1/2 has half of EVERY batch.
    """

    pools: Sequence[Pool]
    render: Callable[..., Prompt | None]  # of a problem; None: the row is dropped
    seed: int
    position: int = 0
    drawn: list[int] = field(default_factory=list)  # from each pool, up to `position`
    orders: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # each pool's epoch at hand and its permutation

    def take(self, count: int) -> tuple[list[Prompt], int]:
        """The next prompts, and how many rows were dropped on the way.

        Raises:
            ValueError: every problem was dropped.
        """
        prompts: list[Prompt] = []
        dropped = in_a_row = 0
        round_trip = math.ceil(max(len(pool.problems) / pool.share for pool in self.pools)) + len(self.pools)
        while len(prompts) < count:
            prompt = self.render(self._next())
            if prompt is not None:
                prompts.append(prompt)
                in_a_row = 0
                continue
            dropped += 1
            in_a_row += 1
            if in_a_row >= round_trip:
                raise self._none_fits()
        return prompts, dropped

    def first(self) -> Prompt:
        """The first prompt, in the data's own order, that fits.

        Raises:
            ValueError: none does.
        """
        for pool in self.pools:
            for problem in pool.problems:
                prompt = self.render(problem)
                if prompt is not None:
                    return prompt
        raise self._none_fits()

    def _none_fits(self) -> ValueError:
        count = sum(len(pool.problems) for pool in self.pools)
        return ValueError(
            f"data: all {count} problems are too long for the context beside rollout.max_len; lower that, raise "
            "model.context, or keep prompt.too_long=shorten, which cuts solutions but never a problem."
        )

    def _next(self) -> Problem:
        pool, drawn = self._draw()
        epoch, place = divmod(drawn, len(pool.problems))
        if self.orders.get(pool.name, (-1, []))[0] != epoch:
            permutation = list(range(len(pool.problems)))
            marks = ("order", epoch) if len(self.pools) == 1 else ("order", pool.name, epoch)
            random.Random(derive(self.seed, *marks)).shuffle(permutation)
            self.orders[pool.name] = (epoch, permutation)
        return pool.problems[self.orders[pool.name][1][place]]

    def _draw(self) -> tuple[Pool, int]:
        """The pool that is furthest behind its share at this position, and how many draws from it came before."""
        if len(self.drawn) < len(self.pools) or sum(self.drawn) != self.position:  # set anew: what came before is counted again
            end, self.position, self.drawn = self.position, 0, [0] * len(self.pools)
            while self.position < end:
                self._draw()
        behind = [pool.share * (self.position + 1) - count for pool, count in zip(self.pools, self.drawn, strict=True)]
        index = behind.index(max(behind))
        self.drawn[index] += 1
        self.position += 1
        return self.pools[index], self.drawn[index] - 1
