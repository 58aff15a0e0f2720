"""DeepSpeed's ZeRO (arXiv 1910.02054): optimizer states (1), gradients (2) and weights (3) split over the ranks."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from opsd.endings import EngineFailure
from opsd.engines.base import AdamW, Engine, TrainingEngine
from opsd.ranks import Ranks
from opsd.registry import register

if TYPE_CHECKING:
    from opsd.scoring import Objective

INSTALL = "`pip install -e '.[deepspeed]'` in the project's directory"


@register("engine", "deepspeed")
class DeepSpeed(Engine):
    """Parameters keep the types that they were loaded in: DeepSpeed's bf16 mode, which casts all of them, is not used."""

    zero: int  # 1: optimizer states are split over the ranks; 2: gradients too; 3: weights too
    keep_whole: int  # zero=3: a parameter of at most so many entries is not split

    def __post_init__(self) -> None:
        Engine.__post_init__(self)  # not super(): slots=True makes the class anew
        if self.zero not in (1, 2, 3):
            raise ValueError(
                f"engine.zero={self.zero}: must be 1 (optimizer states are split), 2 (gradients too) or 3 (weights too); to split "
                "nothing set engine=torch."
            )
        if self.keep_whole < 0:
            raise ValueError(f"engine.keep_whole={self.keep_whole}: must be at least 0.")

    def held(self, processes: int) -> tuple[float, float]:
        weights = 1 / processes if self.zero == 3 else 1.0
        gradients = 1.0 if self.zero == 1 else 1 / processes
        return weights, gradients + 3 / processes  # two moments, and DeepSpeed's own copy of what it updates

    def check(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(f"engine=deepspeed: DeepSpeed is not installed; run {INSTALL}, or set engine=torch.")

    def build(self, objective: Objective, *, optimizer: AdamW, ranks: Ranks) -> TrainingEngine:
        from opsd.engines.deepspeed_zero import ZeroEngine

        self.check()
        self.prepare(objective)
        try:
            return ZeroEngine(objective, optimizer, ranks, stage=self.zero, keep_whole=self.keep_whole)
        except Exception as error:  # whatever DeepSpeed's import and start may meet: compilers, drivers, versions
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EngineFailure(f"engine=deepspeed does not start: {first}; mend that, or set engine=torch.") from error
