"""Losses x clippings: against 50-digit vectors, a dense reference, gradcheck, closed forms and the released formula."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml

from opsd.losses.base import Divergence
from opsd.registry import kinds, lookup
from opsd.scoring import Objective, _ChunkedLoss
from opsd.types import MicroBatch

CONF = Path(__file__).parents[2] / "conf" / "loss"
LOSSES = {"forward_kl": {}, "reverse_kl": {}, "jsd": {"beta": 0.3}}
CLIPS = {"none": None, "entry": 0.05, "token": 0.2, "rescale": 0.2}


def make_loss(kind: str, **values):
    """A loss with the values of its config file, some changed."""
    file = yaml.safe_load((CONF / f"{kind}.yaml").read_text()) | values
    file.pop("defaults", None)  # the options of other groups that it brings along
    return lookup("loss", kind)(**file)


def make_clipping(kind: str, clip: float | None):
    return lookup("clipping", kind)(name=kind, kind=kind, clip=clip)


def fused(
    student_TH,
    head_VH,
    teacher_TH,
    *,
    loss,
    clipping,
    temperature=1.0,
    chunk_tokens=64,
    weights_T=None,
    ids_T=None,
    sampler_T=None,
    teacher_head_VH=None,
    want_cosine=False,
):
    """The project's one autograd function on given hidden states: (weighted sum, diagnostics by name)."""
    count = student_TH.shape[0]
    objective = Objective(
        SimpleNamespace(model=torch.nn.Identity()), loss=loss, clipping=clipping, temperature=temperature, chunk_tokens=chunk_tokens
    )
    objective.want_cosine = want_cosine
    batch = MicroBatch(
        student=None,
        teacher=None,
        response_ids_T=torch.zeros(count, dtype=torch.int64) if ids_T is None else ids_T,
        sampler_logps_T=torch.zeros(count) if sampler_T is None else sampler_T,
        sampler_raw_logps_T=torch.zeros(count),
        weights_T=torch.ones(count, dtype=torch.float64) if weights_T is None else weights_T,
        index_T=torch.zeros(count, dtype=torch.int64),
        length_T=torch.ones(count, dtype=torch.int64),
    )
    teacher_head_VH = head_VH.detach() if teacher_head_VH is None else teacher_head_VH
    value, diagnostics_TD = _ChunkedLoss.apply(student_TH, head_VH, teacher_TH, teacher_head_VH, batch, objective)
    return value, dict(zip(objective.columns, diagnostics_TD.unbind(-1), strict=True))


def on_logits(student_TV, teacher_TV, **settings):
    """As `fused`, with an identity for a head: values and gradients at the logits themselves."""
    student_TV = student_TV.clone().requires_grad_()
    value, columns = fused(student_TV, torch.eye(student_TV.shape[1], dtype=student_TV.dtype), teacher_TV, **settings)
    (gradient_TV,) = torch.autograd.grad(value, student_TV)
    return columns, gradient_TV


def reference(student_V, teacher_V, *, loss, beta, temperature, clipping, clip):
    """One token, from the definitions, on probabilities: its value; nothing of the project is used."""
    p_s, p_t = torch.softmax(student_V / temperature, -1), torch.softmax(teacher_V / temperature, -1)
    if loss == "forward_kl":
        entries = p_t * torch.log(p_t / p_s)
    elif loss == "reverse_kl":
        entries = p_s * torch.log(p_s / p_t)
    else:
        m = beta * p_t + (1 - beta) * p_s
        entries = beta * p_t * torch.log(p_t / m) + (1 - beta) * p_s * torch.log(p_s / m)
    if clipping == "entry":
        entries = torch.minimum(entries, torch.tensor(clip, dtype=entries.dtype))
    total = entries.sum()
    if clipping == "token":
        return torch.minimum(total, torch.tensor(clip, dtype=total.dtype))
    if clipping == "rescale":
        return total * (clip / max(total.item(), clip))
    return total


def cases():
    return [(loss, clipping, t) for loss in LOSSES for clipping in CLIPS for t in (1.0, 1.1)]


def logits(count=6, width=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: 2 * torch.randn(count, width, dtype=torch.float64, generator=generator)  # noqa: E731
    return draw(), draw()


def test_worked_tokens(shared):
    rows = [json.loads(line) for line in (shared / "cases" / "divergence_vectors.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    for row in rows:
        student, teacher = (torch.tensor([row[side]], dtype=torch.float64) for side in ("student_logits", "teacher_logits"))
        extra = {"beta": row["beta"]} if row["loss"] == "jsd" else {}
        loss = make_loss(row["loss"], top_k=row["top_k"], **extra)
        clipping = make_clipping(row["clipping"], row["clip"])
        columns, gradient = on_logits(student, teacher, loss=loss, clipping=clipping, temperature=row["temperature"])
        assert columns["value"].item() == pytest.approx(row["value"], abs=1e-10), row["id"]
        assert columns["divergence"].item() == pytest.approx(row["unclipped"], abs=1e-10), row["id"]
        torch.testing.assert_close(gradient[0], torch.tensor(row["grad_student_logits"], dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("loss", "clipping", "temperature"), cases())
def test_equals_the_dense_reference(loss, clipping, temperature):
    student_TV, teacher_TV = logits()
    columns, gradient_TV = on_logits(
        student_TV,
        teacher_TV,
        loss=make_loss(loss, **LOSSES[loss]),
        clipping=make_clipping(clipping, CLIPS[clipping]),
        temperature=temperature,
        chunk_tokens=4,
    )
    for token in range(len(student_TV)):
        z = student_TV[token].clone().requires_grad_()
        settings = dict(loss=loss, beta=LOSSES[loss].get("beta"), temperature=temperature, clipping=clipping, clip=CLIPS[clipping])
        value = reference(z, teacher_TV[token], **settings)
        (wanted,) = torch.autograd.grad(value, z)
        assert columns["value"][token].item() == pytest.approx(value.item(), abs=1e-10)
        torch.testing.assert_close(gradient_TV[token], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("clipping", ["none", "entry", "token"])
@pytest.mark.parametrize("top_k", [None, 3])
def test_gradcheck(loss, clipping, top_k):
    student_TV, teacher_TV = logits(count=3, width=6)
    chosen, capped = make_loss(loss, top_k=top_k, **LOSSES[loss]), make_clipping(clipping, CLIPS[clipping])
    head = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    fixed = torch.eye(6, dtype=torch.float64)

    def run(z, w):
        return fused(z, w, teacher_TV, loss=chosen, clipping=capped, temperature=1.1, chunk_tokens=2, teacher_head_VH=fixed)[0]

    assert torch.autograd.gradcheck(run, (student_TV.requires_grad_(), head), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_rescale_is_the_unclipped_gradient_scaled(loss):
    """Closed form: (clip / max(d, clip)) grad d, the factor held fixed."""
    student_TV, teacher_TV = logits()
    chosen = make_loss(loss, **LOSSES[loss])
    plain, unclipped_TV = on_logits(student_TV, teacher_TV, loss=chosen, clipping=make_clipping("none", None))
    columns, gradient_TV = on_logits(student_TV, teacher_TV, loss=chosen, clipping=make_clipping("rescale", 0.2), want_cosine=True)
    factor_T = 0.2 / plain["divergence"].clamp(min=0.2)
    assert (factor_T < 1).any(), "no token was capped"
    torch.testing.assert_close(gradient_TV, factor_T[:, None] * unclipped_TV, rtol=0, atol=1e-12)
    torch.testing.assert_close(columns["cosine"], torch.ones_like(factor_T), rtol=0, atol=1e-12)


def test_the_clipping_example():
    """p_T = .90/.06/.02/.01/.01, p_S = .10/.80/.05/.03/.02: capping the entry turns its pull around and makes the loss negative."""
    teacher = torch.tensor([[0.90, 0.06, 0.02, 0.01, 0.01]], dtype=torch.float64).log()
    student = torch.tensor([[0.10, 0.80, 0.05, 0.03, 0.02]], dtype=torch.float64).log()
    loss = make_loss("forward_kl")
    _, unclipped = on_logits(student, teacher, loss=loss, clipping=make_clipping("none", None))
    columns, clipped = on_logits(student, teacher, loss=loss, clipping=make_clipping("entry", 0.05), want_cosine=True)
    assert -unclipped[0, 0].item() == pytest.approx(0.80, abs=1e-12)
    assert -clipped[0, 0].item() == pytest.approx(-0.01, abs=1e-12)
    assert columns["value"].item() == pytest.approx(-0.142, abs=5e-4)
    assert columns["clipped_mass"].item() == pytest.approx(0.90, abs=1e-12)
    assert columns["clipped_entries"].item() == pytest.approx(0.2)
    wanted = F.cosine_similarity(clipped, unclipped).item()
    assert columns["cosine"].item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_equals_the_released_formula(beta, clip):
    """The released trainer: F.kl_div on log-probs of logits / T, beta 0 and 1 being the two KLs, entries clamped before the sum."""
    student_TV, teacher_TV = logits(count=9, width=31, seed=3)
    z = student_TV.float().requires_grad_()
    s, t = (F.log_softmax(x / 1.1, dim=-1) for x in (z, teacher_TV.float()))
    if beta == 0:
        entries = F.kl_div(s, t, reduction="none", log_target=True)
        loss = make_loss("forward_kl")
    elif beta == 1:
        entries = F.kl_div(t, s, reduction="none", log_target=True)
        loss = make_loss("reverse_kl")
    else:
        mixture = torch.logsumexp(torch.stack([s + math.log(1 - beta), t + math.log(beta)]), dim=0)
        parts = (F.kl_div(mixture, side, reduction="none", log_target=True) for side in (t, s))
        teacher_part, student_part = parts
        entries = beta * teacher_part + (1 - beta) * student_part
        loss = make_loss("jsd", beta=beta)
    released = (entries if clip is None else entries.clamp(max=clip)).sum() / len(student_TV)
    (wanted_TV,) = torch.autograd.grad(released, z)
    clipping = make_clipping("none" if clip is None else "entry", clip)
    weights_T = torch.full((len(student_TV),), 1 / len(student_TV))
    columns, gradient_TV = on_logits(
        student_TV.float(), teacher_TV.float(), loss=loss, clipping=clipping, temperature=1.1, weights_T=weights_T
    )
    assert float(columns["value"].mean()) == pytest.approx(released.item(), abs=1e-6)
    torch.testing.assert_close(gradient_TV, wanted_TV, rtol=0, atol=1e-6)


# Every registered loss, plug-ins included, must hold what follows.


def every_loss():
    whole = [make_loss(kind, **LOSSES.get(kind, {})) for kind in kinds("loss")]
    return [*whole, *(replace(loss, top_k=4) for loss in whole if isinstance(loss, Divergence))]


def sampled(count, width=11, seed=8):
    """Response tokens and their log-probs under a sampler, as some losses read them."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(width, (count,), generator=generator)
    return ids_T, -3 * torch.rand(count, dtype=torch.float64, generator=generator)


def label(loss) -> str:
    return f"{loss.kind}-{getattr(loss, 'top_k', None)}"


@pytest.mark.parametrize("loss", [loss for loss in every_loss() if loss.has_teacher], ids=label)
def test_nothing_to_learn_where_both_agree(loss):
    student_TV, _ = logits()
    ids_T, sampler_T = sampled(len(student_TV))
    columns, gradient_TV = on_logits(
        student_TV, student_TV, loss=loss, clipping=make_clipping("none", None), ids_T=ids_T, sampler_T=sampler_T
    )
    assert columns["value"].abs().max() < 1e-12
    assert gradient_TV.abs().max() < 1e-12
    assert columns["agreement"].min() == 1


@pytest.mark.parametrize("loss", every_loss(), ids=label)
def test_divergences_are_positive_and_bounded(loss):
    for seed in range(5):
        student_TV, teacher_TV = logits(count=50, seed=seed)
        ids_T, sampler_T = sampled(50, seed=seed)
        columns, _ = on_logits(
            3 * student_TV, 3 * teacher_TV, loss=loss, clipping=make_clipping("none", None), ids_T=ids_T, sampler_T=sampler_T
        )
        assert columns["divergence"].min() > 0
        entry, token = loss.largest()
        assert columns["divergence"].max() <= token
        contributions = loss(
            (3 * student_TV).log_softmax(-1), (3 * teacher_TV).log_softmax(-1), response_ids_T=ids_T, sampler_logps_T=sampler_T
        )
        assert contributions.max() <= entry


def with_clippings():
    every = [(loss, clipping) for clipping in CLIPS for loss in every_loss() if loss.clippable or clipping == "none"]
    return [pytest.param(loss, clipping, id=f"{clipping}-{label(loss)}") for loss, clipping in every]


@pytest.mark.parametrize(("loss", "clipping"), with_clippings())
def test_chunks_weights_and_subsets(loss, clipping):
    """chunked == whole, a token of weight zero == a token left out, a trained head == a dense one."""
    capped = make_clipping(clipping, CLIPS[clipping])
    generator = torch.Generator().manual_seed(5)
    student_TH, teacher_TH = (torch.randn(7, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    head_VH = torch.randn(11, 5, dtype=torch.float64, generator=generator)
    weights_T = torch.rand(7, dtype=torch.float64, generator=generator)
    weights_T[2] = 0
    ids_T, sampler_T = sampled(7)

    def gradients(chunk_tokens, rows=slice(None)):
        hidden, head = student_TH[rows].clone().requires_grad_(), head_VH.clone().requires_grad_()
        value, _ = fused(
            hidden,
            head,
            teacher_TH[rows],
            loss=loss,
            clipping=capped,
            chunk_tokens=chunk_tokens,
            weights_T=weights_T[rows],
            ids_T=ids_T[rows],
            sampler_T=sampler_T[rows],
        )
        return value.detach(), *torch.autograd.grad(3 * value, (hidden, head))

    hidden, head = student_TH.clone().requires_grad_(), head_VH.clone().requires_grad_()
    s, t = (hidden @ head.T).log_softmax(-1), (teacher_TH @ head_VH.T).log_softmax(-1)
    dense = (capped(loss(s, t, response_ids_T=ids_T, sampler_logps_T=sampler_T))[0] * weights_T).sum()
    wanted = (dense.detach(), *torch.autograd.grad(3 * dense, (hidden, head)))
    for chunk_tokens in (1, 3, 7, 100):
        for got, right in zip(gradients(chunk_tokens), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-13)
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    value, at_hidden, at_head = gradients(3, kept)
    torch.testing.assert_close(value, wanted[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(at_hidden, wanted[1][kept], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(at_head, wanted[2], rtol=1e-12, atol=1e-13)
    assert wanted[1][2].abs().max() == 0


def test_a_teacher_of_another_width():
    generator = torch.Generator().manual_seed(6)
    student_TH, teacher_TH = torch.randn(4, 5, generator=generator), torch.randn(4, 9, generator=generator)
    head_VH, teacher_head_VH = torch.randn(11, 5, generator=generator), torch.randn(11, 9, generator=generator)
    _, columns = fused(
        student_TH,
        head_VH,
        teacher_TH,
        loss=make_loss("jsd", beta=0.5),
        clipping=make_clipping("none", None),
        teacher_head_VH=teacher_head_VH,
    )
    _, plain = fused(
        student_TH @ head_VH.T,
        torch.eye(11),
        teacher_TH @ teacher_head_VH.T,
        loss=make_loss("jsd", beta=0.5),
        clipping=make_clipping("none", None),
    )
    torch.testing.assert_close(columns["value"], plain["value"])


def test_low_precision_inputs_keep_the_gradient():
    """bf16 states and head, a near teacher: within 0.5% of float64, where bf16 logits would be off by a seventh."""
    generator = torch.Generator().manual_seed(7)
    student_TH = torch.randn(64, 128, generator=generator).bfloat16()
    teacher_TH = (student_TH.float() + 0.05 * torch.randn(64, 128, generator=generator)).bfloat16()
    head_VH = (0.3 * torch.randn(20_000, 128, generator=generator)).bfloat16()
    settings = dict(loss=make_loss("jsd", beta=0.5), clipping=make_clipping("none", None))

    def gradient(dtype):
        hidden = student_TH.to(dtype).requires_grad_()
        value, _ = fused(hidden, head_VH.to(dtype), teacher_TH.to(dtype), **settings)
        return torch.autograd.grad(value, hidden)[0].double()

    exact = gradient(torch.float64)
    assert ((gradient(torch.bfloat16) - exact).norm() / exact.norm()).item() < 0.005


def test_entries_of_a_large_vocabulary_are_diagnosed():
    """Entropy, agreement and log-probs of the response token against plain softmax."""
    student_TV, teacher_TV = logits(count=8, width=40, seed=9)
    ids_T = torch.arange(8)
    columns, _ = on_logits(
        student_TV, teacher_TV, loss=make_loss("forward_kl"), clipping=make_clipping("none", None), temperature=1.3, ids_T=ids_T
    )
    p_s, p_t = (torch.softmax(z / 1.3, -1) for z in (student_TV, teacher_TV))
    torch.testing.assert_close(columns["student_entropy"], torch.distributions.Categorical(probs=p_s).entropy())
    torch.testing.assert_close(columns["teacher_entropy"], torch.distributions.Categorical(probs=p_t).entropy())
    torch.testing.assert_close(columns["student_logp"], p_s[ids_T, ids_T].log())
    torch.testing.assert_close(columns["teacher_logp"], p_t[ids_T, ids_T].log())
    torch.testing.assert_close(columns["raw_logp"], torch.softmax(student_TV, -1)[ids_T, ids_T].log())
    assert columns["agreement"].sum() == (p_s.argmax(-1) == p_t.argmax(-1)).sum()


@pytest.mark.parametrize("beta", [-0.5, 0.0, 1.0, 2.0])
def test_jsd_ends_are_refused(beta):
    with pytest.raises(ValueError, match=r"loss\.beta=.*loss=(forward|reverse)_kl"):
        make_loss("jsd", beta=beta)


def test_top_k_cannot_go_negative_where_mass_escapes():
    """Without the tail entry the kept terms of a student that fled the support sum below zero."""
    teacher = torch.tensor([[4.0, 3.0, -4.0, -4.0]], dtype=torch.float64)
    student = torch.tensor([[-4.0, -4.0, 4.0, 4.0]], dtype=torch.float64)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    kept = (s.exp() * (s - t))[:, :2].sum()
    assert kept < 0
    columns, _ = on_logits(student, teacher, loss=make_loss("reverse_kl", top_k=2), clipping=make_clipping("none", None))
    tail_s, tail_t = s[:, 2:].logsumexp(-1), t[:, 2:].logsumexp(-1)
    assert columns["value"].item() == pytest.approx((kept + tail_s.exp() * (tail_s - tail_t)).item(), abs=1e-12)
    assert columns["value"].item() > 5
