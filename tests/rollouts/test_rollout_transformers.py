"""The rollout engine against independent full forwards, exact probabilities and itself.

Shapes: R rows, V vocabulary entries.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from opsd.rollouts.decoding import NUCLEUS, invert, process
from opsd.rollouts.transformers import TransformersEngine
from opsd.types import FinishReason, LoadedModel, Request, Response, Sampling

VOCABULARY = 61
STOP = 7  # also the padding token, as in tokenizers whose pad is their eos
VALUES = dict(
    name="transformers",
    kind="transformers",
    max_len=24,
    temperature=1.1,
    top_p=0.95,
    top_k=20,
    samples=1,
    max_rows=256,
    cache_tokens=10**6,
)


def small_model(
    seed: int = 0, *, dtype: torch.dtype = torch.float32, stops: tuple[int, ...] = (STOP,), spread: float = 0.3
) -> LoadedModel:
    """A random two-layer Qwen3, spread widely enough that its next-token distributions differ from place to place."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=STOP,
            eos_token_id=STOP,
            initializer_range=spread,
        )
        model = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    return as_loaded(model, stops=stops)


def as_loaded(model, *, stops: tuple[int, ...] = (STOP,)) -> LoadedModel:
    return LoadedModel(
        model=model,
        body=model.get_decoder(),
        head_VH=model.get_output_embeddings().weight,
        tokenizer=None,  # never touched: the engine sees no text  # type: ignore[arg-type]
        context=256,
        stop_ids=list(stops),
        directory=Path(),
        lora=False,
        device=torch.device("cpu"),
    )


def requests(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 30) -> list[Request]:
    """Prompts of unequal length, in no order, some ending in the padding token."""
    rng = random.Random(seed)
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    for ids in prompts[::3]:
        ids[-1] = STOP
    return [Request(prompt_ids=ids, seed=1000 + place) for place, ids in enumerate(prompts)]


def generate(loaded: LoadedModel, asked: list[Request], *, sampling: Sampling | None = None, max_rows: int = 256) -> list[Response]:
    engine = TransformersEngine(**{**VALUES, "max_rows": max_rows})
    return engine.build(loaded, processed=False).generate(asked, sampling=engine.sampling if sampling is None else sampling)


def plain(max_len: int, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, top_p=1.0, top_k=None, max_len=max_len)


@torch.no_grad()
def forward_logits(loaded: LoadedModel, prompt_ids: list[int], response_ids: list[int]) -> torch.Tensor:
    """Float64 logits at the response's tokens from one unpadded forward without a cache."""
    logits_LV = loaded.model.eval()(input_ids=torch.tensor([prompt_ids + response_ids]), use_cache=False).logits[0]
    return logits_LV[len(prompt_ids) - 1 : -1].double()


def processed_by_hand(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The processed log-probs of one token in plain Python, written from the words and not from the engine."""
    weights = {token: float(np.exp(logit)) for token, logit in enumerate((logits_V / sampling.temperature).tolist())}
    ranked = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k]
    total, kept, mass = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if mass >= sampling.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    whole = sum(weights[token] for token in kept)
    return torch.tensor([np.log(weights[token] / whole) if token in kept else -np.inf for token in weights], dtype=torch.float64)


@pytest.mark.parametrize("cut", [dict(top_p=1.0, top_k=None), dict(top_p=0.9, top_k=None), dict(top_p=0.8, top_k=10)])
def test_logps_are_those_of_an_independent_forward(cut):
    loaded, asked = small_model(stops=(STOP, 8, 9, 10)), requests(17)
    sampling = Sampling(temperature=1.3, max_len=20, **cut)
    responses = generate(loaded, asked, sampling=sampling)
    assert {len(response.token_ids) for response in responses} > {20}  # some stopped early, some were cut
    for request, response in zip(asked, responses, strict=True):
        logits_TV = forward_logits(loaded, request.prompt_ids, response.token_ids)
        picked = torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)
        torch.testing.assert_close(torch.tensor(response.logps).double(), logits_TV.log_softmax(-1)[picked], atol=1e-5, rtol=0)
        processed_TV = torch.stack([processed_by_hand(logits_V, sampling) for logits_V in logits_TV])
        torch.testing.assert_close(torch.tensor(response.processed_logps).double(), processed_TV[picked], atol=1e-5, rtol=0)


def test_samples_follow_the_processed_distribution():
    """Chi-square of 6,000 first and second tokens against exact probabilities; the seeds are fixed, so the p-value is too."""
    loaded = small_model(stops=())
    prompt = [3, 1, 4, 1, 5]
    sampling = Sampling(temperature=1.2, top_p=0.9, top_k=12, max_len=2)
    responses = generate(loaded, [Request(prompt_ids=prompt, seed=seed) for seed in range(6000)], sampling=sampling, max_rows=6000)

    def p_value(tokens: list[int], logits_V: torch.Tensor) -> float:
        probs_V = processed_by_hand(logits_V, sampling).exp().numpy()
        counts_V = np.bincount(tokens, minlength=VOCABULARY)
        assert counts_V[probs_V == 0].sum() == 0
        kept = probs_V > 0
        assert kept.sum() >= 3
        return stats.chisquare(counts_V[kept], probs_V[kept] * len(tokens)).pvalue

    first = [response.token_ids[0] for response in responses]
    assert p_value(first, forward_logits(loaded, prompt, [0])[0]) > 0.01
    common = max(set(first), key=first.count)
    second = [response.token_ids[1] for response in responses if response.token_ids[0] == common]
    assert p_value(second, forward_logits(loaded, prompt, [common, 0])[1]) > 0.01


def test_the_same_seed_gives_the_same_response_whatever_else_is_in_the_batch():
    loaded, asked = small_model(), requests(40)
    alone = [generate(loaded, [request])[0] for request in asked]
    for responses in (
        generate(loaded, asked),
        generate(loaded, asked, max_rows=7),
        generate(loaded, asked[::-1])[::-1],
        generate(loaded, asked[:11]) + generate(loaded, asked[11:]),
    ):
        assert [response.token_ids for response in responses] == [response.token_ids for response in alone]
        for response, single in zip(responses, alone, strict=True):
            np.testing.assert_allclose(response.logps, single.logps, atol=1e-5)
            np.testing.assert_allclose(response.processed_logps, single.processed_logps, atol=1e-5)


def test_every_token_is_drawn_with_its_own_uniform():
    """Long responses, rows leaving in between: the n-th token is where the n-th uniform of the row's seed falls."""
    loaded, asked = small_model(), requests(12)
    together = generate(loaded, asked, sampling=plain(150, 1.5))
    assert max(len(response.token_ids) for response in together) > 64
    for request, response in zip(asked, together, strict=True):
        uniforms = np.random.Generator(np.random.Philox(request.seed)).random(150)
        logps_TV = (forward_logits(loaded, request.prompt_ids, response.token_ids) / 1.5).log_softmax(-1)
        cumulated_TV = logps_TV.exp().cumsum(-1).numpy()
        for token, u, cumulated_V in zip(response.token_ids, uniforms, cumulated_TV, strict=False):
            below = cumulated_V[token - 1] if token else 0.0
            assert below - 1e-5 <= u <= cumulated_V[token] + 1e-5


def test_requests_with_one_prompt_equal_requests_that_share_nothing():
    loaded = small_model()
    prompts = [request.prompt_ids for request in requests(4)]
    asked = [Request(prompt_ids=list(ids), seed=100 * place + sample) for place, ids in enumerate(prompts) for sample in range(6)]
    shared = generate(loaded, asked)
    apart = [generate(loaded, [request])[0] for request in asked]
    assert [response.token_ids for response in shared] == [response.token_ids for response in apart]
    assert len({tuple(response.token_ids) for response in shared[:6]}) == 6  # one prompt, six seeds, six responses
    for response, single in zip(shared, apart, strict=True):
        np.testing.assert_allclose(response.logps, single.logps, atol=1e-5)


def test_stopping():
    """A stop token is kept and ends the row; a cut row has exactly max_len tokens; the padding token means nothing by itself."""
    loaded = small_model(stops=(STOP, 8))
    responses = generate(loaded, requests(60), sampling=plain(12))
    for response in responses:
        assert len(response.token_ids) == len(response.logps) == len(response.processed_logps)
        *before, last = response.token_ids
        assert not {STOP, 8} & set(before)
        stopped = last in (STOP, 8)
        assert response.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(response.token_ids) == 12
    assert {response.finish_reason for response in responses} == set(FinishReason)

    every = generate(small_model(stops=tuple(range(VOCABULARY))), requests(5))
    assert [len(response.token_ids) for response in every] == [1] * 5
    assert all(response.finish_reason == FinishReason.STOP for response in every)

    none = generate(small_model(stops=()), requests(60), sampling=plain(12))
    assert {len(response.token_ids) for response in none} == {12}
    assert any(STOP in response.token_ids[:-1] for response in none)  # pad == eos inside a response is a token like any other


def test_one_token_at_most():
    responses = generate(small_model(), requests(6), sampling=plain(1))
    assert [len(response.token_ids) for response in responses] == [1] * 6


def test_greedy():
    loaded, asked = small_model(stops=()), requests(5)
    for request, response in zip(asked, generate(loaded, asked, sampling=plain(10, 0.0)), strict=True):
        logits_TV = forward_logits(loaded, request.prompt_ids, response.token_ids)
        assert response.token_ids == logits_TV.argmax(-1).tolist()
        assert response.processed_logps == [0.0] * 10
        np.testing.assert_allclose(response.logps, logits_TV.log_softmax(-1).amax(-1), atol=1e-5)


def test_no_request_no_response():
    assert generate(small_model(), []) == []


def numpy_state() -> np.ndarray:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return state["state"]["key"].copy()


def test_training_flags_gradients_and_random_states_are_left_alone():
    loaded = small_model()
    loaded.model.train()
    loaded.body.get_submodule("layers.0").eval()
    before = [module.training for module in loaded.model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy_state()
    generate(loaded, requests(5))
    assert [module.training for module in loaded.model.modules()] == before and len(set(before)) == 2
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(numpy_state(), states[2])
    assert all(weight.grad is None and weight.requires_grad for weight in loaded.model.parameters())
    loaded.model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()  # nothing of the sampling blocks a later backward
    assert loaded.head_VH.grad is not None


def test_draws_do_not_depend_on_the_global_seed():
    loaded, asked = small_model(), requests(5)
    torch.manual_seed(1)
    first = generate(loaded, asked)
    torch.manual_seed(2)
    assert generate(loaded, asked) == first  # bitwise, log-probs included


def test_adapters_are_active_and_dropout_is_not():
    """With LoRA the samples are the adapted model's, and training-time dropout does not reach them."""
    loaded = small_model()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_alpha=64, lora_dropout=0.5, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        wrapped = get_peft_model(loaded.model, config)
    loaded = replace(loaded, model=cast(PreTrainedModel, wrapped), lora=True)  # the body stays the same module
    loaded.model.train()
    asked = requests(6)
    responses = generate(loaded, asked)
    base = small_model()
    gaps = []
    for request, response in zip(asked, responses, strict=True):
        picked = torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)
        adapted_T = forward_logits(loaded, request.prompt_ids, response.token_ids).log_softmax(-1)[picked]
        np.testing.assert_allclose(response.logps, adapted_T, atol=1e-5)
        gaps.append((forward_logits(base, request.prompt_ids, response.token_ids).log_softmax(-1)[picked] - adapted_T).abs().max())
    assert max(gaps) > 0.1


def test_bfloat16_weights_keep_float32_logits():
    """Sampler and scorer share one projection: log-probs equal a float32 head over the bfloat16 body, not bfloat16 logits."""
    loaded, asked = small_model(dtype=torch.bfloat16), requests(1, shortest=9)
    response = generate(loaded, asked, sampling=plain(1))[0]
    with torch.no_grad():
        hidden_H = loaded.body(input_ids=torch.tensor([asked[0].prompt_ids])).last_hidden_state[0, -1]
        expected = (hidden_H.double() @ loaded.head_VH.double().T).log_softmax(-1)[response.token_ids[0]].item()
    assert response.logps[0] == pytest.approx(expected, abs=1e-5)


def test_sliding_windows():
    """Alternating full and windowed layers, prompts and responses longer than the window, padding on the left."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            pad_token_id=STOP,
            initializer_range=0.3,
        )
        loaded = as_loaded(Gemma3ForCausalLM(config))
    asked = requests(9)
    asked += [Request(prompt_ids=asked[0].prompt_ids, seed=5)]
    for request, response in zip(asked, generate(loaded, asked, sampling=plain(20)), strict=True):
        logps_TV = forward_logits(loaded, request.prompt_ids, response.token_ids).log_softmax(-1)
        expected_T = logps_TV[torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)]
        np.testing.assert_allclose(response.logps, expected_T, atol=1e-5)


def test_a_recurrent_past_is_refused():
    config = Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=1, expand=2
    )
    with pytest.raises(ValueError, match="mamba2 keeps its past in LinearAttentionLayer"):
        TransformersEngine(**VALUES).build(as_loaded(Mamba2ForCausalLM(config)), processed=False)


def test_versions_and_contexts():
    loaded = small_model()
    sampler = TransformersEngine(**VALUES).build(loaded, processed=False)
    asked = requests(2)
    assert [response.weights_version for response in sampler.generate(asked, sampling=plain(2))] == [0, 0]
    sampler.sync(weights_version=3)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.mul_(1.01)
    fresh = sampler.generate(asked, sampling=plain(2))
    assert [response.weights_version for response in fresh] == [3, 3]
    expected = forward_logits(loaded, asked[0].prompt_ids, fresh[0].token_ids).log_softmax(-1)[0, fresh[0].token_ids[0]]
    assert fresh[0].logps[0] == pytest.approx(expected.item(), abs=1e-5)  # the trainer's new weights, not a copy of the old
    with pytest.raises(ValueError, match=r"max_len=250 plus a prompt of \d+ tokens exceeds model.context=256"):
        sampler.generate(requests(1, shortest=20), sampling=plain(250))


def test_logits_that_are_not_finite_stop_the_run():
    loaded = small_model()
    with torch.no_grad():
        loaded.head_VH[5, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="weights version 0"):
        generate(loaded, requests(3))


def test_processing_by_hand():
    """p = .5 .3 .15 .05 at temperature 1."""
    logits_RV = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()

    def kept(temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> list[float]:
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_len=1)
        return [round(prob, 6) for prob in process(logits_RV, sampling).exp()[0].tolist()]

    assert kept() == kept(top_k=4) == kept(top_k=99) == [0.15, 0.5, 0.05, 0.3]
    assert kept(top_k=1) == kept(top_p=1e-9) == kept(top_p=0.49) == [0, 1, 0, 0]
    assert kept(top_p=0.51) == kept(top_p=0.79) == kept(top_k=2) == [0, 0.625, 0, 0.375]
    assert kept(top_p=0.81) == kept(top_k=3) == [0.157895, 0.526316, 0, 0.315789]
    assert kept(top_p=0.96) == [0.15, 0.5, 0.05, 0.3]
    assert kept(top_k=2, top_p=0.62) == [0, 1, 0, 0]  # mass is that of the two: .625 and .375
    squares = np.array([0.15, 0.5, 0.05, 0.3]) ** 2
    np.testing.assert_allclose(kept(temperature=0.5), squares / squares.sum(), atol=1e-6)
    assert kept(temperature=0.5, top_p=0.69) == [0, round(0.25 / 0.34, 6), 0, round(0.09 / 0.34, 6)]  # .25 of .365 is .685


def test_nucleus_of_a_large_vocabulary():
    """Peaked rows, whose nucleus the first look holds, beside a flat one, which needs the whole vocabulary sorted."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(3, 3000, generator=generator, dtype=torch.float64) * torch.tensor([[8.0], [0.1], [4.0]])
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=None, max_len=1)
    expected_RV = torch.stack([processed_by_hand(logits_V, sampling) for logits_V in logits_RV])
    assert [(row > -np.inf).sum().item() > NUCLEUS for row in expected_RV] == [False, True, False]
    torch.testing.assert_close(process(logits_RV, sampling), expected_RV, atol=1e-10, rtol=0)
    for place in range(3):
        alone_RV = process(logits_RV[place : place + 1], sampling)
        torch.testing.assert_close(alone_RV, expected_RV[place : place + 1], atol=1e-10, rtol=0)


def test_inversion_by_hand():
    """Boundaries belong to the next token; zero mass is never drawn, first or last; u just below 1 does not fall off."""
    probs_RV = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    drawn = {
        u: invert(probs_RV.log(), torch.tensor([u], dtype=torch.float64)).item() for u in (0.0, 0.2, 0.25, 0.7, 0.75, 1 - 2**-53)
    }
    assert drawn == {0.0: 1, 0.2: 1, 0.25: 3, 0.7: 3, 0.75: 4, 1 - 2**-53: 4}

    generator = torch.Generator().manual_seed(0)
    logps_RV = torch.randn(2000, 501, generator=generator).mul(5).log_softmax(-1)
    logps_RV[:, -200:] = float("-inf")
    logps_RV[:, :100] = float("-inf")  # what is left does not sum to 1
    tokens_R = invert(logps_RV, torch.full((2000,), 1 - 2**-53, dtype=torch.float64))
    assert (logps_RV.gather(-1, tokens_R[:, None]) > float("-inf")).all()
    assert (invert(logps_RV, torch.zeros(2000, dtype=torch.float64)) >= 100).all()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_len", 0, "rollout.max_len=0: must be at least 1."),
        ("samples", 0, "rollout.samples=0: must be at least 1."),
        ("max_rows", -1, "rollout.max_rows=-1: must be at least 1."),
        ("temperature", 0.0, "rollout.temperature=0.0: must be above 0"),
        ("temperature", float("nan"), "rollout.temperature=nan: must be above 0"),
        ("top_p", 0.0, "rollout.top_p=0.0: must be above 0 and at most 1"),
        ("top_p", 1.5, "rollout.top_p=1.5: must be above 0 and at most 1"),
        ("top_k", 0, "rollout.top_k=0: must be at least 1, or null"),
    ],
)
def test_values_out_of_range(key, value, message):
    with pytest.raises(ValueError) as error:
        TransformersEngine(**{**VALUES, key: value})
    assert str(error.value).startswith(message)


def test_the_option_is_read_without_torch():
    code = "import sys; from opsd.registry import lookup; lookup('rollout', 'transformers'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
