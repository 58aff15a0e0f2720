"""Saved rollouts come back bit for bit, or not at all."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from opsd.records import Record, file_of, load, num_steps, save
from opsd.types import FinishReason, Problem, Prompt, Response, Rollout


def rollout(rng: random.Random, *, prompt: int, response: int, sampled: bool = True, finish=FinishReason.STOP) -> Rollout:
    """Token ids of a large vocabulary; log-probs as a sampler's float32 gives them."""
    ids = lambda count: [rng.randrange(151_936) for _ in range(count)]  # noqa: E731
    logps = lambda: torch.tensor([-20 * rng.random() for _ in range(response)]).tolist() if sampled else [math.nan] * response  # noqa: E731
    problem = Problem(id=f"problem {rng.random()} é", text="", solution=None, answer=None)
    return Rollout(
        prompt=Prompt(problem=problem, student_ids=ids(prompt), teacher_ids=None, shortened=False, analysis_ids=None),
        response=Response(
            token_ids=ids(response),
            logps=logps(),
            processed_logps=logps(),
            finish_reason=finish,
            weights_version=7 if sampled else None,
        ),
        text="",
    )


def record_of(rollout: Rollout) -> Record:
    return Record(problem_id=rollout.prompt.problem.id, student_ids=rollout.prompt.student_ids, response=rollout.response)


def test_what_is_saved_comes_back(tmp_path):
    rng = random.Random(0)
    rollouts = [
        rollout(rng, prompt=5, response=9),
        rollout(rng, prompt=1, response=0, finish=FinishReason.LENGTH),
        rollout(rng, prompt=300, response=1),
    ]
    save(tmp_path, 1, rollouts)
    assert load(tmp_path, 1) == [record_of(each) for each in rollouts]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.safetensors"]


def test_responses_that_were_not_sampled(tmp_path):
    saved = rollout(random.Random(1), prompt=3, response=4, sampled=False)
    save(tmp_path, 2, [saved])
    (record,) = load(tmp_path, 2)
    assert (record.response.token_ids, record.response.weights_version) == (saved.response.token_ids, None)
    assert all(math.isnan(logp) for logp in [*record.response.logps, *record.response.processed_logps])


def test_a_step_taken_again_replaces_the_first(tmp_path):
    first, second = ([rollout(random.Random(seed), prompt=2, response=3)] for seed in (2, 3))
    save(tmp_path, 1, first)
    save(tmp_path, 1, second)
    assert load(tmp_path, 1) == [record_of(second[0])]


def test_steps_are_counted_up_to_the_first_gap(tmp_path):
    assert num_steps(tmp_path) == 0
    for step in (1, 2, 4):
        save(tmp_path, step, [rollout(random.Random(step), prompt=1, response=1)])
    assert num_steps(tmp_path) == 2
    with pytest.raises(ValueError, match=r"step_000003\.safetensors: does not exist; .* has the rollouts of 2 steps\."):
        load(tmp_path, 3)


def test_damage_and_other_formats_are_told(tmp_path):
    save(tmp_path, 1, [rollout(random.Random(4), prompt=8, response=8)])
    path = file_of(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path, 1)
    path.write_bytes(whole.replace(b'"format":"1"', b'"format":"9"'))
    with pytest.raises(ValueError, match="its format is 9, this opsd reads 1"):
        load(tmp_path, 1)


def test_a_step_of_the_paper_costs_milliseconds(tmp_path):
    """32 rollouts of 1,024 tokens: 12 bytes a token, far below a second of a step that takes eight."""
    rng = random.Random(5)
    rollouts = [rollout(rng, prompt=200, response=1024) for _ in range(32)]
    began = time.perf_counter()
    save(tmp_path, 1, rollouts)
    assert time.perf_counter() - began < 1
    assert file_of(tmp_path, 1).stat().st_size < 450_000
