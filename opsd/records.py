"""The rollouts of every step as they were trained on, RUN_DIR/rollouts/step_000001.safetensors: what a replay reads.

Ids and log-probs of all rows follow one another, lengths say where a row ends; what is no number stands in the file's header.
Log-probs are float32, as samplers compute them and micro-batches hold them. A file under its final name is whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from opsd.checkpoints import step_name
from opsd.files import write_whole
from opsd.types import FinishReason, Response, Rollout

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "1"
SAMPLED = ("max_len", "temperature", "top_p", "top_k", "samples")  # how a run's responses were drawn


@dataclass(kw_only=True, slots=True)
class Record:
    """One saved rollout."""

    problem_id: str
    student_ids: list[int]  # the prompt
    response: Response


def file_of(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"{step_name(step)}.safetensors"


def num_steps(run_dir: Path) -> int:
    """How many steps, from the first, have their rollouts saved."""
    step = 0
    while file_of(run_dir, step + 1).is_file():
        step += 1
    return step


def save(run_dir: Path, step: int, rollouts: Sequence[Rollout]) -> None:
    """The step's rollouts, in order; those of an earlier job that took the same step are replaced."""
    import torch
    from safetensors.torch import save as serialized

    prompts = [rollout.prompt.student_ids for rollout in rollouts]
    responses = [rollout.response for rollout in rollouts]
    tensors = {
        "student_ids": torch.tensor([token for ids in prompts for token in ids], dtype=torch.int32),
        "student_lengths": torch.tensor([len(ids) for ids in prompts], dtype=torch.int32),
        "response_ids": torch.tensor([token for response in responses for token in response.token_ids], dtype=torch.int32),
        "response_lengths": torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int32),
        "logps": torch.tensor([logp for response in responses for logp in response.logps], dtype=torch.float32),
        "processed_logps": torch.tensor([logp for response in responses for logp in response.processed_logps], dtype=torch.float32),
    }
    header = {
        "format": FORMAT,
        "problem_ids": json.dumps([rollout.prompt.problem.id for rollout in rollouts]),
        "finish_reasons": json.dumps([response.finish_reason.value for response in responses]),
        "weights_versions": json.dumps([response.weights_version for response in responses]),
    }
    final = file_of(run_dir, step)
    final.parent.mkdir(exist_ok=True)
    write_whole(final, serialized(tensors, metadata=header))


def load(run_dir: Path, step: int) -> list[Record]:
    """What `save` was given.

    Raises:
        ValueError: there is no such file, it is damaged, or another version of opsd wrote it.
    """
    from safetensors import SafetensorError, safe_open

    path = file_of(run_dir, step)
    if not path.is_file():
        raise ValueError(f"{path}: does not exist; {run_dir} has the rollouts of {num_steps(run_dir)} steps.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: is damaged ({error}); run {run_dir} anew.") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: its format is {header.get('format')}, this opsd reads {FORMAT}; use the opsd that wrote it.")

    def rows(name: str, lengths: str) -> list[Any]:
        return cut(tensors[name], tensors[lengths])

    return [
        Record(
            problem_id=problem_id,
            student_ids=student_ids,
            response=Response(
                token_ids=response_ids,
                logps=logps,
                processed_logps=processed_logps,
                finish_reason=FinishReason(finish_reason),
                weights_version=weights_version,
            ),
        )
        for problem_id, student_ids, response_ids, logps, processed_logps, finish_reason, weights_version in zip(
            json.loads(header["problem_ids"]),
            rows("student_ids", "student_lengths"),
            rows("response_ids", "response_lengths"),
            rows("logps", "response_lengths"),
            rows("processed_logps", "response_lengths"),
            json.loads(header["finish_reasons"]),
            json.loads(header["weights_versions"]),
            strict=True,
        )
    ]


def lacks_processed(run_dir: Path) -> bool:
    """Whether the first step's responses come without processed log-probs."""
    return any(math.isnan(logp) for record in load(run_dir, 1) for logp in record.response.processed_logps)


def cut(values: Tensor, lengths: Tensor) -> list[Any]:
    """Plain lists of the given lengths."""
    flat, ends = values.tolist(), [0, *accumulate(lengths.tolist())]
    return [flat[start:end] for start, end in pairwise(ends)]


def sampled_as(path: str) -> dict[str, Any]:
    """How the responses of a run directory were drawn, out of its frozen config: the values of SAMPLED.

    Raises:
        ValueError: it is no run directory, or its responses were not sampled.
    """
    file = Path(path).expanduser() / "config.yaml"
    if not file.is_file():
        raise ValueError(
            f"rollout.path={path}: is not a run directory, it holds no config.yaml; give the directory that a launch printed."
        )
    try:
        values = yaml.safe_load(file.read_text())["rollout"]
        name, sampled = values["name"], set(SAMPLED) <= values.keys()
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"rollout.path={path}: its config.yaml is no frozen config; give the directory of a run.") from error
    if not sampled:
        raise ValueError(f"rollout.path={path}: its responses were not sampled (rollout={name}); set rollout={name} here too.")
    return {key: values[key] for key in SAMPLED}


def as_recorded(rollout: dict[str, Any]) -> dict[str, Any]:
    """The values of a `rollout` group, a replay's nulls filled in with how the recorded run sampled: what is checked, frozen and
    shown. A frozen replay has no null left but that of `top_k`, which says off."""
    unset = [key for key in SAMPLED if key in rollout and rollout[key] is None]
    if rollout.get("kind") != "replay" or rollout.get("path") in (None, "???") or not set(unset) - {"top_k"}:
        return rollout
    recorded = sampled_as(str(rollout["path"]))
    return rollout | {key: recorded[key] for key in unset}
