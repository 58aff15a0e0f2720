"""Checkpoints: everything a run needs to go on as if it had never stopped, in safetensors and JSON, written atomically.

RUN_DIR/checkpoints/step_000100/
    model/ or adapter/     weights, config and tokenizer; from_pretrained (or peft) loads them without this project
    state.safetensors      optimizer tensors, teacher tensors; one layout, whichever engine on however many ranks wrote it
    state.json             step, data position, seconds trained, MLflow run, versions

A directory under its final name is complete: it is written beside, synced and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from opsd.types import LoadedModel

FORMAT = 3


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int  # optimizer steps taken
    position: list[list[int]]  # of the problem stream: for each pool the prompts taken and the problems drawn
    elapsed_s: float  # wall time, over all jobs
    mlflow_run_id: str
    engine: str
    processes: int
    problems: str  # digest of what is trained on
    format: int = FORMAT


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def complete(run_dir: Path) -> list[Path]:
    """A run's checkpoints, earliest first."""
    return sorted(folder(run_dir).glob("step_*"))


def latest(run_dir: Path) -> Path | None:
    found = complete(run_dir)
    return found[-1] if found else None


def go_on(run_dir: Path) -> str:
    """What to do with a run that has stopped."""
    if latest(run_dir) is None:
        return "before the first checkpoint: start the run anew"
    return f"go on with: python launch.py resume={run_dir}"


def weights(checkpoint: Path) -> Path:
    """The directory that holds a checkpoint's weights.

    Raises:
        ValueError: there are none; the base model is never taken in their place.
    """
    for name in ("adapter", "model"):
        if any((checkpoint / name).glob("*.safetensors")):
            return checkpoint / name
    raise ValueError(f"checkpoint={checkpoint}: no adapter/*.safetensors and no model/*.safetensors; give a complete checkpoint.")


def save(run_dir: Path, progress: Progress, *, loaded: LoadedModel, groups: dict[str, dict[str, Tensor]], keep: int) -> Path:
    """Writes a checkpoint and removes all but the `keep` latest.

    Args:
        groups: tensors by name for each part that has state (`optimizer`, `teacher`).

    Raises:
        OSError: the disk is full or gone; earlier checkpoints are untouched and nothing is left of this one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = folder(run_dir) / step_name(progress.step)
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        where = part / ("adapter" if loaded.lora else "model")
        loaded.model.save_pretrained(str(where))
        loaded.tokenizer.save_pretrained(where)
        tensors = {f"{group}/{name}": value for group, entries in groups.items() for name, value in entries.items()}
        save_file({name: value.detach().contiguous().cpu() for name, value in tensors.items()}, part / "state.safetensors")
        (part / "state.json").write_text(json.dumps(asdict(progress), indent=1) + "\n")
        for path in [*part.rglob("*"), part]:
            sync(path)
        part.rename(final)
        sync(final.parent)
    except SafetensorError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OSError(f"{final}: could not be written ({error}); free space or set another output_root") from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in complete(run_dir)[:-keep]:
        gone = old.with_name(f".{old.name}.old")  # what stands under a checkpoint's name is whole, also while it is removed
        old.rename(gone)
        shutil.rmtree(gone)
    return final


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def damage_told(checkpoint: Path) -> Iterator[None]:
    """A file of a checkpoint that cannot be read any more, as one message with the way out."""
    from safetensors import SafetensorError

    try:
        yield
    except (json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"checkpoint={checkpoint}: is damaged ({error}); remove it, and the one before it is used.") from error


def step_name(step: int) -> str:
    """What everything that belongs to a step is called."""
    return f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def read_progress(checkpoint: Path, *, expected: Progress | None = None) -> Progress:
    """How far the run was when it wrote this checkpoint.

    Raises:
        ValueError: of another format; or of another MLflow run, engine, number of processes or problem set than `expected`.
    """
    with damage_told(checkpoint):
        values = json.loads((checkpoint / "state.json").read_text())
    if values.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint={checkpoint}: its format is {values.get('format')}, this opsd reads {FORMAT}; use the opsd that wrote it."
        )
    progress = Progress(**values)
    for key in ("mlflow_run_id", "engine", "processes", "problems"):
        if expected is not None and getattr(progress, key) != getattr(expected, key):
            raise ValueError(
                f"checkpoint={checkpoint}: was written with {key}={getattr(progress, key)}, now it is {getattr(expected, key)}; "
                "put back what has changed, or start a new run."
            )
    return progress


def restore(checkpoint: Path, *, loaded: LoadedModel) -> dict[str, dict[str, Tensor]]:
    """Puts the weights back in place; gives the groups of tensors as `save` got them."""
    from safetensors.torch import load_file

    with damage_told(checkpoint):
        load_weights(weights(checkpoint), loaded)
        tensors = load_file(checkpoint / "state.safetensors")
    groups: dict[str, dict[str, Tensor]] = {}
    for entry, value in tensors.items():
        group, name = entry.split("/", 1)
        groups.setdefault(group, {})[name] = value
    return groups


def load_weights(directory: Path, loaded: LoadedModel) -> None:
    """The weights of a directory into the model in memory, in place: nobody's view of the model goes stale."""
    if loaded.lora:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        outcome = set_peft_model_state_dict(loaded.model, load_file(directory / "adapter_model.safetensors"))
        missing, unexpected = [name for name in outcome.missing_keys if "lora_" in name], outcome.unexpected_keys
    else:  # through transformers, which renames weights of some architectures on their way to the disk
        from transformers import PreTrainedModel

        assert isinstance(loaded.model, PreTrainedModel)
        stored = type(loaded.model).from_pretrained(
            directory, dtype=loaded.model.dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
        missing, unexpected = loaded.model.load_state_dict(stored.state_dict(), strict=False)
    if missing or unexpected:
        raise ValueError(
            f"checkpoint={directory}: its weights do not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}."
        )
