"""Token clipping: the token's summed divergence is capped, min(sum over v of l_v, clip).

What many forks take pointwise clipping to be. A capped token has no gradient at all: the tokens that differ most teach nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.clipping.base import Clipping
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("clipping", "token")
class TokenClipping(Clipping):
    def cap(self, contributions_TK: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        values_T = contributions_TK.sum(-1)
        return values_T.clamp(max=clip), values_T.detach()[:, None] > clip
