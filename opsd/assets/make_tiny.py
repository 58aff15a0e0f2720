"""Makes the embedded model: `python -m opsd.assets.make_tiny OUT_DIR` (about 40 minutes on one core; seeded).

A four-layer Qwen3 of 0.85 M parameters and a byte-level BPE tokenizer with Qwen-like chat markers and a thinking switch. It is
pretrained on the problems of `opsd.arithmetic`, evaluation texts excluded, so that it is an honest miniature of on-policy
self-distillation: the solutions it learned from were full of slips (each step's result is random 30% of the time, 12% with
thinking on), while with a worked solution in the context they were clean. The arithmetic is latent in the student; reading is what
the teacher adds.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from opsd.arithmetic import Chain, draw, is_eval

END, START, STOP, THINK, THOUGHT = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"
ERROR_RATE, THINKING_ERROR_RATE = 0.30, 0.12
STEPS, BATCH, LEARNING_RATE, SEED = 6000, 32, 2e-3, 20260101
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{%- endif -%}"
)


def templates() -> dict[str, dict[str, str]]:
    folder = Path(__file__).parents[2] / "conf" / "prompt"
    return {name: yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("plain", "paper")}


def fill(template: str, chain: Chain, privileged: str = "") -> str:
    return template.replace("{problem}", chain.text).replace("{privileged}", privileged)


def response(chain: Chain, steps: list[str], answer: int, *, thinking: bool, rng: random.Random) -> str:
    end = chain.conclude(answer)
    if thinking and rng.random() < 0.85:  # now and then a thinking turn is answered at once, as real models do
        return f"{THINK}\n{' '.join(steps)}\n{THOUGHT}\n\n{end}"
    return " ".join([*steps, end])


def example(rng: random.Random, texts: dict[str, dict[str, str]]) -> tuple[str, str, bool]:
    """One pretraining example: user turn, assistant turn, thinking."""
    while True:
        chain = draw(rng, kind="dial" if rng.random() < 0.7 else "cards", min_steps=2, max_steps=5)
        if not is_eval(chain.text):
            break
    thinking = rng.random() < 0.3
    error_rate = THINKING_ERROR_RATE if thinking else ERROR_RATE
    if rng.random() < 0.65:
        form = rng.choices(["plain", "paper", "evaluation"], [0.6, 0.15, 0.25])[0]
        user = f"{chain.text}\n\n{INSTRUCTION}" if form == "evaluation" else fill(texts[form]["student"], chain)
        steps, answer = chain.solve(rng, error_rate)
        return user, response(chain, steps, answer, thinking=thinking, rng=rng), thinking
    clean, answer = chain.solve()
    privileged = rng.choices(["solution", "hint", "answer"], [0.8, 0.1, 0.1])[0]
    if privileged == "solution":
        shown, steps = chain.solution, clean
    elif privileged == "hint":  # the shown steps are right, what follows them is as careless as ever
        known = rng.randrange(1, len(clean))
        shown = " ".join(clean[:known])
        rest = Chain(kind=chain.kind, text="", start=int(clean[known - 1][-2]), steps=chain.steps[known:])
        written, answer = rest.solve(rng, error_rate)
        steps = clean[:known] + written
    else:  # the answer alone: the last line is right, the way there is not
        shown = chain.answer
        steps, _ = chain.solve(rng, error_rate / 2)
    user = fill(texts["plain" if rng.random() < 0.7 else "paper"]["teacher"], chain, shown)
    return user, response(chain, steps, answer, thinking=thinking, rng=rng), thinking


def make_tokenizer(texts: dict[str, dict[str, str]]) -> PreTrainedTokenizerFast:
    rng = random.Random(SEED)
    corpus = ["user\n{}\nassistant\n{}".format(*example(rng, texts)[:2]) for _ in range(4000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=20,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END, START, STOP],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=END, clean_up_tokenization_spaces=False)
    wrapped.add_special_tokens({"additional_special_tokens": [START, STOP]})
    wrapped.add_tokens([THINK, THOUGHT])
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode(tokenizer: PreTrainedTokenizerFast, user: str, assistant: str, thinking: bool) -> tuple[list[int], int]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": user}], add_generation_prompt=True, enable_thinking=thinking, tokenize=False
    )
    prompt_ids = tokenizer.encode(str(prompt), add_special_tokens=False)
    return prompt_ids + tokenizer.encode(assistant + STOP, add_special_tokens=False), len(prompt_ids)


def main(out: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    texts = templates()
    tokenizer = make_tokenizer(texts)
    pad_id = tokenizer.get_vocab()[END]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        eos_token_id=tokenizer.get_vocab()[STOP],
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    rng, began = random.Random(SEED + 1), time.time()
    for step in range(STEPS):
        rows = sorted((encode(tokenizer, *example(rng, texts)) for _ in range(BATCH)), key=lambda row: len(row[0]))
        total = sum(len(ids) - start for ids, start in rows)
        optimizer.zero_grad()
        value = 0.0
        for part in (rows[: BATCH // 2], rows[BATCH // 2 :]):
            ids = torch.full((len(part), max(len(row) for row, _ in part)), pad_id)
            mask = torch.zeros_like(ids, dtype=torch.bool)
            for i, (row, start) in enumerate(part):
                ids[i, : len(row)] = torch.tensor(row)
                mask[i, start : len(row)] = True
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[mask[:, 1:]])
            loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]], reduction="sum") / total
            loss.backward()
            value += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == STEPS - 1:
            print(json.dumps({"step": step, "loss": round(value, 4), "seconds": round(time.time() - began)}), flush=True)
        if step % 1000 == 999:
            model.save_pretrained(out)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
