"""Training engines: forward, backward and the optimizer step around one `Objective`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opsd.registry import Option

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.scoring import Objective
    from opsd.types import MicroBatch


@dataclass(kw_only=True, slots=True)
class AdamW:
    """The optimizer's settings (arXiv 1711.05101). The learning rate comes with each step."""

    betas: list[float]
    weight_decay: float
    max_grad_norm: float


class TrainingEngine:
    """A running engine. `accumulate` any number of micro-batches, then `step` once."""

    def accumulate(
        self, batch: MicroBatch, teacher_TH: Tensor | None, teacher_head_VH: Tensor | None, *, want_cosine: bool
    ) -> Tensor:
        """Adds one micro-batch's gradient and gives its diagnostics `[T, D]` (columns: `Objective.columns`).

        Raises:
            NonFinite: the loss is not a number.
        """
        raise NotImplementedError

    def step(self, *, lr: float) -> float:
        """Clips, steps, clears; gives the gradient norm before clipping.

        Raises:
            NonFinite: the norm is not a number; weights and optimizer are as they were.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by name, for a checkpoint."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Engine(Option):
    """How the step is carried out."""

    device: str
    gradient_checkpointing: bool

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"engine.device={self.device}: must be auto, cpu, cuda or cuda:N.")

    def build(self, objective: Objective, *, optimizer: AdamW) -> TrainingEngine:
        raise NotImplementedError
