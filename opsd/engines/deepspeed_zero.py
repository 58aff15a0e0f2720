"""The running DeepSpeed engine. Imported only when one is built."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opsd.endings import NonFinite
from opsd.engines.base import AdamW, TrainingEngine
from opsd.ranks import Ranks
from opsd.scoring import Objective
from opsd.types import MicroBatch

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET = 25_000_000  # entries that are reduced, updated or read ahead at one time, unless a parameter has more


def start(ranks: Ranks, device: torch.device) -> Any:
    """DeepSpeed, imported and connected."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # by itself it takes a GPU where there is one, and warns where there is none
    if ranks.size == 1:
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # where it moves the model
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning, module=r"torch\.distributed")  # its calls
    if not dist.is_initialized():  # one process: a group of one, without a port
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]  # documented, and not in torch's list of exports
            rank=0,
            world_size=1,
        )
    if device.type == "cpu":
        # an extension for inference that it would compile for a minute; training does without
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed


@dataclass(kw_only=True, frozen=True, slots=True)
class Piece:
    """The part of one parameter whose optimizer states this rank holds."""

    flat: Tensor  # the optimizer's own parameter: pieces of many, one after another
    at: int  # where the piece begins in `flat`
    start: int  # where it begins in the parameter
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """The same piece of a tensor that is laid out as `self.flat`."""
        return flat[self.at : self.at + self.count]


class ZeroEngine(TrainingEngine):
    """One objective under ZeRO 1, 2 or 3, with torch's AdamW.

    Parameters keep their types: float32 adapters train over a bf16 base. A loss that is not a number goes through the backward as
    NaN, so that every rank takes part in what all must take part in; `step` then raises on all of them and changes nothing.
    """

    def __init__(self, objective: Objective, settings: AdamW, ranks: Ranks, *, stage: int, keep_whole: int) -> None:
        self.deepspeed = start(ranks, objective.loaded.device)
        self.objective, self.ranks, self.stage = objective, ranks, stage
        self.parameters = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        sizes = [p.numel() for p in self.parameters.values()]
        if stage == 3:  # read in the objective's forward, and no module of its own there
            self.deepspeed.zero.register_external_parameter(objective, objective.loaded.head_VH)
        optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=(settings.betas[0], settings.betas[1]), weight_decay=settings.weight_decay
        )
        self.engine = self.deepspeed.initialize(
            model=objective,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,  # not used: the weights of the tokens say what a micro-batch weighs
                "gradient_accumulation_steps": 1,
                "managed_gradient_accumulation": False,  # `step` alone ends a step
                "gradient_clipping": settings.max_grad_norm,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": None,
                "zero_optimization": {
                    "stage": stage,
                    "overlap_comm": False,
                    "reduce_bucket_size": max(max(sizes), min(sum(sizes), BUCKET)),
                    "stage3_param_persistence_threshold": keep_whole,
                    # its own values keep whole what is used again within 1e9 entries: all of most models here
                    "stage3_max_reuse_distance": 0,
                    "stage3_max_live_parameters": BUCKET,
                    "stage3_prefetch_bucket_size": BUCKET // 2,
                    "sub_group_size": BUCKET,
                },
            },
        )[0]
        self.optimizer: Any = self.engine.optimizer
        self.fault: str | None = None  # what was wrong with a loss of the step at hand

    def accumulate(
        self, batch: MicroBatch, teacher_TH: Tensor | None, teacher_head_VH: Tensor | None, *, want_cosine: bool, last: bool
    ) -> Tensor:
        self.objective.want_cosine = want_cosine
        if teacher_head_VH is self.objective.loaded.head_VH:
            teacher_head_VH = None
        loss, diagnostics_TD = self.engine(batch, teacher_TH, teacher_head_VH)
        scale = float(self.ranks.size)  # the ranks' gradients are averaged
        if not loss.isfinite():
            self.fault, scale = f"the loss is {loss.item()}", math.nan
        self.engine.backward(loss * scale)
        return diagnostics_TD

    def step(self, *, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        fault, self.fault = self.fault, None
        if self.optimizer.overflow:
            raise NonFinite(fault or "the gradient norm is not a number")
        return float(self.engine.get_global_grad_norm())

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stage < 3 else self.gathered()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole parameters, and modules without DeepSpeed's hooks, which would split each parameter again once it was used."""
        modules = list(self.objective.modules())
        hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
        with self.deepspeed.zero.GatheredParameters(list(self.objective.model.parameters())):
            for module in modules:
                module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
            try:
                yield
            finally:
                for module, (before, after) in zip(modules, hooks, strict=True):
                    module._forward_pre_hooks, module._forward_hooks = before, after

    @property
    def flats(self) -> list[Tensor]:
        """What the optimizer steps: this rank's pieces of many parameters, one after another, in float32."""
        zero = self.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def pieces(self) -> dict[str, Piece]:
        """By parameter; those of which nothing is here are left out."""
        found = {}
        for name, parameter in self.parameters.items():
            mapping = getattr(parameter, "_hp_mapping", None)  # stages 1 and 2
            if self.stage == 3:
                group, at, count = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
                start = self.ranks.rank * count
                count = min(count, self.shapes[name].numel() - start)  # the last ones are padded
            elif mapping is None:
                continue
            else:
                group, at, count = mapping.param_group_index, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                start = mapping.lp_fragment_address.start
            if count > 0:
                found[name] = Piece(flat=self.flats[group], at=at, start=start, count=count)
        return found

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        held, pieces, state = self.optimizer.optimizer.state, self.pieces(), {}
        for name, shape in self.shapes.items() if held else ():  # there are none before the first step
            for key in MOMENTS:
                whole = torch.zeros(shape.numel(), device=self.objective.loaded.device)
                piece = pieces.get(name)
                if piece is not None:
                    whole[piece.start : piece.start + piece.count] = piece.of(held[piece.flat][key])
                dist.reduce(whole, dst=0)
                if self.ranks.first:
                    state[f"{key}/{name}"] = whole.view(shape).cpu()
            if self.ranks.first:
                state[f"step/{name}"] = held[self.flats[0]]["step"].clone()
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        if not state:
            return
        held = self.optimizer.optimizer.state
        (step,) = {float(value) for entry, value in state.items() if entry.startswith("step/")}
        for flat in self.flats:
            held[flat] = {"step": torch.tensor(step)} | {key: torch.zeros_like(flat) for key in MOMENTS}
        for name, piece in self.pieces().items():
            for key in MOMENTS:
                value = state[f"{key}/{name}"].flatten()[piece.start : piece.start + piece.count]
                piece.of(held[piece.flat][key]).copy_(value)
