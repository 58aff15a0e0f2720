"""The data's own solutions as responses: supervised fine-tuning under `loss=nll`, and off-policy distillation under a divergence.

A solution is tokenised as plain text, whatever chat markers it spells, and ends with the token that ends the template's turns; what
exceeds `max_len` is cut and counted as truncated. Nothing is sampled, so that there are no log-probs of a sampler and no weights
that wrote it. Evaluations are sampled from the weights at hand through transformers.
"""

from __future__ import annotations

from math import nan

from opsd import chat
from opsd.registry import register
from opsd.rollouts.base import Recorded, RolloutEngine, Sampler, check_decoding, own_sampler, rows_within
from opsd.types import FinishReason, LoadedModel, Prompt, Response


class Solutions(Recorded):
    """Each problem's solution."""

    def __init__(self, loaded: LoadedModel, *, max_len: int) -> None:
        self.tokenizer, self.max_len = loaded.tokenizer, max_len
        self.end = chat.end_of_turn(loaded.tokenizer, loaded.stop_ids)

    def responses(self, prompts: list[Prompt], *, step: int) -> list[Response]:
        return [self.response(prompt) for prompt in prompts]

    def response(self, prompt: Prompt) -> Response:
        solution = prompt.problem.solution
        if solution is None:
            raise ValueError(
                f"rollout=dataset: the problem {prompt.problem.id} has no solution to learn from; add it to the data "
                "(data.columns.solution says in which column)."
            )
        ids = [*chat.encode_text(self.tokenizer, solution), self.end]
        kept = ids[: self.max_len]
        unknown = [nan] * len(kept)
        return Response(
            token_ids=kept,
            logps=unknown,
            processed_logps=list(unknown),
            finish_reason=FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH,
            weights_version=None,
        )


@register("rollout", "dataset")
class DatasetEngine(RolloutEngine):
    max_rows: int  # responses of an evaluation decoded at one time
    cache_tokens: int  # prompts and longest responses together of what is decoded at one time: bounds the key-value cache

    def __post_init__(self) -> None:
        RolloutEngine.__post_init__(self)
        check_decoding(self.max_rows, self.cache_tokens)
        if self.samples != 1:
            raise ValueError(
                f"rollout.samples={self.samples} with rollout={self.name}: a problem has one solution; set rollout.samples=1."
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"solution"})

    @property
    def samples_anew(self) -> bool:
        return False

    def rows_at_once(self, row_tokens: int) -> int:
        return rows_within(row_tokens, max_rows=self.max_rows, cache_tokens=self.cache_tokens)

    def build(self, loaded: LoadedModel, *, processed: bool) -> Sampler:
        return own_sampler(loaded, max_rows=self.max_rows, cache_tokens=self.cache_tokens)

    def recorded(self, loaded: LoadedModel) -> Recorded:
        return Solutions(loaded, max_len=self.max_len)
