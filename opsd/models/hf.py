"""Any causal language model that transformers knows, from a local directory or from the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.chat import stop_ids
from opsd.models.base import Lora, Model
from opsd.pretrained import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    WEIGHTS,
    Dtype,
    ModelPath,
    positions,
    read,
    read_config,
    read_skeleton,
    read_tokenizer,
    require_files,
    require_plain_head,
)
from opsd.registry import register
from opsd.seeding import derive
from opsd.types import LoadedModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        return self.lora is not None

    def directory(self) -> Path:
        """Where config, tokenizer and weights are; fetches them where need be."""
        raise NotImplementedError

    def description(self) -> Path:
        """Where config and tokenizer are, with or without weights."""
        return self.directory()

    def check(self) -> int:
        return self.context_tokens(require_files(self.directory(), self.origin))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.description(), origin=self.origin)

    def skeleton(self) -> PreTrainedModel | PeftModel:
        import torch

        with torch.device("meta"):
            model = read_skeleton(self.description(), dtype=self.dtype, origin=self.origin)
            return model if self.lora is None else self.adapt(model, self.lora, None)

    def context_tokens(self, config: dict[str, Any]) -> int:
        """`model.context`, or what the model's config.json says."""
        own = positions(config)
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
            model, tokenizer = read(whole, tokenizer_directory=directory, dtype=self.dtype, origin=self.origin)
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
            directory=whole,
            lora=self.has_adapters,
            device=where,
        )

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
    def place(self) -> ModelPath:
        return ModelPath(key="model.path", path=self.path, revision=self.revision)

    @property
    def origin(self) -> str:
        return self.place.origin

    def directory(self) -> Path:
        return self.place.directory()

    def description(self) -> Path:
        return self.place.description()

    def check(self) -> int:
        local = self.place.local()
        if local is not None:
            return self.context_tokens(require_files(local, self.origin))
        return self.context_tokens(read_config(self.place.fetch([CONFIG]), self.origin))
