"""A teacher of another make for the random student."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wider(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the student's tokenizer: 48 wide instead of 32, untied, its vocabulary padded. Not to be written to."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("wider_model")
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 11,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(config).save_pretrained(directory)
    for file in model_directory.glob("*token*"):
        shutil.copy(file, directory)
    return directory
