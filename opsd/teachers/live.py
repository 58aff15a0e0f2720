"""The student's weights of the moment as teacher, without gradient: two contexts of one network and nothing else between them.

The divergence is that of the two contexts, so both sides move with every step and nothing holds the model where it started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.registry import register
from opsd.teachers.base import Teacher, TeacherModel

if TYPE_CHECKING:
    from opsd.types import LoadedModel


@register("teacher", "live")
class Live(Teacher):
    def build(self, loaded: LoadedModel) -> TeacherModel:
        from opsd.teachers.copies import Shared

        return Shared(loaded)
