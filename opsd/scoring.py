"""Hidden states -> per-token values: projection, loss and clipping in ONE autograd function, chunk by chunk.

The logits of a batch never exist at once: a chunk's are made, turned into values and into the gradient at the hidden states, and
dropped. Row weights (mask, 1/N) go in, so that a trained head gets its gradient in the same pass and the backward only scales.
Three head products a chunk for a frozen head (student, teacher, gradient), a fourth for a trained one. Any registered loss and
clipping run inside and get this for nothing.

Shapes: T response tokens, V vocabulary entries, H hidden width (the teacher's may differ), D diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from opsd.clipping.base import Clipping
    from opsd.losses.base import Loss
    from opsd.types import LoadedModel, MicroBatch, Sequences

TILE_V = 8192  # vocabulary rows of a low-precision head that are widened at one time
DIAGNOSTICS = (
    "value",  # what is optimised: after clipping
    "divergence",  # before clipping
    "clipped_entries",  # share of entries capped (of tokens, where clipping is by token)
    "clipped_tokens",  # 1 where anything was capped
    "clipped_mass",  # teacher probability on capped entries (1 on a capped token)
    "student_entropy",
    "teacher_entropy",
    "agreement",  # 1 where both have the same most likely entry
    "student_logp",  # of the response token, at the loss's temperature
    "teacher_logp",
    "raw_logp",  # the student's at temperature 1
    "cosine",  # between the clipped and the unclipped gradient at the logits; NaN where not asked for or undefined
)


def project(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
    """Logits `[T, V]`, accumulated and returned in float32 (float64 for float64 inputs).

    Low-precision logits would ruin the gradient where teacher and student are close: relative errors of 14-24% against 0.2%.
    On the CPU a low-precision head is widened in tiles, since a whole one costs hundreds of megabytes.
    """
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    if head_VH.dtype == wide:
        return hidden_TH.to(wide) @ head_VH.T
    if head_VH.is_cuda:
        return torch.mm(hidden_TH.to(head_VH.dtype), head_VH.T, out_dtype=wide)
    hidden_TH = hidden_TH.to(wide)
    logits_TV = hidden_TH.new_empty(hidden_TH.shape[0], head_VH.shape[0])
    for start in range(0, head_VH.shape[0], TILE_V):
        tile_VH = head_VH[start : start + TILE_V]
        logits_TV[:, start : start + TILE_V] = hidden_TH @ tile_VH.to(wide).T
    return logits_TV


def project_back(gradient_TV: Tensor, head_VH: Tensor) -> Tensor:
    """The gradient at the hidden states, `[T, H]`, from the one at the logits, in the latter's precision."""
    if head_VH.dtype == gradient_TV.dtype:
        return gradient_TV @ head_VH
    hidden_TH = gradient_TV.new_zeros(gradient_TV.shape[0], head_VH.shape[1])
    for start in range(0, head_VH.shape[0], TILE_V):
        tile_VH = head_VH[start : start + TILE_V].to(gradient_TV.dtype)
        hidden_TH.addmm_(gradient_TV[:, start : start + TILE_V], tile_VH)
    return hidden_TH


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TH: Tensor,
        head_VH: Tensor,
        teacher_TH: Tensor | None,
        teacher_head_VH: Tensor | None,
        batch: MicroBatch,
        spec: Objective,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(student_TH.dtype, torch.float32)
        train_head = ctx.needs_input_grad[1]
        student_gradient_TH = torch.empty_like(student_TH)
        head_gradient_VH = torch.zeros(head_VH.shape, dtype=wide, device=head_VH.device) if train_head else None
        diagnostics_TD = student_TH.new_empty(student_TH.shape[0], len(spec.columns), dtype=wide)
        weights_T = batch.weights_T.to(wide)
        for start in range(0, student_TH.shape[0], spec.chunk_tokens):
            chunk = slice(start, start + spec.chunk_tokens)
            teacher_logps_TV = None
            if teacher_TH is not None and teacher_head_VH is not None:
                teacher_logps_TV = (project(teacher_TH[chunk], teacher_head_VH).to(wide) / spec.temperature).log_softmax(-1)
            logits_TV = project(student_TH[chunk], head_VH)
            gradient_TV, diagnostics_TD[chunk] = spec.score_chunk(
                logits_TV, teacher_logps_TV, batch.response_ids_T[chunk], batch.sampler_logps_T[chunk].to(wide)
            )
            gradient_TV *= weights_T[chunk, None]
            student_gradient_TH[chunk] = project_back(gradient_TV, head_VH).to(student_TH.dtype)
            if head_gradient_VH is not None:
                head_gradient_VH.addmm_(gradient_TV.T, student_TH[chunk].to(wide))
        ctx.save_for_backward(student_gradient_TH, head_gradient_VH)
        ctx.head_dtype = head_VH.dtype
        ctx.mark_non_differentiable(diagnostics_TD)
        return (diagnostics_TD[:, 0] * weights_T).sum(), diagnostics_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        student_gradient_TH, head_gradient_VH = ctx.saved_tensors
        scale = gradients[0]
        at_head = None if head_gradient_VH is None else (head_gradient_VH * scale).to(ctx.head_dtype)
        return student_gradient_TH * scale.to(student_gradient_TH.dtype), at_head, None, None, None, None


class Objective(nn.Module):
    """What an engine wraps: body, head and loss in one forward, so that data parallelism and sharding see one module."""

    def __init__(self, loaded: LoadedModel, *, loss: Loss, clipping: Clipping, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = loaded.model
        self.loaded = loaded
        self.loss, self.clipping, self.temperature, self.chunk_tokens = loss, clipping, temperature, chunk_tokens
        self.want_cosine = False

    @property
    def columns(self) -> tuple[str, ...]:
        """What the diagnostics hold: DIAGNOSTICS, then the loss's own measures."""
        return (*DIAGNOSTICS, *self.loss.measures)

    def forward(self, batch: MicroBatch, teacher_TH: Tensor | None, teacher_head_VH: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weighted sum of the tokens' values, and their diagnostics `[T, D]` (`columns`).

        Args:
            teacher_TH: None: there is no teacher.
            teacher_head_VH: None beside a teacher: the student's own.
        """
        student_TH = hidden_at(self.loaded.body, batch.student)
        head_VH = self.loaded.head_VH  # read here: under ZeRO-3 it is whole inside this forward alone
        if teacher_TH is not None and teacher_head_VH is None:
            teacher_head_VH = head_VH.detach()
        return _ChunkedLoss.apply(student_TH, head_VH, teacher_TH, teacher_head_VH, batch, self)

    def score_chunk(
        self, logits_TV: Tensor, teacher_logps_TV: Tensor | None, response_ids_T: Tensor, sampler_logps_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One chunk's gradient at the student's logits `[T, V]` and its diagnostics `[T, D]`."""
        sampled = {"response_ids_T": response_ids_T, "sampler_logps_T": sampler_logps_T}
        with torch.enable_grad():
            logits_TV.requires_grad_()
            logps_TV = (logits_TV / self.temperature).log_softmax(-1)
            if teacher_logps_TV is None:
                teacher_logps_TV = logps_TV.detach()
            contributions_TK = self.loss(logps_TV, teacher_logps_TV, **sampled)
            values_T, capped_TK = self.clipping(contributions_TK)
            (gradient_TV,) = torch.autograd.grad(values_T.sum(), logits_TV, retain_graph=self.want_cosine)
            cosine_T = torch.full_like(values_T, torch.nan)
            if self.want_cosine:
                (unclipped_TV,) = torch.autograd.grad(contributions_TK.sum(), logits_TV)
                cosine_T = cosine(gradient_TV, unclipped_TV)
        logits_TV, logps_TV = logits_TV.detach(), logps_TV.detach()
        picked_T1 = response_ids_T[:, None]
        teacher_probs_TV = teacher_logps_TV.exp()
        raw_T = logps_TV if self.temperature == 1 else logits_TV.log_softmax(-1)
        mass_TK = self.loss.entries(teacher_logps_TV).exp() if capped_TK.shape[1] > 1 else capped_TK.new_ones(1)
        columns = {
            "value": values_T.detach(),
            "divergence": self.loss.divergence(contributions_TK.detach(), logps_TV, teacher_logps_TV),
            "clipped_entries": capped_TK.to(logps_TV.dtype).mean(-1),
            "clipped_tokens": capped_TK.any(-1).to(logps_TV.dtype),
            "clipped_mass": (mass_TK * capped_TK).sum(-1).to(logps_TV.dtype),
            "student_entropy": -(logps_TV.exp() * logps_TV).sum(-1),
            "teacher_entropy": -(teacher_probs_TV * teacher_logps_TV).sum(-1),
            "agreement": (logps_TV.argmax(-1) == teacher_logps_TV.argmax(-1)).to(logps_TV.dtype),
            "student_logp": logps_TV.gather(-1, picked_T1)[:, 0],
            "teacher_logp": teacher_logps_TV.gather(-1, picked_T1)[:, 0],
            "raw_logp": raw_T.gather(-1, picked_T1)[:, 0],
            "cosine": cosine_T.detach(),
        }
        measures = self.loss.measure(logps_TV, teacher_logps_TV, **sampled)
        return gradient_TV, torch.stack([*(columns[name] for name in DIAGNOSTICS), *measures], dim=-1)


def cosine(gradient_TV: Tensor, unclipped_TV: Tensor) -> Tensor:
    """The cosine of each row. 0 where clipping left no gradient; NaN where there was none to begin with."""
    size_T, unclipped_size_T = gradient_TV.norm(dim=-1), unclipped_TV.norm(dim=-1)
    dot_T = (gradient_TV * unclipped_TV).sum(-1)
    cosine_T = torch.where(size_T > 0, dot_T / (size_T * unclipped_size_T), torch.zeros_like(dot_T))
    return torch.where(unclipped_size_T > 0, cosine_T, torch.full_like(dot_T, torch.nan))


def hidden_at(body: Callable[..., Any], side: Sequences) -> Tensor:
    """The hidden states that predict the response tokens, `[T, H]`. Right padding is to the right of all that matters."""
    hidden_BLH = body(input_ids=side.ids_BL, use_cache=False).last_hidden_state
    flat = hidden_BLH.flatten(0, 1)
    return flat.index_select(0, side.rows_T * hidden_BLH.shape[1] + side.at_T)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout and without gradient inside; afterwards every submodule is in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
