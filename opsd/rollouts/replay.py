"""Another run's rollouts in place of new ones: step n trains on that run's responses of step n, so that losses, clippings and
teachers are compared on identical text.

Off-policy from the second step on: the text comes from the weights of the recorded run, not from those at hand.
`rollout/sampler_gap` then shows how far the two have parted, and `loss=sampled_token` weighs tokens accordingly. What the responses
answer is checked at every step, token for token. Evaluations are sampled from the weights at hand through transformers.
"""

from __future__ import annotations

from pathlib import Path

from opsd import records
from opsd.registry import register
from opsd.rollouts.base import Recorded
from opsd.rollouts.transformers import TransformersEngine
from opsd.typed import spelled
from opsd.types import LoadedModel, Prompt, Response


class Replayed(Recorded):
    """What a run directory holds."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def responses(self, prompts: list[Prompt], *, step: int) -> list[Response]:
        saved = records.load(self.run_dir, step)
        here = [(prompt.problem.id, prompt.student_ids) for prompt in prompts]
        there = [(record.problem_id, record.student_ids) for record in saved]
        if here != there:
            raise ValueError(f"rollout.path={self.run_dir}: {difference(here, there, step)}.")
        return [record.response for record in saved]


def difference(here: list[tuple[str, list[int]]], there: list[tuple[str, list[int]]], step: int) -> str:
    """The first of the step's prompts that is another one, and what must be the recorded run's."""
    if len(here) != len(there):
        return f"holds {len(there)} rollouts of step {step}, and this run has {len(here)}; set train.batch={len(there)}"
    row = next(row for row, (mine, other) in enumerate(zip(here, there, strict=True)) if mine != other)
    if here[row][0] != there[row][0]:
        return (
            f"rollout {row + 1} of step {step} answers problem {there[row][0]}, and this run is at {here[row][0]}; give data, seed "
            "and prompt of that run, its prompt.max_teacher_tokens and prompt.too_long included"
        )
    return (
        f"rollout {row + 1} of step {step} answers problem {here[row][0]} in another prompt than this run's; give the student's "
        "side of that run's prompt, and a model with its tokenizer and chat template"
    )


@register("rollout", "replay")
class ReplayEngine(TransformersEngine):
    """How the responses were sampled is the recorded run's: `records.as_recorded` fills it in before this is made."""

    path: str  # the run directory

    @property
    def samples_anew(self) -> bool:
        return False

    @property
    def replayed(self) -> Path:
        return Path(self.path).expanduser()

    def check(self) -> None:
        for key, value in records.sampled_as(self.path).items():
            if getattr(self, key) != value:
                raise ValueError(
                    f"rollout.{key}={spelled(getattr(self, key))}: the responses of rollout.path={self.path} were sampled with "
                    f"{spelled(value)}; set rollout.{key}={spelled(value)}."
                )
        if not records.num_steps(self.replayed):
            raise ValueError(f"rollout.path={self.path}: holds no saved rollouts; give a run that has taken steps.")

    def check_processed(self) -> None:
        if records.lacks_processed(self.replayed):
            raise ValueError(
                f"rollout.path={self.path}: its sampler kept raw log-probs alone, as rollout=vllm does for a loss that reads no "
                "others; replay a run of this loss, or one with temperature=1 top_p=1 top_k=null."
            )

    def recorded(self, loaded: LoadedModel) -> Recorded:
        return Replayed(self.replayed)
