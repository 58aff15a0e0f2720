"""The embedded model: packaged with the project, so that everything runs without a download."""

from __future__ import annotations

from pathlib import Path

from opsd.models.hf import Pretrained
from opsd.registry import register


@register("model", "tiny")
class Tiny(Pretrained):
    """A small Qwen3 pretrained on the embedded problems; `opsd/assets/make_tiny.py` made it."""

    def directory(self) -> Path:
        return Path(__file__).parents[1] / "assets" / "tiny"
