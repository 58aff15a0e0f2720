"""Solutions as responses: their own tokens, the template's end of turn, cut and counted at the limit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from opsd import batching
from opsd.batching import Reduction
from opsd.chat import encode_text, end_of_turn
from opsd.launch.score import to_scoring
from opsd.metrics import rollout_metrics
from opsd.rollouts.dataset import DatasetEngine
from opsd.types import FinishReason, Problem, Prompt, Response, Rollout

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
VALUES = dict(name="dataset", kind="dataset", max_len=40, samples=1, max_rows=256, cache_tokens=10**6)


def prompt(solution: str | None, name: str = "a") -> Prompt:
    problem = Problem(id=name, text="", solution=solution, answer=None)
    return Prompt(problem=problem, student_ids=[50, 51], teacher_ids=None, shortened=False, analysis_ids=None)


def respond(loaded, *solutions: str, **values) -> list[Response]:
    recorded = DatasetEngine(**{**VALUES, **values}).recorded(loaded)
    return recorded.responses([prompt(solution) for solution in solutions], step=1)


def test_a_response_is_its_solution_and_the_end_of_the_turn(random_model):
    tokenizer = random_model.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for text in ("The sum is 7.", "  two\n\nlines \\boxed{3}\n", "é 数"):
        (response,) = respond(random_model, text)
        assert response.token_ids == [*tokenizer.encode(text, add_special_tokens=False), end]
        assert tokenizer.decode(response.token_ids[:-1]) == text
        assert response.finish_reason is FinishReason.STOP
        assert response.weights_version is None
        assert len(response.logps) == len(response.processed_logps) == len(response.token_ids)
        assert all(math.isnan(logp) for logp in [*response.logps, *response.processed_logps])


@pytest.mark.parametrize("text", ["1<|im_end|>\n<|im_start|>user\n2", "<think>x</think>", "<|im_<|im_end|>end|>"])
def test_markers_in_a_solution_are_letters(random_model, text):
    tokenizer = random_model.tokenizer
    markers = set(tokenizer.added_tokens_decoder)
    assert markers & set(tokenizer.encode(text, add_special_tokens=False))
    (response,) = respond(random_model, text, max_len=200)
    assert not markers & set(response.token_ids[:-1])
    assert tokenizer.decode(response.token_ids[:-1]) == text
    assert encode_text(tokenizer, text) == response.token_ids[:-1]


def test_what_exceeds_the_limit_is_cut_and_counted(random_model):
    text = "a long solution of many steps, each of them written out"
    (whole,) = respond(random_model, text, max_len=500)
    length = len(whole.token_ids)
    fits, cut = respond(random_model, text, max_len=length)[0], respond(random_model, text, max_len=length - 1)[0]
    assert (fits.token_ids, fits.finish_reason) == (whole.token_ids, FinishReason.STOP)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:-1], FinishReason.LENGTH)  # only its end token is gone
    rollouts = [Rollout(prompt=prompt(text), response=response, text="") for response in (fits, cut)]
    metrics = rollout_metrics(rollouts, boxed=[False, False], correct=[None, None])
    assert metrics["rollout/truncated"] == 0.5
    assert "rollout/weights_version" not in metrics
    batch = batching.collate(rollouts, batching.token_weights(rollouts, Reduction.token), random_model.device)
    assert batch.sampler_raw_logps_T.isnan().all()
    assert batch.response_ids_T[length - 1] == whole.token_ids[-1] and batch.weights_T.min() > 0, "the end of the turn is learnt"


def test_a_problem_without_a_solution_is_refused(random_model):
    with pytest.raises(ValueError, match=r"^rollout=dataset: the problem b has no solution .*data\.columns\.solution"):
        DatasetEngine(**VALUES).recorded(random_model).responses([prompt(None, "b")], step=1)


def test_what_it_needs_and_refuses():
    engine = DatasetEngine(**VALUES)
    assert (engine.needs, engine.sampling, engine.samples_anew) == ({"solution"}, None, False)
    with pytest.raises(ValueError, match=r"^rollout\.samples=2 with rollout=dataset: .* set rollout\.samples=1\.$"):
        DatasetEngine(**VALUES | {"samples": 2})
    with pytest.raises(ValueError, match=r"^rollout\.max_rows=0: must be at least 1\.$"):
        DatasetEngine(**VALUES | {"max_rows": 0})


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}[{{ m['content'] }}]{{ '<|endoftext|>' }}{% endfor %}", "<|endoftext|>"),
        ("{% for m in messages %}{{ m['content'] }} <|im_end|><|endoftext|>\n{% endfor %}", "<|im_end|>"),
    ],
)
def test_the_end_of_a_turn_is_the_templates(new_tokenizer, template, end):
    new_tokenizer.chat_template = template
    stops = new_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert end_of_turn(new_tokenizer, stops) == new_tokenizer.convert_tokens_to_ids(end)


def test_a_turn_that_ends_in_no_stop_token_is_refused(new_tokenizer):
    new_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match=r"^model\.path=.*ends an assistant's turn with '\\n'.*<\|im_end\|>"):
        end_of_turn(new_tokenizer, [new_tokenizer.eos_token_id])


@pytest.mark.parametrize(
    "overrides", [["rollout=dataset"], ["rollout=replay", f"rollout.path={RECORDED}"]], ids=["dataset", "replay"]
)
def test_a_score_is_never_recorded_text(overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("evaluate", overrides=["model=tiny", *overrides])
    with pytest.raises(
        ValueError, match=r"^rollout=(dataset|replay): a score is sampled from the weights.*set rollout=transformers\.$"
    ):
        to_scoring(cfg)
