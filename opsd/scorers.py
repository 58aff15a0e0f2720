"""What scores a step's rollouts: a run's models, problems and objective in memory, nothing of its record."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opsd import checkpoints
from opsd.config import Run
from opsd.evaluate import texts_of
from opsd.inputs import problem_stream, training_problems
from opsd.ranks import Ranks
from opsd.seeding import derive
from opsd.stream import ProblemStream
from opsd.types import FinishReason, LoadedModel, ProblemSet, Prompt, Request

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.rollouts.base import Recorded, Sampler
    from opsd.scoring import Objective
    from opsd.teachers.base import TeacherModel


@dataclass(kw_only=True, slots=True)
class Scorers:
    """The parts that a run's numbers come from."""

    run: Run
    ranks: Ranks
    loaded: LoadedModel
    data: ProblemSet
    stream: ProblemStream
    recorded: Recorded | None  # None: responses are sampled
    teacher: TeacherModel | None
    analyst: Sampler | None  # the teacher's own voice; None: its prompt asks for no analysis
    objective: Objective


def load(run: Run, ranks: Ranks) -> Scorers:
    """The parts before the first step, in evaluation mode.

    Raises:
        ValueError: as the options' own `load` and `build`.
    """
    import torch

    from opsd.scoring import Objective

    torch.set_num_threads(run.threads)
    data = training_problems(run)
    loaded = run.model.load(seed=run.seed, device=ranks.device(run.engine.device))
    if loaded.device.type == "cpu":  # or DeepSpeed, which others import where it is installed, warns of a GPU that it misses
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    teacher = run.teacher.build(loaded) if run.teacher.exists else None
    speaks = teacher is not None and run.prompt.analysis_len is not None
    return Scorers(
        run=run,
        ranks=ranks,
        loaded=loaded,
        data=data,
        stream=problem_stream(run, data, tokenizer=loaded.tokenizer, context=loaded.context),
        recorded=None if run.rollout.samples_anew else run.rollout.recorded(loaded),
        teacher=teacher,
        analyst=run.rollout.build_speaker(teacher.speaker(loaded)) if teacher is not None and speaks else None,
        objective=Objective(
            loaded, loss=run.loss, clipping=run.clipping, temperature=run.loss_temperature, chunk_tokens=run.train.chunk_tokens
        ),
    )


def restore(scorers: Scorers, checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Puts student and teacher back to where they were at a checkpoint; gives its groups of tensors, the optimizer's among them."""
    groups = checkpoints.restore(checkpoint, loaded=scorers.loaded)
    if scorers.teacher is not None:
        scorers.teacher.load_state(groups.get("teacher", {}))
    return groups


def with_analyses(scorers: Scorers, prompts: list[Prompt], step: int) -> tuple[list[Prompt], dict[str, float]]:
    """The prompts, each with what its teacher wrote about the solution, where the prompt option has the teacher write first; and
    the analyses' mean length in tokens and the share that was cut at the limit."""
    run, limit, sampling, analyst = scorers.run, scorers.run.prompt.analysis_len, scorers.run.rollout.sampling, scorers.analyst
    if analyst is None or limit is None:
        return prompts, {}
    assert sampling is not None, "config refuses a prompt with an analysis beside responses that were not sampled"
    requests, counts = [], Counter[str]()
    for prompt in prompts:
        name = prompt.problem.id
        requests.append(Request(prompt_ids=prompt.analysis_ids or [], seed=derive(run.seed, "analysis", step, name, counts[name])))
        counts[name] += 1
    analyst.sync(weights_version=step - 1)
    responses = analyst.generate(requests, sampling=replace(sampling, max_len=limit))
    texts = texts_of(responses, scorers.loaded.tokenizer)
    analysed = [scorers.stream.render(prompt.problem, analysis=text) for prompt, text in zip(prompts, texts, strict=True)]
    whole = [prompt for prompt in analysed if prompt is not None]
    assert len(whole) == len(prompts), "a prompt that was made with room for an analysis has none"
    metrics = {
        "rollout/analysis_len": sum(len(response.token_ids) for response in responses) / len(responses),
        "rollout/analysis_truncated": sum(r.finish_reason is FinishReason.LENGTH for r in responses) / len(responses),
    }
    return whole, metrics
