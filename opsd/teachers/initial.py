"""The starting weights as teacher: adapters switched off under LoRA, a frozen copy under full fine-tuning.

The fixed teacher of arXiv 2601.18734. Under LoRA it costs no memory; the shared module is in evaluation mode only inside `hidden`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from opsd.registry import register
from opsd.teachers.base import Teacher, TeacherModel

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.types import LoadedModel, Sequences


class WithoutAdapters(TeacherModel):
    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.head_VH = loaded.head_VH.detach()

    def hidden(self, side: Sequences) -> Tensor:
        from transformers import PreTrainedModel

        from opsd.scoring import evaluating, hidden_at

        assert not isinstance(self.loaded.model, PreTrainedModel), "adapters come with peft's model around the base"
        with evaluating(self.loaded.model), self.loaded.model.disable_adapter():
            return hidden_at(self.loaded.body, side)


class FrozenCopy(TeacherModel):
    def __init__(self, loaded: LoadedModel) -> None:
        model = copy.deepcopy(loaded.model).eval().requires_grad_(False)
        self.body = model.get_decoder()
        self.head_VH = model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]  # loading has checked

    def hidden(self, side: Sequences) -> Tensor:
        import torch

        from opsd.scoring import hidden_at

        with torch.no_grad():  # in evaluation mode for good
            return hidden_at(self.body, side)


@register("teacher", "initial")
class Initial(Teacher):
    def build(self, loaded: LoadedModel) -> TeacherModel:
        return WithoutAdapters(loaded) if loaded.lora else FrozenCopy(loaded)
