"""`loss=sampled_token`: its expectation is the reverse KL's gradient, its gradient the closed form, whatever its caps do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from opsd.registry import lookup
from opsd.scoring import Objective

VOCABULARY = 7


def make_loss(*, adv_clip=None, ratio_clip=None):
    return lookup("loss", "sampled_token")(
        name="sampled_token", kind="sampled_token", temperature=None, adv_clip=adv_clip, ratio_clip=ratio_clip
    )


def score(student_TV, teacher_TV, ids_T, sampler_T, *, temperature=1.0, **caps):
    """Gradients at the student's logits and diagnostics by name, through the project's one scoring path."""
    clipping = lookup("clipping", "none")(name="none", kind="none", clip=None)
    objective = Objective(
        SimpleNamespace(model=torch.nn.Identity()),
        loss=make_loss(**caps),
        clipping=clipping,
        temperature=temperature,
        chunk_tokens=64,
    )
    objective.want_cosine = True
    teacher_logps_TV = (teacher_TV / temperature).log_softmax(-1)
    gradient_TV, diagnostics_TD = objective.score_chunk(student_TV.clone(), teacher_logps_TV, ids_T, sampler_T)
    return gradient_TV, dict(zip(objective.columns, diagnostics_TD.unbind(-1), strict=True))


def logits(seed, count=1):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, VOCABULARY, dtype=torch.float64, generator=generator) for _ in range(3))


def reverse_kl(z_V, teacher_V, temperature):
    """From the definition on probabilities, and its gradient."""
    z_V = z_V.clone().requires_grad_()
    p_s, p_t = torch.softmax(z_V / temperature, -1), torch.softmax(teacher_V / temperature, -1)
    value = (p_s * torch.log(p_s / p_t)).sum()
    return value.detach(), torch.autograd.grad(value, z_V)[0]


@pytest.mark.parametrize("temperature", [1.0, 1.1])
@pytest.mark.parametrize("seed", range(3))
def test_its_expectation_is_the_gradient_of_the_reverse_kl(seed, temperature):
    """Every token of the vocabulary in turn, weighed with the probability of a sampler that is not the student."""
    student, teacher, other = logits(seed)
    q = other.softmax(-1)[0]
    every_T = torch.arange(VOCABULARY)
    gradient_TV, columns = score(
        student.expand(VOCABULARY, -1), teacher.expand(VOCABULARY, -1), every_T, q.log(), temperature=temperature
    )
    value, wanted_V = reverse_kl(student[0], teacher[0], temperature)
    torch.testing.assert_close(q @ gradient_TV, wanted_V, rtol=0, atol=1e-13)
    torch.testing.assert_close(columns["divergence"], value.expand(VOCABULARY), rtol=0, atol=1e-13)
    p_s = (student[0] / temperature).softmax(-1)
    assert (p_s @ columns["advantage"]).item() == pytest.approx(-value.item(), abs=1e-13)
    assert (q @ columns["ratio"]).item() == pytest.approx(1, abs=1e-13)


def test_tokens_that_the_sampler_leaves_out_pull_on_nothing():
    """top_k=3 in the sampler: the expectation is the same sum over its three tokens alone, and no longer the whole gradient."""
    student, teacher, _ = logits(4)
    kept = student[0].topk(3).indices
    q = student[0, kept].softmax(-1)
    gradient_TV, _ = score(student.expand(3, -1), teacher.expand(3, -1), kept, q.log())
    p_s, p_t = student[0].softmax(-1), teacher[0].softmax(-1)
    pull = torch.eye(VOCABULARY, dtype=torch.float64)[kept] - p_s
    wanted = ((p_s * torch.log(p_s / p_t))[kept, None] * pull).sum(0)
    torch.testing.assert_close(q @ gradient_TV, wanted, rtol=0, atol=1e-13)
    assert (wanted - reverse_kl(student[0], teacher[0], 1.0)[1]).abs().max() > 0.01


@pytest.mark.parametrize("temperature", [1.0, 1.1])
def test_the_closed_form_under_both_caps(temperature):
    count, adv_clip, ratio_clip = 40, 1.5, 2.0
    student_TV, teacher_TV, other_TV = logits(5, count)
    ids_T = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(6))
    rows_T = torch.arange(count)
    sampler_T = other_TV.log_softmax(-1)[rows_T, ids_T]
    gradient_TV, columns = score(
        student_TV, teacher_TV, ids_T, sampler_T, temperature=temperature, adv_clip=adv_clip, ratio_clip=ratio_clip
    )
    p_s, p_t = (torch.softmax(z_TV / temperature, -1) for z_TV in (student_TV, teacher_TV))
    at_s, at_t = p_s[rows_T, ids_T], p_t[rows_T, ids_T]
    advantage_T, ratio_T = torch.log(at_t / at_s), at_s / torch.exp(sampler_T)
    capped_T, weighed_T = advantage_T.clamp(-adv_clip, adv_clip), ratio_T.clamp(max=ratio_clip)
    pull_TV = torch.nn.functional.one_hot(ids_T, VOCABULARY) - p_s
    torch.testing.assert_close(gradient_TV, -(weighed_T * capped_T)[:, None] * pull_TV / temperature, rtol=0, atol=1e-12)
    torch.testing.assert_close(columns["value"], -weighed_T * capped_T * at_s.log(), rtol=0, atol=1e-12)
    torch.testing.assert_close(columns["advantage"], advantage_T, rtol=0, atol=1e-12)
    torch.testing.assert_close(columns["ratio"], ratio_T, rtol=1e-12, atol=0)
    for name, touched_T in (("advantage_clipped", advantage_T.abs() > adv_clip), ("ratio_clipped", ratio_T > ratio_clip)):
        assert torch.equal(columns[name], touched_T.double())
        assert 0 < touched_T.double().mean() < 1
    assert columns["value"].min() < 0 < columns["value"].max(), "no divergence: either sign"
    torch.testing.assert_close(columns["cosine"], torch.ones(count, dtype=torch.float64), rtol=0, atol=1e-12)
    assert columns["clipped_tokens"].max() == columns["clipped_mass"].max() == 0


@pytest.mark.parametrize("key", ["adv_clip", "ratio_clip"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_caps_that_are_none_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"^loss\.{key}={value}: must be above 0, or null for no cap\.$"):
        make_loss(**{key: value})
