"""What tests of several rooms share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.types import LoadedModel

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real problem sets and worked cases, kept beside the repository and not in it."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"the problem sets and cases are not here ({folder})")
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow store for all whole runs: making one takes ten seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


def make_tokenizer():
    """A byte-level BPE tokenizer with Qwen-like markers, some merges, a thinking switch, and a pad token that IS its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["Problem: what is the sum of the digits? Please reason step by step. user assistant system answer solution"] * 8
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_tokens(["<think>", "</think>"])  # as in Qwen3: added, yet not "special"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer, *, seed: int = 0):
    """A random Qwen3 of two layers, tied, in float32: big enough to tell tokens apart, small enough to be made in milliseconds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,  # so that its distributions are not flat
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model as a directory that `model=hf model.path=...` loads. Not to be written to."""
    directory = tmp_path_factory.mktemp("random_model")
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def new_tokenizer():
    """A tokenizer of the test's own, to be changed at will."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def random_model(tokenizer) -> LoadedModel:
    """A tiny random Qwen3 whose pad token is its end token, every weight trainable. One for the whole session: whoever changes
    its weights or its training flags works on `copy.deepcopy(random_model.model)` instead."""
    import torch

    model: Any = make_model(tokenizer)
    return LoadedModel(
        model=model,
        body=model.get_decoder(),
        head_VH=model.get_output_embeddings().weight,
        tokenizer=tokenizer,
        context=model.config.max_position_embeddings,
        stop_ids=[tokenizer.eos_token_id],
        directory=Path(),  # made here, read from nowhere
        lora=False,
        device=torch.device("cpu"),
    )


@pytest.fixture(params=["closed", "silent"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A hub address that refuses every connection, and one that takes it and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
