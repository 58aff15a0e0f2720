"""Trains the embedded model under an engine; what the tests of engines compare. Run by torchrun, or in the test's own process.

    torchrun ... ranks_training.py OUT ENGINE ...    every scenario under each ENGINE (torch, zero1, ...), into OUT/ENGINE.pt
    python ranks_training.py OUT ENGINE ...          in one process a few steps alone

Everything is the project's own: model, teacher, objective, batching, engine, checkpoints. Rollouts are random token ids of unequal
lengths. Under two ranks step 3 leaves one of them without a rollout, and in step 4 one's only rollout has an empty response.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opsd import batching, checkpoints
from opsd import ranks as processes
from opsd.checkpoints import Progress
from opsd.endings import NonFinite
from opsd.engines.base import AdamW, TrainingEngine
from opsd.models.base import Lora
from opsd.models.tiny import Tiny
from opsd.pretrained import Dtype
from opsd.ranks import Ranks
from opsd.registry import lookup
from opsd.scoring import Objective
from opsd.types import FinishReason, LoadedModel, Problem, Prompt, Response, Rollout

TINY = Path(__file__).parents[2] / "opsd" / "assets" / "tiny"
TEACHERS: dict[str, dict[str, Any]] = {
    "initial": {},
    "ema": {"rate": 0.3},
    "sync": {"every": 2},
    "live": {},
    "external": {"path": str(TINY), "revision": None, "dtype": Dtype.float32},
}
OTHERS = ("initial", "sync", "live", "external")  # than ema, under which the long training goes
LR = 1e-3
STEP_5 = Path("checkpoints") / "step_000005"


def option(group: str, kind: str, **keys: Any) -> Any:
    return lookup(group, kind)(name=kind, kind=kind, **keys)


def random_rollouts(step: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(step)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 500, (count,), generator=generator).tolist()

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    lengths = {3: [9], 4: [11, 0]}.get(step, [number(1, 14) for _ in range(6)])
    rollouts = []
    for row, length in enumerate(lengths):
        prompt = Prompt(
            problem=Problem(id=str(row), text="", solution="", answer=None),
            student_ids=ids(number(3, 12)),
            teacher_ids=ids(number(6, 25)),
            shortened=False,
            analysis_ids=None,
        )
        zeros = [0.0] * length
        response = Response(
            token_ids=ids(length), logps=zeros, processed_logps=zeros, finish_reason=FinishReason.STOP, weights_version=step - 1
        )
        rollouts.append(Rollout(prompt=prompt, response=response, text=""))
    return rollouts


@dataclass(kw_only=True)
class Training:
    """A student with its teacher under an engine."""

    ranks: Ranks
    loaded: LoadedModel
    teacher: Any
    engine: TrainingEngine

    def step(self, step: int, *, spoilt: bool = False) -> tuple[float, float]:
        """The step's loss over all ranks, and its gradient norm. `spoilt`: a weight of the last rank is not a number."""
        rollouts = random_rollouts(step)
        weights = batching.token_weights(rollouts, batching.Reduction.token)
        mine = batching.plan(rollouts, micro_tokens=60, ranks=self.ranks.size)[self.ranks.rank]
        loss = 0.0
        for place, rows in enumerate(mine, start=1):
            batch = batching.nothing(self.loaded.device, teacher=True)
            if rows:
                batch = batching.collate([rollouts[row] for row in rows], [weights[row] for row in rows], self.loaded.device)
            if spoilt and self.ranks.rank == self.ranks.size - 1 and place == 1:
                batch.weights_T[0] = math.nan
            assert batch.teacher is not None
            teacher_TH, head_VH = self.teacher.hidden(batch.teacher), self.teacher.head_VH
            scored_TD = self.engine.accumulate(batch, teacher_TH, head_VH, want_cosine=step % 2 == 0, last=place == len(mine))
            loss += float((scored_TD[:, 0] * batch.weights_T).sum())
        norm = self.engine.step(lr=LR)
        with self.engine.whole():
            self.teacher.after_step(step)
        return sum(self.ranks.gather(loss)), norm

    def weights(self) -> dict[str, Tensor]:
        with self.engine.whole():
            return {name: p.detach().clone() for name, p in self.loaded.model.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """The optimizer's, on every rank."""
        return self.ranks.gather({name: value.clone() for name, value in self.engine.state().items()})[0]

    def save(self, directory: Path, step: int) -> None:
        """As a run does it."""
        progress = Progress(
            step=step, position=[], elapsed_s=0.0, mlflow_run_id="", engine="", processes=self.ranks.size, problems=""
        )
        groups = {"optimizer": self.engine.state(), "teacher": self.teacher.state()}
        with self.engine.whole():
            if self.ranks.first:
                checkpoints.save(directory, progress, loaded=self.loaded, groups=groups, keep=1)
        self.ranks.gather(None)


def build(
    engine: str,
    ranks: Ranks,
    *,
    lora: bool,
    teacher: str = "initial",
    dtype: Dtype = Dtype.float32,
    checkpointing: bool = False,
    checkpoint: Path | None = None,
) -> Training:
    """In the order of a run: model, teacher, weights of a checkpoint, engine, its state."""
    adapters = Lora(r=4, alpha=8.0, dropout=0.0, targets=["q_proj", "v_proj", "down_proj"]) if lora else None
    loaded = Tiny(name="tiny", kind="tiny", dtype=dtype, context=None, lora=adapters).load(seed=0, device="cpu")
    built = option("teacher", teacher, **TEACHERS[teacher]).build(loaded)
    groups: dict[str, dict[str, Tensor]] = {}
    if checkpoint is not None:
        groups = checkpoints.restore(checkpoint, loaded=loaded)
        built.load_state(groups.get("teacher", {}))
    objective = Objective(
        loaded,
        loss=option("loss", "forward_kl", temperature=None, top_k=None),
        clipping=option("clipping", "rescale", clip=0.05),
        temperature=1.0,
        chunk_tokens=16,
    )
    keys: dict[str, Any] = {"device": "cpu", "gradient_checkpointing": checkpointing}
    kind = "torch" if engine == "torch" else "deepspeed"
    if kind == "deepspeed":
        from opsd.engines import deepspeed_zero

        deepspeed_zero.BUCKET = 200_000  # so that the embedded model too is reduced and updated in several parts
        keys |= {"zero": int(engine[-1]), "keep_whole": 0}
    loaded.model.train()
    settings = AdamW(betas=[0.9, 0.999], weight_decay=0.01, max_grad_norm=0.1)
    running = option("engine", kind, **keys).build(objective, optimizer=settings, ranks=ranks)
    if checkpoint is not None:
        running.load_state(groups.get("optimizer", {}))
    return Training(ranks=ranks, loaded=loaded, teacher=built, engine=running)


def curve(engine: str, ranks: Ranks, *, steps: int, saved: Path | None = None, **keys: Any) -> dict[str, Any]:
    """Loss and norm of each step, the first step's gradient as the first moments have it, and where it ends. `saved`: where a
    checkpoint is written after step 5, from which a second training goes on to the end."""
    training = build(engine, ranks, **keys)
    before = training.state()
    figures = [training.step(1)]
    first = {name: value for name, value in training.state().items() if name.startswith("exp_avg/")}
    found: dict[str, Any] = {"before": before, "figures": figures, "first": first}
    for step in range(2, steps + 1):
        figures.append(training.step(step))
        if step == 5 and saved is not None:
            training.save(saved, step)
            found["halfway"] = training.weights()
    found["dtypes"] = {name: p.dtype for name, p in training.loaded.model.named_parameters()}
    found |= ending(training)
    if saved is not None:
        again = build(engine, ranks, **keys, checkpoint=saved / STEP_5)
        found["again"] = {"figures": [again.step(step) for step in range(6, steps + 1)], **ending(again)}
    return found


def ending(training: Training) -> dict[str, Any]:
    teacher = {name: value.clone() for name, value in training.teacher.state().items()}
    return {"weights": training.weights(), "state": training.state(), "teacher": teacher}


def moved(engine: str, ranks: Ranks, checkpoint: Path, *, lora: bool) -> dict[str, Any]:
    """Steps 6 to 8 from a checkpoint that another engine wrote after step 5."""
    training = build(engine, ranks, lora=lora, teacher="ema", checkpoint=checkpoint)
    loaded = training.weights()
    return {"halfway": loaded, "figures": [training.step(step) for step in range(6, 9)]}


def spoilt(engine: str, ranks: Ranks) -> dict[str, Any]:
    """A loss that is not a number, on the last rank alone."""
    training = build(engine, ranks, lora=True)
    training.step(1)
    before, state = training.weights(), training.state()
    message = None
    try:
        training.step(2, spoilt=True)
    except NonFinite as error:
        message = str(error)
    return {"messages": ranks.gather(message), "weights": (before, training.weights()), "state": (state, training.state())}


def held(engine: str, ranks: Ranks) -> dict[str, Any]:
    """Entries of the parameters and of one moment in this process."""
    training = build(engine, ranks, lora=False)
    parameters = list(training.loaded.model.parameters())
    with training.engine.whole():
        total = sum(p.numel() for p in parameters)
    training.step(1)
    optimizer: Any = training.engine.optimizer  # pyright: ignore[reportAttributeAccessIssue]  # of both engines
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    here = sum(p.numel() for p in parameters), sum(state["exp_avg"].numel() for state in states)
    return {"total": total, "held": ranks.gather(here)}


def scenarios(engine: str, ranks: Ranks, directory: Path) -> dict[Any, Any]:
    both = [("full", False), ("lora", True)]
    found: dict[Any, Any] = {}
    for name, lora in both:
        keys: dict[str, Any] = {"lora": lora, "teacher": "ema"}
        found["curve", name] = curve(engine, ranks, **keys, steps=10, saved=directory / f"{engine}_{name}")
        found["checkpointing", name] = curve(engine, ranks, **keys, steps=2, checkpointing=True)
        for teacher in OTHERS:
            found["teacher", teacher, name] = curve(engine, ranks, lora=lora, steps=3, teacher=teacher)
    found["bf16"] = curve(engine, ranks, lora=True, steps=3, dtype=Dtype.bfloat16, teacher="ema")
    if engine != "torch":
        found["spoilt"], found["held"] = spoilt(engine, ranks), held(engine, ranks)
        for name, lora in both:
            found["moved", name] = moved(engine, ranks, directory / f"torch_{name}" / STEP_5, lora=lora)
    return found


def main() -> None:
    directory, engines = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    ranks = processes.start()
    for engine in engines:
        if ranks.size == 1:
            found = {
                ("curve", name): curve(engine, ranks, lora=name == "lora", teacher="ema", steps=4) for name in ("full", "lora")
            }
        else:
            found = scenarios(engine, ranks, directory)
        if ranks.first:
            torch.save(found, directory / f"{engine}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
