"""Losses: one chunk's log-probs in, contributions out. No mask, no mean, no clipping inside.

Shapes: T response tokens of a chunk, V vocabulary entries, K kept entries (V, or k + 1 with `loss.top_k`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opsd.registry import Option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Loss(Option):
    """How far the student is from the teacher at each response token."""

    temperature: float | None  # both logits are divided by it; null: the rollout's

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"loss.temperature={self.temperature}: must be above 0, or null for the rollout's.")

    def __call__(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, *, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> Tensor:
        """Contributions `[T, K]`; a row's sum is the token's value.

        Args:
            student_logps_TV: log-probs with gradient, float32 or float64.
            teacher_logps_TV: log-probs without gradient.
            response_ids_T: the sampled tokens.
            sampler_logps_T: their log-probs under the sampler's processed distribution.
        """
        raise NotImplementedError

    def entries(self, teacher_logps_TV: Tensor) -> Tensor:
        """The teacher's log-probs of the entries that contributions are given for, `[T, K]`."""
        return teacher_logps_TV

    def largest(self) -> tuple[float, float]:
        """Upper bounds of one entry and of one token's value (inf where there is none): a clip above them cannot bind."""
        return float("inf"), float("inf")

    def divergence(self, contributions_TK: Tensor, student_logps_TV: Tensor, teacher_logps_TV: Tensor) -> Tensor:
        """What `train/divergence` shows, `[T]`: before clipping, and in units that can be compared between runs."""
        return contributions_TK.sum(-1)

    @property
    def has_teacher(self) -> bool:
        """Whether the teacher's log-probs are read. Without a teacher the student's own, detached, stand in their place."""
        return True

    @property
    def clippable(self) -> bool:
        """Whether contributions are a divergence, which a clip can bound."""
        return True

    @property
    def needs_sampler(self) -> bool:
        """Whether `sampler_logps_T` is read, which only sampled responses have."""
        return False

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what `measure` gives, each logged as `train/<name>`, a mean over tokens."""
        return ()

    def measure(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, *, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> list[Tensor]:
        """Columns `[T]` of the loss's own, one for each of `measures`; nothing here has a gradient."""
        return []


@dataclass(kw_only=True, slots=True)
class Divergence(Loss):
    """A sum over the vocabulary of a term in the two log-probs of an entry. Subclasses say the term."""

    top_k: int | None  # the teacher's k largest entries and a tail; null: the whole vocabulary

    def __post_init__(self) -> None:
        Loss.__post_init__(self)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"loss.top_k={self.top_k}: must be at least 1, or null for the whole vocabulary.")

    def term(self, student_logps_TK: Tensor, teacher_logps_TK: Tensor) -> Tensor:
        """The contribution of each entry, `[T, K]`."""
        raise NotImplementedError

    def __call__(
        self, student_logps_TV: Tensor, teacher_logps_TV: Tensor, *, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> Tensor:
        kept_Tk = self.kept(teacher_logps_TV)
        return self.term(with_tail(student_logps_TV, kept_Tk), with_tail(teacher_logps_TV, kept_Tk))

    def kept(self, teacher_logps_TV: Tensor) -> Tensor | None:
        """The entries that are told apart, `[T, k]`; None for all of them."""
        if self.top_k is None or self.top_k >= teacher_logps_TV.shape[-1]:
            return None
        return teacher_logps_TV.topk(self.top_k, dim=-1).indices

    def entries(self, teacher_logps_TV: Tensor) -> Tensor:
        return with_tail(teacher_logps_TV, self.kept(teacher_logps_TV))


def with_tail(logps_TV: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """The kept entries and one more that holds the rest of the mass: `[T, k + 1]`, still a distribution. None keeps all.

    The tail is the logsumexp of the complement, not log(1 - kept mass), which has no digits left when nearly all mass is kept. A
    complement without any mass stands at the lowest number instead of -inf, so that 0 log 0 is 0 in values and gradients.
    """
    if kept_Tk is None:
        return logps_TV
    import torch

    rest_T1 = logps_TV.scatter(-1, kept_Tk, torch.finfo(logps_TV.dtype).min).logsumexp(-1, keepdim=True)
    return torch.cat([logps_TV.gather(-1, kept_Tk), rest_T1], dim=-1)
