"""Models: where weights and tokenizer come from, and how adapters are put on."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.registry import Option
from opsd.types import LoadedModel


@dataclass(kw_only=True, slots=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685) in fp32 over a frozen base. `model.lora=null` trains every weight instead."""

    r: int
    alpha: float
    dropout: float
    targets: list[str]  # names of the linear layers that get an adapter


class Model(Option):
    """A causal language model with its tokenizer and chat template."""

    def check(self) -> int:
        """Refuses what cannot be loaded, before anything is imported or written, and gives the model's context in tokens.

        Raises:
            ValueError: the model is missing, has no safetensors weights, or cannot be reached.
        """
        raise NotImplementedError

    def load(self, *, seed: int, checkpoint: str | None = None) -> LoadedModel:
        """The model in memory, adapters on. With `checkpoint`, the weights of that directory instead of the model's own.

        Args:
            seed: decides the adapters' initial values.
            checkpoint: a directory of safetensors weights as `opsd.checkpoints` writes it: a whole model or an adapter.
        """
        raise NotImplementedError
