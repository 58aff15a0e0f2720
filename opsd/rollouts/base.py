"""Rollout engines: token ids in, token ids and log-probs out. They never see problems or text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opsd.registry import Option
from opsd.types import LoadedModel, Prompt, Request, Response, Sampling

if TYPE_CHECKING:
    from torch.nn import Module


class Sampler:
    """A running engine. Built once a process; `generate` may be called with any sampling settings."""

    def generate(self, requests: list[Request], *, sampling: Sampling) -> list[Response]:
        """One response for each request, in order. The same request under the same weights gives the same response."""
        raise NotImplementedError

    def sync(self, *, weights_version: int) -> dict[str, float]:
        """Makes the trainer's current weights the ones that `generate` samples from, from now on.

        Called where the weights are whole in this process (`TrainingEngine.whole`). Gives what was measured on the way, as metrics.

        Raises:
            EngineFailure: they did not arrive; the sampler is of no use any more.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Gives back what memory it can until it is asked again."""

    @property
    def ranks_together(self) -> int:
        """How many ranks, side by side, sample as one and must be given the same requests (tensor parallelism)."""
        return 1

    @property
    def notes(self) -> list[str]:
        """What somebody who reads the log should know of this engine, e.g. which settings have no effect here."""
        return []

    def close(self) -> None:
        """Gives back what the engine holds; it is not asked again. A process that ends without it leaves nothing behind either."""


class Recorded:
    """Responses that were there before the run: another run's, or the data's own."""

    def responses(self, prompts: list[Prompt], *, step: int) -> list[Response]:
        """One for each prompt, in order.

        Args:
            prompts: the step's, a problem repeated for each of its samples.
            step: the optimizer step they are for, from 1.

        Raises:
            ValueError: nothing is recorded for one of them.
        """
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class RolloutEngine(Option):
    """Where the responses come from that are trained on, and who samples those of an evaluation."""

    max_len: int  # response tokens at most
    samples: int  # responses a problem

    def __post_init__(self) -> None:
        for key in ("max_len", "samples"):
            if getattr(self, key) < 1:
                raise ValueError(f"rollout.{key}={getattr(self, key)}: must be at least 1.")

    @property
    def needs(self) -> frozenset[str]:
        """The fields of a problem, beside its text, that become responses."""
        return frozenset()

    @property
    def sampling(self) -> Sampling | None:
        """How the responses were or are sampled; None: they were not, and have no log-probs of a sampler."""
        return None

    @property
    def samples_anew(self) -> bool:
        """Whether responses are sampled from the weights at hand; otherwise `recorded` has them."""
        return True

    @property
    def replayed(self) -> Path | None:
        """The run directory whose rollouts are trained on; None: no run's."""
        return None

    @property
    def processes_together(self) -> int:
        """How many processes sample as one (tensor parallelism)."""
        return 1

    @property
    def reads_module(self) -> bool:
        """Whether sampling calls the trainer's own module, which must be whole then; otherwise the sampler has its own weights."""
        return True

    def own_bytes(self, student: Module) -> int:
        """Bytes that the sampler holds beside the trainer's, key-value cache included; 0 where it `reads_module`.

        Args:
            student: without weights, as `Model.skeleton` gives it.
        """
        return 0

    def refuses(self, *, adapters: bool) -> str | None:
        """Why it cannot sample from such a model, and what to set; None: it can.

        Args:
            adapters: whether the model is trained through LoRA adapters.
        """
        return None

    def check_processed(self) -> None:
        """Refuses recorded responses without the sampler's own probability; called where the loss reads it.

        Raises:
            ValueError: says what to replay instead.
        """

    def check(self) -> None:
        """Refuses what cannot be read or is not installed, before anything is written. Needs no torch.

        Raises:
            ValueError: names the key, its value and what to do.
        """

    def rows_at_once(self, row_tokens: int) -> int:
        """How many responses the sampler decodes side by side.

        Args:
            row_tokens: of the longest prompt and the longest response together.
        """
        raise NotImplementedError

    def build(self, loaded: LoadedModel, *, processed: bool) -> Sampler:
        """A sampler for evaluations and, where `samples_anew`, for the rollouts.

        Args:
            processed: whether the loss reads the sampler's own probability, `Response.processed_logps`. An engine that gives one
                kind of log-probs alone gives these then, otherwise the raw ones; the other kind is NaN where the two differ.

        Raises:
            ValueError: it cannot sample from this model.
            EngineFailure: it did not start.
        """
        raise NotImplementedError

    def build_speaker(self, loaded: LoadedModel) -> Sampler:
        """A sampler for what the teacher writes. `loaded`: `TeacherModel.speaker`."""
        return self.build(loaded, processed=False)

    def recorded(self, loaded: LoadedModel) -> Recorded:
        """The responses of a run that samples none; called where not `samples_anew`."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class SamplingEngine(RolloutEngine):
    """Responses sampled from a model. Subclasses say by what."""

    temperature: float
    top_p: float
    top_k: int | None

    def __post_init__(self) -> None:
        RolloutEngine.__post_init__(self)
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"rollout.temperature={self.temperature}: must be above 0 and finite, since the loss divides logits by it; "
                "greedy decoding is for evaluation alone."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p={self.top_p}: must be above 0 and at most 1 (1 is off).")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"rollout.top_k={self.top_k}: must be at least 1, or null for the whole vocabulary.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_len=self.max_len)


def require_room(requests: list[Request], max_len: int, *, context: int) -> int:
    """The longest prompt in tokens.

    Raises:
        ValueError: it leaves fewer than `max_len` tokens of the model's context.
    """
    longest = max((len(request.prompt_ids) for request in requests), default=0)
    if longest + max_len > context:
        raise ValueError(f"max_len={max_len} plus a prompt of {longest} tokens exceeds model.context={context}; lower max_len.")
    return longest


def diverged(what: str) -> FloatingPointError:
    """What to raise over numbers that are not finite."""
    return FloatingPointError(f"{what}: the model has diverged; go on from an earlier checkpoint with a lower train.lr.")


def check_decoding(max_rows: int, cache_tokens: int) -> None:
    """The limits of `own_sampler` make sense."""
    for key, value in (("max_rows", max_rows), ("cache_tokens", cache_tokens)):
        if value < 1:
            raise ValueError(f"rollout.{key}={value}: must be at least 1.")


def rows_within(row_tokens: int, *, max_rows: int, cache_tokens: int) -> int:
    """The rows of `row_tokens` each that both limits allow; one at least."""
    return max(1, min(max_rows, cache_tokens // row_tokens))


def own_sampler(loaded: LoadedModel, *, max_rows: int, cache_tokens: int) -> Sampler:
    """A sampler over the weights of `loaded` through transformers; it never copies them.

    Args:
        max_rows: responses decoded at one time.
        cache_tokens: prompts and longest responses together of what is decoded at one time.

    Raises:
        ValueError: the model keeps its past in something other than keys and values.
    """
    from opsd.rollouts.decoding import TransformersSampler, make_cache

    make_cache(loaded.model.config)
    return TransformersSampler(loaded=loaded, max_rows=max_rows, cache_tokens=cache_tokens)
