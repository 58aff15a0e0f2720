"""METHOD's exactness rules 1 to 4 and point 8, on a model whose pad token is its eos token, with prompts of unequal length."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from opsd import batching
from opsd.batching import Reduction
from opsd.endings import NonFinite
from opsd.engines.base import AdamW
from opsd.metrics import rollout_metrics, token_metrics
from opsd.ranks import ALONE
from opsd.registry import lookup
from opsd.scoring import DIAGNOSTICS, Objective
from opsd.types import FinishReason, Problem, Prompt, Response, Rollout


def make_loss(kind: str, **values):
    return lookup("loss", kind)(name=kind, kind=kind, temperature=None, **values)


LOSS = make_loss("forward_kl", top_k=None)
LOSSES = {
    "forward_kl": LOSS,
    "top_k": make_loss("jsd", beta=0.3, top_k=5),
    "sampled_token": make_loss("sampled_token", adv_clip=2.0, ratio_clip=2.0),
    "nll": make_loss("nll"),
}
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
CLIPPING = lookup("clipping", "none")(name="none", kind="none", clip=None)
DIFFERENT = 40  # any token that is neither a marker nor the end of a turn

WITH_TEACHER = {"columns": DIAGNOSTICS, "teacher": True}


def rollout(loaded, student: int, teacher: int, response_ids: list[int], finish=FinishReason.STOP) -> Rollout:
    """A rollout with prompts of the given lengths; its content is made of the lengths."""
    spell = lambda count, salt: [(7 * i + salt) % 200 + DIFFERENT for i in range(count)]  # noqa: E731
    problem = Problem(id=f"{student}-{teacher}", text="", solution="", answer="1")
    prompt = Prompt(
        problem=problem, student_ids=spell(student, 1), teacher_ids=spell(teacher, 2), shortened=False, analysis_ids=None
    )
    logps = [-0.1 * i for i in range(len(response_ids))]
    response = Response(token_ids=response_ids, logps=logps, processed_logps=list(logps), finish_reason=finish, weights_version=0)
    return Rollout(prompt=prompt, response=response, text=loaded.tokenizer.decode(response_ids))


def without_teacher(rollouts: list[Rollout]) -> list[Rollout]:
    return [replace(rollout, prompt=replace(rollout.prompt, teacher_ids=None)) for rollout in rollouts]


def logps_alone(loaded, prompt_ids: list[int], response_ids: list[int]) -> torch.Tensor:
    """The model's own log-probs of a response in a batch of one, no padding anywhere: `[T, V]`."""
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([prompt_ids + response_ids])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].float().log_softmax(-1)


def engine_for(loaded, *, chunk_tokens=16, loss=LOSS):
    """A fresh copy of the model under the torch engine, with a frozen teacher."""
    own = copy.deepcopy(loaded.model).train().requires_grad_(True)
    mine = type(loaded)(
        **{name: getattr(loaded, name) for name in ("tokenizer", "context", "stop_ids", "directory", "lora", "device")},
        model=own,
        body=own.get_decoder(),
        head_VH=own.get_output_embeddings().weight,
    )
    teacher = lookup("teacher", "initial")(name="initial", kind="initial").build(mine)
    objective = Objective(mine, loss=loss, clipping=CLIPPING, temperature=1.0, chunk_tokens=chunk_tokens)
    kind = lookup("engine", "torch")(name="torch", kind="torch", device="cpu", gradient_checkpointing=False)
    settings = AdamW(betas=[0.9, 0.999], weight_decay=0.0, max_grad_norm=1.0)
    return mine, teacher, kind.build(objective, optimizer=settings, ranks=ALONE)


def accumulate(loaded, rollouts, *, micro_tokens, reduction=Reduction.token, **settings):
    """Gradients by name, and the step's batches and diagnostics."""
    mine, teacher, engine = engine_for(loaded, **settings)
    weights = batching.token_weights(rollouts, reduction)
    batches, diagnostics = [], []
    for rows in batching.cut(rollouts, micro_tokens=micro_tokens):
        batch = batching.collate([rollouts[i] for i in rows], [weights[i] for i in rows], mine.device)
        scored = (teacher.hidden(batch.teacher), teacher.head_VH) if batch.teacher is not None else (None, None)
        diagnostics.append(engine.accumulate(batch, *scored, want_cosine=False, last=True))
        batches.append(batch)
    gradients = {name: p.grad for name, p in mine.model.named_parameters()}
    return gradients, batches, diagnostics, engine


@pytest.fixture
def ragged(random_model):
    """Rows of unequal length on both sides: a normal one, a cut one, one that is a single EOS, one with pad inside."""
    eos = random_model.tokenizer.eos_token_id
    assert random_model.tokenizer.pad_token_id == eos
    return [
        rollout(random_model, 5, 19, [60, 61, 62, eos]),
        rollout(random_model, 17, 31, [70 + i for i in range(11)], FinishReason.LENGTH),
        rollout(random_model, 9, 12, [eos]),
        rollout(random_model, 3, 40, [80, eos, 81, 82, eos]),
    ]


def test_ids_go_from_the_sampler_to_both_scorers_untouched(random_model):
    """Rule 1: ids that no tokenizer would give back for their own text are scored as they are."""
    tokenizer = random_model.tokenizer
    pieces = tokenizer.encode("step", add_special_tokens=False)
    split = [token for piece in "step" for token in tokenizer.encode(piece, add_special_tokens=False)]
    odd = split + [tokenizer.eos_token_id]
    assert tokenizer.encode(tokenizer.decode(split), add_special_tokens=False) == pieces != split
    row = rollout(random_model, 4, 6, odd)
    batch = batching.collate([row], [1.0], random_model.device)
    assert batch.response_ids_T.tolist() == odd
    for side, prompt in ((batch.student, row.prompt.student_ids), (batch.teacher, row.prompt.teacher_ids)):
        assert side.ids_BL[0].tolist() == prompt + odd


def test_prompts_of_unequal_length_change_no_score(random_model, ragged):
    """Rule 2: every token's log-prob on either side is that of its row alone."""
    _, batches, diagnostics, _ = accumulate(random_model, ragged, micro_tokens=10_000)
    assert len(batches) == 1
    columns = dict(zip(DIAGNOSTICS, diagnostics[0].unbind(-1), strict=True))
    order = batching.cut(ragged, micro_tokens=10_000)[0]
    for side, column in (("student_ids", "student_logp"), ("teacher_ids", "teacher_logp")):
        wanted = torch.cat(
            [
                logps_alone(random_model, getattr(ragged[i].prompt, side), ragged[i].response.token_ids)
                .gather(-1, torch.tensor(ragged[i].response.token_ids)[:, None])
                .flatten()
                for i in order
            ]
        )
        torch.testing.assert_close(columns[column], wanted, rtol=0, atol=2e-5)


def test_masks_come_from_lengths(random_model, ragged):
    """Rule 3: the final EOS is supervised and a pad id inside a response counts, though pad == eos."""
    _, batches, diagnostics, _ = accumulate(random_model, ragged, micro_tokens=10_000)
    eos = random_model.tokenizer.eos_token_id
    assert len(batches[0].response_ids_T) == sum(len(r.response.token_ids) for r in ragged)
    at_eos = batches[0].response_ids_T == eos
    assert at_eos.sum() == 4
    assert (diagnostics[0][:, DIAGNOSTICS.index("divergence")][at_eos] > 0).all()
    assert (batches[0].weights_T[at_eos] > 0).all()


@EVERY_LOSS
def test_degenerate_responses_are_finite_and_counted(random_model, ragged, loss):
    """Rule 4: an empty response, one EOS, a cut one, and a micro-batch with nothing to learn from."""
    rows = [*ragged, rollout(random_model, 6, 7, [])]
    rows = rows if loss.has_teacher else without_teacher(rows)
    gradients, batches, diagnostics, engine = accumulate(random_model, rows, micro_tokens=1, loss=loss)
    assert len(batches) == len(rows)
    assert min(len(batch.response_ids_T) for batch in batches) == 0
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    metrics = token_metrics(batches, diagnostics, columns=engine.objective.columns, teacher=loss.has_teacher)
    metrics |= rollout_metrics(rows, boxed=[False] * 5, correct=[None] * 5)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/empty"] == 1
    assert metrics["rollout/truncated"] == pytest.approx(1 / 5)
    assert metrics["train/response_tokens"] == 21
    assert math.isfinite(engine.step(lr=1e-3))


def test_a_step_with_nothing_at_all_is_finite(random_model):
    rows = [rollout(random_model, 6, 7, []), rollout(random_model, 3, 9, [])]
    gradients, batches, diagnostics, engine = accumulate(random_model, rows, micro_tokens=10_000)
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients.values())
    metrics = token_metrics(batches, diagnostics, **WITH_TEACHER)
    assert metrics["train/response_tokens"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert engine.step(lr=1e-3) == 0


@EVERY_LOSS
@pytest.mark.parametrize("reduction", list(Reduction))
def test_however_the_batch_is_cut_the_gradient_is_one(random_model, ragged, reduction, loss):
    """Point 8: accumulated == one batch and chunked == whole, a trained tied head included."""
    rows = ragged if loss.has_teacher else without_teacher(ragged)
    whole, *_ = accumulate(random_model, rows, micro_tokens=10_000, chunk_tokens=1000, reduction=reduction, loss=loss)
    for micro_tokens, chunk_tokens in ((1, 1000), (60, 3), (10_000, 1)):
        parts, batches, *_ = accumulate(
            random_model, rows, micro_tokens=micro_tokens, chunk_tokens=chunk_tokens, reduction=reduction, loss=loss
        )
        assert len(batches) > 1 or micro_tokens == 10_000
        for name, gradient in parts.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6 * float(whole[name].abs().max()) + 1e-9)


def definition(loss, student_TV, teacher_TV, ids, sampler_T):
    """Each token's value from the formulas, on log-probs of both sides."""
    picked = torch.arange(len(ids)), torch.tensor(ids)
    if loss.kind == "nll":
        return -student_TV[picked]
    if loss.kind == "sampled_token":
        advantage_T = (teacher_TV[picked] - student_TV[picked].detach()).clamp(-2, 2)
        return -(student_TV[picked].detach() - sampler_T).exp().clamp(max=2) * advantage_T * student_TV[picked]
    p_t, p_s = teacher_TV.exp(), student_TV.exp()
    if loss.kind == "jsd":
        kept = p_t.topk(5).indices
        p_t, p_s = (torch.cat([p.gather(-1, kept), 1 - p.gather(-1, kept).sum(-1, keepdim=True)], -1) for p in (p_t, p_s))
        m = 0.3 * p_t + 0.7 * p_s
        return (0.3 * p_t * (p_t / m).log() + 0.7 * p_s * (p_s / m).log()).sum(-1)
    return (p_t * (p_t / p_s).log()).sum(-1)


@EVERY_LOSS
@pytest.mark.parametrize("reduction", list(Reduction))
def test_the_gradient_is_that_of_the_definition(random_model, ragged, reduction, loss):
    """Row by row through the model's own logits, dense, with autograd: mean over tokens, or mean of means."""
    rows = ragged if loss.has_teacher else without_teacher(ragged)
    gradients, batches, diagnostics, engine = accumulate(random_model, rows, micro_tokens=60, reduction=reduction, loss=loss)
    student = copy.deepcopy(random_model.model).requires_grad_(True)
    per_row = []
    for row in ragged:
        ids = row.response.token_ids
        logits = student(input_ids=torch.tensor([row.prompt.student_ids + ids])).logits[0, len(row.prompt.student_ids) - 1 : -1]
        teacher = logps_alone(random_model, row.prompt.teacher_ids, ids)
        per_row.append(definition(loss, logits.log_softmax(-1), teacher, ids, torch.tensor(row.response.processed_logps)))
    value = torch.cat(per_row).mean() if reduction is Reduction.token else torch.stack([row.mean() for row in per_row]).mean()
    value.backward()
    metrics = token_metrics(batches, diagnostics, columns=engine.objective.columns, teacher=loss.has_teacher)
    assert metrics["train/objective"] == pytest.approx(value.item(), rel=1e-5)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5 * float(parameter.grad.abs().max()) + 1e-9)


def test_the_teacher_leaves_the_student_in_training_mode(random_model, ragged):
    mine, teacher, _ = engine_for(random_model)
    batch = batching.collate(ragged, batching.token_weights(ragged, Reduction.token), mine.device)
    mine.model.train()
    mine.body.layers[0].eval()
    before = [part.training for part in mine.model.modules()]
    hidden_TH = teacher.hidden(batch.teacher)
    assert [part.training for part in mine.model.modules()] == before
    assert not hidden_TH.requires_grad


def test_a_gradient_that_is_not_a_number_is_no_step(random_model, ragged):
    mine, teacher, engine = engine_for(random_model)
    weights = batching.token_weights(ragged, Reduction.token)
    batch = batching.collate(ragged, [math.inf, *weights[1:]], mine.device)
    before = {name: p.detach().clone() for name, p in mine.model.named_parameters()}
    with pytest.raises(NonFinite, match="loss"):
        engine.accumulate(batch, teacher.hidden(batch.teacher), teacher.head_VH, want_cosine=False, last=True)
    next(mine.model.parameters()).grad = torch.full_like(next(mine.model.parameters()), math.nan)
    with pytest.raises(NonFinite, match="gradient"):
        engine.step(lr=1e-3)
    assert all(torch.equal(p, before[name]) for name, p in mine.model.named_parameters())
    assert engine.state() == {}
