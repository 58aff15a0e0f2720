"""What a run reads, held against each other before anything is written: model, problems, benchmark, teacher, rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from opsd.config import Run
from opsd.data.base import Overlap
from opsd.overlap import Shared, shared_problems
from opsd.types import Pool, ProblemSet


def check_inputs(run: Run, seen: dict[str, Any]) -> None:
    """Asks every option that reads something whether it can, and holds response lengths against the model's context.

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
    once(repr(run.teacher), run.teacher.check)
    once(f"{run.data!r} {replace(run.eval, samples=1)!r} {run.seed}", lambda: training_problems(run))
    once(repr(run.rollout), run.rollout.check)
    check_length("rollout", run.rollout.max_len, run.model.name, context)
    if run.eval.enabled:
        check_length("eval", run.eval.max_len, run.model.name, context)


def check_length(group: str, max_len: int, model: str, context_tokens: int) -> None:
    """Refuses a `max_len` that leaves no room for a prompt."""
    if max_len >= context_tokens:
        raise ValueError(
            f"{group}.max_len={max_len}: model={model} attends to {context_tokens} tokens, prompt and response together; "
            f"set {group}.max_len lower."
        )


def training_problems(run: Run) -> ProblemSet:
    """What the run trains on: its data, without the problems that its evaluation asks.

    Raises:
        ValueError: the evaluation asks some of them and `data.overlap=refuse`, which lists them; or dropping them leaves nothing.
    """
    found = run.data.load(seed=run.seed)
    if not run.eval.enabled or run.data.overlap is Overlap.allow:
        return found
    shared = shared_problems(found.problems, run.eval.problems(), words=run.data.overlap_words)
    if shared and run.data.overlap is Overlap.refuse:
        raise ValueError(refusal(run, shared))
    gone = {pair.problem_id for pair in shared}
    pools = [
        Pool(name=pool.name, share=pool.share, problems=[problem for problem in pool.problems if problem.id not in gone])
        for pool in found.pools
    ]
    for pool in pools:
        if not pool.problems:
            raise ValueError(f"data.overlap=drop: eval={run.eval.name} asks every problem of {pool.name}; give other data.")
    return ProblemSet(pools=pools, counts=found.counts | {"overlap": len(gone)})


def refusal(run: Run, shared: list[Shared]) -> str:
    shown = "".join(f"\n    {pair.problem_id} ~ {pair.evaluation_id}: {pair.words}" for pair in shared[:20])
    more = f"\n    and {len(shared) - 20} more" if len(shared) > 20 else ""
    return (
        f"data={run.data.name}: eval={run.eval.name} asks {len(shared)} of its problems too, so that the score would count what "
        f"was trained on; set data.overlap=drop, or other data:{shown}{more}"
    )
