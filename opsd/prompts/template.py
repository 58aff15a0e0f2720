"""Prompts from two templates: the student's text and the teacher's, which also holds the privileged field."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from opsd import chat
from opsd.prompts.base import PromptTemplate
from opsd.registry import register
from opsd.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLOT = re.compile(r"\{(problem|privileged)\}")
# a lower-case word in braces that is no argument of a LaTeX command, index or other group is a slot that nobody fills
UNKNOWN_SLOT = re.compile(r"(?<![\\\w}\]^])\{(?!problem\}|privileged\})[a-z_]{2,}\}")
GAP = " [...] "  # what stands for the cut middle of a solution


class Privileged(Enum):
    """Which field of a problem the teacher sees beside its text. Member names are what a config says."""

    solution = "solution"
    answer = "answer"


class TooLong(Enum):
    """What happens to a problem whose teacher prompt does not fit."""

    shorten = "shorten"
    drop = "drop"


@register("prompt", "template")
class Template(PromptTemplate):
    """`{problem}` and `{privileged}` are replaced, once and at the same time; every other brace stays as it is."""

    student: str
    teacher: str
    privileged: Privileged
    student_thinking: bool
    teacher_thinking: bool
    max_teacher_tokens: int | None  # the teacher's prompt; null: what fits the context beside the response
    too_long: TooLong

    def __post_init__(self) -> None:
        for key, template in (("student", self.student), ("teacher", self.teacher)):
            unknown = UNKNOWN_SLOT.search(template)
            if unknown:
                raise ValueError(f"prompt.{key}: {unknown[0]} is no slot; the slots are {{problem}} and {{privileged}}.")
            if "{problem}" not in template:
                raise ValueError(f"prompt.{key}={template!r}: has no {{problem}}; say where the problem's text stands.")
        if "{privileged}" in self.student:
            raise ValueError("prompt.student: holds {privileged}, which only the teacher may see; remove it.")
        if self.max_teacher_tokens is not None and self.max_teacher_tokens < 1:
            raise ValueError(
                f"prompt.max_teacher_tokens={self.max_teacher_tokens}: must be at least 1, or null for whatever fits the context."
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.privileged.name} if "{privileged}" in self.teacher else ())

    def render(
        self,
        problem: Problem,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        teacher: bool,
        analysis: str | None = None,
    ) -> Prompt | None:
        student_ids = chat.render(tokenizer, fill(self.student, problem.text, ""), thinking=self.student_thinking)
        if len(student_ids) > max_prompt_tokens:
            return None
        if not teacher:
            return Prompt(problem=problem, student_ids=student_ids, teacher_ids=None, shortened=False, analysis_ids=None)
        limit = max_prompt_tokens if self.max_teacher_tokens is None else min(max_prompt_tokens, self.max_teacher_tokens)

        def teacher_ids(privileged: str) -> list[int]:
            return chat.render(tokenizer, fill(self.teacher, problem.text, privileged), thinking=self.teacher_thinking)

        privileged = self.privileged_text(problem)
        whole_ids = teacher_ids(privileged)
        if len(whole_ids) <= limit:
            return Prompt(problem=problem, student_ids=student_ids, teacher_ids=whole_ids, shortened=False, analysis_ids=None)
        if self.too_long is TooLong.drop or not self.needs:
            return None
        shortened_ids = longest_that_fits(teacher_ids, privileged, limit=limit)
        if shortened_ids is None:
            return None
        return Prompt(problem=problem, student_ids=student_ids, teacher_ids=shortened_ids, shortened=True, analysis_ids=None)

    def privileged_text(self, problem: Problem) -> str:
        """The privileged field, or nothing where the teacher's template has no slot for it."""
        if not self.needs:
            return ""
        field = self.privileged.name
        text = problem.solution if self.privileged is Privileged.solution else problem.answer
        if text is None:
            other = "answer" if field == "solution" else "solution"
            raise ValueError(
                f"prompt.privileged={field}: the problem {problem.id} has no {field} for the teacher to read; add it to the data "
                f"(data.columns.{field} says in which column) or set prompt.privileged={other}."
            )
        return text


def fill(template: str, problem: str, privileged: str) -> str:
    """Both slots in one pass, so that a slot's name inside a problem's own text stays text."""
    values = {"problem": problem, "privileged": privileged}
    return SLOT.sub(lambda slot: values[slot[1]], template)


def longest_that_fits(render: Callable[[str], list[int]], text: str, *, limit: int) -> list[int] | None:
    """The rendering of as much of both ends of `text` as `limit` tokens allow, or None where even its absence is too long.

    Found by bisection over characters: unlike tokens they can be cut anywhere without breaking one.
    """

    def shortened(kept: int) -> list[int]:
        return render(text[: (kept + 1) // 2].rstrip() + GAP + text[len(text) - kept // 2 :].lstrip())

    best = shortened(0)
    if len(best) > limit:
        return None
    fits, too_many = 0, len(text)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        ids = shortened(middle)
        if len(ids) <= limit:
            best, fits = ids, middle
        else:
            too_many = middle
    return best
