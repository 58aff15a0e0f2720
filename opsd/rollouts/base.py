"""Rollout engines: token ids in, token ids and log-probs out. They never see problems or text."""

from __future__ import annotations

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


class RolloutEngine(Option):
    """How responses are sampled."""

    max_len: int
    temperature: float
    top_p: float
    top_k: int | None
    samples: int  # responses a problem

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_len=self.max_len)

    def build(self, loaded: LoadedModel) -> Sampler:
        raise NotImplementedError
