"""The torch engine on two ranks trains as it does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines.comparing import assert_close_weights, assert_equal, assert_resumed, assert_same_training, read, run_ranks
from engines.ranks_training import OTHERS, STEP_5, build

from opsd.ranks import ALONE

MODES = ("full", "lora")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    directory = tmp_path_factory.mktemp("ddp")
    done = run_ranks(directory, ["torch"], ranks=2)
    assert "FutureWarning" not in done.stderr
    return directory, read(directory, "torch")


@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_are_those_of_one_process(ddp: tuple[Path, Any], reference: dict[Any, Any], mode: str):
    """Rows of unequal length; a step in which one rank has no rollout, and one in which its only response is empty."""
    assert_same_training(ddp[1]["curve", mode], reference["curve", mode])


@pytest.mark.parametrize("mode", MODES)
def test_gradient_checkpointing_changes_nothing(ddp: tuple[Path, Any], reference: dict[Any, Any], mode: str):
    assert_same_training(ddp[1]["checkpointing", mode], reference["checkpointing", mode])
    assert reference["checkpointing", mode]["figures"] == reference["curve", mode]["figures"][:2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("teacher", OTHERS)
def test_every_other_teacher(ddp: tuple[Path, Any], reference: dict[Any, Any], teacher: str, mode: str):
    assert_same_training(ddp[1]["teacher", teacher, mode], reference["teacher", teacher, mode])


@pytest.mark.parametrize("mode", MODES)
def test_resumes_bitwise(ddp: tuple[Path, Any], reference: dict[Any, Any], mode: str):
    assert_resumed(ddp[1]["curve", mode])
    assert_resumed(reference["curve", mode])


@pytest.mark.parametrize("mode", MODES)
def test_its_weights_load_in_one_process(ddp: tuple[Path, Any], mode: str):
    directory, found = ddp
    again = build("torch", ALONE, lora=mode == "lora", teacher="ema", checkpoint=directory / f"torch_{mode}" / STEP_5)
    assert_equal(again.weights(), found["curve", mode]["halfway"])
    for step in range(6, 11):
        again.step(step)
    assert_close_weights(again.weights(), found["curve", mode]["weights"])


def test_adapters_stay_in_float32_over_a_bf16_base(ddp: tuple[Path, Any], reference: dict[Any, Any]):
    found = ddp[1]["bf16"]
    assert found["dtypes"] == reference["bf16"]["dtypes"]
    assert set(found["dtypes"].values()) == {torch.float32, torch.bfloat16}
    assert {value.dtype for value in found["state"].values()} == {torch.float32}
