"""Any causal language model that transformers knows, from a local directory or from the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.chat import stop_ids
from opsd.hub import is_hub_id, snapshot
from opsd.models.base import Lora, Model
from opsd.registry import register
from opsd.seeding import derive
from opsd.types import LoadedModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth")
WEIGHTS = "model*.safetensors"  # one file or shards; other formats stand beside them in some repositories
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", WEIGHTS]


class Dtype(Enum):
    """Of the weights. Member names are what a config says."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class Pretrained(Model):
    """A directory as `save_pretrained` writes it. Subclasses say which."""

    dtype: Dtype
    context: int | None  # null: the model's own; less is allowed
    lora: Lora | None

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise ValueError(f"model.context={self.context}: must be at least 1, or null for the model's own.")
        if self.lora is None and self.dtype is Dtype.bfloat16:
            raise ValueError(
                "model.dtype=bfloat16 with model.lora=null: a step of AdamW is smaller than what bf16 weights can hold and would "
                "vanish; set model.dtype=float32, or train adapters with model.lora."
            )

    @property
    def origin(self) -> str:
        """What messages call the model: a key and its value."""
        return f"model={self.name}"

    @property
    def has_adapters(self) -> bool:
        """Whether a checkpoint of this model holds an adapter; otherwise it holds the whole model."""
        return self.lora is not None

    def directory(self) -> Path:
        """Where config, tokenizer and weights are; fetches them where need be."""
        raise NotImplementedError

    def check(self) -> int:
        return self.context_tokens(require_files(self.directory(), self.origin))

    def context_tokens(self, config: dict[str, Any]) -> int:
        """`model.context`, or what the model's config.json says."""
        own = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
        if self.context is None and own is None:
            raise ValueError(f"{self.origin}: its config.json has no max_position_embeddings; set model.context.")
        if self.context is not None and own is not None and self.context > own:
            raise ValueError(f"model.context={self.context}: exceeds the {own} positions that {self.name} was made for; lower it.")
        context = own if self.context is None else self.context
        assert context is not None
        return context

    def load(self, *, seed: int, device: str, checkpoint: str | None = None) -> LoadedModel:
        import torch

        directory = self.directory()
        context = self.context_tokens(require_files(directory, self.origin))
        if checkpoint is not None:
            self.require_checkpoint(Path(checkpoint))
        whole = directory if checkpoint is None or self.has_adapters else Path(checkpoint)
        # everything random happens on the CPU, whatever the device, and leaves no trace in the global generator
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(seed, "adapters"))
            model, tokenizer = self.read(whole, tokenizer_directory=directory)
            require_plain_head(model, self.origin)
            outer: Any = model if self.lora is None else self.adapt(model, self.lora, checkpoint)
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"engine.device={device}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here; set "
                "engine.device=auto, or install a torch that was built for this machine's GPU."
            )
        outer.to(where).eval()
        return LoadedModel(
            model=outer,
            body=model.get_decoder(),
            head_VH=model.get_output_embeddings().weight,
            tokenizer=tokenizer,
            context=context,
            stop_ids=stop_ids(model, tokenizer),
            lora=self.has_adapters,
            device=where,
        )

    def read(self, directory: Path, *, tokenizer_directory: Path) -> tuple[Any, Any]:
        """Weights and tokenizer as transformers reads them, every weight accounted for. No code of the model's own is run."""
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # one bar a run: the training loop's
        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory, trust_remote_code=False, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, self.dtype.value),
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(f"{self.origin}: transformers cannot load {directory} ({reason}); give another model.") from error
        model, report = loaded
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise ValueError(
                f"{self.origin}: {directory} lacks {len(report['missing_keys'])} of the model's weights ({missing}, ...), and "
                "random ones would stand in for them; give a complete causal language model."
            )
        return model, tokenizer

    def require_checkpoint(self, checkpoint: Path) -> None:
        """Refuses a directory that does not hold the kind of weights that this model trains."""
        wanted = [ADAPTER_CONFIG, ADAPTER_WEIGHTS] if self.has_adapters else [CONFIG]
        missing = [name for name in wanted if not (checkpoint / name).is_file()]
        if not self.has_adapters and not any(checkpoint.glob(WEIGHTS)):
            missing.append(WEIGHTS)
        if missing:
            kind = "an adapter" if self.has_adapters else "a whole model"
            key = "model.lora is set" if self.has_adapters else "model.lora=null"
            raise ValueError(
                f"checkpoint={checkpoint}: holds no {' and no '.join(missing)}; {kind} is needed there since {key}. "
                "Give the directory of a checkpoint of this model."
            )

    def adapt(self, model: PreTrainedModel, lora: Lora, checkpoint: str | None) -> PeftModel:
        """The model with fp32 adapters in place: new ones, or those of a checkpoint, which go on training."""
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model

        if checkpoint is not None:
            return PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
        head = model.get_output_embeddings()
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head]
        for target in lora.targets:
            if not any(name == target or name.endswith(f".{target}") for name in linear):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                raise ValueError(f"model.lora.targets: {self.name} has no linear layer {target!r} to adapt; it has {known}.")
        return get_peft_model(
            model,
            LoraConfig(
                r=lora.r,
                lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # any number will do
                lora_dropout=lora.dropout,
                target_modules=list(lora.targets),
                task_type="CAUSAL_LM",
            ),
        )


@register("model", "hf")
class Hf(Pretrained):
    """A local directory, or `owner/name` on the hub. What looks like a path is never sent to the hub."""

    path: str
    revision: str | None  # of a hub model; null: its main branch

    @property
    def origin(self) -> str:
        return f"model.path={self.path}"

    def local(self) -> Path | None:
        """The directory that `path` says, or None where it names a hub model."""
        path = Path(self.path).expanduser()
        if path.is_dir():
            return path
        if path.exists():
            raise ValueError(f"{self.origin}: is a file; give the directory that holds config.json and the weights.")
        if not is_hub_id(self.path):
            raise ValueError(
                f"{self.origin}: there is no such directory; give a local model directory, or a hub model as owner/name."
            )
        return None

    def directory(self) -> Path:
        return self.local() or self.fetch(HUB_FILES)

    def check(self) -> int:
        local = self.local()
        if local is not None:
            return self.context_tokens(require_files(local, self.origin))
        return self.context_tokens(read_config(self.fetch([CONFIG]), self.origin))

    def fetch(self, patterns: list[str]) -> Path:
        return snapshot(
            self.path,
            repo_type="model",
            revision=self.revision,
            patterns=patterns,
            needs=".safetensors",
            key="model.path",
            remedy="set model.path=DIRECTORY to a local model.",
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
