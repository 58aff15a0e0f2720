"""`do=check` prints and refuses as it should, and a baseline says what is to be expected and what was gained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from composing import CONF, composed, rows, run_of

from opsd.config import freeze, load, params
from opsd.evaluate import save_report
from opsd.evaluation.statistics import paired_difference
from opsd.inputs import problem_stream, training_problems
from opsd.launch.local import Outcome
from opsd.launch.main import main
from opsd.launch.plan import Job, label
from opsd.launch.table import line
from opsd.preflight.baseline import check_baseline, measured, versus
from opsd.preflight.pace import pace
from opsd.preflight.survey import survey, tokens
from opsd.tracking import Store
from opsd.types import EvalReport

FEW = ["data.max_rows=64", "train.steps=10", "train.batch=8"]


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


# the baseline


def report_of(rates: dict[str, float], *, benchmark: str = "arithmetic") -> EvalReport:
    metrics = {"avg_at_4": 25.0, "mean_tokens": 40.0, "samples": 240.0, "truncated_rate": 0.0}
    return EvalReport(benchmark=benchmark, step=10, k=4, metrics=metrics, solve_rates=rates, samples=[], canonical=False)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run directory as a run of 10 steps leaves it, with round numbers."""
    run_dir = tmp_path / "earlier"
    run_dir.mkdir()
    freeze(composed(*FEW, "eval.samples=4"), run_dir / "config.yaml")
    step = {"train/objective": 0.1, "rollout/mean_len": 30.0, "rollout/truncated": 0.25, "rollout/boxed": 0.5}
    lines: list[dict[str, Any]] = [{"step": n, **step, "timings": {"time/step_s": 2.0}} for n in range(1, 11)]
    lines[0]["timings"]["time/step_s"] = 50.0  # a slow first step
    lines.append({"step": 10, "timings": {"time/evaluation_s": 6.0}})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_report(report_of({"a": 0.25, "b": 0.5, "c": 0.0}), run_dir / "evaluations" / "step_000010")
    return run_dir


def test_time_is_the_baselines_scaled_by_tokens(earlier: Path) -> None:
    base = measured(str(earlier))
    assert (base.step_s, base.mean("rollout/mean_len"), base.mean("rollout/truncated")) == (2.0, 30.0, 0.25)
    for batch, factor in ((8, 1), (24, 3)):
        run = run_of(*FEW, f"train.batch={batch}", "eval.samples=12")
        found = survey(problem_stream(run, training_problems(run), tokenizer=run.model.tokenizer(), context=4096), most=64)
        expected = tokens(run, found, response=30, evaluation=40, num_evaluated=60)
        ahead = pace(run, base, expected)
        assert ahead.step_s == pytest.approx(2.0 * factor, rel=1e-12)
        assert ahead.evaluation_s == pytest.approx(6.0 * 60 * 12 * 40 / (240 * 40), rel=1e-12)
        assert ahead.total_s == pytest.approx(10 * 2.0 * factor + 2 * 18.0, rel=1e-12)
    with pytest.raises(ValueError, match="^the baseline trained model=tiny in other settings"):
        pace(run_of(*FEW, "model=tiny_lora"), base, expected)


def test_the_final_score_is_held_against_the_baselines(earlier: Path) -> None:
    told = versus(str(earlier), report_of({"a": 0.75, "b": 0.5, "c": 0.25}))
    right = paired_difference([0.25, 0.5, 0.0], [0.75, 0.5, 0.25])
    assert told["difference"]["mean"] == pytest.approx(25.0) == right.mean
    assert (told["difference"]["low"], told["name"], told["after"]) == (right.low, "earlier", 25.0)
    run = run_of(f"baseline={earlier}")
    job = Job(run_dir=Path("outputs/x"), run=run, overrides=[], store=Store(uri="sqlite:///x.db", experiment_id="1"), run_id="1")
    result = {"benchmark": "arithmetic", "metric": "avg_at_4", "before": 10.0, "after": 50.0, "baseline": told}
    said = line(job, Outcome(status="finished", message=None, result=result), "url")
    assert f"10.0 -> 50.0  vs baseline earlier +25.0 [{right.low:+.1f}, {right.high:+.1f}]  url" in said
    other = versus(str(earlier), report_of({"a": 0.75}, benchmark="aime24"))
    assert other["difference"] is None and other["why"].startswith("not compared: benchmark=arithmetic and benchmark=aime24")
    shutil.rmtree(earlier / "evaluations")
    assert versus(str(earlier), report_of({"a": 1.0}))["why"] == "not compared: it was not scored"


def test_a_baseline_is_beside_the_experiment(earlier: Path, somewhere: Path) -> None:
    cfg = composed("baseline=../earlier", "name=x")
    freeze(cfg, somewhere / "config.yaml")
    assert load(somewhere).baseline == str(somewhere / ".." / "earlier")
    assert "baseline" not in params(cfg)
    assert label(["baseline=../earlier", "loss=jsd"]) == "loss-jsd"
    check_baseline("../earlier")
    with pytest.raises(ValueError, match=r"^baseline=nowhere: is not a run directory, it holds no config.yaml; give"):
        check_baseline("nowhere")
    (earlier / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="^baseline=.*: has not taken a step"):
        measured(str(earlier))


# do=check


def test_check_shows_where_the_papers_prompts_differ(somewhere: Path, capsys: pytest.CaptureFixture[str], earlier: Path) -> None:
    file = rows(somewhere.parent / "rows.jsonl", [("What is 1+1?", "It is 2."), ("What is 2+2?", "word " * 3000)])
    base = composed(*FEW, "model=tiny_lora", "prompt=paper", "data=jsonl", f"data.path={file}")
    freeze(base, earlier / "config.yaml")
    command = ["do=check", "model=tiny_lora", "prompt=paper", "data=jsonl", f"data.path={file}", "prompt.max_teacher_tokens=900"]
    assert main(CONF, [*command, f"baseline={earlier}"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("ok\n")
    assert all(len(line) <= 130 for line in out.partition("\nprompts ---")[2].splitlines())
    flat = " ".join(out.split())
    assert 'student and evaluation differ: words in front ("Problem:" / nothing); instruction ("Please reason' in flat
    assert "the response starts after another boundary on each side" in flat
    assert "1 (50%) shortened, 0 dropped" in flat and "shortened: row-1 (problem " in flat
    assert "25% were cut at the limit, 50% reached a box; mean length 30" in flat
    assert "an evaluation: about" in flat
    assert list(somewhere.iterdir()) == []


def test_check_of_a_sweep_looks_at_its_first_point(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CONF, ["do=check", "-m", "loss=jsd,forward_kl", "data.max_rows=64"]) == 0
    out = capsys.readouterr().out
    assert "the first of 2 points: do=check loss=jsd data.max_rows=64" in out
    assert "student and evaluation: equal, token for token" in out
    assert "not estimated: give baseline=RUN_DIR" in out
    assert list(somewhere.iterdir()) == []


def broken(model_directory: Path, where: Path, *, template: str | None = None, tokenizer: str | None = None) -> Path:
    shutil.copytree(model_directory, where)
    if template is not None:
        (where / "chat_template.jinja").write_text(template)
    if tokenizer is not None:
        (where / "tokenizer.json").write_text(tokenizer)
    return where


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["baseline=nowhere"], "baseline=nowhere: is not a run directory"),
        (["eval.max_len=4090"], "eval.max_len=4090 plus the longest prompt ("),
        (
            ["model.context=100", "rollout.max_len=90", "eval=none"],
            "data: all 4096 problems of arithmetic are too long for the context",
        ),
        (["prompt.student='{problm}'"], "prompt.student: {problm} is no slot"),
        (["data=jsonl", "data.path=gone.jsonl"], "data.path=gone.jsonl: there is no such file"),
    ],
)
def test_check_refuses_what_cannot_work(
    overrides: list[str], message: str, somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(CONF, ["do=check", *overrides]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1 and "Traceback" not in err
    assert list(somewhere.iterdir()) == []


def test_check_refuses_a_template_that_breaks_the_boundary_and_a_tokenizer_that_is_none(
    tokenizer, model_directory: Path, somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_header = tokenizer.chat_template.partition("{%- if add_generation_prompt -%}")[0]
    few = ["do=check", "model=hf", "model.dtype=float32", "model.lora=null", "rollout.max_len=64"]
    headless = broken(model_directory, somewhere.parent / "headless", template=without_header)
    assert main(CONF, [*few, f"model.path={headless}"]) == 2
    err = capsys.readouterr().err
    assert "its chat template has no generation prompt" in err and err.count("\n") == 1
    torn = broken(model_directory, somewhere.parent / "torn", tokenizer="{")
    assert main(CONF, [*few, f"model.path={torn}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: model.path={torn}: transformers cannot load {torn} (") and "Traceback" not in err


def test_check_lists_problems_that_the_evaluation_asks_too(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = run_of().eval.problems()[0]
    file = rows(somewhere.parent / "rows.jsonl", [("What is 1+1?", "2"), (asked.text, "s")])
    assert main(CONF, ["do=check", "data=jsonl", f"data.path={file}"]) == 2
    err = capsys.readouterr().err
    assert "asks 1 of its problems too" in err and f"row-1 ~ {asked.id}" in err
