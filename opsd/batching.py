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
    micro_batches: list[list[int]] = []
    widest = 0
    for index in longest_first(rollouts):
        if micro_batches and (len(micro_batches[-1]) + 1) * widest <= micro_tokens:
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
            widest = size(rollouts[index])
    return micro_batches


def plan(rollouts: Sequence[Rollout], *, micro_tokens: int, ranks: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, as indices of rollouts: of nearly the same size, and equally many on every rank.

    The rollouts are dealt to and fro, longest first. A rank that has fewer micro-batches than another gets empty ones.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(longest_first(rollouts)):
        turn, rank = divmod(place, ranks)
        dealt[rank if turn % 2 == 0 else ranks - 1 - rank].append(index)
    cuts = [[[rows[i] for i in part] for part in cut([rollouts[i] for i in rows], micro_tokens=micro_tokens)] for rows in dealt]
    most = max(len(own) for own in cuts)
    return [own + [[]] * (most - len(own)) for own in cuts]


def longest_first(rollouts: Sequence[Rollout]) -> list[int]:
    sizes = [size(rollout) for rollout in rollouts]
    return sorted(range(len(rollouts)), key=lambda index: (-sizes[index], index))


def size(rollout: Rollout) -> int:
    """Tokens of the longer side."""
    return max(len(rollout.prompt.student_ids), len(rollout.prompt.teacher_ids or ())) + len(rollout.response.token_ids)


def nothing(device: torch.device, *, teacher: bool) -> MicroBatch:
    """A micro-batch without a response token, for a rank that has no rollout left: one token that nothing depends on."""
    import torch

    none = torch.zeros(0, dtype=torch.int64, device=device)
    side = sequences([[0]], [[]], device)
    return MicroBatch(
        student=side,
        teacher=side if teacher else None,
        response_ids_T=none,
        sampler_logps_T=none.float(),
        sampler_raw_logps_T=none.float(),
        weights_T=none.float(),
        index_T=none,
        length_T=none,
    )


def sequences(prompts: list[list[int]], responses: list[list[int]], device: torch.device) -> Sequences:
    """One side's tokens, padded on the right, and where the hidden states stand that predict the response tokens."""
    import torch

    def long(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    width = max(len(row) for row in rows)
    return Sequences(
        ids_BL=long([row + [0] * (width - len(row)) for row in rows]),
        rows_T=long([row for row, ids in enumerate(responses) for _ in ids]),
        at_T=long([len(prompts[row]) - 1 + i for row, ids in enumerate(responses) for i in range(len(ids))]),
    )


def collate(rollouts: Sequence[Rollout], weights: Sequence[float], device: torch.device) -> MicroBatch:
    """The tensors of one micro-batch."""
    import torch

    def long(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def real(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    responses = [rollout.response.token_ids for rollout in rollouts]
    teacher_prompts = [rollout.prompt.teacher_ids for rollout in rollouts if rollout.prompt.teacher_ids is not None]
    return MicroBatch(
        student=sequences([rollout.prompt.student_ids for rollout in rollouts], responses, device),
        teacher=sequences(teacher_prompts, responses, device) if teacher_prompts else None,
        response_ids_T=long([token for ids in responses for token in ids]),
        sampler_logps_T=real([logp for rollout in rollouts for logp in rollout.response.processed_logps]),
        sampler_raw_logps_T=real([logp for rollout in rollouts for logp in rollout.response.logps]),
        weights_T=real([weight for weight, ids in zip(weights, responses, strict=True) for _ in ids]),
        index_T=long([i for ids in responses for i in range(len(ids))]),
        length_T=long([len(ids) for ids in responses for _ in ids]),
    )
