"""The transformers engine's decode loop. Imported only when an engine is built.

Our own, since `generate()` draws from the global random state and carries finished rows along as padding. Here every row draws from
its own seed, finished rows leave the batch, and requests with one prompt share its prefill.

Shapes: P distinct prompts, R rows (responses) still in the batch, L columns (padded prompt, then response), V vocabulary entries,
K entries considered, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from opsd.rollouts.base import Sampler, diverged, require_room, rows_within
from opsd.scoring import evaluating, project
from opsd.types import FinishReason, LoadedModel, Request, Response, Sampling

COMPACT_BELOW = 0.75  # finished rows are dropped once no more than this share of the batch is running
NUCLEUS = 1024  # entries that nearly always hold the mass of top_p; the whole vocabulary is sorted where they do not
SPARE_TOKENS = 64  # room a cache layer makes beyond what it needs now


@dataclass(kw_only=True, slots=True)
class Row:
    """One response under way."""

    prompt_ids: list[int]
    stream: np.random.Generator  # this row's uniforms, decided by its seed alone
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    processed_logps: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(kw_only=True, slots=True)
class TransformersSampler(Sampler):
    """Samples from the weights of `loaded` as they are at the moment of the call."""

    loaded: LoadedModel
    max_rows: int
    cache_tokens: int
    weights_version: int = 0

    def sync(self, *, weights_version: int) -> dict[str, float]:
        """The weights are the trainer's own: only their version is noted."""
        self.weights_version = weights_version
        return {}

    def generate(self, requests: list[Request], *, sampling: Sampling) -> list[Response]:
        """One response for each request, in order. `sampling.temperature=0` is greedy decoding.

        Raises:
            ValueError: a prompt leaves fewer than `max_len` tokens of the model's context.
            FloatingPointError: the model's logits are not finite.
        """
        longest = require_room(requests, sampling.max_len, context=self.loaded.context)
        rows = [Row(prompt_ids=request.prompt_ids, stream=uniform_stream(request.seed)) for request in requests]
        ordered = sorted(rows, key=lambda row: (len(row.prompt_ids), row.prompt_ids))
        with evaluating(self.loaded.model):
            at_once = rows_within(longest + sampling.max_len, max_rows=self.max_rows, cache_tokens=self.cache_tokens)
            for start in range(0, len(ordered), at_once):
                self._decode(ordered[start : start + at_once], sampling)
        return [self._response(row) for row in rows]

    def _decode(self, rows: list[Row], sampling: Sampling) -> None:
        """Fills a group of rows, decoded side by side."""
        device = self.loaded.device
        batch, hidden_RH = Batch.prefill(self.loaded, [row.prompt_ids for row in rows], max_len=sampling.max_len)
        while True:
            logits_RV = project(hidden_RH, self.loaded.head_VH)
            uniforms_R = torch.tensor([row.stream.random() for row in rows], dtype=torch.float64).to(device)
            tokens_R, logps_R, processed_logps_R = sample(logits_RV, uniforms_R, sampling)
            self._append(rows, tokens_R, logps_R, processed_logps_R, max_len=sampling.max_len)
            running = [place for place, row in enumerate(rows) if row.finish_reason is None]
            if not running:
                return
            if len(running) <= COMPACT_BELOW * len(rows):
                rows = [rows[place] for place in running]
                places_R = torch.tensor(running, device=device)
                tokens_R = tokens_R[places_R]
                batch.keep(places_R)
            hidden_RH = batch.advance(tokens_R)

    def _append(self, rows: list[Row], tokens_R: Tensor, logps_R: Tensor, processed_logps_R: Tensor, *, max_len: int) -> None:
        """Gives every running row its token; finished ones are in the batch only until it is next compacted."""
        drawn = zip(rows, tokens_R.tolist(), logps_R.tolist(), processed_logps_R.tolist(), strict=True)
        for row, token, logp, processed_logp in drawn:
            if not math.isfinite(logp):
                raise diverged(
                    f"the logits of weights version {self.weights_version} are not finite at response token {len(row.token_ids)}"
                )
            if row.finish_reason is None:
                row.token_ids.append(token)
                row.logps.append(logp)
                row.processed_logps.append(processed_logp)
                if token in self.loaded.stop_ids:
                    row.finish_reason = FinishReason.STOP
                elif len(row.token_ids) == max_len:
                    row.finish_reason = FinishReason.LENGTH

    def _response(self, row: Row) -> Response:
        assert row.finish_reason is not None
        return Response(
            token_ids=row.token_ids,
            logps=row.logps,
            processed_logps=row.processed_logps,
            finish_reason=row.finish_reason,
            weights_version=self.weights_version,
        )


@dataclass(kw_only=True, slots=True)
class Batch:
    """Rows being decoded: their past, which of its columns are real tokens, and where each row's next token stands."""

    body: Callable[..., Any]
    cache: DynamicCache
    mask_RL: Tensor | None  # int64, prompt and response; None where no prompt is padded
    positions_R: Tensor  # int64; of the next token, real tokens only
    num_seen: int  # columns that the cache holds

    @classmethod
    def prefill(cls, loaded: LoadedModel, prompts: list[list[int]], *, max_len: int) -> tuple[Batch, Tensor]:
        """Reads every distinct prompt once, left-padded. Gives the batch and the hidden states `[R, H]` of its next tokens."""
        place_of = {ids: place for place, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
        owners_R = torch.tensor([place_of[tuple(ids)] for ids in prompts], device=loaded.device)
        lengths = [len(ids) for ids in place_of]
        width = max(lengths)
        assert min(lengths) > 0, "an empty prompt has nothing to predict a first token from"
        ids_PL = torch.tensor([(0,) * (width - len(ids)) + ids for ids in place_of], device=loaded.device)
        lengths_P = torch.tensor(lengths, device=loaded.device)
        places_PL = torch.arange(width + max_len, device=loaded.device) - (width - lengths_P)[:, None]
        mask_PL = None if min(lengths) == width else (places_PL >= 0).long()
        cache = make_cache(loaded.model.config)
        hidden_PLH = loaded.body(
            input_ids=ids_PL,
            attention_mask=None if mask_PL is None else mask_PL[:, :width],
            position_ids=places_PL[:, :width].clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        batch = cls(body=loaded.body, cache=cache, mask_RL=mask_PL, positions_R=lengths_P, num_seen=width)
        if len(place_of) < len(prompts):
            batch.keep(owners_R)
        return batch, hidden_PLH[owners_R, -1]

    def keep(self, places_R: Tensor) -> None:
        """Makes the rows at `places_R` the batch; a place may be named more than once."""
        self.cache.batch_select_indices(places_R)
        self.positions_R = self.positions_R[places_R]
        if self.mask_RL is not None:
            self.mask_RL = self.mask_RL[places_R]

    def advance(self, tokens_R: Tensor) -> Tensor:
        """Appends one token to every row and gives the hidden states `[R, H]` that predict the next."""
        self.num_seen += 1
        hidden_R1H = self.body(
            input_ids=tokens_R[:, None],
            attention_mask=None if self.mask_RL is None else self.mask_RL[:, : self.num_seen],
            position_ids=self.positions_R[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.positions_R = self.positions_R + 1
        return hidden_R1H[:, 0]


class GrowingLayer(DynamicLayer):
    """Keys and values in buffers with room to spare: the past is copied once in SPARE_TOKENS tokens, not once a token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states)]
        seen = self.get_seq_length()
        total = seen + key_states.shape[2]
        for place, states in enumerate((key_states, value_states)):
            if total > self.buffers[place].shape[2]:
                wider = states.new_empty(*states.shape[:2], total + SPARE_TOKENS, states.shape[3])
                wider[:, :, :seen] = self.buffers[place][:, :, :seen]
                self.buffers[place] = wider
            self.buffers[place][:, :, seen:total] = states
        self.keys, self.values = (buffer[:, :, :total] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        seen = self.get_seq_length()
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, :seen] for buffer in self.buffers)


def make_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of that config.

    Raises:
        ValueError: the model keeps its past in something other than keys and values, which cannot be cut row by row.
    """
    cache = DynamicCache(config=config)
    foreign = {type(layer).__name__ for layer in cache.layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if foreign:
        raise ValueError(
            f"rollout.kind=transformers: {config.model_type} keeps its past in {', '.join(sorted(foreign))}, which this engine "
            "cannot cut row by row; set a model of plain or sliding-window attention, or another rollout."
        )
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = GrowingLayer()
    return cache


def uniform_stream(seed: int) -> np.random.Generator:
    """A row's own float64 uniforms in [0, 1), one a response token."""
    return np.random.Generator(np.random.Philox(seed))


def sample(logits_RV: Tensor, uniforms_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row, with its raw and its processed log-prob, `[R]` each.

    Args:
        logits_RV: float32 or wider.
        uniforms_R: float64 in [0, 1).
    """
    raw_logps_RV = logits_RV.log_softmax(-1)
    if sampling.temperature == 0:
        raw_logps_R, tokens_R = raw_logps_RV.max(-1)
        return tokens_R, raw_logps_R, torch.zeros_like(raw_logps_R)
    processed_logps_RV = process(logits_RV, sampling)
    tokens_R1 = invert(processed_logps_RV, uniforms_R)[:, None]
    return tokens_R1[:, 0], raw_logps_RV.gather(-1, tokens_R1)[:, 0], processed_logps_RV.gather(-1, tokens_R1)[:, 0]


def process(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs `[R, V]` of the distribution that is sampled: logits / temperature, then the top_k largest, then of those the
    smallest set of mass top_p (the largest entry always), renormalised. What is left out stands at -inf."""
    logps_RV = (logits_RV / sampling.temperature).log_softmax(-1)
    vocabulary = logps_RV.shape[-1]
    if sampling.top_k is not None and sampling.top_k < vocabulary:
        logps_RK, ids_RK = logps_RV.topk(sampling.top_k, dim=-1)
        logps_RK = logps_RK.log_softmax(-1)
    elif sampling.top_p < 1:
        logps_RK, ids_RK = logps_RV.topk(min(NUCLEUS, vocabulary), dim=-1)
        if (logps_RK.double().exp().sum(-1) < sampling.top_p).any():
            logps_RK, ids_RK = logps_RV.sort(dim=-1, descending=True)
    else:
        return logps_RV
    if sampling.top_p < 1:
        probs_RK = logps_RK.double().exp()
        mass_before_RK = probs_RK.cumsum(-1) - probs_RK
        logps_RK = logps_RK.masked_fill(mass_before_RK >= sampling.top_p, float("-inf")).log_softmax(-1)
    return torch.full_like(logps_RV, float("-inf")).scatter(-1, ids_RK, logps_RK)


def invert(logps_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """The first token of each row at which the cumulated probability exceeds the row's uniform, `[R]`.

    In float64, so that u < 1 implies u * total < total: the last token with mass is not overrun, and one without not drawn (but for
    a GPU's rounding: its parallel sums need not grow monotonically).
    """
    cumulated_RV = logps_RV.double().exp().cumsum(-1)
    targets_R1 = uniforms_R[:, None] * cumulated_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulated_RV, targets_R1, right=True)
    return tokens_R1[:, 0].clamp(max=logps_RV.shape[-1] - 1)  # binds for NaN alone, which the caller refuses
