"""Clipping: contributions `[T, K]` in, token values `[T]` out, and which contributions were capped.

Shapes: T response tokens of a chunk, K kept entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opsd.registry import Option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Clipping(Option):
    """How a token's, or an entry's, share of the loss is bounded by `clip`; null bounds nothing."""

    clip: float | None

    def __call__(self, contributions_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens' values `[T]` and a mask of what was capped: `[T, K]` where entries are, `[T, 1]` where whole tokens are."""
        if self.clip is None:
            return contributions_TK.sum(-1), contributions_TK[:, :1].detach() > float("inf")
        return self.cap(contributions_TK, self.clip)

    def cap(self, contributions_TK: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError
