"""Response tokens a second of `rollout=transformers` against transformers' own `generate()`, same model, prompts and settings.

    python -m benchmarks.rollout [--vllm [SYNC]] [--json FILE] [--repeats 3] [--most ROWS] [OVERRIDE ...]

Overrides are launch.py's (`model=smollm2_135m rollout.max_len=64`); without any it is the embedded model on the embedded problems.
Both sides run in this process, in turns, and stop where the model does; the medians of the repeats are printed. A case is so many
prompts times so many samples of each: training's shapes, and an evaluation's. `generate()` gets the left-padded batch, the same
sampling values and key-value cache, in batches of `rollout.max_rows`; it gives no log-probs, which the engine does.

`--vllm` puts `rollout=vllm` beside both, with the overrides' settings, its weights brought by `rollout.sync=SYNC`, and times that.
On a GPU no sleeping is counted (`rollout.sleep=false` is set), since there is no trainer to make room for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

from opsd.config import to_run
from opsd.launch.compose import compose
from opsd.rollouts.base import Sampler
from opsd.seeding import derive
from opsd.types import LoadedModel, Request, Sampling

CASES = ((8, 1), (32, 1), (128, 1), (60, 12))  # prompts, samples of each


@torch.no_grad()
def baseline(loaded: LoadedModel, requests: list[Request], *, sampling: Sampling, max_rows: int) -> list[int]:
    """Response lengths in tokens from `generate()`."""
    lengths = []
    for start in range(0, len(requests), max_rows):
        rows = [request.prompt_ids for request in requests[start : start + max_rows]]
        width = max(map(len, rows))
        ids_BL = torch.tensor([[0] * (width - len(ids)) + ids for ids in rows], device=loaded.device)
        mask_BL = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=loaded.device)
        written_BL = loaded.model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids_BL,
            attention_mask=mask_BL,
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            max_new_tokens=sampling.max_len,
            eos_token_id=loaded.stop_ids,
            pad_token_id=loaded.stop_ids[0],
        )[:, width:]
        for row in written_BL.tolist():
            stops = [place for place, token in enumerate(row) if token in loaded.stop_ids]
            lengths.append(stops[0] + 1 if stops else len(row))
    return lengths


def engine(sampler: Sampler, requests: list[Request], *, sampling: Sampling) -> list[int]:
    return [len(response.token_ids) for response in sampler.generate(requests, sampling=sampling)]


def speed(generate: Callable[[], list[int]]) -> tuple[float, float]:
    """Response tokens a second, and seconds."""
    began = time.perf_counter()
    lengths = generate()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return sum(lengths) / seconds, seconds


def measure(
    loaded: LoadedModel,
    samplers: dict[str, Sampler],
    prompts: list[list[int]],
    *,
    sampling: Sampling,
    max_rows: int,
    repeats: int,
    most: int = 720,
) -> list[dict[str, float]]:
    """One row of figures a case."""
    table = []
    loaded.model.eval()
    for num_prompts, samples in CASES:
        if num_prompts * samples > most:
            continue
        requests = [
            Request(prompt_ids=prompts[place % len(prompts)], seed=derive(0, place, sample))
            for place in range(num_prompts)
            for sample in range(samples)
        ]
        sides: dict[str, Callable[[], list[int]]] = {
            side: lambda asked=requests, sampler=sampler: engine(sampler, asked, sampling=sampling)
            for side, sampler in samplers.items()
        }
        sides["generate"] = lambda asked=requests: baseline(loaded, asked, sampling=sampling, max_rows=max_rows)
        runs: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for repeat in range(repeats + 1):
            for side, generate in sides.items():
                run = speed(generate)
                if repeat > 0:  # the first is a warm-up
                    runs[side].append(run)
        row: dict[str, float] = {"prompts": num_prompts, "samples": samples}
        for side, figures in runs.items():
            row[f"{side}_tokens_per_s"] = round(statistics.median(rate for rate, _ in figures), 1)
            row[f"{side}_s"] = round(statistics.median(seconds for _, seconds in figures), 3)
        row["times"] = round(row["engine_tokens_per_s"] / row["generate_tokens_per_s"], 2)
        if "vllm" in samplers:
            row["vllm_times"] = round(row["vllm_tokens_per_s"] / row["engine_tokens_per_s"], 2)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        table.append(row)
    return table


def sync_seconds(sampler: Sampler, *, repeats: int) -> tuple[float, dict[str, float]]:
    """Seconds of a sync of weights, the median after a warm-up, and what the last one measured."""
    seconds, measured = [], {}
    for version in range(repeats + 1):
        began = time.perf_counter()
        measured = sampler.sync(weights_version=version)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]), measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--vllm", nargs="?", const="null", metavar="SYNC", help="rollout=vllm as well, and the time of its sync: adapter or merged"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=720, help="leave out cases of more responses than this")
    parser.add_argument("overrides", nargs="*", help="as for launch.py, e.g. model=smollm2_135m")
    arguments = parser.parse_args()
    run = to_run(compose(Path("conf"), "config", arguments.overrides)[0].cfg)
    torch.set_num_threads(run.threads)
    loaded = run.model.load(seed=run.seed, device=run.engine.device)
    sampling = run.rollout.sampling
    assert sampling is not None
    problems = islice(run.data.load(seed=run.seed).problems, max(prompts for prompts, _ in CASES))
    rendered = [
        run.prompt.render(problem, tokenizer=loaded.tokenizer, max_prompt_tokens=loaded.context - sampling.max_len, teacher=False)
        for problem in problems
    ]
    prompts = [prompt.student_ids for prompt in rendered if prompt is not None]
    max_rows = getattr(run.rollout, "max_rows", len(prompts))
    print(f"model={run.model.name} {loaded.device} threads={run.threads} torch={torch.__version__} {sampling}")
    samplers = {"engine": run.rollout.build(loaded, processed=False)}
    about: dict[str, object] = {"model": run.model.name, "device": str(loaded.device)}
    about |= {"threads": run.threads, "torch": torch.__version__}
    if arguments.vllm:
        overrides = ["rollout=vllm", f"rollout.sync={arguments.vllm}", *arguments.overrides, "rollout.sleep=false"]
        option = to_run(compose(Path("conf"), "config", overrides)[0].cfg).rollout
        option.check()
        began = time.perf_counter()
        samplers["vllm"] = option.build(loaded, processed=False)
        about["vllm_start_s"] = round(time.perf_counter() - began, 1)
        seconds, measured = sync_seconds(samplers["vllm"], repeats=arguments.repeats)
        about |= {"sync_s": round(seconds, 3), **measured}
        print("  ".join(f"{key}={about[key]}" for key in ("vllm_start_s", "sync_s", *measured)), flush=True)
    table = measure(
        loaded,
        samplers,
        prompts,
        sampling=sampling,
        max_rows=max_rows,
        repeats=arguments.repeats,
        most=arguments.most,
    )
    for sampler in samplers.values():
        sampler.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "cases": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
