"""What the tests of `rollout=vllm` ask, and what the trainer says to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opsd.rollouts.vllm_sampler import VllmSampler
from opsd.types import LoadedModel, Request, Response, Sampling

ROOT = Path(__file__).parents[2]
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_len=24)
SHAPED = Sampling(temperature=0.7, top_p=0.9, top_k=20, max_len=24)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=None, max_len=24)
EXACT = 1e-4  # between two float32 engines
Build = Callable[..., VllmSampler]


def step(loaded: LoadedModel, *, seed: int, size: float = 0.02) -> None:
    """Changes every trained weight a little, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def asked(count: int, *, seed: int = 0) -> list[Request]:
    """Requests with prompts of unequal lengths, some of them twice."""
    prompts = [[5, 6, 7], [30, 31, 32, 33, 34, 35, 36, 37, 38], [60], [100, 101, 102, 103]]
    return [Request(prompt_ids=prompts[place % len(prompts)], seed=seed + place) for place in range(count)]


@torch.no_grad()
def logits_of(loaded: LoadedModel, request: Request, response: Response) -> torch.Tensor:
    """The trainer's logits `[T, V]` at the response's tokens, from transformers' own forward, float32."""
    start = len(request.prompt_ids)
    ids = torch.tensor([request.prompt_ids + response.token_ids])
    model: Any = loaded.model
    return model(input_ids=ids).logits[0, start - 1 : -1].float()


def picked(logps_TV: torch.Tensor, response: Response) -> list[float]:
    return logps_TV.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0].tolist()


def close_to(values: list[float], tolerance: float = EXACT) -> Any:
    return pytest.approx(values, abs=tolerance)
