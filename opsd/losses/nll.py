"""Negative log-likelihood of the response, -log p_S(y): supervised fine-tuning where the responses are the data's solutions.

It is the forward KL from a teacher that puts all its mass on the response's token, so that `train/divergence` is the value itself.
No model scores the other side: `teacher=none`. Gradient at logit j: p_S(j) - 1[j = y]. Clipping is refused: what is capped first is
the token that the student knows least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.losses.base import Loss
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "nll")
class NLL(Loss):
    def __call__(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, *, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> Tensor:
        return -student_logps_TV.gather(-1, response_ids_T[:, None])

    @property
    def has_teacher(self) -> bool:
        return False

    @property
    def clippable(self) -> bool:
        return False
