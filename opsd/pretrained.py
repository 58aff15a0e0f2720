"""Directories of weights as `save_pretrained` writes them, local or on the hub: found, checked and read.

Pickled weights are never opened and code of a model's own is never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.hub import is_hub_id, snapshot

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth")
UNREADABLE = (OSError, ValueError, KeyError, ImportError, RuntimeError)  # what transformers raises over files it cannot use
WEIGHTS = "model*.safetensors"  # one file or shards; other formats stand beside them in some repositories
DESCRIPTION = ["*.json", "*.jinja", "*.txt", "*.model"]  # config and tokenizer
HUB_FILES = [*DESCRIPTION, WEIGHTS]


class Dtype(Enum):
    """Of the weights. Member names are what a config says."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class ModelPath:
    """A local directory, or `owner/name` on the hub. What looks like a path is never sent to the hub."""

    key: str  # the config key that holds the path
    path: str
    revision: str | None  # of a hub model; None: its main branch

    @property
    def origin(self) -> str:
        """What messages call the model: the key and its value."""
        return f"{self.key}={self.path}"

    def local(self) -> Path | None:
        """The directory that `path` says, or None where it names a hub model."""
        path = Path(self.path).expanduser()
        if path.is_dir():
            if self.revision is not None:
                raise ValueError(
                    f"{self.key.rpartition('.')[0]}.revision={self.revision}: {self.origin} is a local directory, which has no "
                    "revisions; set it to null."
                )
            return path
        if path.exists():
            raise ValueError(f"{self.origin}: is a file; give the directory that holds config.json and the weights.")
        if not is_hub_id(self.path):
            raise ValueError(
                f"{self.origin}: there is no such directory; give a local model directory, or a hub model as owner/name."
            )
        return None

    def directory(self) -> Path:
        """Where config, tokenizer and weights are; fetches them where need be."""
        return self.local() or self.fetch(HUB_FILES)

    def description(self) -> Path:
        """Where config and tokenizer are; of a hub model no weights are fetched."""
        return self.local() or self.fetch(DESCRIPTION)

    def fetch(self, patterns: list[str]) -> Path:
        return snapshot(
            self.path,
            repo_type="model",
            revision=self.revision,
            patterns=patterns,
            needs=".safetensors",
            key=self.key,
            remedy=f"set {self.key}=DIRECTORY to a local model.",
        )


def read_config(directory: Path, origin: str) -> dict[str, Any]:
    """A model directory's config.json."""
    file = directory / CONFIG
    if not file.is_file():
        raise ValueError(f"{origin}: {directory} holds no config.json, so it is no model; give a directory of save_pretrained.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{origin}: {file} is not valid JSON ({error}); save the model again.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{origin}: {file} is not a JSON object; save the model again.")
    return config


def positions(config: dict[str, Any]) -> int | None:
    """The tokens that a model was made to attend to, as its config.json says; None where that does not say."""
    return config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))


def require_files(directory: Path, origin: str) -> dict[str, Any]:
    """The config.json of a directory that also holds a tokenizer and safetensors weights; pickled weights are refused.

    Raises:
        ValueError: says what is missing.
    """
    config = read_config(directory, origin)
    if not any(directory.glob(WEIGHTS)):
        pickled = sorted(file.name for pattern in PICKLED for file in directory.glob(pattern))
        if pickled:
            raise ValueError(
                f"{origin}: has only pickled weights ({', '.join(pickled[:3])}), and unpickling can run any code; convert them "
                "once where you trust them: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) writes safetensors."
            )
        raise ValueError(f"{origin}: {directory} holds no weights ({WEIGHTS}); give a complete model directory.")
    if not any(directory.glob("tokenizer*")):
        raise ValueError(f"{origin}: {directory} holds no tokenizer; save one there with AutoTokenizer's save_pretrained.")
    return config


def read(directory: Path, *, tokenizer_directory: Path, dtype: Dtype, origin: str) -> tuple[Any, Any]:
    """Weights and tokenizer as transformers reads them, every weight accounted for. No code of the model's own is run."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one bar a run: the training loop's
    tokenizer = read_tokenizer(tokenizer_directory, origin=origin)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype.value),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (*UNREADABLE, SafetensorError) as error:
        raise unreadable(directory, origin, error) from error
    model, report = loaded
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(
            f"{origin}: {directory} lacks {len(report['missing_keys'])} of the model's weights ({missing}, ...), and "
            "random ones would stand in for them; give a complete causal language model."
        )
    return model, tokenizer


def read_tokenizer(directory: Path, *, origin: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's directory; weights need not be there."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except UNREADABLE as error:
        raise unreadable(directory, origin, error) from error


def read_skeleton(directory: Path, *, dtype: Dtype, origin: str) -> PreTrainedModel:
    """The model that a directory's config describes, with whatever weights the default device gives it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype.value), trust_remote_code=False)
    except UNREADABLE as error:
        raise unreadable(directory, origin, error) from error


def num_bytes(parameters: Iterable[Tensor]) -> int:
    """What they take in memory."""
    return sum(parameter.numel() * parameter.itemsize for parameter in parameters)


def unreadable(directory: Path, origin: str, error: Exception) -> ValueError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    remedy = "`python -m opsd.doctor` says what is wrong here" if "Could not import" in reason else "give another model"
    return ValueError(f"{origin}: transformers cannot load {directory} ({reason}); {remedy}.")


def require_plain_head(model: PreTrainedModel, origin: str) -> None:
    """Refuses a model whose logits are not its last hidden states times its output embedding: scoring computes just that.

    Soft-capped or scaled logits and a bias on the head are caught by trying a few tokens, since no config key is common to them.
    """
    import torch

    head = model.get_output_embeddings()
    if head is None or model.get_decoder() is model:
        raise ValueError(
            f"{origin}: {type(model).__name__} does not tell body and head apart, as scoring needs; use another model."
        )
    ids_BL = torch.arange(1, 9)[None] % head.weight.shape[0]
    training = model.training
    model.eval()
    with torch.inference_mode():
        logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
        hidden_BLH = model.get_decoder()(input_ids=ids_BL, use_cache=False).last_hidden_state
        plain_BLV = torch.nn.functional.linear(hidden_BLH, head.weight)
    model.train(training)
    gap = ((logits_BLV - plain_BLV).abs().max() / plain_BLV.abs().max()).item()
    limit = max(1e-5, 2 * torch.finfo(head.weight.dtype).eps)
    if not gap <= limit:
        raise ValueError(
            f"{origin}: the logits of {type(model).__name__} are not hidden states times output embedding (they differ by "
            f"{gap:.2g} of the largest), so they are capped, scaled or shifted, which scoring does not do; use another model."
        )
