"""A moving average of the student as teacher, as in mean teachers (arXiv 1703.01780, with alpha = 1 - rate).

After each step

    teacher += rate * (student - teacher)

for every trained tensor, in float32, from the starting weights on: after n steps those still weigh (1 - rate)^n. Under LoRA the two
factors A and B of each adapter are averaged apart, which is not the average of their product: with d the distance from teacher to
student, a step's B A misses that average by rate (1 - rate) dB dA, which vanishes as the two draw near.
"""

from __future__ import annotations

from opsd.registry import register
from opsd.teachers.base import Follower


@register("teacher", "ema")
class Ema(Follower):
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"teacher.rate={self.rate}: must be above 0 and at most 1; for a teacher that never moves set teacher=initial."
            )

    def share(self, step: int) -> float:
        return self.rate
