"""The processes of one run, one a GPU, and what they tell each other. torchrun starts them and says in the environment who is who.

Every rank goes through the same steps and knows the same rollouts, metrics and decisions; the first alone writes. What is split is
the work: `share` of the requests to sample, and of the rollouts to score.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PATIENCE = timedelta(days=1)  # that a rank waits for the slowest; a dead one is noticed at once, by torchrun or by its connection


@dataclass(kw_only=True, frozen=True, slots=True)
class Ranks:
    """One process's view of them all. With a size of 1 nothing is sent anywhere."""

    rank: int
    size: int
    local: int  # this process's number on its machine
    local_size: int  # processes on its machine

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` things are this rank's: blocks of one size, the first few one larger."""
        return share(count, part=self.rank, parts=self.size)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in order. All ranks must call it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agreed(self, make: Callable[[], T]) -> T:
        """What the first rank makes of it, on every rank; the others do not try. All ranks must call it."""
        return self.gather(make() if self.first else None)[0]  # pyright: ignore[reportReturnType]  # the first rank's is a T

    def device(self, asked: str) -> str:
        """Where this rank computes, of `engine.device`.

        Raises:
            ValueError: there are fewer GPUs than ranks on this machine, or one is named for all.
        """
        if self.size == 1 or asked == "cpu":
            return asked
        if asked != "auto":
            raise ValueError(
                f"engine.device={asked} with launcher.processes={self.size}: every process has a GPU of its own; set "
                "engine.device=auto, or cpu."
            )
        import torch

        if not torch.cuda.is_available():
            return "cpu"
        if self.local >= torch.cuda.device_count():
            raise ValueError(
                f"launcher.processes: process {self.local} of this machine has no GPU, torch {torch.__version__} sees "
                f"{torch.cuda.device_count()}; start no more processes than there are GPUs, or set engine.device=cpu."
            )
        return f"cuda:{self.local}"


ALONE = Ranks(rank=0, size=1, local=0, local_size=1)


def share(count: int, *, part: int, parts: int) -> range:
    """Which of `count` things belong to `part` of `parts`: blocks of one size, the first few one larger."""
    size, larger = divmod(count, parts)
    start = part * size + min(part, larger)
    return range(start, start + size + (part < larger))


def start() -> Ranks:
    """This process among the others, connected to them."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    import torch
    import torch.distributed as dist

    end_with_parent()
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    return Ranks(rank=int(os.environ["RANK"]), size=size, local=local, local_size=int(os.environ["LOCAL_WORLD_SIZE"]))


def end_with_parent() -> None:
    """Asks Linux to send this process a Ctrl-C when torchrun is killed, or it would go on for a run that is told as failed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def end() -> None:
    """Lets go of the others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def lost(error: BaseException) -> bool:
    """Whether this failure only says that another rank has ended."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    if error.__cause__ is not None:  # inside a library's call
        return lost(error.__cause__)
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in ("gloo/", "Connection closed by peer", "NCCL"))
