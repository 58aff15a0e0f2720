"""DeepSpeed on two ranks trains as the torch engine does in one process: ZeRO 1, 2 and 3, really run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs the extra: pip install -e '.[deepspeed]'")

from engines.comparing import (  # noqa: E402
    assert_close_figures,
    assert_close_weights,
    assert_equal,
    assert_resumed,
    assert_same_training,
    read,
    run_ranks,
)
from engines.ranks_training import OTHERS, STEP_5, build  # noqa: E402

from opsd.ranks import ALONE  # noqa: E402

MODES = ("full", "lora")
ENGINES = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def started(trained: Path, reference: dict[Any, Any]) -> str:
    """All stages, in one start of two ranks; what they wrote."""
    done = run_ranks(trained, list(ENGINES), ranks=2)
    return done.stdout + done.stderr


@pytest.fixture(params=ENGINES)
def zero(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def found(started: str, trained: Path, zero: str) -> dict[Any, Any]:
    return read(trained, zero)


@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_are_those_of_one_process(found: dict[Any, Any], reference: dict[Any, Any], mode: str):
    """Rows of unequal length; a step in which one rank has no rollout, and one in which its only response is empty."""
    assert_same_training(found["curve", mode], reference["curve", mode])


@pytest.mark.parametrize("mode", MODES)
def test_gradient_checkpointing_changes_nothing(found: dict[Any, Any], reference: dict[Any, Any], mode: str):
    assert_same_training(found["checkpointing", mode], reference["checkpointing", mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("teacher", OTHERS)
def test_every_other_teacher(found: dict[Any, Any], reference: dict[Any, Any], teacher: str, mode: str):
    assert_same_training(found["teacher", teacher, mode], reference["teacher", teacher, mode])


@pytest.mark.parametrize("mode", MODES)
def test_resumes_bitwise(found: dict[Any, Any], mode: str):
    assert_resumed(found["curve", mode])


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_states_move_between_engines(
    found: dict[Any, Any], reference: dict[Any, Any], trained: Path, zero: str, mode: str
):
    """There and back: both go on as the run that they come from. The weights are the same to the last bit."""
    to_zero, one = found["moved", mode], reference["curve", mode]
    assert_equal(to_zero["halfway"], one["halfway"])
    assert_close_figures(to_zero["figures"], one["figures"][5:8])
    own = found["curve", mode]
    to_torch = build("torch", ALONE, lora=mode == "lora", teacher="ema", checkpoint=trained / f"{zero}_{mode}" / STEP_5)
    assert_equal(to_torch.weights(), own["halfway"])
    assert_close_figures([to_torch.step(step) for step in range(6, 11)], own["figures"][5:])
    assert_close_weights(to_torch.weights(), own["weights"])


def test_a_loss_that_is_not_a_number_on_one_rank_ends_all_and_spoils_nothing(found: dict[Any, Any]):
    spoilt = found["spoilt"]
    assert spoilt["messages"] == ["the gradient norm is not a number", "the loss is nan"]
    assert_equal(*spoilt["weights"])
    assert_equal(*spoilt["state"])


def test_adapters_stay_in_float32_over_a_bf16_base(found: dict[Any, Any], reference: dict[Any, Any]):
    """The norms differ by what bf16 makes of other shapes of micro-batches; between DDP and one process it is as much."""
    mixed, wanted = found["bf16"], reference["bf16"]
    assert mixed["dtypes"] == wanted["dtypes"]
    assert set(mixed["dtypes"].values()) == {torch.float32, torch.bfloat16}
    assert {value.dtype for value in mixed["state"].values()} == {torch.float32}
    torch.testing.assert_close(torch.tensor(mixed["figures"]), torch.tensor(wanted["figures"]), rtol=0.02, atol=0.0)


def test_each_rank_holds_its_part_alone(found: dict[Any, Any], zero: str):
    total = found["held"]["total"]
    assert total == 853_632
    for parameters, moments in found["held"]["held"]:
        assert parameters == (0 if zero == "zero3" else total)
        assert total / 2 <= moments < total / 2 + 1000  # padded to a multiple


def test_is_quiet(started: str):
    lines = [line for line in started.splitlines() if "deepspeed" in line.lower()]
    assert all("Gradients are non-finite" in line for line in lines), lines
    assert "FutureWarning" not in started


def test_one_process_alone(reference: dict[Any, Any], tmp_path: Path):
    run_ranks(tmp_path, list(ENGINES), ranks=1)
    for engine in ENGINES:
        for mode in MODES:
            alone, wanted = read(tmp_path, engine)["curve", mode], reference["curve", mode]
            assert_close_figures(alone["figures"], wanted["figures"][:4])
            torch.testing.assert_close(alone["first"], wanted["first"], rtol=1e-5, atol=1e-7)
