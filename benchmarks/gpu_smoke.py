"""Everything that only a GPU can show, in one command and under five minutes: `python -m benchmarks.gpu_smoke [--json FILE]`.

A model of Qwen3-1.7B's shape with random weights (LoRA r 64 over a bfloat16 base) takes a few steps in the setting of the paper's
run on one GPU: 8 rollouts of up to 1,024 tokens a step. Each case is a whole `launch.py` command, so that what is checked is what
users run; a table of the seconds of a step's parts, tokens a second and peak memory follows, and what did not work is told and
makes the exit status 1. Random weights hardly ever end their turn, so that every response has its full length: lengths are known.

    --small     the embedded model's shape and short responses: to try the command itself on any machine, a CPU's too
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
TINY = ROOT / "opsd" / "assets" / "tiny"
SHAPES = {  # of Qwen3-1.7B, as its config.json says; and something that any machine can hold
    "full": dict(
        **dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8),
        **dict(head_dim=128, vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=True),
    ),
    "small": dict(
        **dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
        **dict(head_dim=32, vocab_size=2048, max_position_embeddings=2048, rope_theta=1e6, tie_word_embeddings=True),
    ),
}
COMMON = ("model=hf", "eval.in_run=false", "train.steps=4")  # conf/model/hf.yaml: LoRA r 64 on all linear layers, bfloat16
CASES = {
    "adapter, sleep, CUDA graphs": ("rollout=vllm", "rollout.sync=adapter"),
    "merged, awake": ("rollout=vllm", "rollout.sync=merged", "rollout.sleep=false", "rollout.cuda_graphs=false"),
    "every weight, float32": ("rollout=vllm", "model.lora=null", "model.dtype=float32", "rollout.cuda_graphs=false"),
    "DeepSpeed, adapter": ("rollout=vllm", "engine=deepspeed", "rollout.cuda_graphs=false"),
}
SHOWN = {  # column: where it is in a line of metrics.jsonl
    "step s": "time/step_s",
    "rollout s": "time/rollout_s",
    "teacher s": "time/teacher_s",
    "student s": "time/student_s",
    "optimizer s": "time/optimizer_s",
    "sync s": "time/sync_s",
    "GPU while training MB": "memory/gpu_training_mb",
    "trainer's GPU peak MB": "memory/gpu_peak_mb",
    "process peak MB": "memory/peak_mb",
    "probe gap": "sync/probe_gap",
    "unread share": "sync/unread_share",
}


def make_model(directory: Path, shape: dict[str, Any]) -> None:
    """Random weights of that shape with the embedded model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = Qwen3Config(**shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def run(name: str, overrides: list[str], *, cwd: Path, limit_s: float) -> dict[str, Any]:
    """One launch, as a user types it; medians over all steps but the first, or what went wrong."""
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "launch.py"), *overrides, f"name={name}", f"output_root={cwd / 'outputs'}"]
    with (cwd / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log)
        try:
            status = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            for part in [*psutil.Process(process.pid).children(recursive=True), process]:
                part.kill()  # or the job would go on, and hold the GPU
            process.wait()
            return {"failed": f"not done after {limit_s:.0f} s"}
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if status:
        said = [line for line in lines if line.startswith("error:")]
        return {"failed": (said or lines or ["no message"])[-1]}
    (run_dir,) = (cwd / "outputs").glob(f"*-{name}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    flat = [{**row, **row["timings"]} for row in rows if "train/objective" in row][1:]
    found = {
        column: statistics.median(row[key] for row in flat) for column, key in SHOWN.items() if all(key in row for row in flat)
    }
    found["rollout tokens/s"] = statistics.median(row["train/response_tokens"] / row["time/rollout_s"] for row in flat)
    return found | {"whole command s": time.perf_counter() - began}


def machine() -> str:
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, where sleep and CUDA graphs have no effect"
    return f"torch {torch.__version__} on {where}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"medians of the steps after the first, {machine()}", title_justify="left")
    table.add_column("")
    columns = list(dict.fromkeys(key for found in results.values() for key in found if key != "failed"))
    for name in results:
        table.add_column(name, justify="right")
    for column in columns:
        table.add_row(column, *(number(found[column]) if column in found else "" for found in results.values()))
    Console(width=200, highlight=False).print(table)
    for name, found in results.items():
        if "failed" in found:
            print(f"FAILED  {name}: {found['failed']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--small", action="store_true", help="the embedded model's shape: to try the command itself")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one case may take")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not arguments.small:
        print("no GPU here: only --small can run", file=sys.stderr)
        return 2
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: docs/gpu.md says how", file=sys.stderr)
        return 2
    sizes = ("train.batch=8", f"rollout.max_len={32 if arguments.small else 1024}", "train.micro_tokens=16384")
    cases = {name: own for name, own in CASES.items() if "engine=deepspeed" not in own or importlib.util.find_spec("deepspeed")}
    if torch.cuda.device_count() > 1:
        cases["two GPUs"] = ("rollout=vllm", "launcher.processes=2", "rollout.cuda_graphs=false")
    for name in CASES.keys() - cases.keys():
        print(f"left out, since DeepSpeed is not installed: {name}")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="opsd-smoke-") as place:
        cwd = Path(place)
        make_model(cwd / "model", SHAPES["small" if arguments.small else "full"])
        room = ("rollout.kv_cache_gb=1", "model.context=512") if arguments.small else ("model.context=4096",)
        for number, (name, own) in enumerate(cases.items()):
            print(f"{name} ...", flush=True)
            overrides = [*COMMON, f"model.path={cwd / 'model'}", *sizes, *room, *own]
            results[name] = run(f"case{number}", overrides, cwd=cwd, limit_s=arguments.limit)
            shutil.rmtree(cwd / "outputs", ignore_errors=True)
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any("failed" in found for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
