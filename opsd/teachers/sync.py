"""The student of a while ago as teacher: the starting weights, then a copy of the student's after every `every` steps.

Steps 1 to `every` have the starting weights as teacher, the next `every` the weights after step `every`, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.pretrained import num_bytes
from opsd.registry import register
from opsd.teachers.base import Teacher, TeacherModel

if TYPE_CHECKING:
    from torch.nn import Module

    from opsd.types import LoadedModel


@register("teacher", "sync")
class Sync(Teacher):
    every: int  # optimizer steps

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(
                f"teacher.every={self.every}: must be at least 1 step; for a teacher that never moves set teacher=initial."
            )

    def own_bytes(self, student: Module) -> int:
        return num_bytes(parameter for parameter in student.parameters() if parameter.requires_grad)

    def build(self, loaded: LoadedModel) -> TeacherModel:
        from opsd.teachers.copies import Following

        return Following(loaded, lambda step: float(step % self.every == 0))
