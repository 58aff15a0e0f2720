"""Forward KL, KL(p_T || p_S): the student must put mass wherever the teacher has some (mass-covering).

    D_n = sum over v of p_T(v) (log p_T(v) - log p_S(v))

The final choice of arXiv 2601.18734 (section 3; `beta=0` in its released code). Gradient at the student's logits: p_S - p_T.
An entry is negative where p_S > p_T; the sum never is. No upper bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.losses.base import Divergence
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "forward_kl")
class ForwardKL(Divergence):
    def term(self, student_logps_TK: Tensor, teacher_logps_TK: Tensor) -> Tensor:
        return teacher_logps_TK.exp() * (teacher_logps_TK - student_logps_TK)
