"""The recipes say what they claim to say, and every experiment and every sweep runs, the embedded model in place of its own."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from whole_runs import launch, the_run

from opsd.arithmetic import chains
from opsd.checkpoints import weights
from opsd.config import Run, frozen, leaves, load, resolved, to_run

CONF = Path(__file__).parents[1] / "conf"
EXPERIMENTS = sorted(path.relative_to(CONF / "experiment").with_suffix("").as_posix() for path in CONF.glob("experiment/**/*.yaml"))
SWEEPS = sorted(path.stem for path in CONF.glob("sweep/*.yaml"))
PAPER = "opsd_qwen3_1_7b"
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def values(*overrides: str) -> dict[str, object]:
    """Every leaf of a composed config by its dotted key."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return dict(leaves(resolved(compose("config", overrides=list(overrides)))))


def run_of(*overrides: str) -> Run:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_run(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(
    ("recipe", "model", "clip"),
    [
        ("opsd_qwen3_1_7b", "Qwen/Qwen3-1.7B", 0.05),
        ("opsd_qwen3_4b", "Qwen/Qwen3-4B", 0.05),
        ("opsd_qwen3_8b", "Qwen/Qwen3-8B", 0.06),
    ],
)
def test_the_papers_recipes_hold_every_published_value(recipe: str, model: str, clip: float) -> None:
    run = run_of(f"experiment={recipe}")
    found = values(f"experiment={recipe}")
    assert (run.loss.kind, run.clipping.kind, run.clip, run.loss.top_k) == ("forward_kl", "entry", clip, None)
    assert (run.train.lr, found["train.schedule"], run.train.warmup, run.train.max_grad_norm) == (5e-6, "constant", 0, 0.1)
    assert (run.train.betas, run.train.weight_decay) == ([0.9, 0.999], 0.0)
    assert (run.train.batch, run.rollout.samples, run.train.steps, run.train.save_every) == (32, 1, 100, 25)
    assert run.train.keep >= 5  # steps 0, 25, 50, 75 and 100
    sampling = run.rollout.sampling
    assert sampling is not None
    assert (sampling.max_len, sampling.temperature, sampling.top_p, sampling.top_k) == (1024, 1.1, 0.95, 20)
    assert run.loss_temperature == 1.1
    lora = {key: found[f"model.lora.{key}"] for key in ("r", "alpha", "dropout", "targets")}
    assert lora == {"r": 64, "alpha": 128, "dropout": 0.0, "targets": ALL_LINEAR}
    assert (found["model.path"], found["model.dtype"]) == (model, "bfloat16")
    assert (run.teacher.kind, run.prompt.name, run.prompt.max_teacher_tokens) == ("initial", "paper", 20000)
    assert (run.prompt.privileged.value, run.prompt.student_thinking, run.prompt.teacher_thinking) == ("solution", False, True)
    assert found["data.repo"] == "siyanzhao/Openthoughts_math_30k_opsd"
    assert (found["data.columns.problem"], found["data.columns.solution"]) == ("problem", "solution")
    assert (run.eval.name, run.eval.in_run, run.eval.samples, run.eval.thinking) == ("aime24", False, 12, True)
    assert run.warnings == []


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("opsd_qwen3_4b", {"model.name": "qwen3_4b", "model.path": "Qwen/Qwen3-4B"}),
        ("opsd_qwen3_8b", {"model.name": "qwen3_8b", "model.path": "Qwen/Qwen3-8B", "clip": 0.06, "clipping.clip": 0.06}),
        (
            "opsd_qwen3_1_7b_march",
            {
                "loss.name": "jsd",
                "loss.kind": "jsd",
                "loss.beta": 0.5,
                "clip": None,
                "clipping.name": "none",
                "clipping.kind": "none",
                "clipping.clip": None,
                "rollout.max_len": 2048,
                "train.lr": 2e-4,
            },
        ),
        (
            "opsd_nonthinking",
            {"clip": 1e-6, "clipping.clip": 1e-6, "prompt.teacher_thinking": False, "eval.thinking": False},
        ),
        (
            "eval_text",
            {
                "prompt.name": "eval_text",
                "prompt.student": "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
            },
        ),
        ("longer_rollouts", {"rollout.max_len": 1536}),
        ("clip_fixed", {"clipping.name": "rescale", "clipping.kind": "rescale"}),
        ("ema", {"teacher.name": "ema", "teacher.kind": "ema", "teacher.rate": 0.01}),
        ("topk", {"loss.top_k": 100}),
    ],
)
def test_a_recipe_is_the_papers_but_for_what_it_names(recipe: str, changes: dict[str, object]) -> None:
    paper, found = values(f"experiment={PAPER}"), values(f"experiment={recipe}")
    assert {key: value for key, value in found.items() if paper.get(key, "absent") != value} == changes
    assert not paper.keys() - found.keys()


def test_recipes_with_options_of_other_keys_are_the_papers_in_all_others() -> None:
    paper = values(f"experiment={PAPER}")
    for recipe, groups in (
        ("sampled_token", ("loss", "clipping", "clip")),
        ("reason_first", ("prompt",)),
        ("replay_aime", ("data",)),
        ("sft_qwen3_1_7b", ("rollout", "teacher", "loss", "clipping", "clip")),
    ):
        found = values(f"experiment={recipe}")
        differing = {key for key in found.keys() | paper.keys() if found.get(key, "absent") != paper.get(key, "absent")}
        allowed = {"train.micro_tokens"} if recipe == "sft_qwen3_1_7b" else set()
        assert {key for key in differing if key.partition(".")[0] not in groups} == allowed, recipe
    run = run_of("experiment=sampled_token")
    assert (run.loss.kind, run.clipping.kind, run.clip) == ("sampled_token", "none", None)
    assert run_of("experiment=reason_first").prompt.analysis_len == 512


def test_fine_tuning_takes_the_papers_records_as_they_are() -> None:
    run = run_of("experiment=sft_qwen3_1_7b")
    assert (run.rollout.kind, run.loss.kind, run.teacher.kind, run.clipping.kind) == ("dataset", "nll", "none", "none")
    assert (run.rollout.max_len, run.train.lr, run.clip, run.loss_temperature) == (16000, 5e-6, None, 1.0)


def test_half_of_replay_aimes_batch_is_replayed() -> None:
    found = values("experiment=replay_aime")
    assert (found["data.kind"], found["data.shares.paper"], found["data.shares.replay"]) == ("mix", 1, 1)
    assert {key: value for key, value in found.items() if key.startswith("data.sources.paper.")} == {
        f"data.sources.paper.{key.removeprefix('data.')}": value
        for key, value in values(f"experiment={PAPER}").items()
        if key.startswith("data.")
    }
    assert (found["data.sources.replay.kind"], found["data.sources.replay.path"]) == ("jsonl", "???")
    assert found["data.sources.replay.overlap"] == "refuse"


def test_the_studys_candidates_change_one_cause_each() -> None:
    baseline = values("experiment=trace/baseline")
    changed = {}
    for candidate in ("domain_replay", "eval_text", "longer_rollouts", "clip_fixed"):
        found = values(f"experiment=trace/{candidate}")
        assert found.keys() == baseline.keys()
        changed[candidate] = {key: value for key, value in found.items() if baseline[key] != value}
    instruction = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert changed == {
        "domain_replay": {"data.shares.cards": 1},
        "eval_text": {"prompt.name": "eval_text", "prompt.student": "{problem}" + instruction},
        "longer_rollouts": {"rollout.max_len": 45},
        "clip_fixed": {"clipping.name": "rescale", "clipping.kind": "rescale"},
    }
    assert baseline["prompt.student"] == "Problem: {problem}" + instruction
    assert (baseline["eval.instruction"], baseline["eval.thinking"], baseline["prompt.student_thinking"]) == (
        instruction,
        True,
        False,
    )
    params = OmegaConf.load(CONF / "sweep" / "trace_candidates.yaml").hydra.sweeper.params
    assert params.experiment == ",".join(f"trace/{name}" for name in ("baseline", *changed))
    assert params.seed == "0,1,2"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Problem sets for those that recipes take from the hub or from the user: the embedded stories, and two of a contest's kind."""
    folder = tmp_path_factory.mktemp("problems")
    paths = {name: folder / f"{name}.jsonl" for name in ("dial", "cards", "aime")}
    for kind in ("dial", "cards"):
        drawn = islice(chains(1, kinds=(kind,), split="train", min_steps=3, max_steps=5), 24)
        rows = [{"problem": each.text, "solution": each.solution, "answer": each.answer} for each in drawn]
        paths[kind].write_text("".join(json.dumps(row) + "\n" for row in rows))
    contest = [
        {"id": "1", "problem": "How many positive divisors does the product of the first four primes have?", "answer": "16"},
        {"id": "2", "problem": "Find the remainder when 7^{100} is divided by 1000.", "answer": "1"},
    ]
    paths["aime"].write_text("".join(json.dumps(row) + "\n" for row in contest))
    return paths


def local(run: dict[str, object], files: dict[str, Path]) -> list[str]:
    """What stands in for the hub, for what the user gives and for the recipe's own model."""
    given = ["model=tiny_lora"]
    if run["eval.name"] == "aime24":
        given.append(f"eval.path={files['aime']}")
    if run["data.name"] in ("openthoughts_math", "jsonl"):
        given.append(f"data.path={files['dial']}")
    if run["data.name"] == "mix":
        given += [f"data.sources.paper.path={files['dial']}", f"data.sources.replay.path={files['cards']}"]
    return given


# those of the study run in its sweep
@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if not name.startswith("trace/")])
def test_every_experiment_runs(experiment: str, files: dict[str, Path], store: str, tmp_path: Path) -> None:
    recipe = values(f"experiment={experiment}")
    done = launch(tmp_path, store, f"experiment={experiment}", "debug=smoke", *local(recipe, files))
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = the_run(tmp_path)
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 2)
    assert ("after" in result) == recipe["eval.in_run"]
    assert weights(run_dir / "checkpoints" / "step_000002").name == "adapter"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "train/objective" in row] == [1, 2]
    ran = dict(leaves(resolved(frozen(run_dir))))
    for key in ("loss.name", "clipping.name", "clip", "teacher.name", "prompt.name", "rollout.name", "train.lr", "data.kind"):
        assert ran[key] == recipe[key], key
    assert load(run_dir).model.name == "tiny_lora"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_sweep_runs(sweep: str, store: str, tmp_path: Path) -> None:
    """Every setting of it, under one seed."""
    done = launch(tmp_path, store, f"sweep={sweep}", "debug=smoke", "seed=0", "eval.max_rows=4", timeout_s=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    (where,) = (tmp_path / "multirun").iterdir()
    assert where.name.endswith(f"-{sweep}")
    ranked = json.loads((where / "sweep.json").read_text())["settings"]
    params = OmegaConf.load(CONF / "sweep" / f"{sweep}.yaml").hydra.sweeper.params
    counts = [len(str(choices).split(",")) for key, choices in params.items() if key != "seed"]
    assert len(ranked) == (counts[0] if len(counts) == 1 else counts[0] * counts[1])
    assert all(setting["not_counted"] == [] and list(setting["after"]) == ["0"] for setting in ranked)
    assert [setting["reading"] for setting in ranked].count("the first") == 1
    results = [json.loads((where / name / "result.json").read_text()) for each in ranked for name in each["points"]]
    assert {(result["status"], result["step"]) for result in results} == {("finished", 2)}
