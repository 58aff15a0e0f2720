"""One evaluation: problems, prompts, samples, grades, report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd import chat, checkpoints
from opsd.evaluation.base import Benchmark
from opsd.evaluation.grading import Grade, Grader
from opsd.evaluation.statistics import (
    PairedDifference,
    avg_at_k,
    maj_at_k,
    paired_difference,
    pass_at_k,
    se_clustered,
    se_sampling,
)
from opsd.models.base import Model
from opsd.ranks import Ranks
from opsd.rollouts.base import RolloutEngine, Sampler
from opsd.rollouts.spread import Spread
from opsd.seeding import derive
from opsd.types import EvalReport, FinishReason, LoadedModel, Problem, Request, Response, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPORT, SAMPLES = "report.json", "samples.jsonl"
KEPT_MARKS = ("<think>", "</think>")  # the strict grader reads after the last of them, special tokens or not


def evaluate(
    benchmark: Benchmark,
    *,
    loaded: LoadedModel,
    sampler: Sampler,
    seed: int,
    step: int,
    on_progress: Callable[[str], None] | None = None,
) -> EvalReport:
    """Asks every problem `benchmark.samples` times in ONE call of the sampler, grades the responses and sums up.

    A sample's seed depends on `seed`, benchmark, problem and sample, not on `step`: two evaluations of a run draw alike, which
    takes noise out of their difference.

    Args:
        sampler: already in step with the weights of `loaded`.
        step: optimizer steps behind the weights.
        on_progress: told, in words, what starts.

    Raises:
        ValueError: a problem set that cannot be read or has no answers, or a prompt that leaves less than `eval.max_len` of the
        context.
    """
    tell = on_progress or (lambda _: None)
    problems = benchmark.problems()
    golds = [gold_of(problem) for problem in problems]
    prompts = [chat.render(loaded.tokenizer, benchmark.prompt_text(problem), thinking=benchmark.thinking) for problem in problems]
    check_room(benchmark, problems, prompts, context=loaded.context)
    seeds = [
        derive(seed, "eval", benchmark.name, problem.id, sample) for problem in problems for sample in range(benchmark.samples)
    ]
    rows = [row for row in range(len(problems)) for _ in range(benchmark.samples)]
    tell(f"{benchmark.name}: sampling {len(rows)} responses")
    responses = sampler.generate(
        [Request(prompt_ids=prompts[row], seed=own) for row, own in zip(rows, seeds, strict=True)], sampling=benchmark.sampling
    )
    tell(f"{benchmark.name}: grading {len(rows)} responses")
    texts = texts_of(responses, loaded.tokenizer)
    with Grader() as grader:
        grades = [grader.grade(text, golds[row]) for text, row in zip(texts, rows, strict=True)]
    samples = [
        Sample(
            problem_id=problems[row].id,
            sample=index % benchmark.samples,
            seed=seeds[index],
            text=texts[index],
            num_tokens=len(responses[index].token_ids),
            finish_reason=responses[index].finish_reason.value,
            gold=golds[row],
            extracted=grades[index].extracted,
            canonical=grades[index].canonical,
            frozen=grades[index].frozen,
            strict=grades[index].strict,
            boxed=grades[index].boxed,
        )
        for index, row in enumerate(rows)
    ]
    k = benchmark.samples
    return EvalReport(
        benchmark=benchmark.title(problems),
        step=step,
        k=k,
        metrics=summarise(samples, grades, k=k),
        solve_rates={
            problem.id: sum(sample.frozen for sample in samples[row * k : (row + 1) * k]) / k
            for row, problem in enumerate(problems)
        },
        samples=samples,
        canonical=benchmark.canonical(problems),
    )


def evaluate_weights(
    benchmark: Benchmark,
    *,
    model: Model,
    checkpoint: Path | None,
    rollout: RolloutEngine,
    seed: int,
    threads: int,
    device: str,
    ranks: Ranks,
) -> EvalReport:
    """One evaluation apart from training: of a model as it is, or with the weights of a checkpoint of it. On all ranks alike.

    Raises:
        ValueError: the checkpoint holds no weights (the base model is never scored in their place), or as `evaluate`.
    """
    import torch

    torch.set_num_threads(threads)
    weights = None if checkpoint is None else str(checkpoints.weights(checkpoint))
    step = 0 if checkpoint is None else checkpoints.read_progress(checkpoint).step
    loaded = model.load(seed=seed, device=ranks.device(device), checkpoint=weights)
    sampler = Spread(rollout.build(loaded, processed=False), ranks, whole=nullcontext)
    try:
        sampler.sync(weights_version=step)
        return evaluate(benchmark, loaded=loaded, sampler=sampler, seed=seed, step=step)
    finally:
        sampler.close()


def metrics_of(report: EvalReport) -> dict[str, float]:
    """The report's metrics under the benchmark's name, and the short column that the canonical protocol alone may write."""
    metrics = {f"{report.benchmark}/{name}": value for name, value in report.metrics.items()}
    return metrics | ({report.benchmark: report.metrics[f"avg_at_{report.k}"]} if report.canonical else {})


def gold_of(problem: Problem) -> str:
    if problem.answer is None:
        raise ValueError(f"eval: problem {problem.id} has no answer to grade against; give one or leave the problem out.")
    return problem.answer


def check_room(benchmark: Benchmark, problems: list[Problem], prompts: list[list[int]], *, context: int) -> None:
    """Refuses a longest prompt that leaves less than `max_len` tokens of the context."""
    longest, problem = max(zip(map(len, prompts), (problem.id for problem in problems), strict=True))
    if longest + benchmark.max_len > context:
        raise ValueError(
            f"eval.max_len={benchmark.max_len} plus the longest prompt ({longest} tokens, problem {problem}) exceeds "
            f"model.context={context}; set eval.max_len to at most {context - longest}."
        )


def texts_of(responses: list[Response], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Responses as text, exactly as their tokens spell it, without special tokens; marks of thinking stay, special or not."""
    hidden = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special and added.content not in KEPT_MARKS}
    shown = [[token for token in response.token_ids if token not in hidden] for response in responses]
    return [str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) for ids in shown]


def summarise(samples: list[Sample], grades: list[Grade], *, k: int) -> dict[str, float]:
    """The metrics of one evaluation, in percent where they are scores, errors or rates. `frozen` is the headline grader.

    Args:
        samples, grades: problem after problem, k of each.
    """

    def by_problem(values: list[Any]) -> list[list[Any]]:
        return [values[start : start + k] for start in range(0, len(values), k)]

    def rate(flags: list[bool]) -> float:
        return 100 * sum(flags) / len(flags)

    right_PG = by_problem([sample.frozen for sample in samples])
    errors = {"se_sampling": se_sampling(right_PG), "se_clustered": se_clustered(right_PG)}
    return {
        f"avg_at_{k}": avg_at_k(right_PG),
        f"pass_at_{k}": pass_at_k(right_PG, k),
        f"maj_at_{k}": maj_at_k(by_problem([sample.canonical for sample in samples]), right_PG),
        f"avg_at_{k}_strict": avg_at_k(by_problem([sample.strict for sample in samples])),
        "grader_disagreements": float(sum(sample.frozen != sample.strict for sample in samples)),
        **{name: error for name, error in errors.items() if error is not None},
        "boxed_rate": rate([sample.boxed for sample in samples]),
        "unread_rate": rate([grade.unread for grade in grades]),
        "truncated_rate": rate([sample.finish_reason == FinishReason.LENGTH.value for sample in samples]),
        "mean_tokens": sum(sample.num_tokens for sample in samples) / len(samples),
        "samples": float(len(samples)),
    }


def save_report(report: EvalReport, directory: Path) -> None:
    """Writes `report.json` and `samples.jsonl` into `directory`, which appears complete or not at all; an older one is replaced."""
    part = directory.with_name(f".{directory.name}.part")
    old = directory.with_name(f".{directory.name}.old")
    for left in (part, old):  # of an attempt that was cut off
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    summary = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "samples"}
    write(part / REPORT, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    write(part / SAMPLES, "".join(json.dumps(asdict(sample)) + "\n" for sample in report.samples))
    if directory.exists():
        directory.rename(old)
    part.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def write(path: Path, text: str) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def load_report(directory: Path) -> EvalReport:
    """What `save_report` wrote.

    Raises:
        ValueError: no report in the directory.
    """
    if not (directory / REPORT).is_file():
        raise ValueError(f"{directory}: holds no {REPORT}; give the directory of an evaluation.")
    summary = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    lines = (directory / SAMPLES).read_text(encoding="utf-8").split("\n")[:-1]
    return EvalReport(**summary, samples=[Sample(**json.loads(line)) for line in lines])


def compare(before: EvalReport, after: EvalReport) -> PairedDifference:
    """How much `after` is above `before`, problem by problem.

    Raises:
        ValueError: another benchmark or protocol, another number of samples, or other problems.
    """
    for key in ("benchmark", "k"):
        if getattr(before, key) != getattr(after, key):
            raise ValueError(
                f"{key}={getattr(before, key)} and {key}={getattr(after, key)}: only scores of one protocol can be compared; "
                "evaluate both in the same way."
            )
    differing = sorted(before.solve_rates.keys() ^ after.solve_rates.keys())
    if differing:
        raise ValueError(
            f"{before.benchmark}: {len(differing)} problems are in one evaluation and not in the other (such as {differing[0]}); "
            "evaluate both on the same problems."
        )
    return paired_difference(list(before.solve_rates.values()), [after.solve_rates[name] for name in before.solve_rates])
