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
    def needs(self) -> frozenset[str]:
        """The fields of a problem, beside its text, that the teacher reads; every problem of the run must have them."""
        raise NotImplementedError

    @property
    def analysis_len(self) -> int | None:
        """Tokens of the analysis that the teacher writes before it reads the response; None: it writes none."""
        return None

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
