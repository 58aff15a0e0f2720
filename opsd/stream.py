"""The order in which a run sees its problems: shuffled anew every epoch, a pure function of the seed and the position."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opsd.seeding import derive
from opsd.types import Problem, Prompt


def digest(problems: Sequence[Problem]) -> str:
    """Sixteen hex digits that change when a problem, its solution, its answer or the order does."""
    state = hashlib.sha256()
    for problem in problems:
        state.update(repr((problem.id, problem.text, problem.solution, problem.answer)).encode())
    return state.hexdigest()[:16]


@dataclass(kw_only=True, slots=True)
class ProblemStream:
    """Prompts without end. `position` counts the problems drawn, dropped ones included; setting it goes on from there."""

    problems: Sequence[Problem]
    render: Callable[[Problem], Prompt | None]  # None: the row is dropped
    seed: int
    position: int = 0
    order: tuple[int, list[int]] = field(default=(-1, []))  # the epoch at hand and its permutation

    def take(self, count: int) -> tuple[list[Prompt], int]:
        """The next prompts, and how many rows were dropped on the way.

        Raises:
            ValueError: a whole epoch was dropped.
        """
        prompts: list[Prompt] = []
        dropped = in_a_row = 0
        while len(prompts) < count:
            prompt = self.render(self._next())
            if prompt is not None:
                prompts.append(prompt)
                in_a_row = 0
                continue
            dropped += 1
            in_a_row += 1
            if in_a_row == len(self.problems):
                raise self._none_fits()
        return prompts, dropped

    def first(self) -> Prompt:
        """The first prompt, in the data's own order, that fits.

        Raises:
            ValueError: none does.
        """
        for problem in self.problems:
            prompt = self.render(problem)
            if prompt is not None:
                return prompt
        raise self._none_fits()

    def _none_fits(self) -> ValueError:
        return ValueError(
            f"data: all {len(self.problems)} problems are too long for the context beside rollout.max_len; lower that, raise "
            "model.context, or keep prompt.too_long=shorten, which cuts solutions but never a problem."
        )

    def _next(self) -> Problem:
        epoch, place = divmod(self.position, len(self.problems))
        if self.order[0] != epoch:
            permutation = list(range(len(self.problems)))
            random.Random(derive(self.seed, "order", epoch)).shuffle(permutation)
            self.order = (epoch, permutation)
        self.position += 1
        return self.problems[self.order[1][place]]
