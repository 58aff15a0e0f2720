"""Teachers: who scores the response with the solution in view. They give hidden states and a head; never a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.pretrained import num_bytes
from opsd.registry import Option

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

    from opsd.types import LoadedModel, Sequences


class TeacherModel:
    """A teacher in memory."""

    head_VH: Tensor  # projects the hidden states to the student's vocabulary; H is the teacher's own width

    def hidden(self, side: Sequences) -> Tensor:
        """The hidden states that predict the response tokens, `[T, H]`."""
        raise NotImplementedError

    def speaker(self, loaded: LoadedModel) -> LoadedModel:
        """The teacher as a model to sample from, with the weights that `hidden` has at the time. `loaded`: the student."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Called when the student's weights have changed."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold for the teacher to go on. Empty where the starting weights tell all."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        assert not state, f"a teacher without state was given {sorted(state)}"


class Teacher(Option):
    """Which weights the teacher has."""

    @property
    def exists(self) -> bool:
        """Whether there is a teacher at all; false for `teacher=none` alone."""
        return True

    def check(self, *, context: int) -> None:
        """Refuses what cannot be read, before anything is written. Needs no torch.

        Args:
            context: tokens that a prompt and its response may take together.

        Raises:
            ValueError: names the key, its value and what to do.
        """

    @property
    def own_vocabulary(self) -> bool:
        """Whether it comes with a tokenizer, to be held against the student's by `check_vocabulary`."""
        return False

    def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses a teacher that the student's token ids would mean something else to; called where `own_vocabulary`.

        Raises:
            ValueError: the vocabularies differ; says in what.
        """

    def own_bytes(self, student: Module) -> int:
        """Bytes of the weights that it keeps beside the student's; none where it shares the student's module.

        Args:
            student: without weights, as `Model.skeleton` gives it.
        """
        return 0

    def build(self, loaded: LoadedModel) -> TeacherModel:
        """Called once, while `loaded` still holds its STARTING weights, also when a run resumes.

        Raises:
            ValueError: the teacher does not fit this student.
        """
        raise NotImplementedError


class Follower(Teacher):
    """Weights of its own that start as the student's and take over a share of them after each step."""

    def share(self, step: int) -> float:
        """Of the student's weights that flows in after a step, from 0 to 1; the steps count from 1."""
        raise NotImplementedError

    def own_bytes(self, student: Module) -> int:
        return num_bytes(parameter for parameter in student.parameters() if parameter.requires_grad)

    def build(self, loaded: LoadedModel) -> TeacherModel:
        from opsd.teachers.copies import Following

        return Following(loaded, self.share)
