"""One evaluation from problems to report: by hand with scripted responses, and with a random model through the real sampler."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import dataclass, field, replace

import pytest

from opsd import chat
from opsd.evaluate import compare, evaluate, load_report, save_report
from opsd.evaluation.math import MathBenchmark
from opsd.registry import lookup
from opsd.rollouts.base import Sampler
from opsd.seeding import derive
from opsd.types import FinishReason, LoadedModel, Request, Response, Sampling

PROBLEMS = [
    {"id": "p1", "problem": "What is 3 + 4?", "answer": 7},
    {"id": "p2", "problem": "What is 2 + 1?", "answer": "3"},
    {"id": "p3", "problem": "What is 6 + 6?", "answer": "12"},
]
END = "<|im_end|>"
WRITTEN = {
    "p1": [
        f"<think>\n\\boxed{{9}}\n</think>\n\nIt is \\boxed{{7}}.{END}",
        f"\\boxed{{07}}{END}",
        f"\\boxed{{8}}{END}",
        f"7 é{END}",
    ],
    "p2": [f"\\boxed{{3}}{END}", f"\\boxed{{4}}{END}", f"\\boxed{{4}}{END}", f"\\fbox{{3}}{END}"],
    "p3": ["\\boxed{12"] * 4,
}


@dataclass(kw_only=True, slots=True)
class Scripted(Sampler):
    """Answers each prompt with the next of its written responses. Cut where the script has no end of turn."""

    loaded: LoadedModel
    script: dict[tuple[int, ...], list[str]]
    asked: list[list[Request]] = field(default_factory=list)

    def generate(self, requests: list[Request], *, sampling: Sampling) -> list[Response]:
        self.asked.append(requests)
        left = {prompt: iter(texts) for prompt, texts in self.script.items()}
        return [self.respond(next(left[tuple(request.prompt_ids)])) for request in requests]

    def respond(self, text: str) -> Response:
        ids = self.loaded.tokenizer.encode(text, add_special_tokens=False)
        finish = FinishReason.STOP if text.endswith(END) else FinishReason.LENGTH
        zeros = [0.0] * len(ids)
        return Response(token_ids=ids, logps=zeros, processed_logps=zeros, finish_reason=finish, weights_version=0)


@pytest.fixture
def benchmark(tmp_path) -> MathBenchmark:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return MathBenchmark(
        name="sums",
        kind="math",
        path=str(file),
        repo=None,
        revision=None,
        split=None,
        columns={"id": "id", "problem": "problem", "answer": "answer"},
        max_rows=None,
        samples=4,
        every=0,
        in_run=True,
        max_len=200,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        thinking=True,
        instruction="\n\nAnswer.",
    )


def scripted(loaded: LoadedModel, benchmark: MathBenchmark, written=WRITTEN) -> Scripted:
    prompts = {
        problem.id: tuple(chat.render(loaded.tokenizer, problem.text + "\n\nAnswer.", thinking=True))
        for problem in benchmark.problems()
    }
    return Scripted(loaded=loaded, script={prompts[name]: texts for name, texts in written.items()})


def test_a_report_by_hand(random_model, benchmark):
    sampler = scripted(random_model, benchmark)
    told = []
    report = evaluate(benchmark, loaded=random_model, sampler=sampler, seed=3, step=25, on_progress=told.append)
    assert told == ["sums: sampling 12 responses", "sums: grading 12 responses"]
    assert (report.benchmark, report.step, report.k, report.canonical) == ("sums", 25, 4, False)
    assert report.solve_rates == {"p1": 0.5, "p2": 0.25, "p3": 0.0}
    lengths = [len(random_model.tokenizer.encode(text, add_special_tokens=False)) for texts in WRITTEN.values() for text in texts]
    assert report.metrics == pytest.approx(
        {
            "avg_at_4": 25,
            "pass_at_4": 200 / 3,
            "maj_at_4": 100 * (1 + 0.25 + 0) / 3,  # p2: 3 and 4 tie, and the released rule takes one of the two 3s
            "avg_at_4_strict": 100 / 3,
            "grader_disagreements": 1,
            "se_sampling": 100 * math.sqrt((0.25 + 0.1875) / 3) / 3,
            "se_clustered": 100 * math.sqrt(0.0625 / 3),
            "boxed_rate": 50,
            "unread_rate": 0,
            "truncated_rate": 100 / 3,
            "mean_tokens": sum(lengths) / 12,
            "samples": 12,
        }
    )
    first, last = report.samples[0], report.samples[-1]
    assert first.text == WRITTEN["p1"][0].removesuffix(END)  # marks of thinking and white space as they were
    assert (first.extracted, first.canonical, first.gold, first.frozen, first.strict) == ("7", "7", "7", True, True)
    assert report.samples[3].text == "7 é"
    assert (last.problem_id, last.sample, last.finish_reason, last.extracted, last.boxed) == ("p3", 3, "length", None, False)


def test_one_call_with_a_seed_for_every_sample(random_model, benchmark):
    sampler = scripted(random_model, benchmark)
    evaluate(benchmark, loaded=random_model, sampler=sampler, seed=3, step=0)
    evaluate(benchmark, loaded=random_model, sampler=sampler, seed=3, step=50)
    evaluate(benchmark, loaded=random_model, sampler=sampler, seed=4, step=0)
    first, later, other = ([request.seed for request in requests] for requests in sampler.asked)
    assert first == [derive(3, "eval", "sums", name, sample) for name in ("p1", "p2", "p3") for sample in range(4)]
    assert later == first and not set(other) & set(first) and len(set(first)) == 12
    [prompt] = {tuple(request.prompt_ids) for request in sampler.asked[0][:4]}
    assert random_model.tokenizer.decode(prompt) == "<|im_start|>user\nWhat is 3 + 4?\n\nAnswer.<|im_end|>\n<|im_start|>assistant\n"


def test_marks_of_thinking_stay_where_they_are_special_tokens(random_model, benchmark):
    loaded = replace(random_model, tokenizer=copy.deepcopy(random_model.tokenizer))
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    assert loaded.tokenizer.convert_tokens_to_ids("</think>") in loaded.tokenizer.all_special_ids
    report = evaluate(benchmark, loaded=loaded, sampler=scripted(loaded, benchmark), seed=0, step=0)
    assert report.samples[0].text == WRITTEN["p1"][0].removesuffix(END)


def test_the_real_sampler_gives_the_same_report_twice(random_model):
    arithmetic = lookup("eval", "arithmetic")(
        name="arithmetic",
        kind="arithmetic",
        max_rows=3,
        kinds=["dial"],
        min_steps=3,
        max_steps=5,
        samples=4,
        every=0,
        in_run=True,
        max_len=12,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        thinking=False,
        instruction="",
    )
    engine = lookup("rollout", "transformers")(
        name="transformers",
        kind="transformers",
        max_len=8,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        samples=1,
        max_rows=5,
        cache_tokens=1000,
    )
    reports = [
        evaluate(arithmetic, loaded=random_model, sampler=engine.build(random_model, processed=False), seed=seed, step=0)
        for seed in (1, 1, 2)
    ]
    assert reports[0] == reports[1] and reports[0].samples != reports[2].samples
    assert reports[0].metrics["samples"] == 12 and len({sample.text for sample in reports[0].samples}) > 6
    assert all(sample.num_tokens <= 12 for sample in reports[0].samples)


def test_too_little_room_is_refused_before_anything_is_sampled(random_model, benchmark):
    sampler = scripted(random_model, benchmark)
    longest = max(len(prompt) for prompt in sampler.script)
    exact = replace(benchmark, max_len=random_model.context - longest)
    evaluate(exact, loaded=random_model, sampler=sampler, seed=0, step=0)
    with pytest.raises(
        ValueError, match=rf"^eval.max_len={exact.max_len + 1} plus .* set eval.max_len to at most {exact.max_len}\.$"
    ):
        evaluate(replace(exact, max_len=exact.max_len + 1), loaded=random_model, sampler=sampler, seed=0, step=0)
    assert len(sampler.asked) == 1


def test_reports_are_kept_whole(random_model, benchmark, tmp_path, monkeypatch):
    report = evaluate(benchmark, loaded=random_model, sampler=scripted(random_model, benchmark), seed=0, step=0)
    report.samples[0].text += "\u2028 \x00 \n"  # what cuts lines elsewhere
    folder = tmp_path / "evals" / "step-0"
    save_report(report, folder)
    assert load_report(folder) == report
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-0"]
    later = replace(report, step=1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_report(later, folder)
        with pytest.raises(OSError, match="No space left"):
            save_report(later, tmp_path / "evals" / "step-1")
    assert load_report(folder) == report and not (tmp_path / "evals" / "step-1").exists()
    save_report(later, folder)
    assert load_report(folder) == later
    with pytest.raises(ValueError, match=r"holds no report.json"):
        load_report(tmp_path)


def test_comparison(random_model, benchmark):
    before = evaluate(benchmark, loaded=random_model, sampler=scripted(random_model, benchmark), seed=0, step=0)
    better = WRITTEN | {"p2": [f"\\boxed{{3}}{END}"] * 4, "p3": [f"\\boxed{{12}}{END}"] * 2 + [f"\\boxed{{1}}{END}"] * 2}
    after = evaluate(benchmark, loaded=random_model, sampler=scripted(random_model, benchmark, better), seed=0, step=9)
    after = replace(after, solve_rates=dict(reversed(after.solve_rates.items())))
    result = compare(before, after)  # 0, 75 and 50 points, by problem and not by place
    error = math.sqrt((41.6666667**2 + 33.3333333**2 + 8.3333333**2) / 2 / 3)
    assert result.mean == pytest.approx(125 / 3)
    assert result.high - result.mean == pytest.approx(4.302652729911275 * error)
    for changed, message in (
        ({"benchmark": "sums_partial"}, "benchmark=sums and benchmark=sums_partial: only scores of one protocol"),
        ({"k": 8}, "k=4 and k=8: only scores of one protocol"),
        ({"solve_rates": {"p1": 1.0, "p2": 0.5}}, "sums: 1 problems are in one evaluation and not in the other (such as p3)"),
    ):
        with pytest.raises(ValueError) as refusal:
            compare(before, replace(after, **changed))
        assert str(refusal.value).startswith(message)
