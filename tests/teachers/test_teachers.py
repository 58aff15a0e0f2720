"""Teachers, under LoRA and full fine-tuning: whose weights they have after which step, and that the student never notices them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from opsd import batching
from opsd.engines.base import AdamW
from opsd.models.base import Lora
from opsd.models.hf import Hf
from opsd.pretrained import Dtype
from opsd.ranks import ALONE
from opsd.registry import lookup
from opsd.scoring import DIAGNOSTICS, Objective, hidden_at
from opsd.types import FinishReason, LoadedModel, MicroBatch, Problem, Prompt, Request, Response, Rollout

KEYS: dict[str, dict[str, Any]] = {"initial": {}, "ema": {"rate": 0.3}, "sync": {"every": 2}, "live": {}}
MOVING = ["ema", "sync"]


def load_model(directory: Path, *, lora: bool, dropout: float = 0.0, dtype: Dtype = Dtype.float32) -> LoadedModel:
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = Lora(r=4, alpha=8.0, dropout=dropout, targets=targets) if lora else None
    values: dict[str, Any] = {"path": str(directory), "revision": None, "dtype": dtype, "context": None, "lora": adapters}
    return Hf(name="x", kind="hf", **values).load(seed=0, device="cpu")


@pytest.fixture(params=[False, True], ids=["full", "lora"])
def loaded(request: pytest.FixtureRequest, model_directory: Path) -> LoadedModel:
    return load_model(model_directory, lora=request.param)


def option(kind: str, **keys: Any) -> Any:
    return lookup("teacher", kind)(name=kind, kind=kind, **(KEYS.get(kind, {}) | keys))


def trained(loaded: LoadedModel) -> dict[str, torch.nn.Parameter]:
    """By the names that a teacher's state has."""
    module = loaded.body if loaded.lora else loaded.model
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def change(loaded: LoadedModel, step: int) -> dict[str, torch.Tensor]:
    """Moves every trained tensor as an optimizer would, in place, and gives them in float64."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in trained(loaded).values():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return {name: p.detach().double() for name, p in trained(loaded).items()}


def rollouts(loaded: LoadedModel) -> list[Rollout]:
    """Two rows of unequal length."""
    rows = []
    for student, teacher, response_ids in ((5, 19, [60, 61, 62, 1]), (9, 12, [70, 71, 72, 73, 74, 75])):
        spell = lambda count, salt: [(7 * i + salt) % 200 + 40 for i in range(count)]  # noqa: E731
        zeros = [0.0] * len(response_ids)
        prompt = Prompt(
            problem=Problem(id=str(student), text="", solution="", answer=None),
            student_ids=spell(student, 1),
            teacher_ids=spell(teacher, 2),
            shortened=False,
            analysis_ids=None,
        )
        response = Response(
            token_ids=response_ids, logps=zeros, processed_logps=zeros, finish_reason=FinishReason.STOP, weights_version=0
        )
        rows.append(Rollout(prompt=prompt, response=response, text=""))
    return rows


def micro_batch(loaded: LoadedModel) -> MicroBatch:
    rows = rollouts(loaded)
    return batching.collate(rows, batching.token_weights(rows, batching.Reduction.token), loaded.device)


def hidden(loaded: LoadedModel, batch: MicroBatch) -> torch.Tensor:
    """What a separate copy of the model as it is now, in evaluation mode, makes of the teacher's side."""
    apart: Any = copy.deepcopy(loaded.model).eval()
    with torch.no_grad():
        return hidden_at(apart.get_decoder() if not loaded.lora else apart.base_model.model.get_decoder(), batch.teacher)


@pytest.mark.parametrize("rate", [0.05, 0.7, 1.0])
def test_an_average_is_its_closed_form(loaded: LoadedModel, rate: float):
    """After k steps: (1 - rate)^k of the starting weights plus rate (1 - rate)^(k - i) of the weights after step i."""
    start = {name: p.detach().double() for name, p in trained(loaded).items()}
    teacher = option("ema", rate=rate).build(loaded)
    after = []
    for step in range(1, 9):
        after.append(change(loaded, step))
        teacher.after_step(step)
    state = teacher.state()
    assert state.keys() == start.keys()
    for name, value in state.items():
        wanted = (1 - rate) ** 8 * start[name] + sum(rate * (1 - rate) ** (8 - i) * w[name] for i, w in enumerate(after, 1))
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted, rtol=1e-7, atol=1e-7 * float(wanted.abs().max()))
        if rate == 1:
            assert torch.equal(value.double(), after[-1][name])


@pytest.mark.parametrize("kind", KEYS)
def test_the_first_step_has_the_starting_weights(loaded: LoadedModel, kind: str):
    """Exactly: adapters switched off, adapters that start from nothing and a copy are one."""
    batch = micro_batch(loaded)
    teacher = option(kind).build(loaded)
    assert torch.equal(teacher.hidden(batch.teacher), hidden(loaded, batch))
    assert torch.equal(teacher.head_VH, loaded.head_VH)
    assert teacher.head_VH is loaded.head_VH or not teacher.head_VH.requires_grad


def test_a_copy_is_taken_after_each_nth_step_and_at_no_other(loaded: LoadedModel):
    batch = micro_batch(loaded)
    teacher = option("sync", every=3).build(loaded)
    at = [hidden(loaded, batch)]
    heads = [loaded.head_VH.detach().clone()]
    for step in range(1, 8):
        change(loaded, step)
        teacher.after_step(step)
        at.append(hidden(loaded, batch))
        heads.append(loaded.head_VH.detach().clone())
        source = step // 3 * 3
        torch.testing.assert_close(teacher.hidden(batch.teacher), at[source], rtol=1e-6, atol=1e-6)
        assert torch.equal(teacher.head_VH, heads[source])
    assert (at[6] - at[3]).abs().max() > 0.01


def test_the_head_of_a_teacher_does_not_move_with_a_tied_student(model_directory: Path):
    loaded = load_model(model_directory, lora=False)
    start = loaded.head_VH.detach().clone()
    teachers = {kind: option(kind).build(loaded) for kind in KEYS}
    now = change(loaded, 1)["model.embed_tokens.weight"].float()
    for teacher in teachers.values():
        teacher.after_step(1)
    assert torch.equal(teachers["initial"].head_VH, start)
    assert torch.equal(teachers["sync"].head_VH, start)
    torch.testing.assert_close(teachers["ema"].head_VH, start + 0.3 * (now - start))
    assert torch.equal(teachers["live"].head_VH, now)


def test_live_is_the_student_of_the_moment(loaded: LoadedModel):
    batch = micro_batch(loaded)
    teacher = option("live").build(loaded)
    for step in (1, 2):
        change(loaded, step)
        teacher.after_step(step)
        loaded.model.eval()
        with torch.no_grad():
            wanted = hidden_at(loaded.body, batch.teacher)
        loaded.model.train()
        found = teacher.hidden(batch.teacher)
        assert torch.equal(found, wanted)
        assert not found.requires_grad and found.grad_fn is None
        assert torch.equal(teacher.head_VH, loaded.head_VH)
    assert teacher.state() == {}


@pytest.mark.parametrize("kind", KEYS)
def test_hidden_states_are_those_of_a_plain_model_with_these_weights(loaded: LoadedModel, kind: str):
    """A deep copy of the whole model, its trained tensors set to the teacher's, called as transformers has it."""
    batch = micro_batch(loaded)
    start: Any = copy.deepcopy(loaded)
    teacher = option(kind).build(loaded)
    for step in (1, 2, 3):
        change(loaded, step)
        teacher.after_step(step)
    plain: Any = loaded if kind == "live" else start
    with torch.no_grad():
        for name, value in teacher.state().items():
            trained(plain)[name].copy_(value)
        wanted = plain.model.eval()(input_ids=batch.teacher.ids_BL).logits[batch.teacher.rows_T, batch.teacher.at_T]
        found = teacher.hidden(batch.teacher) @ teacher.head_VH.T
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)
    assert (kind in MOVING) == bool(teacher.state())


def test_adapters_of_its_own_over_a_bf16_base(model_directory: Path):
    """In float32 like the student's: with the student's values they give the student's hidden states to the last bit."""
    loaded = load_model(model_directory, lora=True, dtype=Dtype.bfloat16)
    batch = micro_batch(loaded)
    teacher, live = option("sync").build(loaded), option("live").build(loaded)
    for step in (1, 2, 3):
        change(loaded, step)
        teacher.after_step(step)
        assert torch.equal(teacher.hidden(batch.teacher), live.hidden(batch.teacher)) == (step == 2)
    assert all(value.dtype == torch.float32 for value in teacher.state().values())


@pytest.mark.parametrize("kind", MOVING)
def test_state_goes_through_a_checkpoint_bitwise(model_directory: Path, loaded: LoadedModel, kind: str):
    """A teacher built anew from the starting weights and given the state goes on as if nothing had been."""
    batch = micro_batch(loaded)
    teacher = option(kind, **({"rate": 0.1} if kind == "ema" else {"every": 4})).build(loaded)
    again_loaded = load_model(model_directory, lora=loaded.lora)
    again = option(kind, **({"rate": 0.1} if kind == "ema" else {"every": 4})).build(again_loaded)
    for step in range(1, 6):
        change(loaded, step)
        teacher.after_step(step)
    with torch.no_grad():
        for name, p in trained(again_loaded).items():
            p.copy_(trained(loaded)[name])
    stored = load(save({name: value.detach().contiguous() for name, value in teacher.state().items()}))
    assert not torch.equal(again.hidden(batch.teacher), teacher.hidden(batch.teacher))
    again.load_state(stored)
    for step in range(5, 10):
        assert torch.equal(again.hidden(batch.teacher), teacher.hidden(batch.teacher))
        assert torch.equal(again.head_VH, teacher.head_VH)
        for one, at in ((loaded, teacher), (again_loaded, again)):
            change(one, step + 1)
            at.after_step(step + 1)
    assert all(torch.equal(value, again.state()[name]) for name, value in teacher.state().items())


@pytest.mark.parametrize("kind", [*KEYS, "external"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_student_never_notices(model_directory: Path, wider: Path, lora: bool, kind: str):
    """A hundred calls, with dropout and gradient checkpointing on: modes, flags, tensors and its gradient are as before."""
    loaded = load_model(model_directory, lora=lora, dropout=0.3)
    keys = {"path": str(wider), "revision": None, "dtype": Dtype.float32} if kind == "external" else {}
    teacher = option(kind, **keys).build(loaded)
    model: Any = loaded.model
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    next(module for module in model.modules() if isinstance(module, torch.nn.Linear)).eval()  # one that stands out
    change(loaded, 1)
    teacher.after_step(1)
    batch = micro_batch(loaded)
    objects = dict(model.named_parameters())
    tensors = {name: p.detach().clone() for name, p in objects.items()}
    flags = {name: p.requires_grad for name, p in objects.items()}
    modes = {name: module.training for name, module in model.named_modules()}

    def student_gradient() -> list[torch.Tensor]:
        torch.manual_seed(3)
        hidden_TH = hidden_at(loaded.body, batch.student)
        return list(torch.autograd.grad(hidden_TH.square().sum(), list(trained(loaded).values()), allow_unused=True))

    before = student_gradient()
    first = teacher.hidden(batch.teacher)
    for _ in range(99):
        assert torch.equal(teacher.hidden(batch.teacher), first)
    assert not first.requires_grad
    assert {name: module.training for name, module in model.named_modules()} == modes
    now = dict(model.named_parameters())
    assert now.keys() == objects.keys()
    for name, p in now.items():
        assert p is objects[name] and p.grad is None
        assert torch.equal(p, tensors[name])
        assert p.requires_grad == flags[name]
    for mine, earlier in zip(student_gradient(), before, strict=True):
        assert mine is earlier is None or torch.equal(mine, earlier)


@pytest.mark.parametrize("kind", [*KEYS, "external"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_teacher_trains_its_student(loaded: LoadedModel, wider: Path, kind: str, checkpointing: bool):
    """Three steps through the engine: finite, downhill against a fixed teacher, and scored as the teacher's own log-probs say."""
    keys = {"path": str(wider), "revision": None, "dtype": Dtype.float32} if kind == "external" else {}
    teacher = option(kind, **keys).build(loaded)
    loaded.model.train()
    loss = lookup("loss", "forward_kl")(name="forward_kl", kind="forward_kl", temperature=None, top_k=None)
    clipping = lookup("clipping", "none")(name="none", kind="none", clip=None)
    objective = Objective(loaded, loss=loss, clipping=clipping, temperature=1.0, chunk_tokens=3)
    kind_of = lookup("engine", "torch")(name="torch", kind="torch", device="cpu", gradient_checkpointing=checkpointing)
    engine = kind_of.build(objective, optimizer=AdamW(betas=[0.9, 0.999], weight_decay=0.0, max_grad_norm=1.0), ranks=ALONE)
    batch = micro_batch(loaded)
    divergences = []
    for step in range(1, 4):
        teacher_TH = teacher.hidden(batch.teacher)
        logps_TV = (teacher_TH @ teacher.head_VH.T).log_softmax(-1)
        diagnostics_TD = engine.accumulate(batch, teacher_TH, teacher.head_VH, want_cosine=False, last=True)
        found_T = diagnostics_TD[:, DIAGNOSTICS.index("teacher_logp")]
        torch.testing.assert_close(found_T, logps_TV.gather(-1, batch.response_ids_T[:, None])[:, 0])
        divergences.append(float(diagnostics_TD[:, DIAGNOSTICS.index("divergence")].mean()))
        assert 0 < engine.step(lr=1e-2) < float("inf")
        teacher.after_step(step)
    assert all(0 < value < 100 for value in divergences)
    if kind in ("initial", "external"):
        assert divergences == sorted(divergences, reverse=True)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (
            "ema",
            {"rate": 0.0},
            "teacher.rate=0.0: must be above 0 and at most 1; for a teacher that never moves set teacher=initial.",
        ),
        (
            "ema",
            {"rate": 1.5},
            "teacher.rate=1.5: must be above 0 and at most 1; for a teacher that never moves set teacher=initial.",
        ),
        ("sync", {"every": 0}, "teacher.every=0: must be at least 1 step; for a teacher that never moves set teacher=initial."),
    ],
)
def test_values_out_of_range(kind: str, keys: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        option(kind, **keys)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", KEYS)
def test_what_a_teacher_says_is_drawn_from_the_weights_it_scores_with(loaded: LoadedModel, kind: str):
    """The log-probs of the teacher's own words are those that `hidden` and `head_VH` give them, also after the student moved."""
    teacher = option(kind).build(loaded)
    for step in (1, 2, 3):
        change(loaded, step)
        teacher.after_step(step)
    prompts = [row.prompt.teacher_ids or [] for row in rollouts(loaded)]
    engine = lookup("rollout", "transformers")(
        name="x", kind="transformers", max_len=6, samples=1, temperature=1.0, top_p=1.0, top_k=None, max_rows=8, cache_tokens=1000
    )
    sampler = engine.build_speaker(teacher.speaker(loaded))
    sampler.sync(weights_version=3)
    asked = [Request(prompt_ids=ids, seed=seed) for seed, ids in enumerate(prompts)]
    training = loaded.model.training
    said = sampler.generate(asked, sampling=engine.sampling)
    assert loaded.model.training is training
    rows = [
        Rollout(prompt=replace(row.prompt, student_ids=ids), response=response, text="")
        for row, ids, response in zip(rollouts(loaded), prompts, said, strict=True)
    ]
    batch = batching.collate(rows, batching.token_weights(rows, batching.Reduction.token), loaded.device)
    assert batch.teacher is not None
    logps_TV = (teacher.hidden(batch.teacher) @ teacher.head_VH.T).log_softmax(-1)
    scored_T = logps_TV.gather(-1, batch.response_ids_T[:, None])[:, 0]
    torch.testing.assert_close(scored_T, batch.sampler_raw_logps_T, rtol=0, atol=2e-5)
