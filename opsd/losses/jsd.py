"""The generalised Jensen-Shannon divergence: both sides against their mixture m = b p_T + (1 - b) p_S.

    D_n = b KL(p_T || m) + (1 - b) KL(p_S || m)

arXiv 2306.13649 (GKD), equation 1, as used by arXiv 2601.18734. An entry is the sum of its two weighted parts, ONE number, which is
what the released code clips. As b -> 0, D / b tends to the forward KL; as b -> 1, D / (1 - b) tends to the reverse KL; D itself
tends to zero at both ends, so the ends are refused: a clip would lose its meaning there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from opsd.losses.base import Divergence
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "jsd")
class JSD(Divergence):
    beta: float

    def __post_init__(self) -> None:
        Divergence.__post_init__(self)
        if not 0 < self.beta < 1:
            instead = "loss=forward_kl" if self.beta <= 0 else "loss=reverse_kl"
            raise ValueError(f"loss.beta={self.beta}: the divergence vanishes at 0 and 1; set {instead}, or a beta between.")

    def term(self, student_logps_TK: Tensor, teacher_logps_TK: Tensor) -> Tensor:
        beta = self.beta
        mixture_logps_TK = (teacher_logps_TK + math.log(beta)).logaddexp(student_logps_TK + math.log1p(-beta))
        teacher_part_TK = teacher_logps_TK.exp() * (teacher_logps_TK - mixture_logps_TK)
        student_part_TK = student_logps_TK.exp() * (student_logps_TK - mixture_logps_TK)
        return beta * teacher_part_TK + (1 - beta) * student_part_TK

    def largest(self) -> tuple[float, float]:
        """A token's value is at most the binary entropy of beta (disjoint sides); an entry's at most its larger half."""
        beta = self.beta
        halves = -beta * math.log(beta), -(1 - beta) * math.log1p(-beta)
        return max(halves), sum(halves)
