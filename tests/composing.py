"""Runs out of conf/ and small problem files, for tests that start no job."""

from __future__ import annotations

import json
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from opsd.config import Run, to_run

CONF = Path(__file__).parents[1] / "conf"


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def run_of(*overrides: str) -> Run:
    return to_run(composed(*overrides))


def rows(path: Path, problems: list[tuple[str, str]]) -> Path:
    """A JSONL file of (problem, solution)."""
    made = [{"id": f"row-{n}", "problem": text, "solution": why, "answer": "1"} for n, (text, why) in enumerate(problems)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path
