"""The order in which a run sees its problems: shuffled anew every epoch, a pure function of the seed and the position.

Several pools take turns by their shares, not by chance: the next prompt comes from the pool that is furthest behind its share of
the prompts so far. A pool of share 1/2 has half of every batch, and a row that is dropped is replaced from its own pool.
"""

from __future__ import annotations

import hashlib
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
    """Prompts without end. Setting `position` goes on from there."""

    pools: Sequence[Pool]
    render: Callable[..., Prompt | None]  # of a problem; None: the row is dropped
    seed: int
    taken: list[int] = field(init=False)  # prompts from each pool
    drawn: list[int] = field(init=False)  # problems from each pool, dropped ones included
    orders: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # each pool's epoch at hand and its permutation
    pool_of: dict[str, str] = field(init=False)  # a problem's id -> its pool's name

    def __post_init__(self) -> None:
        self.taken, self.drawn = [0] * len(self.pools), [0] * len(self.pools)
        self.pool_of = {problem.id: pool.name for pool in self.pools for problem in pool.problems}

    @property
    def position(self) -> list[list[int]]:
        """For each pool the prompts taken and the problems drawn so far."""
        return [list(counts) for counts in zip(self.taken, self.drawn, strict=True)]

    @position.setter
    def position(self, position: Sequence[Sequence[int]]) -> None:
        assert len(position) == len(self.pools), "the position is another data's"
        self.taken, self.drawn = ([counts[index] for counts in position] for index in (0, 1))

    def take(self, count: int) -> tuple[list[Prompt], int]:
        """The next prompts, and how many rows were dropped on the way.

        Raises:
            ValueError: every problem of a pool was dropped.
        """
        prompts, drawn_before = [], sum(self.drawn)
        for _ in range(count):
            index = self._turn()
            prompts.append(self._next(index))
            self.taken[index] += 1
        return prompts, sum(self.drawn) - drawn_before - count

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
        raise none_fits(self.pools)

    def _turn(self) -> int:
        """The pool that is furthest behind its share; of several, the first."""
        turn = sum(self.taken) + 1
        behind = [pool.share * turn - count for pool, count in zip(self.pools, self.taken, strict=True)]
        return behind.index(max(behind))

    def _next(self, index: int) -> Prompt:
        """The pool's next problem that fits, as a prompt."""
        pool = self.pools[index]
        # the one that fits may have stood first in one epoch and stand last in the next
        for _ in range(2 * len(pool.problems)):
            epoch, place = divmod(self.drawn[index], len(pool.problems))
            prompt = self.render(pool.problems[self._order(pool, epoch)[place]])
            self.drawn[index] += 1
            if prompt is not None:
                return prompt
        raise none_fits([pool])

    def _order(self, pool: Pool, epoch: int) -> list[int]:
        """The pool's permutation of that epoch."""
        if self.orders.get(pool.name, (-1, []))[0] != epoch:
            permutation = list(range(len(pool.problems)))
            marks = ("order", epoch) if len(self.pools) == 1 else ("order", pool.name, epoch)
            random.Random(derive(self.seed, *marks)).shuffle(permutation)
            self.orders[pool.name] = (epoch, permutation)
        return self.orders[pool.name][1]


def none_fits(pools: Sequence[Pool]) -> ValueError:
    count = sum(len(pool.problems) for pool in pools)
    names = " and ".join(pool.name for pool in pools)
    return ValueError(
        f"data: all {count} problems of {names} are too long for the context beside rollout.max_len, or for "
        "prompt.max_teacher_tokens (prompt.analysis_len in it): raise the second, lower the others, raise model.context, or "
        "keep prompt.too_long=shorten, which cuts solutions but never a problem."
    )
