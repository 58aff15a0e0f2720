"""Another model as teacher: on-policy distillation (GKD, arXiv 2306.13649) where it reads what the student reads, ours where it has
the solution in view. Any width and any architecture with the student's vocabulary.

It reads token ids that the student's tokenizer and chat template made: its own template is not used. Rows of its head beyond the
student's, which pad a vocabulary to a round number, are cut off before the softmax.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opsd import checkpoints
from opsd.pretrained import (
    ADAPTER_CONFIG,
    CONFIG,
    Dtype,
    ModelPath,
    num_bytes,
    positions,
    read,
    read_config,
    read_skeleton,
    read_tokenizer,
    require_files,
    require_plain_head,
)
from opsd.registry import register
from opsd.teachers.base import Teacher, TeacherModel

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

    from opsd.types import LoadedModel

MERGE = "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(NEW), its tokenizer beside it"


@register("teacher", "external")
class External(Teacher):
    path: str
    revision: str | None  # of a hub model; null: its main branch
    dtype: Dtype

    @property
    def place(self) -> ModelPath:
        return ModelPath(key="teacher.path", path=self.path, revision=self.revision)

    def check(self, *, context: int) -> None:
        origin, local = self.place.origin, self.place.local()
        directory = self.place.fetch([CONFIG, ADAPTER_CONFIG]) if local is None else local
        require_whole_model(directory, origin)
        config = read_config(directory, origin) if local is None else require_files(directory, origin)
        require_context(positions(config), context, origin)

    @property
    def own_vocabulary(self) -> bool:
        return True

    def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        directory = self.place.description()
        own = read_tokenizer(directory, origin=self.place.origin)
        require_same_vocabulary(own.get_vocab(), tokenizer.get_vocab(), self.place.origin)

    def own_bytes(self, student: Module) -> int:
        import torch

        directory = self.place.description()
        with torch.device("meta"):
            return num_bytes(read_skeleton(directory, dtype=self.dtype, origin=self.place.origin).parameters())

    def build(self, loaded: LoadedModel) -> TeacherModel:
        import torch

        from opsd.teachers.copies import FromOutside

        origin, directory = self.place.origin, self.place.directory()
        require_whole_model(directory, origin)
        require_files(directory, origin)
        with torch.random.fork_rng(devices=[]):
            model, tokenizer = read(directory, tokenizer_directory=directory, dtype=self.dtype, origin=origin)
        require_context(getattr(model.config.get_text_config(), "max_position_embeddings", None), loaded.context, origin)
        require_same_vocabulary(tokenizer.get_vocab(), loaded.tokenizer.get_vocab(), origin)
        require_plain_head(model, origin)
        rows, needed = min(len(model.get_input_embeddings().weight), len(model.get_output_embeddings().weight)), len(loaded.head_VH)
        if rows < needed:
            raise ValueError(
                f"{origin}: its embeddings have {rows} rows and the student's head has {needed}, so that it cannot score all that "
                "the student can say; give a model with at least as many."
            )
        teacher = FromOutside(model.to(loaded.device), origin=origin)
        teacher.head_VH = teacher.head_VH[:needed]
        return teacher


def require_whole_model(directory: Path, origin: str) -> None:
    """Refuses an adapter, a run and a checkpoint, and says which directory to give instead."""
    if (directory / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{origin}: is an adapter, no whole model; merge it into its base once and give that: {MERGE}.")
    checkpoint = directory
    if (directory / "config.yaml").is_file() and not (directory / CONFIG).is_file():
        latest = checkpoints.latest(directory)
        if latest is None:
            raise ValueError(f"{origin}: is a run directory without a checkpoint; give a model directory.")
        checkpoint = latest
    elif not (directory / "state.json").is_file():
        return
    kind = "a checkpoint" if checkpoint is directory else "a run directory"
    weights = checkpoints.weights(checkpoint)
    if weights.name == "adapter":
        raise ValueError(
            f"{origin}: is {kind} with the adapter {weights}; merge that into its base once and give the result: {MERGE}."
        )
    raise ValueError(f"{origin}: is {kind}, no model; set teacher.path={weights}.")


def require_context(own: int | None, context: int, origin: str) -> None:
    """Refuses a teacher that attends to less than prompt and response may take. One that names no limit has none."""
    if own is not None and own < context:
        raise ValueError(
            f"{origin}: attends to {own} tokens, and prompt and response may take model.context={context}; set "
            f"model.context={own}, or give a model with a longer context."
        )


def require_same_vocabulary(teacher: dict[str, int], student: dict[str, int], origin: str) -> None:
    """Refuses a tokenizer in which any token, an added one included, is missing, new or under another id."""
    missing = sorted(student.keys() - teacher.keys(), key=student.__getitem__)
    new = sorted(teacher.keys() - student.keys(), key=teacher.__getitem__)
    moved = sorted(
        (token for token in student.keys() & teacher.keys() if student[token] != teacher[token]), key=student.__getitem__
    )
    told = [
        f"{len(tokens)} {what} (such as {tokens[0]!r})"
        for tokens, what in ((missing, "missing there"), (new, "unknown to the student"), (moved, "under another id"))
        if tokens
    ]
    if told:
        raise ValueError(
            f"{origin}: its vocabulary is not the student's: of {len(student)} tokens here and {len(teacher)} there, "
            f"{', '.join(told)}; the teacher reads the student's token ids, so give a model with the student's tokenizer."
        )
