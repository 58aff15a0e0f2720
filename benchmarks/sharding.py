"""Memory and time of a step by engine: what a rank holds of parameters, gradients and optimizer states, and its peak.

    python -m benchmarks.sharding [--json FILE] [--ranks 2] [--steps 4] [--layers 10] [--width 768] [--lora]

A random Qwen3 with a tied head, trained in float32 on random tokens (loss=nll, so that no teacher takes memory). The baseline is
the torch engine in one process with the whole batch; the other rows share the same batch out over the ranks. Every row is a start
of its own, one after another.

Columns, of the rank that holds most, in MB (2^20 bytes):

    parameters, gradients, optimizer    bytes of the tensors held when a step's gradients are complete; the optimizer's include the
                                        float32 copy that ZeRO keeps of what it updates
    other       every other tensor alive at that time: buffers, buckets
    step peak   the most that the process took during the steps, libraries not counted (a GPU's allocator: all that it gave out)
    start peak  the same from the start on: a rank reads the whole model before it splits it
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsd import batching
from opsd import ranks as processes
from opsd.engines.base import AdamW, TrainingEngine
from opsd.ranks import Ranks
from opsd.registry import lookup
from opsd.scoring import Objective
from opsd.types import FinishReason, LoadedModel, Problem, Prompt, Response, Rollout

ENGINES = ("torch", "zero1", "zero2", "zero3")
ROWS, PROMPT_LEN, RESPONSE_LEN, MICRO_TOKENS, VOCABULARY = 8, 64, 64, 256, 16384
MB = 2**20


def random_model(*, layers: int, width: int, lora: bool, device: torch.device) -> LoadedModel:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        head_dim=64,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(device)
    body, head_VH = model.get_decoder(), model.get_output_embeddings().weight
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    tokenizer: Any = None  # nothing here is text
    return LoadedModel(
        model=model.train(),
        body=body,
        head_VH=head_VH,
        tokenizer=tokenizer,
        context=PROMPT_LEN + RESPONSE_LEN,
        stop_ids=[],
        directory=Path(),
        lora=lora,
        device=device,
    )


def random_rollouts(step: int) -> list[Rollout]:
    ids_BL = torch.randint(VOCABULARY, (ROWS, PROMPT_LEN + RESPONSE_LEN), generator=torch.Generator().manual_seed(step)).tolist()
    zeros = [0.0] * RESPONSE_LEN
    return [
        Rollout(
            prompt=Prompt(
                problem=Problem(id=str(row), text="", solution=None, answer=None),
                student_ids=ids[:PROMPT_LEN],
                teacher_ids=None,
                shortened=False,
                analysis_ids=None,
            ),
            response=Response(
                token_ids=ids[PROMPT_LEN:],
                logps=zeros,
                processed_logps=zeros,
                finish_reason=FinishReason.LENGTH,
                weights_version=0,
            ),
            text="",
        )
        for row, ids in enumerate(ids_BL)
    ]


def num_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Of their storages, each once: those in `seen` are left out, and all are added to it."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def held(engine: TrainingEngine, objective: Objective) -> dict[str, float]:
    """MB by kind, of the tensors alive now."""
    parameters: list[Any] = list(objective.model.parameters())
    optimizer: Any = getattr(engine, "optimizer", None)  # torch's, or ZeRO's around one
    zero = optimizer if hasattr(optimizer, "optimizer") else None
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [] if zero is None else list(engine.flats)  # pyright: ignore[reportAttributeAccessIssue]  # the DeepSpeed engine's
    states += [value for state in (zero.optimizer if zero else optimizer).state.values() for value in state.values()]
    if zero is not None:
        parameters += [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        partitions = getattr(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})
        found = [*zero.averaged_gradients.values(), *getattr(zero, "all_grad_tensors", {}).values(), partitions.values()]
        gradients += [gradient for group in found if group is not None for gradient in group if isinstance(gradient, Tensor)]
        gradients += [p.grad_accum for p in parameters if getattr(p, "grad_accum", None) is not None]
    seen: set[int] = set()
    sizes = {
        "parameters": num_bytes(parameters, seen),
        "gradients": num_bytes(gradients, seen),
        "optimizer": num_bytes(states, seen),
    }
    with warnings.catch_warnings():  # some of what the collector knows warns when it is looked at
        warnings.simplefilter("ignore")
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and not thing.is_meta]
    sizes["other"] = num_bytes(alive, seen)
    return {kind: size / MB for kind, size in sizes.items()}


def resident(field: str) -> float:
    """MB of this process, from Linux: VmRSS now, VmHWM the most since `forget_peak`."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak(libraries: float) -> float:
    return torch.cuda.max_memory_allocated() / MB if torch.cuda.is_initialized() else resident("VmHWM") - libraries


def measure(name: str, *, steps: int, layers: int, width: int, lora: bool, ranks: Ranks) -> dict[str, float]:
    import transformers  # noqa: F401  # before the libraries are weighed

    torch.set_num_threads(1)
    where = {"device": "auto", "gradient_checkpointing": False}
    kind = "torch" if name == "torch" else "deepspeed"
    if kind == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed  # noqa: F401

        where |= {"zero": int(name[-1]), "keep_whole": 100_000}
    options = {
        "engine": lookup("engine", kind)(name=name, kind=kind, **where),
        "loss": lookup("loss", "nll")(name="nll", kind="nll", temperature=1.0),
        "clipping": lookup("clipping", "none")(name="none", kind="none", clip=None),
    }
    libraries = resident("VmRSS")
    forget_peak()
    device = torch.device(ranks.device("auto") if torch.cuda.is_available() else "cpu")
    loaded = random_model(layers=layers, width=width, lora=lora, device=device)
    total = sum(parameter.numel() for parameter in loaded.model.parameters())
    objective = Objective(loaded, loss=options["loss"], clipping=options["clipping"], temperature=1.0, chunk_tokens=64)
    engine = options["engine"].build(
        objective, optimizer=AdamW(betas=[0.9, 0.999], weight_decay=0.0, max_grad_norm=1.0), ranks=ranks
    )
    start_peak, seconds, sizes, norms = peak(libraries), [], {}, []
    for step in range(1, steps + 1):
        if step == 2:  # the first makes the optimizer's states
            forget_peak()
        rollouts = random_rollouts(step)
        weights = batching.token_weights(rollouts, batching.Reduction.token)
        mine = batching.plan(rollouts, micro_tokens=MICRO_TOKENS, ranks=ranks.size)[ranks.rank]
        ranks.gather(None)
        began = time.perf_counter()
        for place, rows in enumerate(mine, start=1):
            batch = batching.collate([rollouts[row] for row in rows], [weights[row] for row in rows], device)
            engine.accumulate(batch, None, None, want_cosine=False, last=place == len(mine))
        if step == steps:
            sizes = held(engine, objective)
        norms.append(engine.step(lr=1e-4))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if 1 < step < steps:
            seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    step_peak = peak(libraries)
    with engine.whole():
        whole_s = time.perf_counter() - began
    figures = sizes | {"step_peak": step_peak, "start_peak": start_peak, "step_s": statistics.median(seconds), "whole_s": whole_s}
    most = {key: max(row[key] for row in ranks.gather(figures)) for key in figures}
    return {"ranks": ranks.size, "millions": total / 1e6, "norm": norms[-1]} | most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lora", action="store_true", help="adapters over a frozen base instead of every weight")
    parser.add_argument("--engine", choices=ENGINES, help="one row in this process; torchrun starts several")
    arguments = parser.parse_args()
    if arguments.engine:
        ranks = processes.start()
        row = measure(
            arguments.engine,
            steps=arguments.steps,
            layers=arguments.layers,
            width=arguments.width,
            lora=arguments.lora,
            ranks=ranks,
        )
        if ranks.first:
            print("ROW " + json.dumps(row), flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    table = []
    own = [word for key in ("steps", "layers", "width") for word in (f"--{key}", str(getattr(arguments, key)))]
    own += ["--lora"] if arguments.lora else []
    for engine, size in [("torch", 1), *((name, arguments.ranks) for name in ENGINES)]:
        start = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        done = subprocess.run(
            [sys.executable, *start, "-m", "benchmarks.sharding", "--engine", engine, *own],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MB)},  # freed at once where freed, for a true peak
            check=True,
        )
        (row,) = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if not table:
            print(
                f"{row['millions']:.1f} M parameters, {ROWS} rows of {PROMPT_LEN + RESPONSE_LEN} tokens, torch={torch.__version__}"
            )
        table.append({"engine": engine} | row)
        print(
            "  ".join(f"{key}={round(value, 2) if isinstance(value, float) else value}" for key, value in table[-1].items()),
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
