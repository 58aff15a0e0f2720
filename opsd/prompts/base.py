"""Prompts: what the student and the teacher read before the response starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd.registry import Option
from opsd.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTemplate(Option):
    """Both sides of a problem in one place, so that their relation is visible."""

    @property
    def needs(self) -> str | None:
        """The field of a problem, beside its text, that the teacher reads; every problem of the run must have it."""
        raise NotImplementedError

    def render(self, problem: Problem, *, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> Prompt | None:
        """The two prompts as token ids, or None where the row is dropped (`too_long=drop`, or a problem that alone is too long).

        Args:
            problem: with the privileged field present; its absence is a ValueError.
            max_prompt_tokens: what the model's context leaves beside the longest response.
        """
        raise NotImplementedError
