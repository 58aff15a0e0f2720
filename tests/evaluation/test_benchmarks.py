"""Which problems a benchmark asks, and the name that its score may carry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from opsd.arithmetic import is_eval
from opsd.evaluation.base import Benchmark
from opsd.evaluation.math import AIME24
from opsd.registry import kinds, lookup

CONF = Path(__file__).parents[2] / "conf" / "eval"


def benchmark(name: str, /, **changed):
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text()) | changed
    return lookup("eval", values["kind"])(**values)


def test_helpers_are_no_kinds():
    assert kinds("eval") == ["arithmetic", "math", "none"]


def test_none_is_seen_by_the_loop():
    none = benchmark("none")
    assert not none.enabled and not isinstance(none, Benchmark)
    assert benchmark("arithmetic").enabled


def test_arithmetic_asks_held_out_problems_and_always_the_same():
    arithmetic = benchmark("arithmetic")
    problems = arithmetic.problems()
    assert len(problems) == 60 == len({problem.id for problem in problems})
    assert all(is_eval(problem.text) for problem in problems)
    assert all(problem.solution.endswith(f"\\boxed{{{problem.answer}}}.") for problem in problems)
    assert [problem.id for problem in problems[:2]] == [problem.id for problem in benchmark("arithmetic", max_rows=2).problems()]
    other = {problem.id for problem in benchmark("arithmetic", max_steps=3).problems()}
    assert not other & {problem.id for problem in problems}  # no id ever means two problems
    assert arithmetic.prompt_text(problems[0]) == problems[0].text
    assert (arithmetic.title(problems), arithmetic.canonical(problems)) == ("arithmetic", False)


def test_the_shipped_yaml_is_the_canonical_protocol(shared):
    aime = benchmark("aime24", path=str(shared / "data" / "aime24.jsonl"))
    problems = aime.problems()
    assert len(problems) == 30
    assert (aime.title(problems), aime.canonical(problems)) == ("aime24", True)
    assert aime.prompt_text(problems[0]) == problems[0].text + (
        "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert (aime.sampling.max_len, aime.sampling.temperature, aime.sampling.top_p, aime.sampling.top_k) == (38912, 1.0, 0.95, None)
    assert (aime.repo, aime.revision, aime.split) == (AIME24.repo, AIME24.revision, AIME24.split)
    assert aime.thinking and aime.samples == 12


@pytest.mark.parametrize(
    ("changed", "title"),
    [
        ({"samples": 4}, "aime24_custom"),
        ({"max_len": 1024}, "aime24_custom"),
        ({"temperature": 0.6}, "aime24_custom"),
        ({"top_p": 1.0}, "aime24_custom"),
        ({"top_k": 20}, "aime24_custom"),
        ({"thinking": False}, "aime24_custom"),
        ({"instruction": ""}, "aime24_custom"),
        ({"max_rows": 29}, "aime24_partial"),
        ({"max_rows": 5, "samples": 2}, "aime24_partial"),
        ({"max_rows": 30}, "aime24"),
        ({"every": 50}, "aime24"),
        ({"name": "mine"}, "mine"),
        ({"name": "mine", "max_rows": 5}, "mine_partial"),
    ],
)
def test_the_plain_name_is_for_the_canonical_protocol(shared, changed, title):
    aime = benchmark("aime24", **{"path": str(shared / "data" / "aime24.jsonl"), **changed})
    problems = aime.problems()
    assert aime.title(problems) == title
    assert aime.canonical(problems) == (title == "aime24")


def test_other_problems_are_not_the_benchmark(tmp_path, shared):
    rows = [json.loads(line) for line in (shared / "data" / "aime24.jsonl").read_text(encoding="utf-8").splitlines()]
    file = tmp_path / "rows.jsonl"
    gold = rows[3]["answer"]
    for answer, title in ((gold + 1, "aime24_custom"), ("\\frac{1}{2}", "aime24_custom"), (f"0{gold}", "aime24")):
        file.write_text("".join(json.dumps(row | ({"answer": answer} if row is rows[3] else {})) + "\n" for row in rows))
        aime = benchmark("aime24", path=str(file))
        assert aime.title(aime.problems()) == title
    others = [json.loads(line) for line in (shared / "data" / "aime_1983_2023.jsonl").read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in others[:30]))
    foreign = benchmark("aime24", path=str(file))
    assert (foreign.title(foreign.problems()), foreign.canonical(foreign.problems())) == ("aime24_custom", False)
    hub = benchmark("aime24", repo="someone/else")
    assert hub.title(benchmark("aime24", path=str(file)).problems()) == "aime24_custom"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("arithmetic", {"samples": 0}, "eval.samples=0: must be at least 1."),
        ("arithmetic", {"every": -1}, "eval.every=-1: must be at least 0."),
        ("arithmetic", {"max_len": 0}, "eval.max_len=0: must be at least 1."),
        ("arithmetic", {"temperature": -0.1}, "eval.temperature=-0.1: must be at least 0"),
        ("arithmetic", {"top_p": 0.0}, "eval.top_p=0.0: must be above 0"),
        ("arithmetic", {"top_k": 0}, "eval.top_k=0: must be at least 1, or null"),
        ("arithmetic", {"max_rows": 0}, "eval.max_rows=0: must be at least 1."),
        (
            "arithmetic",
            {"max_rows": 100, "min_steps": 1, "max_steps": 1},
            "eval.max_rows=100: only about 160 such problems are held out",
        ),
        ("arithmetic", {"kinds": ["sums"]}, "eval.kinds=['sums']: must name one or more of dial, cards."),
        ("arithmetic", {"kinds": []}, "eval.kinds=[]: must name one or more of dial, cards."),
        ("arithmetic", {"min_steps": 4, "max_steps": 3}, "eval.min_steps=4 with eval.max_steps=3: must both be at least 1"),
        ("aime24", {"max_rows": 0}, "eval.max_rows=0: must be at least 1, or null for all."),
        ("aime24", {"repo": None}, "eval.path=null with eval.repo=None and eval.split=train: set eval.path=FILE"),
    ],
)
def test_refusals(name, changed, message):
    with pytest.raises(ValueError) as refusal:
        benchmark(name, **changed)
    assert str(refusal.value).startswith(message)


def test_half_of_the_held_out_texts_can_be_drawn():
    assert len(benchmark("arithmetic", max_rows=80, min_steps=1, max_steps=1).problems()) == 80


def test_a_missing_file_is_refused_by_check(tmp_path):
    with pytest.raises(ValueError, match=r"^eval.path=.*missing.jsonl: there is no such file"):
        benchmark("aime24", path=str(tmp_path / "missing.jsonl")).check()
