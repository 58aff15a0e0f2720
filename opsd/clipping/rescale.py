"""Rescaling: a token whose divergence d exceeds the clip is multiplied by stopgrad(clip / d).

Ours: its value is at most `clip`, as with token clipping, and its gradient keeps the direction of the unclipped one, scaled by
clip / max(d, clip). No token is silenced and none is turned. Gradient of a capped token: (clip / d) grad d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.clipping.base import Clipping
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("clipping", "rescale")
class Rescaling(Clipping):
    def cap(self, contributions_TK: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        values_T = contributions_TK.sum(-1)
        size_T = values_T.detach()
        return values_T * (clip / size_T.clamp(min=clip)), size_T[:, None] > clip
