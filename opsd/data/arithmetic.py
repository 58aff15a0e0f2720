"""The embedded problems (`opsd.arithmetic`), those of the training split."""

from __future__ import annotations

from itertools import islice

from opsd.arithmetic import KINDS, chains, num_texts
from opsd.data.base import SinglePool
from opsd.registry import register
from opsd.seeding import derive
from opsd.types import Pool, Problem, ProblemSet


@register("data", "arithmetic")
class Arithmetic(SinglePool):
    """Other problems for every run seed; none is ever one of the evaluation split."""

    max_rows: int
    kinds: list[str]  # of opsd.arithmetic.KINDS
    min_steps: int
    max_steps: int

    def __post_init__(self) -> None:
        SinglePool.__post_init__(self)
        if self.max_rows < 1:
            raise ValueError(f"data.max_rows={self.max_rows}: must be at least 1.")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"data.kinds={self.kinds}: must name one or more of {', '.join(KINDS)}.")
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(
                f"data.min_steps={self.min_steps} with data.max_steps={self.max_steps}: "
                "must both be at least 1, and the first not above the second."
            )
        # drawing distinct problems out of few grows slow towards the last one and then never ends
        most = sum(num_texts(kind, min_steps=self.min_steps, max_steps=self.max_steps) for kind in set(self.kinds)) // 2
        if self.max_rows > most:
            raise ValueError(
                f"data.max_rows={self.max_rows}: at most {most} distinct problems are drawn; lower it or raise data.max_steps."
            )

    def check(self, *, needs: frozenset[str]) -> None:
        """Nothing to read: the problems are made here."""

    def load(self, *, seed: int) -> ProblemSet:
        drawn = chains(
            derive(seed, "data"), kinds=tuple(self.kinds), split="train", min_steps=self.min_steps, max_steps=self.max_steps
        )
        problems = [
            Problem(id=f"{chain.kind}-{index}", text=chain.text, solution=chain.solution, answer=chain.answer)
            for index, chain in enumerate(islice(drawn, self.max_rows))
        ]
        return ProblemSet(pools=[Pool(name=self.name, share=1.0, problems=problems)], counts={"read": len(problems)})
