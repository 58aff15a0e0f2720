"""Training engines: forward, backward and the optimizer step around one `Objective`."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opsd.ranks import Ranks
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
        self, batch: MicroBatch, teacher_TH: Tensor | None, teacher_head_VH: Tensor | None, *, want_cosine: bool, last: bool
    ) -> Tensor:
        """Adds one micro-batch's gradient and gives its diagnostics `[T, D]` (columns: `Objective.columns`).

        The weights of all micro-batches of a step, over all ranks, add up to 1, and so the step's gradient is the SUM over ranks.
        All ranks call it equally often; one that has nothing more to score is given empty micro-batches.

        Args:
            last: no further one comes before `step`.

        Raises:
            NonFinite: the loss is not a number.
        """
        raise NotImplementedError

    def step(self, *, lr: float) -> float:
        """Clips, steps, clears; gives the gradient norm before clipping.

        Raises:
            NonFinite: the norm is not a number. The step counts for nothing.
        """
        raise NotImplementedError

    def whole(self) -> AbstractContextManager[None]:
        """While inside, the model's parameters are whole in this process: to be read, and for forwards without gradient that other
        ranks need not make. All ranks enter it together."""
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by parameter, `exp_avg/NAME`, for a checkpoint: one layout, whatever the engine and the number of
        ranks. All ranks call it; those of the first are written, and others may get none."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` gave. All ranks call it."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Engine(Option):
    """How the step is carried out."""

    device: str
    gradient_checkpointing: bool

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"engine.device={self.device}: must be auto, cpu, cuda or cuda:N.")

    def check(self) -> None:
        """Refuses an engine that is not installed, before anything is written. Needs no torch.

        Raises:
            ValueError: says what to install.
        """

    def prepare(self, objective: Objective) -> None:
        """What every engine does to the module before it wraps it."""
        if self.gradient_checkpointing:
            objective.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def held(self, processes: int) -> tuple[float, float]:
        """What one of so many processes holds: the share of the weights, and how often the bytes of what is trained (a gradient and
        AdamW's two moments)."""
        return 1.0, 3.0

    def build(self, objective: Objective, *, optimizer: AdamW, ranks: Ranks) -> TrainingEngine:
        """Called by all ranks, when the model has the weights that training goes on from and teachers are made.

        Raises:
            ValueError: the engine cannot train this model.
            EngineFailure: its library is missing or does not start.
        """
        raise NotImplementedError
