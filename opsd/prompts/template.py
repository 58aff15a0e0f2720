"""Prompts from templates: the student's text, the teacher's, which also holds the privileged text, and, where the teacher writes
an analysis before it reads the response, the text that asks for one.

The two sides of arXiv 2601.18734 (`paper`): one model reads the problem, and the problem with its worked solution. What the teacher
is shown may be less (`answer`, `hint`) or nothing (`none`), which tells what the privileged text is worth.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from opsd import chat
from opsd.prompts.base import PromptTemplate
from opsd.registry import register
from opsd.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Found = TypeVar("Found")

SLOT = re.compile(r"\{(problem|privileged|analysis)\}")
# a lower-case word in braces that is no argument of a LaTeX command, index or other group is a slot that nobody fills
UNKNOWN_SLOT = re.compile(r"(?<![\\\w}\]^])\{(?!problem\}|privileged\}|analysis\})[a-z_]{2,}\}")
GAP = " [...] "  # what stands for the cut middle of a privileged text
UNFINISHED = " [...]"  # what a hint ends in
THINK, THOUGHT = "<think>", "</think>"


class Privileged(Enum):
    """What the teacher sees beside the problem's text. Member names are what a config says."""

    solution = "solution"
    answer = "answer"
    hint = "hint"
    none = "none"


class Boundary(Enum):
    """What stands between the user's text and the response."""

    released = "released"
    aligned = "aligned"


class TooLong(Enum):
    """What happens to a problem whose teacher prompt does not fit."""

    shorten = "shorten"
    drop = "drop"


@dataclass(kw_only=True, slots=True)
class Reading:
    """What the teacher reads of one problem before the response starts, in a form that fits."""

    privileged: str
    teacher_ids: list[int]  # without an analysis
    analysis_ids: list[int] | None


@register("prompt", "template")
class Template(PromptTemplate):
    """Slots are replaced, once and at the same time; every other brace stays as it is."""

    student: str
    teacher: str
    analysis: str | None  # what asks the teacher for an analysis, which then stands at the teacher's {analysis}
    privileged: Privileged
    hint_fraction: float | None  # of the solution's characters; set with privileged=hint, and with nothing else
    student_thinking: bool
    teacher_thinking: bool
    boundary: Boundary
    max_teacher_tokens: int | None  # the teacher's prompt, analysis included; null: what fits the context beside the response
    too_long: TooLong

    def __post_init__(self) -> None:
        for key, template in self.texts():
            unknown = UNKNOWN_SLOT.search(template)
            if unknown:
                raise ValueError(
                    f"prompt.{key}: {unknown[0]} is no slot; the slots are {{problem}}, {{privileged}} and, for the teacher, "
                    "{analysis}."
                )
            if "{problem}" not in template:
                raise ValueError(f"prompt.{key}={template!r}: has no {{problem}}; say where the problem's text stands.")
        for slot in ("{privileged}", "{analysis}"):
            if slot in self.student:
                raise ValueError(f"prompt.student: holds {slot}, which only the teacher may see; remove it.")
        if (self.hint_fraction is not None) != (self.privileged is Privileged.hint):
            raise ValueError(
                "prompt.hint_fraction=null with prompt.privileged=hint: say how much of the solution the teacher sees, e.g. 0.5."
                if self.hint_fraction is None
                else f"prompt.hint_fraction={self.hint_fraction} with prompt.privileged={self.privileged.name}: it would not be "
                "read; set it to null, or prompt.privileged=hint."
            )
        if self.hint_fraction is not None and not 0 < self.hint_fraction < 1:
            raise ValueError(
                f"prompt.hint_fraction={self.hint_fraction}: must lie between 0 and 1, both excluded; for the whole solution set "
                "prompt.privileged=solution, for nothing prompt.privileged=none."
            )
        if self.max_teacher_tokens is not None and self.max_teacher_tokens < 1:
            raise ValueError(
                f"prompt.max_teacher_tokens={self.max_teacher_tokens}: must be at least 1, or null for whatever fits the context."
            )
        self.check_analysis()

    def check_analysis(self) -> None:
        """An analysis is asked for, limited and read, or none of the three."""
        if self.analysis is None:
            if "{analysis}" in self.teacher:
                raise ValueError(
                    "prompt.analysis=null: prompt.teacher has a slot {analysis}; say in prompt.analysis what asks for it, or "
                    "remove the slot."
                )
            if self.analysis_len is not None:
                raise ValueError(
                    f"prompt.analysis_len={self.analysis_len} with prompt.analysis=null: no analysis is written; set it to null, "
                    "or prompt=reason_first."
                )
            return
        if "{analysis}" not in self.teacher:
            raise ValueError("prompt.teacher: has no {analysis}, so that the analysis would go unread; say where it stands.")
        if "{analysis}" in self.analysis:
            raise ValueError("prompt.analysis: holds {analysis}, which is what it asks for; remove it.")
        if self.analysis_len is None or self.analysis_len < 1:
            said = "null" if self.analysis_len is None else self.analysis_len
            raise ValueError(f"prompt.analysis_len={said}: must be at least 1, the tokens that the analysis may have, e.g. 512.")
        if self.privileged is Privileged.none:
            raise ValueError(
                "prompt.privileged=none with prompt.analysis: the teacher reads the student's text and nothing else, an analysis "
                "included; set another prompt, e.g. prompt=paper."
            )
        if self.max_teacher_tokens is not None and self.analysis_len >= self.max_teacher_tokens:
            raise ValueError(
                f"prompt.analysis_len={self.analysis_len} with prompt.max_teacher_tokens={self.max_teacher_tokens}: leaves no room "
                "for the problem; lower the first or raise the second."
            )

    def texts(self) -> list[tuple[str, str]]:
        """The templates there are, by key."""
        return [
            (key, text)
            for key, text in (("student", self.student), ("teacher", self.teacher), ("analysis", self.analysis))
            if text is not None
        ]

    @property
    def shows(self) -> bool:
        """Whether the teacher sees anything that the student does not."""
        return self.privileged is not Privileged.none and any("{privileged}" in text for _, text in self.texts())

    @property
    def needs(self) -> frozenset[str]:
        if not self.shows:
            return frozenset()
        return frozenset({"answer" if self.privileged is Privileged.answer else "solution"})

    @property
    def same_ids(self) -> bool:
        """Whether both sides' prompts are one, token for token, whatever the model."""
        return self.privileged is Privileged.none and (
            self.boundary is Boundary.aligned or self.student_thinking == self.teacher_thinking
        )

    def check_teacher(self, teacher: str) -> list[str]:
        if teacher == "none":
            if self.analysis is not None:
                raise ValueError(
                    f"prompt={self.name} with teacher=none: it has the teacher write an analysis, and there is none to; set "
                    "another prompt, e.g. prompt=paper."
                )
            return []
        if self.same_ids and teacher == "live":
            raise ValueError(
                "prompt.privileged=none with teacher=live: the same weights read the same tokens on both sides, so that the "
                "divergence is zero for ever; set prompt.privileged=solution, or another teacher."
            )
        if self.same_ids and teacher != "external":
            return [
                f"prompt.privileged=none: student and teacher read the same tokens, and teacher={teacher} starts with the same "
                "weights, so that the first divergence is zero and what follows is rounding; set prompt.privileged, or "
                "teacher=external, unless this is a control."
            ]
        if not self.shows and self.privileged is not Privileged.none:
            return [
                f"prompt.teacher: has no {{privileged}}, so that the teacher does not see the {self.privileged.name}; say where it "
                "stands, or set prompt.privileged=none."
            ]
        return []

    def render(
        self,
        problem: Problem,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        teacher: bool,
        analysis: str | None = None,
    ) -> Prompt | None:
        student_text = fill(self.student, problem=problem.text)
        student_ids = chat.render(tokenizer, student_text, thinking=self.student_thinking)
        if len(student_ids) > max_prompt_tokens:
            return None
        if not teacher:
            return Prompt(problem=problem, student_ids=student_ids, teacher_ids=None, shortened=False, analysis_ids=None)
        limit = max_prompt_tokens if self.max_teacher_tokens is None else min(max_prompt_tokens, self.max_teacher_tokens)
        room = limit - (self.analysis_len or 0)
        ending = self.student_thinking if self.boundary is Boundary.aligned else None

        def teacher_ids(privileged: str, said: str) -> list[int]:
            text = student_text
            if self.privileged is not Privileged.none:
                text = fill(self.teacher, problem=problem.text, privileged=privileged, analysis=said)
            return chat.render(tokenizer, text, thinking=self.teacher_thinking, ending=ending)

        def read(privileged: str) -> Reading | None:
            """Everything that the teacher reads, if each piece leaves room for the longest analysis."""
            read_ids, asked_ids = teacher_ids(privileged, ""), None
            if self.analysis is not None:
                asked = fill(self.analysis, problem=problem.text, privileged=privileged)
                asked_ids = chat.render(tokenizer, asked, thinking=False)  # the limit is for what is read, not for thoughts
            if max(len(read_ids), len(asked_ids or ())) > room:
                return None
            return Reading(privileged=privileged, teacher_ids=read_ids, analysis_ids=asked_ids)

        privileged = self.privileged_text(problem)
        reading, shortened = read(privileged), False
        if reading is None and self.shows and self.too_long is TooLong.shorten:
            reading, shortened = longest(lambda kept: read(without_middle(privileged, kept)), len(privileged)), True
        if reading is None:
            return None
        read_ids = reading.teacher_ids
        if analysis is not None:
            written, cut = conclusion(analysis), reading.privileged

            def with_analysis(kept: int) -> list[int] | None:
                ids = teacher_ids(cut, written[:kept])
                return ids if len(ids) <= limit else None

            whole = with_analysis(len(written))
            if whole is None:  # text can have more tokens than the ones it was written in
                whole, shortened = longest(with_analysis, len(written)), True
            assert whole is not None, "a prompt that was made with room for an analysis has none"
            read_ids = whole
        return Prompt(
            problem=problem, student_ids=student_ids, teacher_ids=read_ids, shortened=shortened, analysis_ids=reading.analysis_ids
        )

    def privileged_text(self, problem: Problem) -> str:
        """What the teacher sees beside the problem's text, or nothing where no template has a slot for it."""
        if not self.shows:
            return ""
        (field,) = self.needs
        text = problem.solution if field == "solution" else problem.answer
        if text is None:
            other = "answer" if field == "solution" else "solution"
            raise ValueError(
                f"prompt.privileged={self.privileged.name}: the problem {problem.id} has no {field} for the teacher to read; add "
                f"it to the data (data.columns.{field} says in which column) or set prompt.privileged={other}."
            )
        return text if self.hint_fraction is None else beginning(text, self.hint_fraction)


def fill(template: str, **values: str) -> str:
    """All slots in one pass, so that a slot's name inside a problem's own text stays text."""
    return SLOT.sub(lambda slot: values[slot[1]], template)


def beginning(text: str, fraction: float) -> str:
    """A leading fraction of the characters, back to the last whole word, marked as unfinished."""
    text = text.strip()
    end = int(fraction * len(text))
    while end > 0 and not text[end].isspace():
        end -= 1
    return text[:end].rstrip() + UNFINISHED


def conclusion(analysis: str) -> str:
    """What an analysis says after its thinking; of one that never stopped thinking, the thoughts."""
    return analysis.rpartition(THOUGHT)[2].strip().removeprefix(THINK).strip()


def without_middle(text: str, kept: int) -> str:
    """`kept` characters from both ends of a text, the cut marked."""
    return text[: (kept + 1) // 2].rstrip() + GAP + text[len(text) - kept // 2 :].lstrip()


def longest(attempt: Callable[[int], Found | None], length: int) -> Found | None:
    """What `attempt` makes of the most characters, fewer than `length`, of which it makes anything; None where of none.

    Found by bisection over characters: unlike tokens they can be cut anywhere without breaking one.
    """
    best, fits, too_many = attempt(0), 0, length
    while best is not None and too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = attempt(middle)
        if found is None:
            too_many = middle
        else:
            best, fits = found, middle
    return best
