"""Models: where weights and tokenizer come from, and how adapters are put on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opsd.registry import Option
from opsd.types import LoadedModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685) in fp32 over a frozen base. `model.lora=null` trains every weight instead."""

    r: int
    alpha: float
    dropout: float
    targets: list[str]  # names of the linear layers that get an adapter

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"model.lora.r={self.r}: must be at least 1.")
        if not self.alpha > 0:
            raise ValueError(f"model.lora.alpha={self.alpha}: must be above 0.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.lora.dropout={self.dropout}: must be at least 0 and below 1.")
        if not self.targets:
            raise ValueError("model.lora.targets=[]: no layer would get an adapter; name one or set model.lora=null.")


class Model(Option):
    """A causal language model with its tokenizer and chat template."""

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are trained, and checkpoints hold them alone; otherwise the whole model."""
        raise NotImplementedError

    def check(self) -> int:
        """Refuses what cannot be loaded, before anything is written, and gives the model's context in tokens. Needs no torch.

        Raises:
            ValueError: the model is missing, has no safetensors weights, or cannot be reached.
        """
        raise NotImplementedError

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer alone; of a hub model no weights are fetched. Raises ValueError as `load` does."""
        raise NotImplementedError

    def skeleton(self) -> PreTrainedModel | PeftModel:
        """What `load` puts in memory without its weights: shapes, types and what is trainable, on torch's meta device.

        Raises:
            ValueError: as `load`, but for what only the weights show.
        """
        raise NotImplementedError

    def load(self, *, seed: int, device: str, checkpoint: str | None = None) -> LoadedModel:
        """The model in memory in eval mode, adapters on, everything trainable that is to be trained.

        Under LoRA `LoadedModel.model` is peft's wrapper: `disable_adapter()` and `save_pretrained()` are its own. The global random
        state stays as it was.

        Args:
            seed: decides the adapters' initial values, the same on every device.
            device: `cpu`, `cuda`, `cuda:1`, ...; `auto`: a GPU where there is one.
            checkpoint: a directory of safetensors weights as `opsd.checkpoints` writes it, taken instead of the model's own: an
                adapter where the model has adapters, otherwise a whole model.

        Raises:
            ValueError: as `check`, or what is there is not a causal language model that this project can score.
        """
        raise NotImplementedError
