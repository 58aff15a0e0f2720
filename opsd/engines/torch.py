"""Plain torch: one process, or DistributedDataParallel over several."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

from opsd.endings import NonFinite
from opsd.engines.base import AdamW, Engine, TrainingEngine
from opsd.ranks import Ranks
from opsd.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.scoring import Objective
    from opsd.types import MicroBatch


class TorchEngine(TrainingEngine):
    def __init__(self, objective: Objective, settings: AdamW, ranks: Ranks) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self.objective, self.ranks = objective, ranks
        self.max_grad_norm = settings.max_grad_norm
        self.parameters = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=(settings.betas[0], settings.betas[1]), weight_decay=settings.weight_decay
        )
        self.parallel = None
        if ranks.size > 1:
            with warnings.catch_warnings():  # torch 2.13 has another name for broadcast_buffers, which 2.8 does not know
                warnings.simplefilter("ignore", FutureWarning)
                self.parallel = DistributedDataParallel(objective, broadcast_buffers=False, gradient_as_bucket_view=True)

    def accumulate(
        self, batch: MicroBatch, teacher_TH: Tensor | None, teacher_head_VH: Tensor | None, *, want_cosine: bool, last: bool
    ) -> Tensor:
        self.objective.want_cosine = want_cosine
        with nullcontext() if self.parallel is None or last else self.parallel.no_sync():
            loss, diagnostics_TD = (self.parallel or self.objective)(batch, teacher_TH, teacher_head_VH)
            if not loss.isfinite():
                raise NonFinite(f"the loss is {loss.item()}")
            (loss * self.ranks.size).backward()  # the ranks' gradients are averaged
        return diagnostics_TD

    def step(self, *, lr: float) -> float:
        import torch

        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NonFinite(f"the gradient norm is {norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> dict[str, Tensor]:
        return {
            f"{key}/{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for entry, value in state.items():
            key, name = entry.split("/", 1)
            parameter = self.parameters[name]
            self.optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)


@register("engine", "torch")
class Torch(Engine):
    def build(self, objective: Objective, *, optimizer: AdamW, ranks: Ranks) -> TrainingEngine:
        self.prepare(objective)
        return TorchEngine(objective, optimizer, ranks)
