"""Training problems that an evaluation asks too: the same text, or a long enough run of the same words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from opsd.types import Problem

BOILERPLATE = 10  # a run of words in more training problems than this is a phrase of the trade, not a copy of one problem
WORD = re.compile(r"[^\W_]+")


@dataclass(kw_only=True, slots=True)
class Shared:
    """One training problem and the evaluation problem that it repeats."""

    problem_id: str
    evaluation_id: str
    words: str  # what both have, for a person to judge


def words_of(text: str) -> list[str]:
    """A text's letters and digits in words, without layout, case or punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shared_problems(problems: Sequence[Problem], evaluation: Sequence[Problem], *, words: int | None) -> list[Shared]:
    """Every training problem that repeats a problem of the evaluation, once, in the order of the training problems.

    Two problems are one where all their words are, or where `words` words in a row are (13 in arXiv 2005.14165, appendix C, which
    also ignores runs that more than 10 training documents have). Only the problems' texts are looked at.

    Args:
        words: None compares whole texts alone.
    """
    whole = {tuple(words_of(problem.text)): problem.id for problem in evaluation}
    runs: dict[tuple[str, ...], str] = {}
    if words is not None:
        for problem in evaluation:
            told = words_of(problem.text)
            for start in range(len(told) - words + 1):
                runs.setdefault(tuple(told[start : start + words]), problem.id)
    found: list[Shared] = []
    by_run: list[tuple[Problem, list[tuple[str, ...]]]] = []
    seen_in: Counter[tuple[str, ...]] = Counter()
    for problem in problems:
        told = words_of(problem.text)
        if tuple(told) in whole:
            by_run.append((problem, [tuple(told)]))
        elif words is not None:
            hits = {run: None for start in range(len(told) - words + 1) if (run := tuple(told[start : start + words])) in runs}
            seen_in.update(hits.keys())
            if hits:
                by_run.append((problem, list(hits)))
    for problem, hits in by_run:
        telling = next((run for run in hits if run in whole or seen_in[run] <= BOILERPLATE), None)
        if telling is not None:
            evaluation_id = whole.get(telling) or runs[telling]
            found.append(Shared(problem_id=problem.id, evaluation_id=evaluation_id, words=" ".join(telling[:20])))
    return found
