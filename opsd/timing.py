"""Where a step's seconds and memory go."""

from __future__ import annotations

import resource
import time


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap goes to `name`; a GPU's queued work is waited for."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.began


def gpu_memory() -> dict[str, float]:
    """MB of the GPU that are taken at this moment, by everybody; called where the trainer has most and a sampler may sleep."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"memory/gpu_training_mb": (total - free) / 2**20}


def peak_memory() -> dict[str, float]:
    """Peak memory so far, in MB: the process's, and the GPU's where there is one."""
    import torch

    peak = {"memory/peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if torch.cuda.is_initialized():
        peak["memory/gpu_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return peak
