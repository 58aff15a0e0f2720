"""The embedded benchmark: held-out problems of `opsd.arithmetic`."""

from __future__ import annotations

import hashlib
from itertools import islice

from opsd.arithmetic import EVAL_SHARE, KINDS, chains, num_texts
from opsd.evaluation.base import Benchmark
from opsd.registry import register
from opsd.types import Problem

SEED = 0  # one list for every run, whatever its own seed


@register("eval", "arithmetic")
class ArithmeticBenchmark(Benchmark):
    """The first `max_rows` problems of the evaluation split. An id carries a digest of its text: it never means two problems."""

    max_rows: int
    kinds: list[str]  # of opsd.arithmetic.KINDS
    min_steps: int
    max_steps: int

    def __post_init__(self) -> None:
        Benchmark.__post_init__(self)
        for kind in self.kinds or [""]:
            if kind not in KINDS:
                raise ValueError(f"eval.kinds={self.kinds}: must name one or more of {', '.join(KINDS)}.")
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(
                f"eval.min_steps={self.min_steps} with eval.max_steps={self.max_steps}: "
                "must both be at least 1, and the first not above the second."
            )
        if self.max_rows < 1:
            raise ValueError(f"eval.max_rows={self.max_rows}: must be at least 1.")
        held_out = (
            sum(num_texts(kind, min_steps=self.min_steps, max_steps=self.max_steps) for kind in set(self.kinds)) // EVAL_SHARE
        )
        if 2 * self.max_rows > held_out:
            raise ValueError(
                f"eval.max_rows={self.max_rows}: only about {held_out} such problems are held out, and at most half of them can be "
                "asked; lower it or raise eval.max_steps."
            )

    def check(self) -> None:
        """Nothing to read: the problems are made here."""

    def problems(self) -> list[Problem]:
        drawn = chains(SEED, kinds=tuple(self.kinds), split="eval", min_steps=self.min_steps, max_steps=self.max_steps)
        return [
            Problem(
                id=f"{index:03d}-{hashlib.sha256(chain.text.encode()).hexdigest()[:8]}",
                text=chain.text,
                solution=chain.solution,
                answer=chain.answer,
            )
            for index, chain in enumerate(islice(drawn, self.max_rows))
        ]
