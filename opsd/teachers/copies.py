"""Teachers in memory, of two sorts: the student's own module seen otherwise, and a model apart. Imported only when one is built.

`Following` makes either one whose weights the student flows into. Under full fine-tuning it is a model apart, head included; under
LoRA a second set of adapter tensors over the one frozen base, which no teacher ever writes to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear
from transformers import PreTrainedModel

from opsd.scoring import evaluating, hidden_at
from opsd.teachers.base import TeacherModel
from opsd.types import LoadedModel, Sequences


class Shared(TeacherModel):
    """The student's own module as it is at the moment, in evaluation mode and without gradient inside a call alone."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.head_VH = loaded.head_VH  # the parameter itself: a detached view of it goes stale where an engine moves its data

    def body(self, **inputs: Any) -> Any:
        return self.loaded.body(**inputs)

    def hidden(self, side: Sequences) -> Tensor:
        with evaluating(self.loaded.model):
            return hidden_at(self.body, side)

    def speaker(self, loaded: LoadedModel) -> LoadedModel:
        return replace(loaded, body=self.body, head_VH=self.head_VH)


class WithoutAdapters(Shared):
    """The base that the adapters stand on."""

    def body(self, **inputs: Any) -> Any:
        assert not isinstance(self.loaded.model, PreTrainedModel), "adapters come with peft's model around the base"
        with self.loaded.model.disable_adapter():
            return self.loaded.body(**inputs)


class OwnAdapters(Shared):
    """The base under adapters of the teacher's own, copied from the student's.

    Inside a call alone each adapter's layer computes with the teacher's tensor. Nothing is merged, the student's tensors are not
    touched, and the layers themselves are called as ever, which an engine that shards them counts on. Another 4 bytes a trained
    parameter.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        Shared.__init__(self, loaded)
        assert isinstance(loaded.body, Module)
        self.weights = {name: p.detach().clone() for name, p in loaded.body.named_parameters() if p.requires_grad}
        self.layers = {name: loaded.body.get_submodule(name.removesuffix(".weight")) for name in self.weights}
        assert all(isinstance(layer, Linear) and layer.bias is None for layer in self.layers.values())

    def body(self, **inputs: Any) -> Any:
        for name, layer in self.layers.items():
            layer.forward = partial(linear, weight=self.weights[name])
        try:
            return self.loaded.body(**inputs)
        finally:
            for layer in self.layers.values():
                del layer.forward  # the class's own comes back to light


class Apart(TeacherModel):
    """A model of the teacher's own, frozen and in evaluation mode for good."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.body = model.get_decoder()
        self.head_VH = model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]  # loading has checked

    def hidden(self, side: Sequences) -> Tensor:
        with torch.no_grad():
            return hidden_at(self.body, side)

    def speaker(self, loaded: LoadedModel) -> LoadedModel:
        return replace(loaded, model=self.model, body=self.body, head_VH=self.head_VH)


class FromOutside(Apart):
    """A model that the run does not save. Checkpoints hold a mark of its weights, so that no other takes its place on resuming."""

    def __init__(self, model: PreTrainedModel, *, origin: str) -> None:
        Apart.__init__(self, model)
        self.origin = origin
        sums = [parameter.sum(dtype=torch.float64) for parameter in model.parameters()]
        norms = [torch.linalg.vector_norm(parameter, dtype=torch.float64) for parameter in model.parameters()]
        self.mark = torch.stack([*sums, *norms]).cpu()

    def state(self) -> dict[str, Tensor]:
        return {"mark": self.mark}

    def load_state(self, state: dict[str, Tensor]) -> None:
        same = state["mark"].shape == self.mark.shape and torch.allclose(state["mark"], self.mark, rtol=1e-9, atol=1e-9)
        if not same:
            raise ValueError(
                f"{self.origin}: holds other weights than those this run began with; put them back, or start a new run."
            )


def copy_of(loaded: LoadedModel) -> Apart:
    """The student under full fine-tuning as it is now, its head with it: a tied or trained one moves on, the copy's stays."""
    assert isinstance(loaded.model, PreTrainedModel), "a model with adapters shares its base with its teacher"
    return Apart(copy.deepcopy(loaded.model))


class Following(TeacherModel):
    """Weights of the teacher's own that start as the student's and take over a share of them after each step:

    teacher += share * (student - teacher)    for every trained tensor, in float32
    """

    def __init__(self, loaded: LoadedModel, share: Callable[[int], float]) -> None:
        """`share` gives the share that flows in after a step; the steps count from 1."""
        self.share = share
        trained = loaded.body if loaded.lora else loaded.model
        assert isinstance(trained, Module)
        self.student = {name: p for name, p in trained.named_parameters() if p.requires_grad}
        if loaded.lora:
            teacher = OwnAdapters(loaded)
            self.weights = teacher.weights
        else:
            teacher = copy_of(loaded)
            self.weights = {name: p for name, p in teacher.model.named_parameters() if name in self.student}
        assert self.weights.keys() == self.student.keys()
        assert len(self.weights) == sum(p.requires_grad for p in loaded.model.parameters()), "something outside the body is trained"
        assert all(weight.dtype.itemsize >= 4 for weight in self.weights.values()), "a small share would vanish in rounding"
        self.hidden, self.speaker, self.head_VH = teacher.hidden, teacher.speaker, teacher.head_VH

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        share = self.share(step)
        if share > 0:
            for name, weight in self.weights.items():
                weight.lerp_(self.student[name].to(weight.dtype), share)  # exactly the student's at a share of 1

    def state(self) -> dict[str, Tensor]:
        return dict(self.weights)

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        assert state.keys() == self.weights.keys(), "a checkpoint of another teacher"
        for name, weight in self.weights.items():
            weight.copy_(state[name])
