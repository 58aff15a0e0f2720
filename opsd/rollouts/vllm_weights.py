"""How weights get from the trainer's module into vLLM's, and the digest of both ends. Imported only when an engine is built.

The digest is the sum of the tensors' bit patterns, read as integers, and the number of elements. It depends neither on the order
nor on how vLLM packs q, k and v, or gate and up, into one matrix. A tied head counts once. vLLM's CPU build keeps linear layers and
the head in a form of oneDNN's that cannot be looked into; there the layers are asked for some of their columns, as the products
with unit vectors, which are exact. Shapes: N outputs, K inputs, C columns, R rank, S slots for adapters, I a single entry.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opsd.pretrained import ADAPTER_WEIGHTS, num_bytes
from opsd.types import LoadedModel

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

COLUMNS = 16  # of a repacked layer that one digest reads
RAM_DISK = Path("/dev/shm")
PART = 2**24  # elements that are copied at one time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True, slots=True)
class Weight:
    """One tensor on its way, in the sampler's dtype."""

    name: str  # as in a checkpoint of the whole model
    values: Tensor
    linear: bool  # a matrix that vLLM may repack
    again: bool  # a tied head: its values are the embedding's


class Digest:
    """Sums of bits, and of elements, of what was added: linear layers and everything else apart."""

    def __init__(self, *, repacked: bool, turn: int) -> None:
        self.repacked, self.turn = repacked, turn  # `turn`: which columns are read
        self.sums: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.num_sent = 0  # elements, read or not

    def columns(self, width: int) -> list[int]:
        """Those of a repacked layer with so many inputs; all of them have had their turn after width / COLUMNS digests."""
        return sorted({(self.turn * COLUMNS + place) % width for place in range(COLUMNS)})

    def add(self, kind: str, values: Tensor) -> None:
        self.counts[kind] += values.numel()
        for part in values.detach().reshape(-1).split(PART):
            part = part + 0.0  # one zero, not two
            self.sums[kind] += int(part.view(BITS[part.itemsize]).sum(dtype=torch.int64))

    def add_weight(self, weight: Weight) -> None:
        """What was sent."""
        self.num_sent += 0 if weight.again else weight.values.numel()
        if weight.linear and self.repacked:
            self.add("linear", weight.values[:, self.columns(weight.values.shape[1])])
        elif not weight.again:
            self.add("linear" if weight.linear else "other", weight.values)

    def add_layer(self, layer: Any) -> None:
        """What a repacked layer of vLLM's holds."""
        width = layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.embedding_dim
        columns = self.columns(width)
        units_CK = torch.zeros(len(columns), width, dtype=layer.weight.dtype)
        units_CK[torch.arange(len(columns)), torch.tensor(columns)] = 1
        values_CN = layer.cpu_linear(units_CK, layer.weight, None)
        self.add("linear", values_CN[:, : getattr(layer, "org_vocab_size", values_CN.shape[1])])


def dense(loaded: LoadedModel) -> nn.Module:
    """The causal LM without peft's wrapper around it."""
    model: Any = loaded.model
    return model.get_base_model() if loaded.lora else model


@torch.no_grad()
def weights(loaded: LoadedModel, *, dtype: torch.dtype, merge: bool) -> Iterator[Weight]:
    """Every tensor of the model as it is now, one at a time; the trainer's own are only read.

    Args:
        merge: adapters are added in float32, W + scaling * B A, to a copy; otherwise the base is given as it is.
    """
    model: Any = dense(loaded)
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head) + ".weight"
    sent = set()
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner_name, _, leaf = name.rpartition(".")
        values = parameter.detach()
        plain = name
        if owner_name.endswith(".base_layer"):
            wrapper = model.get_submodule(owner_name.removesuffix(".base_layer"))
            plain = f"{owner_name.removesuffix('.base_layer')}.{leaf}"
            if merge and leaf == "weight":
                values = values.float() + wrapper.get_delta_weight(wrapper.active_adapters[0]).float()
        linear = leaf == "weight" and isinstance(model.get_submodule(owner_name), nn.Linear)
        sent.add(plain)
        yield Weight(name=plain, values=values.to(dtype), linear=linear, again=False)
    if head_name not in sent:  # tied; vLLM keeps the old head where it is left out
        yield Weight(name=head_name, values=head.weight.detach().to(dtype), linear=True, again=True)


def send(llm: LLM, outgoing: Iterable[Weight], digest: Digest) -> None:
    """Puts every tensor into vLLM's model, in place."""

    def named() -> Iterator[tuple[str, Tensor]]:
        for weight in outgoing:
            digest.add_weight(weight)
            yield weight.name, weight.values

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named()})


def model_of(llm: LLM) -> Any:
    """vLLM's module in this process."""
    return llm.apply_model(lambda model: model)[0]


def is_repacked(llm: LLM) -> bool:
    """Whether this build keeps linear layers in a form that cannot be read as it is."""
    return any(hasattr(layer, "cpu_linear") and layer.weight.numel() == 0 for layer in model_of(llm).modules())


def held(llm: LLM, digest: Digest) -> Digest:
    """Adds what vLLM's model holds: of repacked layers the digest's columns."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    model = model_of(llm)
    layers = [layer for layer in model.modules() if isinstance(layer, LinearBase | ParallelLMHead)]
    vocabularies = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    sizes = {id(layer.weight): layer.org_vocab_size for layer in vocabularies}
    embeddings = {id(layer.weight) for layer in vocabularies if not isinstance(layer, ParallelLMHead)}
    matrices = {id(layer.weight) for layer in layers} - embeddings  # a tied head is an embedding
    if digest.repacked:
        for layer in layers:
            digest.add_layer(layer)
    for parameter in model.parameters():
        if digest.repacked and id(parameter) in matrices:
            continue
        values = parameter.data[: sizes.get(id(parameter))]  # of a vocabulary the rest is padding
        digest.add("linear" if id(parameter) in matrices else "other", values.to(llm.model_config.dtype))
    return digest


class AdapterFile:
    """The adapter's way into vLLM, which reads adapters from directories: from a private one, in memory where there is room, that
    is gone again when it has been read."""

    def __init__(self, loaded: LoadedModel, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model: Any = loaded.model
        self.config = self.model.peft_config[self.model.active_adapter]

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """A and B of every adapted layer, as they are now, under the names of an adapter's checkpoint."""
        for name, parameter in self.model.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                yield name.replace(f".{self.model.active_adapter}.", "."), parameter.detach()

    def request(self, directory: str = "in memory", *, anew: bool = False) -> LoRARequest:
        """What names the adapter to vLLM.

        Args:
            directory: is read where `anew` is set, and only there.
        """
        from vllm.lora.request import LoRARequest

        return LoRARequest("student", 1, directory, load_inplace=anew)

    def send(self, llm: LLM, digest: Digest) -> None:
        """Writes the matrices as they are now and has vLLM read them."""
        from safetensors.torch import save_file

        tensors = {name: values.to(self.dtype).cpu().contiguous() for name, values in self.matrices()}
        scaling = self.config.lora_alpha / self.config.r
        for name, values in tensors.items():
            digest.num_sent += values.numel()
            digest.add("adapter", values * scaling if ".lora_B." in name else values)
        room = 2 * num_bytes(tensors.values())  # the matrices and a spare
        in_memory = RAM_DISK.is_dir() and shutil.disk_usage(RAM_DISK).free > room
        with tempfile.TemporaryDirectory(prefix="opsd-adapter-", dir=RAM_DISK if in_memory else None) as directory:
            self.config.save_pretrained(directory)
            save_file(tensors, Path(directory) / ADAPTER_WEIGHTS)
            llm.llm_engine.add_lora(self.request(directory, anew=True))

    def held(self, llm: LLM, digest: Digest) -> Digest:
        """Adds what stands in vLLM's slots."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        rank = self.config.r
        for layer in model_of(llm).modules():
            if isinstance(layer, BaseLinearLayerWithLoRA):
                for a_SIRK, b_SINR in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                    digest.add("adapter", a_SIRK[:, :, :rank])  # the rest is room for a larger rank
                    digest.add("adapter", b_SINR[..., :rank])
        return digest
