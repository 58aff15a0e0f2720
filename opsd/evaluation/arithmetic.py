"""The embedded benchmark: held-out problems of `opsd.arithmetic`."""

from __future__ import annotations

import hashlib
from itertools import islice

from opsd.arithmetic import EVAL_SHARE, KINDS, MOVES, NAMES, STORIES, SYMBOLS, chains
from opsd.evaluation.base import Benchmark
from opsd.registry import register
from opsd.types import Problem

SEED = 0  # one list for every run, whatever its own seed
DIGITS = 10


@register("eval", "arithmetic")
class ArithmeticBenchmark(Benchmark):
    """The first `rows` problems of the evaluation split. An id carries a digest of its text: it never means two problems."""

    rows: int
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
        if self.rows < 1:
            raise ValueError(f"eval.rows={self.rows}: must be at least 1.")
        held_out = sum(self.num_texts(kind) for kind in set(self.kinds)) // EVAL_SHARE
        if 2 * self.rows > held_out:
            raise ValueError(
                f"eval.rows={self.rows}: only about {held_out} such problems are held out, and at most half of them can be asked; "
                "lower it or raise eval.max_steps."
            )

    def num_texts(self, kind: str) -> int:
        """How many different texts a kind can have, of either split."""
        stories = sum(len(NAMES) if "{name}" in story else 1 for story in STORIES[kind])
        moves = DIGITS * sum(symbol in SYMBOLS[kind] for symbol in MOVES)
        return DIGITS * stories * sum(moves**count for count in range(self.min_steps, self.max_steps + 1))

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
            for index, chain in enumerate(islice(drawn, self.rows))
        ]
