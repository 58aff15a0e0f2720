"""Rollout engines: token ids in, token ids and log-probs out. They never see problems or text."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.registry import Option
from opsd.types import LoadedModel, Request, Response, Sampling


class Sampler:
    """A running engine. Built once a process; `generate` may be called with any sampling settings."""

    def generate(self, requests: list[Request], *, sampling: Sampling) -> list[Response]:
        """One response for each request, in order. The same request under the same weights gives the same response."""
        raise NotImplementedError

    def sync(self, *, weights_version: int) -> None:
        """Makes the trainer's current weights the ones that `generate` samples from."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class RolloutEngine(Option):
    """How responses are sampled."""

    max_len: int
    temperature: float
    top_p: float
    top_k: int | None
    samples: int  # responses a problem

    def __post_init__(self) -> None:
        for key in ("max_len", "samples"):
            if getattr(self, key) < 1:
                raise ValueError(f"rollout.{key}={getattr(self, key)}: must be at least 1.")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"rollout.temperature={self.temperature}: must be above 0 and finite, since the loss divides logits by it; "
                "greedy decoding is for evaluation alone."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p={self.top_p}: must be above 0 and at most 1 (1 is off).")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"rollout.top_k={self.top_k}: must be at least 1, or null for the whole vocabulary.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_len=self.max_len)

    def build(self, loaded: LoadedModel) -> Sampler:
        raise NotImplementedError
