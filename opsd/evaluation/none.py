"""No evaluation: a run trains and saves, and is never scored."""

from __future__ import annotations

from opsd.registry import Option, register


@register("eval", "none")
class NoBenchmark(Option):
    """Not a `Benchmark`, since nothing of one would mean anything here. The loop asks `enabled` and goes no further."""

    every: int  # always 0

    def __post_init__(self) -> None:
        if self.every != 0:
            raise ValueError(f"eval.every={self.every} with eval=none: nothing would be evaluated; choose a benchmark, eval=NAME.")

    @property
    def enabled(self) -> bool:
        return False

    def check(self) -> None:
        """Nothing to refuse."""
