"""What a step's tokens and rollouts say about the run, as flat numbers (docs/method.md lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opsd.scoring import DIAGNOSTICS
from opsd.token_kinds import KINDS, TokenKinds
from opsd.types import FinishReason, MicroBatch, Rollout

if TYPE_CHECKING:
    from torch import Tensor

MEANS = ("divergence", "student_entropy", "clipped_entries", "clipped_tokens")
TEACHER_MEANS = ("clipped_mass", "teacher_entropy", "agreement")
NGRAM = 8  # tokens of a repeated piece of text
ROUNDING = 1e-6  # a sum of float32 terms that is zero in truth may be this far below it
FIRST_TOKENS = 4  # where a response boundary that the two sides see differently shows


def token_metrics(
    batches: Sequence[MicroBatch], diagnostics: Sequence[Tensor], *, columns: Sequence[str], teacher: bool
) -> dict[str, float]:
    """Metrics of the optimizer step's response tokens. Means are over tokens, the objective is the loss itself.

    A step without a single response token has its objective, 0, and no means.

    Args:
        columns: what the diagnostics hold (`Objective.columns`).
        teacher: whether there is one; what speaks of it is left out otherwise.
    """
    import torch

    if not any(len(batch.response_ids_T) for batch in batches):
        return {"train/objective": 0.0, "train/response_tokens": 0.0}
    values_ND = torch.cat(list(diagnostics)).double()
    columns_N = dict(zip(columns, values_ND.unbind(-1), strict=True))
    weights_N = torch.cat([batch.weights_T for batch in batches]).double()
    index_N = torch.cat([batch.index_T for batch in batches])
    place_N = index_N / torch.cat([batch.length_T for batch in batches])
    raw_N = torch.cat([batch.sampler_raw_logps_T for batch in batches]).double()
    metrics = {"train/objective": float((columns_N["value"] * weights_N).sum())}
    own = [name for name in columns if name not in DIAGNOSTICS]
    for name in (*MEANS, *(TEACHER_MEANS if teacher else ()), *own):
        metrics[f"train/{name}"] = float(columns_N[name].mean())
    metrics["train/negative_tokens"] = float((columns_N["value"] < -ROUNDING).double().mean())
    for name, low, high in (("first", 0.0, 1 / 3), ("middle", 1 / 3, 2 / 3), ("last", 2 / 3, 1.0)):
        third_N = (place_N >= low) & (place_N < high)
        if third_N.any():
            metrics[f"train/divergence_{name}"] = float(columns_N["divergence"][third_N].mean())
    if teacher:
        gap_N = (columns_N["teacher_logp"] - columns_N["student_logp"]).abs()
        metrics["train/teacher_gap"] = float(gap_N.mean())
        metrics["train/teacher_gap_first"] = float(gap_N[index_N < FIRST_TOKENS].mean())
    defined_N = ~columns_N["cosine"].isnan()
    # an uncapped token has cosine 1, so that the many on which both sides agree hide the few that clipping is about
    for name, of_N in (("cosine", defined_N), ("cosine_clipped", defined_N & (columns_N["clipped_tokens"] > 0))):
        cosine_N = columns_N["cosine"][of_N]
        if len(cosine_N):
            metrics[f"train/{name}_median"] = float(cosine_N.median())
            metrics[f"train/{name}_negative"] = float((cosine_N < 0).double().mean())
    if not raw_N.isnan().any():  # responses that were sampled
        sampler_gap_N = (columns_N["raw_logp"] - raw_N).abs()
        metrics["rollout/sampler_gap"] = float(sampler_gap_N.mean())
        metrics["rollout/sampler_gap_max"] = float(sampler_gap_N.max())
    metrics["train/response_tokens"] = float(len(weights_N))
    return metrics


def kind_metrics(
    batches: Sequence[MicroBatch], diagnostics: Sequence[Tensor], *, columns: Sequence[str], kinds: TokenKinds
) -> dict[str, float]:
    """The share of each kind of token (`opsd.token_kinds`) in the optimizer step, and its mean divergence before clipping."""
    import torch

    kinds_N = kinds.of(torch.cat([batch.response_ids_T for batch in batches]))
    divergence_N = torch.cat(list(diagnostics))[:, list(columns).index("divergence")].double().cpu()
    metrics = {}
    for kind, name in enumerate(KINDS):
        of_kind_N = kinds_N == kind
        if len(kinds_N):
            metrics[f"train/tokens_{name}"] = float(of_kind_N.double().mean())
        if of_kind_N.any():
            metrics[f"train/divergence_{name}"] = float(divergence_N[of_kind_N].mean())
    return metrics


def rollout_metrics(rollouts: Sequence[Rollout], *, boxed: Sequence[bool], correct: Sequence[bool | None]) -> dict[str, float]:
    """Metrics of the sampled texts; rates are shares from 0 to 1. `correct` is None where no answer is known."""
    responses = [rollout.response for rollout in rollouts]
    lengths = [len(response.token_ids) for response in responses]
    known = [verdict for verdict in correct if verdict is not None]
    metrics = {
        "rollout/mean_len": sum(lengths) / len(lengths),
        "rollout/max_len": float(max(lengths)),
        "rollout/empty": float(sum(length == 0 for length in lengths)),
        "rollout/truncated": sum(r.finish_reason is FinishReason.LENGTH for r in responses) / len(responses),
        "rollout/boxed": sum(boxed) / len(boxed),
        "rollout/repeated": sum(repeated(response.token_ids) for response in responses) / len(responses),
    }
    versions = [response.weights_version for response in responses if response.weights_version is not None]
    if versions:
        metrics["rollout/weights_version"] = float(min(versions))
    if known:
        metrics["rollout/correct"] = sum(known) / len(known)
    return metrics


def pool_metrics(pools: Sequence[str], correct: Sequence[bool | None], *, names: Sequence[str]) -> dict[str, float]:
    """Each pool's share of the step's rollouts, and how many of them are right where that is known.

    Args:
        pools: the pool of each rollout's problem.
        correct: None where no answer is known.
        names: every pool, also one that has none of these rollouts.
    """
    metrics = {}
    for name in names:
        metrics[f"rollout/share_{name}"] = sum(pool == name for pool in pools) / len(pools)
        known = [verdict for pool, verdict in zip(pools, correct, strict=True) if pool == name and verdict is not None]
        if known:
            metrics[f"rollout/correct_{name}"] = sum(known) / len(known)
    return metrics


def repeated(token_ids: Sequence[int]) -> float:
    """Share of a text's token n-grams that stood in it before: near 0 for prose, near 1 for a loop."""
    grams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
