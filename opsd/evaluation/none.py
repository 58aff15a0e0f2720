"""No evaluation: a run trains and saves, and is never scored."""

from __future__ import annotations

from opsd.registry import Option, register


@register("eval", "none")
class NoBenchmark(Option):
    """Not a `Benchmark`, since nothing of one would mean anything here. The loop asks `enabled` and goes no further."""

    # what recipes shorten in any benchmark, so that they compose with this one too
    samples: int | None
    max_len: int | None
    max_rows: int | None

    @property
    def enabled(self) -> bool:
        return False

    @property
    def in_run(self) -> bool:
        return False

    def check(self) -> None:
        """Nothing to refuse."""
