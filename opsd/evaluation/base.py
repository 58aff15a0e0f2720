"""Benchmarks: which problems are asked, how often, in which words, and under which name the score is told."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.registry import Option
from opsd.types import Problem, Sampling


@dataclass(kw_only=True, slots=True)
class Benchmark(Option):
    """A fixed list of problems with known answers, each asked `samples` times."""

    samples: int  # responses a problem
    in_run: bool  # scored by the run itself, before the first step and after the last; otherwise by evaluate.py alone
    every: int  # optimizer steps between evaluations in the loop; 0: before and after only
    max_len: int  # response tokens at most
    temperature: float  # 0: greedy
    top_p: float
    top_k: int | None
    thinking: bool  # the chat template's switch
    instruction: str  # what follows the problem in the user's turn, line breaks included

    def __post_init__(self) -> None:
        for key, least in (("samples", 1), ("every", 0), ("max_len", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"eval.{key}={getattr(self, key)}: must be at least {least}.")
        if self.every and not self.in_run:
            raise ValueError(f"eval.every={self.every} with eval.in_run=false: the run would not be scored; set eval.every=0.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"eval.temperature={self.temperature}: must be at least 0 (0 is greedy) and finite.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"eval.top_p={self.top_p}: must be above 0 and at most 1 (1 is off).")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"eval.top_k={self.top_k}: must be at least 1, or null for the whole vocabulary.")

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate; false for `eval=none` alone."""
        return True

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_len=self.max_len)

    def prompt_text(self, problem: Problem) -> str:
        """The user's turn."""
        return problem.text + self.instruction

    def check(self) -> None:
        """Refuses what cannot be read, before anything is written. Needs no torch.

        Raises:
            ValueError: names the key, the file, the line and what to do.
        """
        raise NotImplementedError

    def problems(self) -> list[Problem]:
        """Every problem, answers included. The same list whatever the run's seed, so that runs can be compared problem by problem.

        Raises:
            ValueError: as `check`.
        """
        raise NotImplementedError

    def title(self, problems: list[Problem]) -> str:
        """The prefix of the metrics: `name`, or `<name>_partial` / `<name>_custom` where the name would promise too much."""
        return self.name

    def canonical(self, problems: list[Problem]) -> bool:
        """Whether this is a published protocol, value for value, so that its score may stand beside published ones."""
        return False
