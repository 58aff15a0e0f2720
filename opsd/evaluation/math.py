"""Mathematics benchmarks: problems with a boxed final answer, from the hub or from a file.

A benchmark whose protocol is published stands in `PROTOCOLS`. Its plain name as a metric prefix, and the mark `canonical`, are for
that protocol alone: fewer problems make it `<name>_partial`, any other departure `<name>_custom`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from opsd.evaluation.base import Benchmark
from opsd.problems import read_hub, read_jsonl
from opsd.registry import register
from opsd.types import Problem, Sampling

REQUIRED = ("problem", "answer")


@dataclass(kw_only=True, frozen=True, slots=True)
class Protocol:
    """How a benchmark is scored where its score is published."""

    repo: str
    revision: str
    split: str
    num_problems: int
    answers: str  # digest of the integer answers: tells the set from another of its size, whatever the wording
    samples: int
    sampling: Sampling
    thinking: bool
    instruction: str


AIME24 = Protocol(  # the evaluation of the code released with arXiv 2601.18734
    repo="HuggingFaceH4/aime_2024",
    revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    split="train",
    num_problems=30,
    answers="6809c5cf89d17fa1",
    samples=12,
    sampling=Sampling(temperature=1.0, top_p=0.95, top_k=None, max_len=38912),
    thinking=True,
    instruction="\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
)
PROTOCOLS = {"aime24": AIME24}


@register("eval", "math")
class MathBenchmark(Benchmark):
    """`path`, a JSONL file, where it is set; otherwise `repo` at `revision`, part `split`, on the hub.

    A file counts as the benchmark when its answers are the benchmark's, in whatever order; the wording is not looked at.
    """

    path: str | None
    repo: str | None
    revision: str | None
    split: str | None
    columns: dict[str, str]  # which column holds id, problem, answer
    max_rows: int | None  # the first n problems only; null: all

    def __post_init__(self) -> None:
        Benchmark.__post_init__(self)
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"eval.max_rows={self.max_rows}: must be at least 1, or null for all.")
        if self.path is None and (self.repo is None or self.split is None):
            raise ValueError(
                f"eval.path=null with eval.repo={self.repo} and eval.split={self.split}: set eval.path=FILE, or both of the others."
            )

    def check(self) -> None:
        self.problems()

    def problems(self) -> list[Problem]:
        if self.path is not None:
            return read_jsonl(self.path, key="eval.path", columns=self.columns, required=REQUIRED, max_rows=self.max_rows)
        assert self.repo is not None and self.split is not None
        return read_hub(
            self.repo,
            key="eval.path",
            revision=self.revision,
            split=self.split,
            columns=self.columns,
            required=REQUIRED,
            max_rows=self.max_rows,
        )

    def title(self, problems: list[Problem]) -> str:
        protocol = PROTOCOLS.get(self.name)
        if self.max_rows is not None if protocol is None else len(problems) < protocol.num_problems:
            return f"{self.name}_partial"
        return self.name if protocol is None or self.canonical(problems) else f"{self.name}_custom"

    def canonical(self, problems: list[Problem]) -> bool:
        protocol = PROTOCOLS.get(self.name)
        return (
            protocol is not None
            and (
                self.path is not None
                or (self.repo, self.revision, self.split) == (protocol.repo, protocol.revision, protocol.split)
            )
            and len(problems) == protocol.num_problems
            and answers_digest(problems) == protocol.answers
            and (self.samples, self.sampling, self.thinking, self.instruction)
            == (protocol.samples, protocol.sampling, protocol.thinking, protocol.instruction)
        )


def answers_digest(problems: list[Problem]) -> str:
    """Sixteen hex digits of the sorted integer answers; empty where one is no integer. 073 is 73."""
    answers = [problem.answer or "" for problem in problems]
    if not all(answer.isascii() and answer.isdigit() for answer in answers):
        return ""
    return hashlib.sha256(json.dumps(sorted(map(int, answers))).encode()).hexdigest()[:16]
