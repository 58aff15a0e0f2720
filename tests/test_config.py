"""to_run refuses with one message, freezes what it read, and tells MLflow everything but secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from opsd.config import Reduction, Schedule, freeze, frozen, load, params, seconds, to_run
from opsd.inputs import check_inputs

CONF = Path(__file__).parents[1] / "conf"
HF = ("model=hf", "model.path=somewhere")


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["clip=abc"], "clip=abc: must be a positive number or null."),
        (["clip=-1"], "clip=-1: must be a positive number or null."),
        (["clip=0"], "clip=0: must be a positive number or null."),
        (["clip=inf"], "clip=inf: must be a positive number or null."),
        (["clip=nan"], "clip=nan: must be a positive number or null."),
        (["clip=true"], "clip=true: must be a positive number or null."),
        (["clip=[1]"], "clip=[1]: must be a positive number or null."),
        (
            ["clipping=none", "clip=0.3"],
            "clip=0.3 with clipping=none: nothing would be clipped; set clip=null or clipping=rescale.",
        ),
        (["clipping.clip=0.1"], "clipping.clip=0.1 beside clip=0.05: set the top-level clip=0.1 alone."),
        (["+loss.bta=3"], "loss.bta=3: loss=forward_kl has no such key. Its keys: name, kind, temperature, top_k."),
        (
            ["loss=jsd", "+loss.bta=3"],
            "loss.bta=3: loss=jsd has no such key, did you mean loss.beta? Its keys: name, kind, temperature, top_k, beta.",
        ),
        ([*HF, "+model.lora.x=3"], "model.lora.x=3: model=hf has no such key. Its keys: r, alpha, dropout, targets."),
        (["loss=jsd", "loss.beta=x"], "loss.beta=x: must be a number."),
        ([*HF, "model.lora.r=a"], "model.lora.r=a: must be a whole number."),
        ([*HF, "model.lora=3"], "model.lora=3: must be a group of the keys r, alpha, dropout, targets or null."),
        ([*HF, "model.lora.targets=3"], "model.lora.targets=3: must be a list, each item text."),
        (["train.betas=[a,0.9]"], "train.betas[0]=a: must be a list, each item a number."),
        (["train.schedule=linear"], "train.schedule=linear: must be one of constant, cosine."),
        (["train.lr=inf"], "train.lr=inf: must be finite."),
        (["train.steps=0"], "train.steps=0: must be at least 1."),
        (["train.warmup=101"], "train.warmup=101: must lie between 0 and train.steps=100."),
        (["train.max_time=6x"], "train.max_time=6x: must be a duration such as 6h, 90m, 45s or 1h30m, or null."),
        (["seed=1.5"], "seed=1.5: must be a whole number."),
        (["threads=0"], "threads=0: must be at least 1."),
        (["do=rn"], "do=rn: must be one of run, check, dry_run."),
        (["data=jsonl"], "data.path is not set: data=jsonl needs it; add data.path=VALUE to the command line."),
        (["~loss"], "loss=null: every run needs a loss; `python launch.py --help` lists groups and options."),
        (["loss.kind=jds"], "loss.kind=jds: there is no opsd/losses/jds.py; did you mean jsd?"),
        (["seed=${nope}"], "seed: its interpolation cannot be resolved (Interpolation key 'nope' not found)."),
        (
            ["rollout.samples=5"],
            "train.batch=32 with rollout.samples=5: a step's rollouts are a whole number of problems; "
            "make train.batch a multiple of rollout.samples.",
        ),
    ],
)
def test_refusals_name_key_value_and_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        to_run(composed(*overrides))
    assert str(refused.value) == message


def test_a_name_that_is_no_directory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^name=a/b: it becomes part of a directory's name"):
        to_run(composed("name=a/b"))


def test_types() -> None:
    run = to_run(composed("train.schedule=cosine", "train.reduction=sequence", "train.max_time=1h30m", "loss.top_k=8"))
    assert (run.train.schedule, run.train.reduction) == (Schedule.cosine, Reduction.sequence)
    assert (run.train.max_time_s, run.loss.top_k, run.clip, run.train.lr) == (5400.0, 8, 0.05, 3e-4)


@pytest.mark.parametrize(("text", "value"), [("6h", 21600), ("90m", 5400), ("45s", 45), ("1h30m", 5400), ("1h 1s", 3601)])
def test_seconds(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "h", "6", "0s", "-1h", "1m1h", "1.5h", "h6"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="train.max_time="):
        seconds(text)


def test_the_loss_takes_the_rollouts_temperature_unless_it_has_its_own() -> None:
    assert to_run(composed("rollout.temperature=1.1")).loss_temperature == 1.1
    assert to_run(composed("rollout.temperature=1.1", "loss.temperature=0.7")).loss_temperature == 0.7


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["loss=jsd", "clip=0.8"], 1),  # a token of the JSD at beta = 1/2 is at most ln 2 = 0.693
        (["loss=jsd", "clip=0.6"], 0),
        (["loss=jsd", "clipping=entry", "clip=0.4"], 1),  # an entry at most ln 2 / 2 = 0.347
        (["loss=jsd", "clipping=entry", "clip=0.3"], 0),
        (["loss=forward_kl", "clip=50"], 0),
        (["loss=jsd", "clip=null"], 0),
    ],
)
def test_a_clip_that_cannot_bind_is_a_warning(overrides: list[str], count: int) -> None:
    warnings = to_run(composed(*overrides)).warnings
    assert len(warnings) == count
    assert all("cannot bind" in warning for warning in warnings)


def test_lengths_are_held_against_the_models_context() -> None:
    for group in ("rollout", "eval"):
        check_inputs(to_run(composed(f"{group}.max_len=2000")), {})
        with pytest.raises(ValueError, match=rf"^{group}.max_len=999999: model=tiny attends to \d+ tokens, .* lower\.$"):
            check_inputs(to_run(composed(f"{group}.max_len=999999")), {})


def test_a_frozen_config_is_the_same_run_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    cfg = composed("data=jsonl", "data.path=rows.jsonl", "model=hf", "model.path=Qwen/Qwen3-1.7B", "clip=1e-6", "name=x")
    freeze(cfg, tmp_path / "config.yaml")
    run = load(tmp_path)
    assert (run.data.path, run.output_root) == (str(tmp_path / "rows.jsonl"), str(tmp_path / "outputs"))
    assert run.model.path == "Qwen/Qwen3-1.7B"  # a hub id
    run.data.path, run.output_root = "rows.jsonl", "outputs"
    assert run == to_run(cfg)
    assert [path.name for path in tmp_path.iterdir() if path.name != "rows.jsonl"] == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "age"), [("format: 4", "a newer"), ("format: 0", "an older"), ("seed: 1", "an older"), ("[]", "an older")]
)
def test_another_format_is_refused(tmp_path: Path, text: str, age: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"is {age}"):
        frozen(tmp_path)


def test_a_directory_without_a_config_and_a_torn_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run directory"):
        frozen(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="is not YAML"):
        frozen(tmp_path)


def test_params_are_flat_short_first_and_tell_every_leaf_once() -> None:
    cfg = composed("loss=jsd", "rollout.max_len=1536")
    shown = params(cfg)
    assert list(shown)[:13] == (
        [
            "model",
            "data",
            "prompt",
            "rollout",
            "rollout.max_len",
            "teacher",
            "loss",
            "clipping",
            "clip",
            "lr",
            "seed",
            "steps",
            "batch",
        ]
    )
    assert [shown[key] for key in ("loss", "rollout.max_len", "clip", "lr", "loss.beta", "loss.top_k")] == (
        ["jsd", "1536", "0.05", "0.0003", "0.5", "null"]
    )
    assert shown["train.reduction"] == "token" and shown["engine.gradient_checkpointing"] == "false"
    assert not {"train.lr", "loss.name", "do", "resume", "output_root"} & set(shown)


def test_params_hide_secrets() -> None:
    cfg = composed()
    OmegaConf.set_struct(cfg, False)
    cfg.tracking.api_key, cfg.model.token = "abc", "abc"
    cfg.tracking.server, cfg.data.note = "https://me:pass@host/x", "hf_" + "a" * 30
    shown = params(cfg)
    assert not {"tracking.api_key", "model.token", "tracking.server", "data.note"} & set(shown)
    assert "train.micro_tokens" in shown
