"""Every yaml composes and makes a run, and says what its class wants to hear and no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from opsd.config import FORMAT, GROUPS, Do, Run, to_option, to_run
from opsd.launch.prompt_file import inline

CONF = Path(__file__).parents[1] / "conf"
FILE = str(Path(__file__).parent / "prompts" / "file.yaml")
OPTIONS = sorted(  # (group, option); an experiment may stand in a folder of its own: ("experiment", "trace/baseline")
    (path.relative_to(CONF).parts[0], Path(*path.relative_to(CONF).parts[1:]).with_suffix("").as_posix())
    for path in CONF.rglob("*.yaml")
    if path.parent != CONF
)
BESIDE: dict[tuple[str, str], tuple[str, ...]] = {  # sense only with others
    ("teacher", "none"): ("loss=nll", "rollout=dataset"),
    ("loss", "nll"): ("rollout=dataset",),
    ("data", "mix"): ("+data@data.sources.a=arithmetic", "+data@data.sources.b=jsonl", "data.shares={a: 1, b: 2}"),
}
NEEDS = {
    "data.path": "rows.jsonl",
    "data.repo": "someone/problems",
    "data.sources.b.path": "rows.jsonl",
    "data.sources.replay.path": "rows.jsonl",
    "model.path": "somewhere",
    "teacher.path": "somewhere",
    "prompt.path": FILE,
    "rollout.path": str(Path(__file__).parent / "rollouts" / "recorded"),
}  # what a user must give


def composed(*overrides: str, root: str = "config") -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(root, overrides=list(overrides))


def run_of(*overrides: str) -> Run:
    cfg = composed(*overrides)
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, NEEDS[key])
    inline(cfg)
    return to_run(cfg)


def test_there_is_something_to_compose() -> None:
    assert {group for group, _ in OPTIONS} == {*GROUPS, "experiment", "debug", "sweep"}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_makes_a_run(group: str, option: str) -> None:
    run = run_of(f"{group}={option}", *BESIDE.get((group, option), ()))
    if group in GROUPS:
        assert getattr(run, group).name == option


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_is_explained_in_its_first_comment(group: str, option: str) -> None:
    lines = [line for line in (CONF / group / f"{option}.yaml").read_text().splitlines() if not line.startswith("# @package")]
    assert re.match(r"# \w", lines[0]) or lines[0].startswith("defaults: [hf, _self_]")


def test_the_root_scalars_stand_before_what_may_override_them() -> None:
    text = (CONF / "config.yaml").read_text()
    places = [text.index(f"- {name}") for name in ("_self_", "experiment: null", "sweep: null", "debug: null")]
    assert places == sorted(places)
    assert composed().format == FORMAT


def test_the_default_is_the_paper_with_its_clipping_repaired() -> None:
    run = run_of()
    assert (run.model.name, run.data.name, run.loss.name, run.clipping.name, run.clip) == (
        "tiny",
        "arithmetic",
        "forward_kl",
        "rescale",
        0.05,
    )
    assert run.do is Do.run and run.warnings == []


@pytest.mark.parametrize(
    ("overrides", "clip"),
    [
        (["clipping=none"], None),
        (["clipping=entry"], 0.05),
        (["clipping=token", "clip=0.3"], 0.3),
        (["clip=null"], None),
        (["experiment=released_jsd"], 0.05),
        (["experiment=released_jsd", "clip=0.06"], 0.06),
        (["clip=1e-6"], 1e-6),
    ],
)
def test_each_clipping_brings_its_clip_and_the_command_line_wins(overrides: list[str], clip: float | None) -> None:
    run = run_of(*overrides)
    assert run.clip == run.clipping.clip == clip


@pytest.mark.parametrize(
    ("overrides", "teacher", "clipping"),
    [
        (["loss=sampled_token"], "initial", "none"),
        (["loss=nll", "rollout=dataset"], "none", "none"),
        (["loss=forward_kl"], "initial", "rescale"),
        (["experiment=sampled_token"], "initial", "none"),
    ],
)
def test_a_loss_brings_along_what_it_needs(overrides: list[str], teacher: str, clipping: str) -> None:
    run = run_of(*overrides)
    assert (run.teacher.name, run.clipping.name) == (teacher, clipping)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss=sampled_token", "clipping=entry"], r"^clipping=entry with loss=sampled_token: .* set clipping=none clip=null\.$"),
        (["experiment=opsd_qwen3_1_7b", "loss=sampled_token"], r"^clipping=entry with loss=sampled_token: "),
        (["loss=sampled_token", "clip=0.3"], r"^clip=0\.3 with clipping=none: "),
        (["loss=sampled_token", "rollout=dataset"], r"^rollout=dataset with loss=sampled_token: .* not sampled"),
        (["loss=sampled_token", "teacher=none"], r"^loss=sampled_token with teacher=none: "),
        (["loss=nll"], r"^loss=nll with rollout=transformers: .* set rollout=dataset or rollout=replay\.$"),
        (["loss=nll", "rollout=dataset", "teacher=live"], r"^teacher=live with loss=nll: .* set teacher=none\.$"),
        (["loss=nll", "rollout=dataset", "clipping=token"], r"^clipping=token with loss=nll: "),
    ],
)
def test_what_a_loss_cannot_use_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_of(*overrides)


def test_the_released_jsd_is_its_three_overrides() -> None:
    recipe, spelt = run_of("experiment=released_jsd"), run_of("loss=jsd", "clipping=entry", "clip=0.05")
    assert recipe == spelt
    assert (recipe.loss.beta, recipe.clipping.kind) == (0.5, "entry")


def test_smoke_is_small_under_every_benchmark() -> None:
    for benchmark in ("arithmetic", "aime24"):
        run = run_of("debug=smoke", f"eval={benchmark}")
        assert (run.train.steps, run.train.batch, run.eval.samples, run.eval.max_len) == (2, 4, 1, 32)


def test_overfitting_repeats_one_batch() -> None:
    run = run_of("debug=overfit_one_batch")
    assert run.data.max_rows == run.train.batch * run.rollout.samples == 8


def test_the_grid_sweeps_losses_and_clippings() -> None:
    params = OmegaConf.load(CONF / "sweep" / "clipping_grid.yaml").hydra.sweeper.params
    assert params == {"loss": "forward_kl,reverse_kl,jsd", "clipping": "none,entry,token,rescale"}
    for group in ("loss", "clipping"):
        assert {(group, option) for option in params[group].split(",")} <= set(OPTIONS)


@pytest.mark.parametrize("option", [option for group, option in OPTIONS if group == "eval" and option != "none"])
def test_evaluate_composes(option: str) -> None:
    cfg = composed("model=tiny", f"eval={option}", root="evaluate")
    assert (cfg.checkpoint, cfg.seed, cfg.threads) == (None, None, 1)
    for group in ("model", "eval", "rollout", "engine"):
        to_option(group, OmegaConf.to_container(cfg[group], resolve=True))
