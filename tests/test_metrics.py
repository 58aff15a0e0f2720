"""What steps are described by: divergence by kind of token, and which kind a token is."""

from __future__ import annotations

import time

import pytest
import torch

from opsd.batching import Reduction, collate, token_weights
from opsd.metrics import kind_metrics, repeated, token_metrics
from opsd.scoring import DIAGNOSTICS
from opsd.token_kinds import KINDS, STYLE, TokenKinds, kind_of
from opsd.types import FinishReason, Problem, Prompt, Response, Rollout


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (
            "digits",
            ["7", " 12", "3.", "x2", "+", " =", "}{", "\\", " \\(", "$", "}$.\n", ")\n\n", "\\frac", "frac", "\\left", "boxed"],
        ),
        ("style", ["Wait", " wait", " So", " therefore,", "Let", "Hmm", " Let\N{RIGHT SINGLE QUOTATION MARK}s", "then:", " Okay."]),
        (
            "other",
            ["", " ", "\n\n", ".", ",", " left", " solution", "x", "sothen", "\N{REPLACEMENT CHARACTER}", "?!", "because of"],
        ),
    ],
)
def test_what_kind_a_text_is(kind, texts):
    assert {text: kind_of(text) for text in texts} == dict.fromkeys(texts, kind)


def test_style_words_are_spelt_as_they_are_looked_up():
    assert all(word == word.strip().lower() and kind_of(word) == "style" for word in STYLE)


def rollout(token_ids: list[int]) -> Rollout:
    problem = Problem(id="p", text="", solution=None, answer=None)
    prompt = Prompt(problem=problem, student_ids=[1], teacher_ids=[1], shortened=False, analysis_ids=None)
    zeros = [0.0] * len(token_ids)
    response = Response(token_ids=token_ids, logps=zeros, processed_logps=zeros, finish_reason=FinishReason.STOP, weights_version=0)
    return Rollout(prompt=prompt, response=response, text="")


def test_divergence_by_kind_is_the_mean_over_its_tokens_of_all_micro_batches(tokenizer):
    """Two micro-batches: `1+` and `so 2 x<|im_end|>`; a chat marker is other, whatever its letters spell."""
    kinds = TokenKinds(tokenizer, vocabulary=len(tokenizer))
    rows = [rollout(tokenizer.encode("1+")), rollout([*tokenizer.encode("2x"), tokenizer.eos_token_id])]
    names = [[KINDS[kind] for kind in kinds.of(torch.tensor(row.response.token_ids)).tolist()] for row in rows]
    assert names == [["digits", "digits"], ["digits", "other", "other"]]
    weights = token_weights(rows, Reduction.token)
    batches = [collate([row], [weight], torch.device("cpu")) for row, weight in zip(rows, weights, strict=True)]
    divergences = [torch.tensor([0.5, 1.0]), torch.tensor([3.0, 0.25, 0.125])]
    diagnostics = [torch.zeros(len(d), len(DIAGNOSTICS)) for d in divergences]
    for table, divergence_T in zip(diagnostics, divergences, strict=True):
        table[:, DIAGNOSTICS.index("divergence")] = divergence_T
    metrics = kind_metrics(batches, diagnostics, columns=DIAGNOSTICS, kinds=kinds)
    assert metrics == {
        "train/tokens_digits": 3 / 5,
        "train/divergence_digits": 4.5 / 3,
        "train/tokens_style": 0.0,
        "train/tokens_other": 2 / 5,
        "train/divergence_other": 0.375 / 2,
    }
    whole = token_metrics(batches, diagnostics, columns=DIAGNOSTICS, teacher=True)["train/divergence"]
    parts = [metrics[f"train/tokens_{kind}"] * metrics.get(f"train/divergence_{kind}", 0.0) for kind in KINDS]
    assert sum(parts) == pytest.approx(whole, abs=1e-12)


def test_a_step_without_tokens_has_no_kinds(tokenizer):
    batch = collate([rollout([])], [0.0], torch.device("cpu"))
    kinds = TokenKinds(tokenizer, vocabulary=len(tokenizer))
    assert kind_metrics([batch], [torch.zeros(0, len(DIAGNOSTICS))], columns=DIAGNOSTICS, kinds=kinds) == {}


def test_kinds_cost_nothing_once_they_are_known(tokenizer):
    """32,768 tokens of a vocabulary of 151,936: each entry is decoded when it first comes up, and never again."""
    kinds = TokenKinds(tokenizer, vocabulary=151_936)
    ids_T = torch.randint(0, len(tokenizer), (32_768,), generator=torch.Generator().manual_seed(0))
    first = kinds.of(ids_T)
    kinds.tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]  # nothing is left to ask it
    began = time.perf_counter()
    assert torch.equal(kinds.of(ids_T), first)
    assert time.perf_counter() - began < 0.05


def test_repeated_text():
    assert repeated(range(50)) == 0.0
    assert repeated([1] * 50) == pytest.approx(42 / 43)
