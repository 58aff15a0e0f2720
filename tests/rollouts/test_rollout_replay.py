"""A replay reads how its run sampled, refuses what would ask other prompts, and holds every step against its own prompts."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from opsd import records
from opsd.checkpoints import Progress
from opsd.config import Run, freeze, load, params, to_run
from opsd.files import write_json
from opsd.inputs import check_inputs, problem_stream, training_problems
from opsd.rollouts.replay import Replayed
from opsd.stream import digest
from opsd.types import FinishReason, Prompt, Response, Rollout

CONF = Path(__file__).parents[2] / "conf"
SMALL = ("train.batch=4", "rollout.samples=2", "rollout.max_len=24", "rollout.top_p=0.9", "rollout.top_k=20", "data.max_rows=50")
STEPS = 2


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def prompts_of(run: Run, steps: int) -> list[list[Prompt]]:
    """The first steps' prompts, each as often as it is sampled."""
    stream = problem_stream(run, training_problems(run), tokenizer=run.model.tokenizer(), context=4096)
    taken = [stream.take(run.train.batch // run.rollout.samples)[0] for _ in range(steps)]
    return [[prompt for prompt in prompts for _ in range(run.rollout.samples)] for prompts in taken]


def responses_of(step: int) -> list[Response]:
    return [
        Response(
            token_ids=[step, row, 2],
            logps=[-0.5, -0.25, -row],
            processed_logps=[-0.125, 0.0, -row],
            finish_reason=FinishReason.STOP,
            weights_version=step - 1,
        )
        for row in range(4)
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two steps of a run leave for a replay: its frozen config, its rollouts, and which problems it had."""
    run_dir = tmp_path_factory.mktemp("recorded")
    cfg = composed(*SMALL)
    freeze(cfg, run_dir / "config.yaml")
    problems = digest(training_problems(to_run(cfg)).problems)
    progress = Progress(step=0, position=[[0, 0]], elapsed_s=0.0, mlflow_run_id="", engine="torch", processes=1, problems=problems)
    (run_dir / "checkpoints" / "step_000000").mkdir(parents=True)
    write_json(run_dir / "checkpoints" / "step_000000" / "state.json", asdict(progress))
    for step, prompts in enumerate(prompts_of(to_run(cfg), STEPS), start=1):
        pairs = zip(prompts, responses_of(step), strict=True)
        records.save(run_dir, step, [Rollout(prompt=prompt, response=response, text="") for prompt, response in pairs])
    return run_dir


def replay(recorded: Path, *overrides: str) -> DictConfig:
    basis = ("rollout=replay", f"rollout.path={recorded}", "train.batch=4", "data.max_rows=50", f"train.steps={STEPS}")
    return composed(*basis, *overrides)


def test_how_it_was_sampled_is_read_checked_frozen_and_shown(recorded, tmp_path):
    cfg = replay(recorded, "loss=sampled_token")
    rollout = to_run(cfg).rollout
    assert (rollout.max_len, rollout.samples, rollout.temperature, rollout.top_p, rollout.top_k) == (24, 2, 1.0, 0.9, 20)
    assert rollout.sampling == to_run(composed(*SMALL)).rollout.sampling
    assert not rollout.samples_anew
    assert params(cfg)["rollout.max_len"] == "24" and params(cfg)["rollout"] == "replay"
    freeze(cfg, tmp_path / "config.yaml")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["rollout"]["max_len"] == 24
    assert load(tmp_path).rollout == rollout
    check_inputs(to_run(cfg), {})


def test_a_frozen_replay_tells_its_values_without_the_recorded_run(recorded, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(recorded, source)
    (tmp_path / "run").mkdir()
    freeze(replay(source), tmp_path / "run" / "config.yaml")
    shutil.rmtree(source)
    run = load(tmp_path / "run")
    assert (run.rollout.max_len, run.rollout.top_k) == (24, 20)
    with pytest.raises(ValueError, match="is not a run directory"):
        check_inputs(run, {})


def test_each_step_gets_that_steps_responses(recorded):
    run = to_run(replay(recorded))
    for step, prompts in enumerate(prompts_of(run, STEPS), start=1):
        assert Replayed(run.rollout.replayed).responses(prompts, step=step) == responses_of(step)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_len=32"], r"^rollout\.max_len=32: the responses of rollout\.path=.* with 24; set rollout\.max_len=24\.$"),
        (["rollout.temperature=1.1"], r"^rollout\.temperature=1\.1: .* set rollout\.temperature=1\.0\.$"),
        (["rollout.top_k=5"], r"^rollout\.top_k=5: .* with 20; set rollout\.top_k=20\.$"),
        (["rollout.samples=1"], r"^rollout\.samples=1: .* set rollout\.samples=2\.$"),
        (["train.steps=3"], r"^train\.steps=3: rollout\.path=.* holds the rollouts of 2 steps; set train\.steps=2\.$"),
        (["seed=1"], r"^seed=1: rollout\.path=.* was run with seed=0; set that\.$"),
        (["train.batch=8"], r"^train\.batch=8: rollout\.path=.* was run with train\.batch=4; set that\.$"),
        (["data.max_rows=51"], r"^data=arithmetic: its problems are not those of rollout\.path=.*; give the data of that run"),
        (["prompt=paper"], r"^rollout\.path=.*: rollout 1 of step 1 .* in another prompt than this run's; give the student's side"),
        (["prompt.student_thinking=true"], r"^rollout\.path=.*: rollout 1 of step 1 answers .* in another prompt"),
    ],
)
def test_what_would_ask_other_prompts_is_refused_at_launch(recorded, overrides, message):
    with pytest.raises(ValueError, match=message):
        check_inputs(to_run(replay(recorded, *overrides)), {})


def test_a_model_with_another_tokenizer_is_refused(recorded, model_directory):
    with pytest.raises(ValueError, match=r"in another prompt .* a model with its tokenizer and chat template\.$"):
        check_inputs(to_run(replay(recorded, "model=hf", f"model.path={model_directory}", "eval=none")), {})


def test_another_teacher_side_is_no_other_prompt(recorded):
    check_inputs(to_run(replay(recorded, "prompt.teacher='{problem} {privileged}'", "prompt.privileged=answer")), {})


def test_other_prompts_on_the_way_are_refused(recorded):
    run = to_run(replay(recorded))
    first, second = prompts_of(run, STEPS)
    for prompts, said in (
        (second, "rollout 1 of step 1 answers problem"),
        (first[:3], r"holds 4 rollouts of step 1, and this run has 3; set train\.batch=4"),
        ([*first[:3], replace(first[3], student_ids=[*first[3].student_ids, 5])], "rollout 4 of step 1 .* in another prompt"),
    ):
        with pytest.raises(ValueError, match=rf"^rollout\.path={recorded}: {said}"):
            Replayed(run.rollout.replayed).responses(prompts, step=1)


def test_a_loss_that_reads_the_samplers_probability_needs_it_recorded(recorded, tmp_path):
    """As vLLM leaves it out for a loss that reads raw log-probs."""
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text((recorded / "config.yaml").read_text())
    prompts = prompts_of(to_run(composed(*SMALL)), 1)[0]
    raw = [replace(response, processed_logps=[math.nan] * 3) for response in responses_of(1)]
    records.save(
        tmp_path / "run", 1, [Rollout(prompt=prompt, response=each, text="") for prompt, each in zip(prompts, raw, strict=True)]
    )
    check_inputs(to_run(replay(recorded, "loss=sampled_token")), {})
    with pytest.raises(ValueError, match=r"^rollout\.path=.*: its sampler kept raw log-probs alone"):
        check_inputs(to_run(replay(tmp_path / "run", "loss=sampled_token")), {})


def test_what_is_no_recorded_run_is_refused(recorded, tmp_path):
    with pytest.raises(ValueError, match=r"^rollout\.path is not set: rollout=replay needs it"):
        to_run(composed("rollout=replay"))
    with pytest.raises(ValueError, match=r"^rollout\.path=.*: is not a run directory, it holds no config\.yaml"):
        to_run(replay(tmp_path))
    (tmp_path / "config.yaml").write_text("- 1")
    with pytest.raises(ValueError, match=r"^rollout\.path=.*: its config\.yaml is no frozen config"):
        to_run(replay(tmp_path))
    shutil.copy(recorded / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(ValueError, match=r"^rollout\.path=.*: holds no saved rollouts"):
        check_inputs(to_run(replay(tmp_path)), {})
    freeze(composed("rollout=dataset", "loss=nll"), tmp_path / "config.yaml")
    with pytest.raises(ValueError, match=r"^rollout\.path=.*: its responses were not sampled \(rollout=dataset\)"):
        to_run(replay(tmp_path))
