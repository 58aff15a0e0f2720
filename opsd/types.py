"""What the rooms hand to each other: plain dataclasses.

Shape suffixes, here and everywhere: B rows (rollouts), L padded sequence, T response tokens of a micro-batch (all rows, one after
another, no padding), V vocabulary entries, K kept entries (V, top-k plus tail, or 1), H hidden width, D diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, device
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class FinishReason(Enum):
    STOP = "stop"  # the model ended its turn
    LENGTH = "length"  # cut at the limit


@dataclass(kw_only=True, slots=True)
class Problem:
    """One row of a problem set."""

    id: str
    text: str
    solution: str | None
    answer: str | None


@dataclass(kw_only=True, slots=True)
class Pool:
    """Problems that are drawn in one order. A mix has several."""

    name: str
    share: float  # of the rollouts; the pools' shares add up to 1
    problems: list[Problem]


@dataclass(kw_only=True, slots=True)
class ProblemSet:
    """What a run trains on."""

    pools: list[Pool]
    counts: dict[str, int]  # rows read, and rows left out by reason: nothing is left out in silence

    @property
    def problems(self) -> list[Problem]:
        return [problem for pool in self.pools for problem in pool.problems]


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One problem as both sides see it, up to where the response starts. Token ids throughout."""

    problem: Problem
    student_ids: list[int]
    teacher_ids: list[int] | None  # None: the run has no teacher
    shortened: bool  # the privileged text, or the analysis of it, was cut to fit
    analysis_ids: list[int] | None  # what the teacher is asked before it reads the response; None: nothing


@dataclass(kw_only=True, slots=True)
class Sampling:
    """How responses are drawn: logits / temperature, then the top_k largest, then the smallest set of mass top_p."""

    temperature: float
    top_p: float
    top_k: int | None  # null: off
    max_len: int  # response tokens at most, the end-of-turn token included


@dataclass(kw_only=True, slots=True)
class Request:
    """One response to be sampled. Its seed alone decides its random draws, whatever else is in the batch."""

    prompt_ids: list[int]
    seed: int


@dataclass(kw_only=True, slots=True)
class Response:
    """What a rollout engine gives back for one request."""

    token_ids: list[int]  # with the end-of-turn token, where the model wrote one
    logps: list[float]  # raw: log-softmax of the logits as they are; NaN throughout where the response was not sampled
    processed_logps: list[float]  # after temperature, top_k and top_p: the sampler's own probability
    finish_reason: FinishReason
    weights_version: int | None  # optimizer steps that the sampling weights had seen; None: it was not sampled


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A sampled response beside the prompt it answers: what the trainer scores. The text is for people; training uses the ids."""

    prompt: Prompt
    response: Response
    text: str


@dataclass(kw_only=True, slots=True)
class LoadedModel:
    """A model in memory, ready for training or sampling.

    `model` is the causal LM with its adapters, if any, injected in place; `body` returns hidden states, `head_VH` projects them.
    """

    model: PreTrainedModel | PeftModel  # under LoRA peft's wrapper around it
    body: Callable[..., Any]  # the module; of a teacher that speaks, a call of it under the teacher's weights
    head_VH: Tensor
    tokenizer: PreTrainedTokenizerBase
    context: int  # tokens the model can attend to, prompt and response together
    stop_ids: list[int]  # tokens that end a turn
    directory: Path  # where its starting weights were read (under LoRA the base's), for engines that read them by themselves
    lora: bool
    device: device


@dataclass(kw_only=True, slots=True)
class Sequences:
    """One side's tokens of a micro-batch: prompt and response of each row, then padding on the right.

    Under a causal mask nothing real attends to what stands to its right, so neither mask nor positions are needed: padding cannot
    change a score. `rows_T` and `at_T` say, for every response token, where the hidden state stands that predicts it.
    """

    ids_BL: Tensor  # int64
    rows_T: Tensor  # int64
    at_T: Tensor  # int64


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Rows that are scored in one forward. Response tokens of all rows follow one another, from lengths, whatever their ids are."""

    student: Sequences
    teacher: Sequences | None  # None: the run has no teacher
    response_ids_T: Tensor  # int64
    sampler_logps_T: Tensor  # float32, processed
    sampler_raw_logps_T: Tensor  # float32, raw
    weights_T: Tensor  # float32; the loss is the weighted sum of the tokens' values
    index_T: Tensor  # int64, which token of its own response
    length_T: Tensor  # int64, tokens of that response


@dataclass(kw_only=True, slots=True)
class StepReport:
    """What one optimizer step leaves behind."""

    step: int
    metrics: dict[str, float]  # METHOD names, e.g. train/divergence; deterministic on the CPU
    seconds: dict[str, float]  # wall time by part


@dataclass(kw_only=True, slots=True)
class Sample:
    """One graded evaluation sample, as kept in samples.jsonl."""

    problem_id: str
    sample: int
    seed: int
    text: str
    num_tokens: int
    finish_reason: str
    gold: str
    extracted: str | None  # what the strict rule read, None where there was no answer
    canonical: str | None  # the form that votes are counted in
    frozen: bool  # right under the released evaluator's rule
    strict: bool  # right under the integer rule
    boxed: bool


@dataclass(kw_only=True, slots=True)
class EvalReport:
    """One evaluation of one set of weights."""

    benchmark: str  # the prefix of its metrics; `<name>_custom` or `_partial` where the protocol is not the benchmark's own
    step: int
    k: int  # samples a problem
    metrics: dict[str, float]  # without the prefix: avg_at_12, pass_at_12, ...; scores and rates in percent
    solve_rates: dict[str, float]  # problem id -> share of right samples, the unit of paired comparisons
    samples: list[Sample]
    canonical: bool
