"""Training problems that an evaluation asks too: the same text, or most of one in long runs of the same words."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from opsd.types import Problem

# Of an evaluation problem's words, in shared runs, from which on it is repeated. Measured with runs of 13 words: phrases of the
# trade ("where m and n are relatively prime positive integers, find m+n") cover up to .39 of a problem of AIME 2024 or 2025 and
# .53 of the shortest of 969 earlier ones; what MATH-500 and those have in common covers .69 and .98.
MOST = 0.6
WORD = re.compile(r"[^\W_]+")
# what LaTeX sets differently without saying anything else
LAYOUT = re.compile(r"\\(?:(?:left|right|displaystyle|text|mathrm|mbox|quad|qquad)(?![A-Za-z])|[,;:!\s()\[\]])")
FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
SILENT = re.compile(r"[\s$\\{}\"'~]|[.,:;?](?!\d)")  # the rest of layout, and marks that end a sentence


@dataclass(kw_only=True, slots=True)
class Shared:
    """One training problem and the evaluation problem that it repeats."""

    problem_id: str
    evaluation_id: str
    share: float  # of the evaluation problem's words; 1 where the texts are the same
    words: str  # the first of them, for a person to judge


def plain(text: str) -> str:
    """A text in one case and one way to write fractions, without LaTeX's spacing."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    return FRACTION.sub(r"\\frac", LAYOUT.sub(" ", text))


def words_of(text: str) -> list[str]:
    """A text's letters and digits in words."""
    return WORD.findall(plain(text))


def whole_of(text: str) -> str:
    """A text's characters without layout. Operators stay: x+1 and x-1 are two problems."""
    return SILENT.sub("", plain(text))


def shared_problems(problems: Sequence[Problem], evaluation: Sequence[Problem], *, words: int | None) -> list[Shared]:
    """Every training problem that repeats a problem of the evaluation, once, in the order of the training problems.

    Two problems are one where their texts are, layout aside, or where runs of `words` words that stand in both (13 in arXiv
    2005.14165, appendix C) cover `MOST` of the evaluation's problem. Only the problems' texts are looked at.

    Args:
        words: None compares whole texts alone, as happens to an evaluation problem of fewer words.
    """
    told = [words_of(problem.text) for problem in evaluation]
    whole = {whole_of(problem.text): index for index, problem in enumerate(evaluation)}
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)  # a run -> where it stands in which evaluation problem
    if words is not None:
        for index, text in enumerate(told):
            for start in range(len(text) - words + 1):
                places[tuple(text[start : start + words])].append((index, start))
    found: list[Shared] = []
    for problem in problems:
        index = whole.get(whole_of(problem.text))
        if index is not None:
            share, common = 1.0, told[index]
        elif words is not None:
            index, share, common = most_covered(words_of(problem.text), places, told, words=words)
        else:
            continue
        if share >= MOST:
            shown = " ".join(common[:20])
            found.append(Shared(problem_id=problem.id, evaluation_id=evaluation[index].id, share=share, words=shown))
    return found


def most_covered(
    text: list[str], places: dict[tuple[str, ...], list[tuple[int, int]]], told: list[list[str]], *, words: int
) -> tuple[int, float, list[str]]:
    """The evaluation problem of which a text's runs cover the largest share, that share (0: none has such a run), and the words."""
    covered: dict[int, set[int]] = defaultdict(set)
    for start in range(len(text) - words + 1):
        for index, place in places.get(tuple(text[start : start + words]), ()):
            covered[index].update(range(place, place + words))
    share, index = max(((len(found) / len(told[index]), index) for index, found in covered.items()), default=(0.0, 0))
    return index, share, [told[index][place] for place in sorted(covered[index])]
