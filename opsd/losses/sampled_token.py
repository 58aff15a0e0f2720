"""The policy-gradient form of the reverse KL, KL(p_S || p_T), from the sampled token alone.

    contribution = -w A log p_S(y),   A = stopgrad(log p_T(y) - log p_S(y)),   w = stopgrad(p_S(y) / q(y))

The sampled-token objective of arXiv 2601.18734; the ratio and its cap are PPO's importance weight (arXiv 1707.06347), with q the
sampler's PROCESSED probability, after temperature, top_p and top_k. Gradient at logit j: -w A (1[j = y] - p_S(j)). With w uncapped
and y drawn from q its expectation is the sum over y of p_S(y) (log p_S(y) - log p_T(y)) grad log p_S(y), which is the gradient of
the reverse KL, as long as q leaves nothing out: the tokens that top_p and top_k cut away are never drawn and pull on nothing.

Only the gradient means something: the value is no divergence, can have either sign, and falls or rises as it likes. So clipping is
refused here; `adv_clip` bounds A and `ratio_clip` bounds w, each at the price of a bias. `train/divergence` is the exact reverse KL
over the whole vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.losses.base import Loss
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "sampled_token")
class SampledToken(Loss):
    adv_clip: float | None  # the advantage is kept within plus and minus this; null: as it is
    ratio_clip: float | None  # the importance ratio is kept at or below this; null: as it is

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        for key in ("adv_clip", "ratio_clip"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"loss.{key}={value}: must be above 0, or null for no cap.")

    def __call__(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, *, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> Tensor:
        advantage_T, ratio_T = self.weights(student_logps_TV, teacher_logps_TV, response_ids_T, sampler_logps_T)
        if self.adv_clip is not None:
            advantage_T = advantage_T.clamp(-self.adv_clip, self.adv_clip)
        if self.ratio_clip is not None:
            ratio_T = ratio_T.clamp(max=self.ratio_clip)
        return (-ratio_T * advantage_T)[:, None] * student_logps_TV.gather(-1, response_ids_T[:, None])

    def weights(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The advantage and the importance ratio of each token before either is capped, `[T]`; neither has a gradient."""
        student_T, teacher_T = (
            logps_TV.detach().gather(-1, response_ids_T[:, None])[:, 0] for logps_TV in (student_logps_TV, teacher_logps_TV)
        )
        return teacher_T - student_T, (student_T - sampler_logps_T).exp()

    def divergence(self, contributions_TK: Tensor, student_logps_TV: Tensor, teacher_logps_TV: Tensor) -> Tensor:
        return (student_logps_TV.exp() * (student_logps_TV - teacher_logps_TV)).sum(-1)

    @property
    def clippable(self) -> bool:
        return False

    @property
    def needs_sampler(self) -> bool:
        return True

    @property
    def measures(self) -> tuple[str, ...]:
        """Means before the caps, and the shares of tokens that the caps touch. The mean advantage is near minus the divergence."""
        return "advantage", "advantage_clipped", "ratio", "ratio_clipped"

    def measure(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, *, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> list[Tensor]:
        advantage_T, ratio_T = self.weights(student_logps_TV, teacher_logps_TV, response_ids_T, sampler_logps_T)
        adv_clip, ratio_clip = (float("inf") if cap is None else cap for cap in (self.adv_clip, self.ratio_clip))
        return [
            advantage_T,
            (advantage_T.abs() > adv_clip).to(advantage_T.dtype),
            ratio_T,
            (ratio_T > ratio_clip).to(ratio_T.dtype),
        ]
