"""The student of a while ago as teacher: the starting weights, then a copy of the student's after every `every` steps.

Steps 1 to `every` have the starting weights as teacher, the next `every` the weights after step `every`, and so on.
"""

from __future__ import annotations

from opsd.registry import register
from opsd.teachers.base import Follower


@register("teacher", "sync")
class Sync(Follower):
    every: int  # optimizer steps

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(
                f"teacher.every={self.every}: must be at least 1 step; for a teacher that never moves set teacher=initial."
            )

    def share(self, step: int) -> float:
        return float(step % self.every == 0)
