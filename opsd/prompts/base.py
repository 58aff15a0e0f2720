"""Prompts: what the student and the teacher read before the response starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opsd.registry import Option
from opsd.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class PromptTemplate(Option):
    """Both sides of a problem in one place, so that their relation is visible."""

    analysis_len: (
        int | None
    )  # tokens at most of the analysis that the teacher writes before it reads the response; null: it writes none

    @property
    def needs(self) -> frozenset[str]:
        """The fields of a problem, beside its text, that the teacher reads; every problem of the run must have them."""
        raise NotImplementedError

    def check_teacher(self, teacher: str) -> list[str]:
        """Holds the teacher's side against which teacher reads it: what is odd, in words.

        Args:
            teacher: its kind.

        Raises:
            ValueError: nothing can come of the two together.
        """
        raise NotImplementedError

    def render(
        self,
        problem: Problem,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        teacher: bool,
        analysis: str | None = None,
    ) -> Prompt | None:
        """The prompts as token ids, or None where the row is dropped (`too_long=drop`, or a problem that alone is too long).

        Args:
            problem: with the privileged field present; its absence is a ValueError.
            max_prompt_tokens: what the model's context leaves beside the longest response.
            teacher: whether the run has one; the teacher's prompt is not made without.
            analysis: what the teacher wrote on `analysis_ids`. Before it has, a prompt is rendered with none, and a row where the
                longest analysis would not fit is dropped already then.
        """
        raise NotImplementedError
