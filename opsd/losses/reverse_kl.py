"""Reverse KL, KL(p_S || p_T): the student must not put mass where the teacher has none (mode-seeking).

    D_n = sum over v of p_S(v) (log p_S(v) - log p_T(v))

`beta=1` in the released code of arXiv 2601.18734. Gradient at logit j: p_S(j) (log p_S(j) - log p_T(j) - D_n).
An entry is negative where p_S < p_T; the sum never is. No upper bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.losses.base import Divergence
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "reverse_kl")
class ReverseKL(Divergence):
    def term(self, student_logps_TK: Tensor, teacher_logps_TK: Tensor) -> Tensor:
        return student_logps_TK.exp() * (student_logps_TK - teacher_logps_TK)
