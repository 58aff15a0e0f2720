"""About how much memory a training step takes, term by term, from the model's shapes alone.

    weights       parameters x bytes of their type; adapters are float32
    training      of every trained parameter a gradient in its own type and AdamW's two moments, so three times its bytes
                  (several processes: what one of them holds of both, `Engine.held`)
    teacher       the weights that it keeps for itself (`Teacher.own_bytes`)
    activations   tokens of a micro-batch x sum over the body's linear layers of (in + out) x bytes of the weights, and under
                  adapters of another type 4 bytes x in for the copy that each reads. With gradient checkpointing the layers' inputs
                  (tokens x layers x width) and ONE layer's activations
    logits        chunk_tokens x V x 4 bytes x CHUNK_COPIES; a trained head has a gradient of its own, V x H x 4 bytes
    sampler       what it holds beside the trainer (`RolloutEngine.own_bytes`): weights and cache of vLLM
    cache         rows decoded at one time x (longest prompt + max_len) x 2 x layers x key-value heads x head width x bytes, and
                  their logits, rows x V x 4 bytes x SAMPLING_COPIES

Training and sampling take turns: the peak is the weights, the training states, the sampler and the larger of the two. What the
allocator wastes, a process's libraries on the CPU and a GPU's context come on top. A guide to settings, not a promise. Measured
peaks of whole processes on a CPU against this sum and LIBRARIES_MB: embedded model, defaults 832 MB (840 expected); the same under
debug=smoke 664 (631); SmolLM2-135M with adapters over a bf16 base, experiment=gsm8k_smollm2 2,800 (2,000).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opsd.config import Run
from opsd.pretrained import num_bytes

if TYPE_CHECKING:
    from torch.nn import Module

FLOAT32 = 4  # bytes
CHUNK_COPIES = 10  # float32 tensors [chunk, V] alive at once: both sides' logits and log-probs, the loss's parts, their gradients
SAMPLING_COPIES = 4  # float32 tensors [rows, V]: logits, raw and processed log-probs, one in between
LIBRARIES_MB = 600  # a process on the CPU before it has a model


@dataclass(kw_only=True, slots=True)
class Memory:
    """Bytes of each term."""

    num_parameters: int
    num_trained: int
    weights: int
    training: int
    teacher: int
    sampler: int
    activations: int
    logits: int
    cache: int

    @property
    def peak(self) -> int:
        return self.weights + self.training + self.teacher + self.sampler + max(self.activations + self.logits, self.cache)


def estimate(run: Run, skeleton: Module, *, longest_student: int, longest_teacher: int, longest_asked: int) -> Memory:
    """The terms for a run's settings, of one process where there are several.

    Args:
        skeleton: the model without weights, as `Model.skeleton` gives it.
        longest_student, longest_teacher: tokens of the longest prompts, analysis included; 0 where there is no teacher.
        longest_asked: tokens of the longest evaluation prompt, 0 where there is no evaluation.
    """
    parts: Any = skeleton
    shape = parts.config.get_text_config()
    trained = [parameter for parameter in skeleton.parameters() if parameter.requires_grad]
    head_VH = parts.get_output_embeddings().weight
    width, item = head_VH.shape[1], head_VH.itemsize
    student, teacher = longest_student + run.rollout.max_len, longest_teacher + run.rollout.max_len
    processes = run.launcher.processes
    whole, copies = run.engine.held(processes)
    own = math.ceil(run.train.batch / processes)  # rollouts of a step
    rows = max(1, min(own, run.train.micro_tokens // max(student, teacher)))
    a_token = activation_bytes(skeleton)
    if run.engine.gradient_checkpointing:
        layers = shape.num_hidden_layers
        a_token = a_token // layers + layers * width * item
    keys = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cached = 2 * shape.num_hidden_layers * keys * head_width * item
    sampled = []
    if run.rollout.samples_anew and run.rollout.reads_module:
        sampled.append((longest_student + run.rollout.max_len, own))
    if run.prompt.analysis_len is not None and longest_teacher:
        sampled.append((longest_teacher, math.ceil(run.train.batch / run.rollout.samples / processes)))
    if run.eval.in_run and run.rollout.reads_module:
        asked = math.ceil(len(run.eval.problems()) * run.eval.samples / processes)
        sampled.append((longest_asked + run.eval.max_len, asked))
    return Memory(
        num_parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        num_trained=sum(parameter.numel() for parameter in trained),
        weights=round(whole * num_bytes(skeleton.parameters())),
        training=round(copies * num_bytes(trained)),
        teacher=run.teacher.own_bytes(skeleton),
        sampler=run.rollout.own_bytes(skeleton),
        activations=rows * student * a_token,
        logits=run.train.chunk_tokens * head_VH.shape[0] * FLOAT32 * CHUNK_COPIES
        + (head_VH.numel() * FLOAT32 if head_VH.requires_grad else 0),
        cache=max((cache_bytes(run, size, count, cached, head_VH.shape[0]) for size, count in sampled), default=0),
    )


def cache_bytes(run: Run, row_tokens: int, count: int, a_token: int, vocabulary: int) -> int:
    """Of `count` responses that are sampled in one call: as many at one time as the rollout's own limits allow."""
    rows = min(count, run.rollout.rows_at_once(row_tokens))
    return rows * (row_tokens * a_token + vocabulary * FLOAT32 * SAMPLING_COPIES)


def activation_bytes(skeleton: Module) -> int:
    """What autograd keeps of one token, all layers together."""
    from torch.nn import Linear

    parts: Any = skeleton
    head = parts.get_output_embeddings()
    linear = {name: module for name, module in skeleton.named_modules() if isinstance(module, Linear) and module is not head}
    total = 0
    for name, module in linear.items():
        if "lora_" not in name:
            total += (module.in_features + module.out_features) * module.weight.itemsize
        elif "lora_A" in name and parts.dtype.itemsize != FLOAT32:
            total += module.in_features * FLOAT32
    return total
