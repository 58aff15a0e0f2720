"""Sampling with the trainer's own module through transformers: nothing to copy, nothing to go stale.

Every response is a pure function of (weights, prompt, seed): no global random state is read or changed, and what else is in the
batch matters to rounding alone. The decode loop stands in `decoding.py`.
"""

from __future__ import annotations

from opsd.registry import register
from opsd.rollouts.base import Sampler, SamplingEngine, check_decoding, own_sampler, rows_within
from opsd.types import LoadedModel


@register("rollout", "transformers")
class TransformersEngine(SamplingEngine):
    max_rows: int  # responses decoded at one time
    cache_tokens: int  # prompts and longest responses together of what is decoded at one time: bounds the key-value cache

    def __post_init__(self) -> None:
        SamplingEngine.__post_init__(self)
        check_decoding(self.max_rows, self.cache_tokens)

    def rows_at_once(self, row_tokens: int) -> int:
        return rows_within(row_tokens, max_rows=self.max_rows, cache_tokens=self.cache_tokens)

    def build(self, loaded: LoadedModel, *, processed: bool) -> Sampler:
        return own_sampler(loaded, max_rows=self.max_rows, cache_tokens=self.cache_tokens)
