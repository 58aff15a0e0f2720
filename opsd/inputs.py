"""What a run reads, held against each other before anything is written: model, problems, benchmark, teacher, rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import checkpoints, records
from opsd.config import Run, frozen
from opsd.data.base import Overlap
from opsd.overlap import Shared, shared_problems
from opsd.stream import ProblemStream, digest
from opsd.types import Pool, ProblemSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_inputs(run: Run, seen: dict[str, Any]) -> ProblemSet:
    """Asks every option that reads something whether it can, and holds response lengths against the model's context. Gives what
    the run trains on.

    Args:
        seen: what was asked before and what came of it, by the options' values; shared between a sweep's points.

    Raises:
        ValueError: as the options' own `check`, the evaluation asks problems that are trained on, or a response alone would exceed
            the context.
    """

    def once(asked: str, check: Callable[[], Any]) -> Any:
        if asked not in seen:
            try:
                seen[asked] = check()
            except ValueError as error:
                seen[asked] = error
        if isinstance(seen[asked], ValueError):
            raise seen[asked]
        return seen[asked]

    context = once(repr(run.model), run.model.check)
    assert isinstance(context, int), f"{run.model.kind}.check gave no context"
    once(f"{run.data!r} {sorted(run.needs)}", lambda: run.data.check(needs=run.needs))
    once(repr(run.eval), run.eval.check)
    once(repr(run.engine), run.engine.check)
    once(f"{run.teacher!r} {context}", lambda: run.teacher.check(context=context))
    if run.teacher.own_vocabulary:
        once(f"{run.teacher!r} {run.model!r}", lambda: run.teacher.check_vocabulary(run.model.tokenizer()))
    data = once(f"{run.data!r} {replace(run.eval, samples=1)!r} {run.seed}", lambda: training_problems(run))
    once(repr(run.rollout), run.rollout.check)
    if run.loss.needs_sampler:
        once(f"{run.rollout!r} processed", run.rollout.check_processed)
    check_length("rollout", run.rollout.max_len, run.model.name, context)
    analysis = run.prompt.analysis_len or 0
    if run.rollout.max_len + analysis >= context:
        raise ValueError(
            f"prompt.analysis_len={analysis} plus rollout.max_len={run.rollout.max_len}: model={run.model.name} attends to "
            f"{context} tokens, prompt, analysis and response together; lower one of them."
        )
    if run.rollout.replayed is not None:
        check_replay(run, run.rollout.replayed, data, context=context)
    if run.eval.enabled:
        check_length("eval", run.eval.max_len, run.model.name, context)
    return data


def check_length(group: str, max_len: int, model: str, context_tokens: int) -> None:
    """Refuses a `max_len` that leaves no room for a prompt."""
    if max_len >= context_tokens:
        raise ValueError(
            f"{group}.max_len={max_len}: model={model} attends to {context_tokens} tokens, prompt and response together; "
            f"set {group}.max_len lower."
        )


def check_replay(run: Run, run_dir: Path, data: ProblemSet, *, context: int) -> None:
    """Refuses to replay a run that asked other prompts: another seed, batch or problem set, too few steps, and whatever else makes
    the first step's differ. Later steps are held against their prompts when they come. Loads the model's tokenizer."""
    from opsd.rollouts.replay import Replayed

    then, steps = frozen(run_dir), records.num_steps(run_dir)
    for key, here, there in (("seed", run.seed, then.seed), ("train.batch", run.train.batch, then.train.batch)):
        if here != there:
            raise ValueError(f"{key}={here}: rollout.path={run_dir} was run with {key}={there}; set that.")
    if run.train.steps > steps:
        raise ValueError(
            f"train.steps={run.train.steps}: rollout.path={run_dir} holds the rollouts of {steps} steps; set train.steps={steps}."
        )
    checkpoint = checkpoints.latest(run_dir)
    if checkpoint is not None and checkpoints.read_progress(checkpoint).problems != digest(data.problems):
        raise ValueError(
            f"data={run.data.name}: its problems are not those of rollout.path={run_dir}; give the data of that run, its "
            "data.overlap and eval included."
        )
    stream = problem_stream(run, data, tokenizer=run.model.tokenizer(), context=context)
    prompts, _ = stream.take(run.train.batch // run.rollout.samples)
    Replayed(run_dir).responses([prompt for prompt in prompts for _ in range(run.rollout.samples)], step=1)


def training_problems(run: Run) -> ProblemSet:
    """What the run trains on: its data, without the problems that its evaluation asks.

    Raises:
        ValueError: the evaluation asks some of them and `data.overlap=refuse`, which lists them; or dropping them leaves nothing.
    """
    found = run.data.load(seed=run.seed)
    sources = run.data.parts()
    if not run.eval.enabled or all(source.overlap is Overlap.allow for source in sources.values()):
        return found
    asked = run.eval.problems()
    pools, counts = [], dict(found.counts)
    for pool, (where, source) in zip(found.pools, sources.items(), strict=True):
        if source.overlap is Overlap.allow:
            pools.append(pool)
            continue
        shared = shared_problems(pool.problems, asked, words=source.overlap_words)
        if shared and source.overlap is Overlap.refuse:
            raise ValueError(refusal(run, where, source.name, shared))
        gone = {pair.problem_id for pair in shared}
        left = [problem for problem in pool.problems if problem.id not in gone]
        if not left:
            raise ValueError(
                f"{where}.overlap=drop: eval={run.eval.name} asks every problem of {where}={source.name}; give others."
            )
        pools.append(Pool(name=pool.name, share=pool.share, problems=left))
        counts["overlap" if len(sources) == 1 else f"{pool.name}/overlap"] = len(gone)
    return ProblemSet(pools=pools, counts=counts)


def told(name: str, data: ProblemSet) -> str:
    """How many problems a run trains on, and how many were left out for which reason, in one line."""
    sizes = [f"{len(pool.problems):,} problems" + (f" of {pool.name}" if len(data.pools) > 1 else "") for pool in data.pools]
    out = [f"{reason} {count:,}" for reason, count in data.counts.items() if count and reason.rpartition("/")[2] != "read"]
    return f"data={name}: {', '.join(sizes)}" + (f"; left out: {', '.join(out)}" if out else "")


def problem_stream(run: Run, data: ProblemSet, *, tokenizer: PreTrainedTokenizerBase, context: int) -> ProblemStream:
    """The prompts of a run's problems, as long as its responses leave room for. `context`: the model's tokens."""
    render = partial(
        run.prompt.render, tokenizer=tokenizer, max_prompt_tokens=context - run.rollout.max_len, teacher=run.teacher.exists
    )
    return ProblemStream(pools=data.pools, render=render, seed=run.seed)


def refusal(run: Run, where: str, name: str, shared: list[Shared]) -> str:
    shown = "".join(f"\n    {pair.problem_id} ~ {pair.evaluation_id} ({pair.share:.0%}): {pair.words}" for pair in shared[:20])
    more = f"\n    and {len(shared) - 20} more" if len(shared) > 20 else ""
    return (
        f"{where}={name}: eval={run.eval.name} asks {len(shared)} of its problems too, so that the score would count what was "
        f"trained on; set {where}.overlap=drop, or other data. In brackets how much of the evaluation's problem is there:"
        f"{shown}{more}"
    )
