"""Pointwise clipping: every vocabulary entry's summand is capped BEFORE the sum, min(l_v, clip).

arXiv 2601.18734 (its "pointwise" clipping; `jsd_token_clip` in the released code, which despite the name caps a [B, T, V] tensor).
A capped entry loses its own pull. The gradient at logit j is h_j 1[j uncapped] - p_S(j) sum over uncapped v of h_v, with
h_v = dl_v / d log p_S(v); under forward KL a capped entry is therefore pushed DOWN by p_S(j) P_T(uncapped), the opposite of
distillation, and a token's value can be negative. Watch `train/cosine_clipped_median`; `clipping=rescale` does not turn gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.clipping.base import Clipping
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("clipping", "entry")
class EntryClipping(Clipping):
    def cap(self, contributions_TK: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        return contributions_TK.clamp(max=clip).sum(-1), contributions_TK.detach() > clip
