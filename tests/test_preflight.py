"""Preflight names what differs, counts what is cut, and its model of memory is held against tensors that exist."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from composing import rows, run_of

from opsd import chat
from opsd.inputs import problem_stream, training_problems
from opsd.preflight.compare import NARROW, Comparer, hunks, thought
from opsd.preflight.memory import activation_bytes, cache_bytes, estimate
from opsd.preflight.start import about
from opsd.preflight.survey import Survey, num_evaluations, response_len, survey, tokens
from opsd.types import Problem, Prompt

ASKED = "What is the sum of the digits of 73?"
INSTRUCTION = "\n\nPlease reason step by step."
PROBLEM = Problem(id="p", text=ASKED, solution="7+3=10.", answer="10")


# what differs


@pytest.mark.parametrize(
    ("student", "thinking", "expected"),
    [
        ("{problem}" + INSTRUCTION, True, []),
        ("Problem: {problem}" + INSTRUCTION, True, ['words in front ("Problem:" / nothing)']),
        ("{problem}" + INSTRUCTION, False, ["think block (closed, empty / none)"]),
        ("{problem}\n\nAnswer at once.", True, ['instruction ("Answer at once." / "Please reason step by step.")']),
        ("{problem}\nPlease reason step by step.", True, ["only white space at the end ('reason·step·by·step.'"]),
        ("\n{problem}" + INSTRUCTION, True, ["only white space in front ('⏎' / '')"]),
        ("Problem: {problem}", False, ["words in front", "instruction (nothing", "think block"]),
    ],
)
def test_differences_are_named(tokenizer, student: str, thinking: bool, expected: list[str]) -> None:
    left = chat.render(tokenizer, student.replace("{problem}", ASKED), thinking=thinking)
    right = chat.render(tokenizer, ASKED + INSTRUCTION, thinking=True)
    told = Comparer(tokenizer).differences(left, right, PROBLEM)
    assert len(told) == len(expected)
    for found, start in zip(told, expected, strict=True):
        assert found.startswith(start.split("'reason")[0])


def test_a_system_turn_that_only_one_side_has_is_named(new_tokenizer) -> None:
    system = "{%- if not enable_thinking -%}{{- '<|im_start|>system\nAnswer at once.<|im_end|>\n' -}}{%- endif -%}"
    new_tokenizer.chat_template = system + new_tokenizer.chat_template
    left, right = (chat.render(new_tokenizer, ASKED, thinking=on) for on in (False, True))
    told = Comparer(new_tokenizer).differences(left, right, PROBLEM)
    assert [found.split(" (")[0] for found in told] == ["system turn", "think block"]


def test_equal_text_in_other_tokens_is_a_difference(tokenizer) -> None:
    whole = chat.render(tokenizer, ASKED, thinking=True)
    place = next(n for n, token in enumerate(whole) if len(tokenizer.decode([token])) == 2)
    letters = tokenizer.decode([whole[place]])
    apart = whole[:place] + [tokenizer.encode(letter)[0] for letter in letters] + whole[place + 1 :]
    assert Comparer(tokenizer).differences(apart, whole, PROBLEM) == ["the same text in other tokens"]


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ("<|im_start|>assistant\n", "none"),
        ("assistant\n<think>\n", "open"),
        ("assistant\n<think>\n\n</think>\n\n", "closed, empty"),
        ("assistant\n<think>\nHm.\n</think>\n\n", "closed"),
    ],
)
def test_the_state_of_a_think_block(tail: str, state: str) -> None:
    assert thought(tail) == state


def test_hunks_hold_every_token_of_both_prompts() -> None:
    draw = random.Random(0)
    for _ in range(200):
        left, right = ([draw.randrange(4) for _ in range(draw.randrange(1, 30))] for _ in range(2))
        found = hunks(left, right)
        assert [token for hunk in found for token in hunk.left_ids] == left
        assert [token for hunk in found for token in hunk.right_ids] == right
        for place, hunk in enumerate(found):
            assert hunk.equal == (hunk.left_ids == hunk.right_ids) or len(hunk.left_ids) < NARROW
            assert place == 0 or hunk.equal != found[place - 1].equal  # differences that nothing parts are one
    same = [5, 6, 7, 8]
    assert [(h.equal, len(h.left_ids), len(h.right_ids)) for h in hunks([1, *same], [2, 3, *same])] == [(False, 1, 2), (True, 4, 4)]


# what is cut


def test_the_survey_counts_what_is_shortened_and_dropped(tmp_path: Path) -> None:
    problems = [("Short?", "1"), ("Short too?", "word " * 400), ("long " * 400, "1"), ("Short again?", "word " * 300)]
    file = rows(tmp_path / "rows.jsonl", problems)
    run = run_of("data=jsonl", f"data.path={file}", "prompt=plain", "model.context=400", "rollout.max_len=100", "eval=none")
    tokenizer = run.model.tokenizer()
    found = survey(problem_stream(run, training_problems(run), tokenizer=tokenizer, context=400), most=512)
    assert [prompt.problem.id for prompt in found.shortened] == ["row-1", "row-3"]
    assert [problem.id for problem in found.dropped] == ["row-2"]
    assert (found.available, found.asked, len(found.prompts)) == (4, 4, 3)
    assert max(found.teacher_lens) <= 300 < 400
    one = survey(problem_stream(run, training_problems(run), tokenizer=tokenizer, context=400), most=1)
    assert one.asked == 1 and len(one.prompts) == 1


def prompt_of(student: int, teacher: int | None) -> Prompt:
    ids = None if teacher is None else [0] * teacher
    return Prompt(problem=PROBLEM, student_ids=[0] * student, teacher_ids=ids, shortened=False, analysis_ids=None)


def test_tokens_of_a_step_by_hand() -> None:
    run = run_of("train.batch=8", "rollout.samples=2", "eval.samples=3")
    found = Survey(available=2, asked=2, prompts=[prompt_of(10, 40), prompt_of(30, 60)], dropped=[])
    ahead = tokens(run, found, response=100, evaluation=50, num_evaluated=4)
    assert (ahead.sampled, ahead.student, ahead.teacher, ahead.evaluation) == (800, 8 * 120, 8 * 150, 4 * 3 * 50)
    assert ahead.step == 800 + 960 + 1200
    alone = Survey(available=1, asked=1, prompts=[prompt_of(10, None)], dropped=[])
    assert tokens(run, alone, response=1, evaluation=0, num_evaluated=0).teacher == 0


def test_responses_that_are_the_datas_own_are_measured() -> None:
    run = run_of("rollout=dataset", "loss=nll", "teacher=none", "clipping=none", "clip=null", "rollout.max_len=6")
    tokenizer = run.model.tokenizer()
    found = Survey(available=1, asked=1, prompts=[prompt_of(10, None)], dropped=[])
    whole = len(chat.encode_text(tokenizer, "7+3=10.")) + 1
    assert whole > 6 and response_len(run, tokenizer, found) == 6
    run.rollout.max_len = 100
    assert response_len(run, tokenizer, found) == whole
    assert response_len(run_of(), tokenizer, found) is None


@pytest.mark.parametrize(("every", "steps", "count"), [(0, 10, 2), (3, 10, 5), (5, 10, 3), (20, 10, 2)])
def test_evaluations_of_a_run(every: int, steps: int, count: int) -> None:
    assert num_evaluations(run_of(f"eval.every={every}", f"train.steps={steps}")) == count
    assert num_evaluations(run_of("eval.in_run=false")) == num_evaluations(run_of("eval=none")) == 0


@pytest.mark.parametrize(("count", "text"), [(9999, "9999"), (12345, "12k"), (1.26e6, "1.3 M"), (48e6, "48 M"), (2e9, "2.0 G")])
def test_numbers_are_rounded(count: float, text: str) -> None:
    assert about(count) == text


# memory


@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
def test_weights_and_states_are_those_of_the_loaded_model(model: str) -> None:
    import torch

    run = run_of(f"model={model}", "data=arithmetic")
    loaded = run.model.load(seed=0, device="cpu")
    memory = estimate(run, run.model.skeleton(), longest_student=60, longest_teacher=100, longest_asked=60)
    parameters = list(loaded.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert (memory.num_parameters, memory.num_trained) == (sum(map(torch.numel, parameters)), sum(map(torch.numel, trained)))
    assert memory.weights == sum(parameter.nbytes for parameter in parameters)
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    assert memory.training == states + sum(parameter.nbytes for parameter in trained)


@pytest.mark.parametrize(
    ("model", "teacher", "whole"), [("tiny", "initial", True), ("tiny", "live", False), ("tiny_lora", "initial", False)]
)
def test_a_teacher_counts_where_it_has_weights_of_its_own(model: str, teacher: str, whole: bool) -> None:
    run = run_of(f"model={model}", f"teacher={teacher}")
    skeleton = run.model.skeleton()
    every = sum(parameter.nbytes for parameter in skeleton.parameters())
    assert run.teacher.own_bytes(skeleton) == (every if whole else 0)
    moving = run_of(f"model={model}", "teacher=ema").teacher.own_bytes(skeleton)
    assert moving == sum(parameter.nbytes for parameter in skeleton.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(("lora", "dtype"), [(None, "float32"), ("tiny_lora", "float32"), ("tiny_lora", "bfloat16")])
def test_activations_are_within_a_third_of_what_autograd_keeps(lora: str | None, dtype: str) -> None:
    import torch

    run = run_of(f"model={lora or 'tiny'}", f"model.dtype={dtype}")
    loaded = run.model.load(seed=0, device="cpu")
    own = {parameter.untyped_storage().data_ptr() for parameter in loaded.model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    loaded.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = loaded.body(input_ids=torch.ones(4, 200, dtype=torch.int64), use_cache=False).last_hidden_state
    measured_bytes = sum(storage.nbytes() for storage in kept.values()) / 800
    assert hidden.shape[1] == 200
    assert activation_bytes(run.model.skeleton()) == pytest.approx(measured_bytes, rel=1 / 3)


def test_the_cache_is_what_the_sampler_holds() -> None:
    import torch

    from opsd.rollouts.decoding import Batch

    run = run_of("rollout.max_rows=5", "data=arithmetic")
    loaded = run.model.load(seed=0, device="cpu")
    with torch.no_grad():
        batch, _ = Batch.prefill(loaded, [[n + 1] * 20 for n in range(5)], max_len=10)
    layers: list[Any] = batch.cache.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    a_token = held // (5 * 20)
    assert held == 5 * 20 * a_token
    run.eval.in_run = False
    memory = estimate(run, run.model.skeleton(), longest_student=20, longest_teacher=20, longest_asked=0)
    vocabulary = loaded.head_VH.shape[0]
    assert memory.cache == cache_bytes(run, 20 + run.rollout.max_len, run.train.batch, a_token, vocabulary)


def test_gradient_checkpointing_keeps_one_layer_and_the_inputs() -> None:
    whole, cut = (run_of(f"engine.gradient_checkpointing={value}") for value in ("false", "true"))
    skeleton: Any = whole.model.skeleton()
    sizes = {"longest_student": 60, "longest_teacher": 100, "longest_asked": 60}
    kept, dropped = (estimate(run, skeleton, **sizes).activations for run in (whole, cut))
    layers, width = skeleton.config.num_hidden_layers, skeleton.config.hidden_size
    rows = whole.train.batch
    assert kept == rows * (60 + 128) * activation_bytes(skeleton)
    assert dropped == rows * (60 + 128) * (activation_bytes(skeleton) // layers + layers * width * 4)


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(1, 378.07, 378.07, 567.10), (2, 378.07, 195.03, 567.10), (3, 189.03, 189.03, 567.10)],
)
def test_what_a_rank_holds_is_what_was_measured(zero: int, parameters: float, gradients: float, optimizer: float) -> None:
    """MB of one of two ranks with 99.1 M parameters in float32, all trained (`python -m benchmarks.sharding`); buckets aside."""
    whole = 99.10784e6 * 4 / 2**20
    share, copies = run_of("engine=deepspeed", f"engine.zero={zero}", "launcher.processes=2").engine.held(2)
    assert share * whole == pytest.approx(parameters, rel=1e-3)
    assert copies * whole == pytest.approx(gradients + optimizer, rel=0.01)


def test_a_sampler_apart_counts_beside_the_trainer() -> None:
    skeleton = run_of().model.skeleton()
    sizes = {"longest_student": 60, "longest_teacher": 100, "longest_asked": 60}
    inside, apart = (
        estimate(run_of(*rollout), skeleton, **sizes)
        for rollout in ([], ["rollout=vllm", "rollout.kv_cache_gb=1", "rollout.dtype=bfloat16"])
    )
    assert inside.sampler == 0 and inside.cache > 0
    assert apart.sampler == 2 * inside.num_parameters + 2**30 and apart.cache == 0
    assert apart.peak > inside.peak
