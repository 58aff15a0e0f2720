"""Rollouts -> micro-batches: cut by tokens, padded on the right, every response token with its weight in the step's loss."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from opsd.types import MicroBatch, Rollout, Sequences

if TYPE_CHECKING:
    import torch


class Reduction(Enum):
    token = "token"  # every response token of the optimizer step weighs the same
    sequence = "sequence"  # every response does: the paper's mean of per-sequence means


def token_weights(rollouts: Sequence[Rollout], reduction: Reduction) -> list[float]:
    """What each rollout's tokens weigh, so that all weights of an optimizer step add up to 1. Empty responses weigh nothing."""
    lengths = [len(rollout.response.token_ids) for rollout in rollouts]
    if reduction is Reduction.token:
        total = sum(lengths)
        return [1.0 / total if length else 0.0 for length in lengths]
    rows = sum(length > 0 for length in lengths)
    return [1.0 / (rows * length) if length else 0.0 for length in lengths]


def cut(rollouts: Sequence[Rollout], *, micro_tokens: int) -> list[list[int]]:
    """Indices of the rollouts of each micro-batch, longest first, so that rows of one are of nearly one length.

    A micro-batch holds at most `micro_tokens` padded tokens on either side; a longer row stands alone.
    """
    sizes = [
        max(len(rollout.prompt.student_ids), len(rollout.prompt.teacher_ids or ())) + len(rollout.response.token_ids)
        for rollout in rollouts
    ]
    micro_batches: list[list[int]] = []
    widest = 0
    for index in sorted(range(len(rollouts)), key=lambda i: (-sizes[i], i)):
        if micro_batches and (len(micro_batches[-1]) + 1) * widest <= micro_tokens:
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
            widest = sizes[index]
    return micro_batches


def collate(rollouts: Sequence[Rollout], weights: Sequence[float], device: torch.device) -> MicroBatch:
    """The tensors of one micro-batch."""
    import torch

    def long(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def real(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def side(prompts: list[list[int]]) -> Sequences:
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        width = max(len(row) for row in rows)
        return Sequences(
            ids_BL=long([row + [0] * (width - len(row)) for row in rows]),
            rows_T=long([row for row, ids in enumerate(responses) for _ in ids]),
            at_T=long([len(prompts[row]) - 1 + i for row, ids in enumerate(responses) for i in range(len(ids))]),
        )

    responses = [rollout.response.token_ids for rollout in rollouts]
    teacher_prompts = [rollout.prompt.teacher_ids for rollout in rollouts if rollout.prompt.teacher_ids is not None]
    return MicroBatch(
        student=side([rollout.prompt.student_ids for rollout in rollouts]),
        teacher=side(teacher_prompts) if teacher_prompts else None,
        response_ids_T=long([token for ids in responses for token in ids]),
        sampler_logps_T=real([logp for rollout in rollouts for logp in rollout.response.processed_logps]),
        sampler_raw_logps_T=real([logp for rollout in rollouts for logp in rollout.response.logps]),
        weights_T=real([weight for weight, ids in zip(weights, responses, strict=True) for _ in ids]),
        index_T=long([i for ids in responses for i in range(len(ids))]),
        length_T=long([len(ids) for ids in responses for _ in ids]),
    )
