"""Sampling with the trainer's own module through transformers: nothing to copy, nothing to go stale.

Every response is a pure function of (weights, prompt, seed): no global random state is read or changed, and what else is in the
batch matters to rounding alone. The decode loop stands in `decoding.py`.
"""

from __future__ import annotations

from opsd.registry import register
from opsd.rollouts.base import Sampler, SamplingEngine
from opsd.types import LoadedModel


@register("rollout", "transformers")
class TransformersEngine(SamplingEngine):
    max_rows: int  # responses decoded at one time
    cache_tokens: int  # prompts and longest responses together of what is decoded at one time: bounds the key-value cache

    def __post_init__(self) -> None:
        SamplingEngine.__post_init__(self)
        for key in ("max_rows", "cache_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"rollout.{key}={getattr(self, key)}: must be at least 1.")

    def build(self, loaded: LoadedModel) -> Sampler:
        """A sampler over the weights of `loaded`, which it never copies.

        Raises:
            ValueError: the model keeps its past in something other than keys and values.
        """
        from opsd.rollouts.decoding import TransformersSampler, make_cache

        make_cache(loaded.model.config)
        return TransformersSampler(loaded=loaded, max_rows=self.max_rows, cache_tokens=self.cache_tokens)
