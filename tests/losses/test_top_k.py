"""`loss.top_k`: k entries and a tail are a coarser view of the same two distributions, at the edges too."""

from __future__ import annotations

import math

import pytest
import torch

from opsd.losses.base import with_tail
from opsd.registry import lookup

LOSSES = {"forward_kl": {}, "reverse_kl": {}, "jsd": {"beta": 0.3}}
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def make_loss(kind, top_k):
    return lookup("loss", kind)(name=kind, kind=kind, temperature=None, top_k=top_k, **LOSSES[kind])


def contributions(kind, top_k, student_TV, teacher_TV):
    """`[T, K]`, and the gradient of their sum at the student's logits."""
    student_TV = student_TV.clone().requires_grad_()
    out_TK = make_loss(kind, top_k)(
        student_TV.log_softmax(-1), teacher_TV.log_softmax(-1), response_ids_T=None, sampler_logps_T=None
    )
    (gradient_TV,) = torch.autograd.grad(out_TK.sum(), student_TV)
    return out_TK.detach(), gradient_TV


def logits(seed, count=60, width=12):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, width, dtype=torch.float64, generator=generator) for _ in range(2))


@pytest.mark.parametrize("kind", LOSSES)
def test_coarser_is_never_more_and_never_below_zero(kind):
    """The data processing inequality: 0 <= D with k <= D with k + 1 where the kept sets are nested <= D over the vocabulary."""
    student_TV, teacher_TV = logits(1)
    before_T = torch.zeros(len(student_TV), dtype=torch.float64)
    for top_k in range(1, 12):
        out_TK, _ = contributions(kind, top_k, student_TV, teacher_TV)
        assert out_TK.shape[1] == top_k + 1
        values_T = out_TK.sum(-1)
        assert (values_T >= before_T - 1e-12).all()
        before_T = values_T
    whole_TV, _ = contributions(kind, None, student_TV, teacher_TV)
    torch.testing.assert_close(values_T, whole_TV.sum(-1), rtol=0, atol=1e-12)  # a tail of one entry tells it apart


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("top_k", [12, 13, 1000])
def test_no_fewer_than_the_vocabulary_is_the_vocabulary(kind, top_k):
    student_TV, teacher_TV = logits(2)
    for got, wanted in zip(
        contributions(kind, top_k, student_TV, teacher_TV), contributions(kind, None, student_TV, teacher_TV), strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", LOSSES)
def test_ties_keep_k_entries(kind):
    """A teacher that tells nothing apart: some k entries, the tail the rest, and the value that of one such choice."""
    student_TV, _ = logits(3, count=4, width=5)
    out_TK, gradient_TV = contributions(kind, 2, student_TV, torch.zeros_like(student_TV))
    assert out_TK.shape == (4, 3)
    assert (out_TK.sum(-1) > 0).all() and gradient_TV.isfinite().all()
    chosen = torch.zeros_like(student_TV).topk(2).indices
    for logps_TV in (student_TV.log_softmax(-1), torch.zeros_like(student_TV).log_softmax(-1)):
        torch.testing.assert_close(
            with_tail(logps_TV, chosen).exp().sum(-1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12
        )


@BOTH
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("far", [40.0, 300.0, 1e4, math.inf])
def test_all_of_the_teachers_mass_among_the_kept(kind, far, dtype):
    """The teacher's tail falls to nothing, at the end exactly: neither value nor gradient may turn into NaN.

    Forward KL and JSD tend to a limit; the reverse KL grows with the distance, as it must.
    """
    student_TV = torch.tensor([[0.3, -0.2, 0.1, 0.5, -0.4]], dtype=dtype)
    teacher_TV = torch.tensor([[1.0, 0.5, -far, -far, -far]], dtype=dtype)
    out_TK, gradient_TV = contributions(kind, 2, student_TV, teacher_TV)
    assert not out_TK.isnan().any() and gradient_TV.isfinite().all()
    p_s, p_t = student_TV.double().softmax(-1)[0], teacher_TV.double().softmax(-1)[0]
    kept, tail = p_s[:2], p_s[2:].sum()
    if kind == "forward_kl":
        wanted = (p_t[:2] * (p_t[:2] / kept).log()).sum()
    elif kind == "jsd":
        m = 0.3 * p_t[:2] + 0.7 * kept
        wanted = (0.3 * p_t[:2] * (p_t[:2] / m).log() + 0.7 * kept * (kept / m).log()).sum() - 0.7 * tail * math.log(0.7)
    else:
        assert out_TK.sum() > 0.9 * tail * min(far, 1e3)
        return
    assert out_TK.sum().item() == pytest.approx(wanted.item(), rel=1e-5 if dtype is torch.float32 else 1e-12)


@BOTH
@pytest.mark.parametrize("kind", LOSSES)
def test_entries_that_neither_side_can_say(kind, dtype):
    """Logits of minus infinity on both sides, as of padded rows of a vocabulary: as if those entries were not there."""
    student_TV, teacher_TV = (z_TV.to(dtype) for z_TV in logits(4, count=3, width=4))
    gone = torch.full((3, 2), -math.inf, dtype=dtype)
    wide = contributions(kind, 4, torch.cat([student_TV, gone], -1), torch.cat([teacher_TV, gone], -1))
    narrow = contributions(kind, None, student_TV, teacher_TV)
    torch.testing.assert_close(wide[0].sum(-1), narrow[0].sum(-1))
    torch.testing.assert_close(wide[1][:, :4], narrow[1])
    assert wide[1][:, 4:].abs().max() == 0


def test_a_small_tail_keeps_its_digits():
    """In float32 1 - (kept mass) is zero here; the logsumexp of the complement is right to seven digits."""
    logits_TV = torch.tensor([[30.0, 29.0, 5.0, 4.0, 4.5]])
    tail = with_tail(logits_TV.log_softmax(-1), torch.tensor([[0, 1]]))[0, -1]
    wanted = with_tail(logits_TV.double().log_softmax(-1), torch.tensor([[0, 1]]))[0, -1]
    assert 1 - logits_TV.softmax(-1)[0, :2].sum() < 1e-7
    assert tail.item() == pytest.approx(wanted.item(), rel=1e-6)
