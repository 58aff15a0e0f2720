"""What the prompts of a run's data come to: lengths, what is shortened and dropped, and the tokens that a run will handle."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from opsd import chat, records
from opsd.config import Run
from opsd.evaluate import check_room
from opsd.seeding import derive
from opsd.stream import ProblemStream
from opsd.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class Survey:
    """The prompts of some of a run's problems."""

    available: int  # problems that the run has
    asked: int  # problems looked at
    prompts: list[Prompt]  # of those that fit
    dropped: list[Problem]

    @property
    def shortened(self) -> list[Prompt]:
        return [prompt for prompt in self.prompts if prompt.shortened]

    @property
    def student_lens(self) -> list[int]:
        return [len(prompt.student_ids) for prompt in self.prompts]

    @property
    def teacher_lens(self) -> list[int]:
        """Empty where the run has no teacher."""
        return [len(prompt.teacher_ids) for prompt in self.prompts if prompt.teacher_ids is not None]


@dataclass(kw_only=True, slots=True)
class Tokens:
    """What one optimizer step and one evaluation handle, for a given length of the responses."""

    sampled: float  # response tokens that the sampler writes, analyses included
    student: float  # prompt and response tokens that the student scores
    teacher: float
    evaluation: float  # response tokens of one evaluation

    @property
    def step(self) -> float:
        return self.sampled + self.student + self.teacher


def survey(stream: ProblemStream, *, most: int) -> Survey:
    """The prompts of all problems, or of `most` drawn by the run's seed.

    Raises:
        ValueError: none of the run's problems fits.
    """
    problems = [problem for pool in stream.pools for problem in pool.problems]
    asked = problems if len(problems) <= most else random.Random(derive(stream.seed, "preflight")).sample(problems, most)
    rendered = [(problem, stream.render(problem)) for problem in asked]
    prompts = [prompt for _, prompt in rendered if prompt is not None] or [stream.first()]
    dropped = [problem for problem, prompt in rendered if prompt is None]
    return Survey(available=len(problems), asked=len(asked), prompts=prompts, dropped=dropped)


def evaluation_prompts(run: Run, tokenizer: PreTrainedTokenizerBase, *, context: int) -> list[list[int]]:
    """What the evaluation asks, as token ids; none where the run has no evaluation.

    Raises:
        ValueError: the longest leaves less than `eval.max_len` of the context.
    """
    if not run.eval.enabled:
        return []
    problems = run.eval.problems()
    prompts = [chat.render(tokenizer, run.eval.prompt_text(problem), thinking=run.eval.thinking) for problem in problems]
    check_room(run.eval, problems, prompts, context=context)
    return prompts


def response_len(run: Run, tokenizer: PreTrainedTokenizerBase, found: Survey) -> float | None:
    """The mean length of responses that are there already, the data's or a run's (of its first step); None: yet to be sampled."""
    if run.rollout.replayed is not None:
        return fmean(len(record.response.token_ids) for record in records.load(run.rollout.replayed, 1))
    if run.rollout.samples_anew:
        return None
    texts = [getattr(prompt.problem, field) or "" for prompt in found.prompts for field in sorted(run.rollout.needs)]
    lens = [len(chat.encode_text(tokenizer, text)) + 1 for text in texts]  # and the end of the turn
    return fmean(min(length, run.rollout.max_len) for length in lens)


def tokens(run: Run, found: Survey, *, response: float, evaluation: float, num_evaluated: int) -> Tokens:
    """For responses of a mean length.

    Args:
        response, evaluation: response tokens of a rollout, and of an evaluation's sample.
        num_evaluated: problems of the evaluation.
    """
    batch, analysis = run.train.batch, run.prompt.analysis_len or 0
    return Tokens(
        sampled=(batch * response if run.rollout.samples_anew else 0) + batch / run.rollout.samples * analysis,
        student=batch * (fmean(found.student_lens) + response),
        teacher=batch * (fmean(found.teacher_lens) + analysis + response) if found.teacher_lens else 0,
        evaluation=num_evaluated * run.eval.samples * evaluation if num_evaluated else 0,
    )


def num_evaluations(run: Run) -> int:
    """How often the run scores itself: before the first step, every `eval.every`, and after the last."""
    if not run.eval.in_run:
        return 0
    every = range(run.eval.every, run.train.steps, run.eval.every) if run.eval.every else ()
    return len({0, run.train.steps, *every})


def spread(lens: list[int]) -> str:
    return f"{min(lens)} / {median(lens):.0f} / {max(lens)}"
