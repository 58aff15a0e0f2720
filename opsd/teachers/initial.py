"""The starting weights as teacher: adapters switched off under LoRA, a frozen copy under full fine-tuning.

The fixed teacher of arXiv 2601.18734. Under LoRA it costs no memory; the shared module is in evaluation mode only inside `hidden`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.pretrained import num_bytes
from opsd.registry import register
from opsd.teachers.base import Teacher, TeacherModel

if TYPE_CHECKING:
    from torch.nn import Module

    from opsd.types import LoadedModel


@register("teacher", "initial")
class Initial(Teacher):
    def own_bytes(self, student: Module) -> int:
        adapters = not all(parameter.requires_grad for parameter in student.parameters())
        return 0 if adapters else num_bytes(student.parameters())

    def build(self, loaded: LoadedModel) -> TeacherModel:
        from opsd.teachers.copies import WithoutAdapters, copy_of

        return WithoutAdapters(loaded) if loaded.lora else copy_of(loaded)
