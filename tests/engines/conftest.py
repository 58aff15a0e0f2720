"""What tests of engines share: the training of one process that others are held against, and samplers on real vLLM."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opsd.types import LoadedModel

if TYPE_CHECKING:
    from opsd.rollouts.vllm_sampler import VllmSampler

    Build = Callable[..., VllmSampler]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reference has its checkpoints, and other engines theirs."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="session")
def reference(trained: Path) -> dict[Any, Any]:
    """Every scenario under the torch engine, in this process alone."""
    from engines.ranks_training import scenarios

    from opsd.ranks import ALONE

    return scenarios("torch", ALONE, trained)


@pytest.fixture(scope="module")
def at_the_root() -> Iterator[None]:
    before = Path.cwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def build(at_the_root: None) -> Iterator[Build]:
    """Makes a sampler over `loaded`, or over a model newly loaded; the first takes seconds to start, further ones half a second.
    All end together: the first to end takes vLLM's groups along."""
    from opsd.config import to_run
    from opsd.launch.compose import compose
    from opsd.rollouts.vllm_sampler import VllmSampler

    made: list[VllmSampler] = []

    def make(model: str, *overrides: str, loaded: LoadedModel | None = None, processed: bool = False) -> VllmSampler:
        cfg = compose(Path("conf"), "config", [f"model={model}", "rollout=vllm", "rollout.kv_cache_gb=0.05", *overrides])[0].cfg
        run = to_run(cfg)
        sampler = run.rollout.build(loaded or run.model.load(seed=0, device="cpu"), processed=processed)
        assert isinstance(sampler, VllmSampler)
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        sampler.close()


@pytest.fixture(scope="module")
def shared_tiny(build: Build) -> VllmSampler:
    return build("tiny")


@pytest.fixture
def tiny(shared_tiny: VllmSampler) -> Iterator[VllmSampler]:
    """Every weight trained. Afterwards its weights are what they were, in the trainer and in vLLM."""
    before = copy.deepcopy(shared_tiny.loaded.model.state_dict())
    shared_tiny.sync(weights_version=0)
    yield shared_tiny
    shared_tiny.loaded.model.load_state_dict(before)


@pytest.fixture(scope="module")
def both(build: Build) -> tuple[VllmSampler, VllmSampler]:
    """Adapter and merged weights of one trainer with LoRA."""
    adapter = build("tiny_lora")
    return adapter, build("tiny_lora", "rollout.sync=merged", loaded=adapter.loaded)
