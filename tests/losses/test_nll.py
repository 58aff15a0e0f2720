"""`loss=nll`: the cross-entropy of the response and nothing of a teacher."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from opsd.metrics import token_metrics
from opsd.registry import lookup
from opsd.scoring import Objective, _ChunkedLoss
from opsd.types import MicroBatch


@pytest.mark.parametrize("temperature", [1.0, 1.3])
@pytest.mark.parametrize("chunk_tokens", [2, 64])
def test_is_the_cross_entropy(temperature, chunk_tokens):
    """Value and gradients of body and head against torch's own, without a teacher and without a sampler's log-probs."""
    count, width, vocabulary = 9, 5, 13
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(count, width, dtype=torch.float64, generator=generator).requires_grad_()
    head_VH = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator).requires_grad_()
    ids_T = torch.randint(vocabulary, (count,), generator=generator)
    objective = Objective(
        SimpleNamespace(model=torch.nn.Identity()),
        loss=lookup("loss", "nll")(name="nll", kind="nll", temperature=temperature),
        clipping=lookup("clipping", "none")(name="none", kind="none", clip=None),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    objective.want_cosine = True
    batch = MicroBatch(
        student=None,
        teacher=None,
        response_ids_T=ids_T,
        sampler_logps_T=torch.full((count,), math.nan),
        sampler_raw_logps_T=torch.full((count,), math.nan),
        weights_T=torch.full((count,), 1 / count, dtype=torch.float64),
        index_T=torch.arange(count),
        length_T=torch.full((count,), count),
    )
    value, diagnostics_TD = _ChunkedLoss.apply(hidden_TH, head_VH, None, None, batch, objective)
    logits_TV = hidden_TH @ head_VH.T / temperature
    wanted = F.cross_entropy(logits_TV, ids_T)
    assert value.item() == pytest.approx(wanted.item(), abs=1e-12)
    for got, right in zip(
        torch.autograd.grad(value, (hidden_TH, head_VH)), torch.autograd.grad(wanted, (hidden_TH, head_VH)), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)
    metrics = token_metrics([batch], [diagnostics_TD], columns=objective.columns, teacher=False)
    assert metrics["train/objective"] == pytest.approx(metrics["train/divergence"], abs=1e-12) == pytest.approx(wanted.item())
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/cosine_median"] == pytest.approx(1)
    assert not [name for name in metrics if "teacher" in name or "agreement" in name or "sampler" in name or "mass" in name]
