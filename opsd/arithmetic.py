"""The embedded problem source: small stories about one digit, solved a step at a time.

Two kinds. `dial`: a ten-digit dial is turned up and down (addition and subtraction modulo 10). `cards`: the larger or the
smaller of two digits is kept. Every problem is a pure function of (seed, split, index); a problem's own text decides to which split
it belongs, so that no evaluation problem can ever be a training problem, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("dial", "cards")
NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fay")
STORIES = {
    "dial": (
        "A dial with the digits 0 to 9 shows {start}. It is turned {moves}. Which digit does it show now?",
        "{name} sets a ten-digit dial to {start} and turns it {moves}. Which digit does it show now?",
        "A counter that only shows its last digit stands at {start}. It goes {moves}. What does it show now?",
    ),
    "cards": (
        "A card shows {start}. It is replaced by the {moves}. Which digit is on it now?",
        "{name} holds a card with {start} and swaps it for the {moves}. Which digit is on it now?",
    ),
}
MOVES = {"+": "up {digit}", "-": "down {digit}", ">": "larger of it and {digit}", "<": "smaller of it and {digit}"}
ENDS = {"dial": "It shows \\boxed{{{answer}}}.", "cards": "It is \\boxed{{{answer}}}."}
OPERATIONS = {
    "+": lambda a, b: (a + b) % 10,
    "-": lambda a, b: (a - b) % 10,
    ">": max,
    "<": min,
}
SYMBOLS = {"dial": "+-", "cards": "><"}
EVAL_SHARE = 10  # one text in ten belongs to the evaluation split


@dataclass(kw_only=True, slots=True)
class Chain:
    """One problem before it is told as a story: a first digit and the operations applied to it in turn."""

    kind: str
    text: str
    start: int
    steps: list[tuple[str, int]]  # (operation, digit)

    def solve(self, rng: random.Random | None = None, error_rate: float = 0.0) -> tuple[list[str], int]:
        """The worked steps and the last digit. With `error_rate`, each step's result is replaced by a random digit that often."""
        value, written = self.start, []
        for symbol, digit in self.steps:
            result = OPERATIONS[symbol](value, digit)
            if rng is not None and rng.random() < error_rate:
                result = rng.randrange(10)
            written.append(f"{value}{symbol}{digit}={result}.")
            value = result
        return written, value

    def conclude(self, answer: int) -> str:
        return ENDS[self.kind].format(answer=answer)

    @property
    def answer(self) -> str:
        return str(self.solve()[1])

    @property
    def solution(self) -> str:
        written, answer = self.solve()
        return " ".join([*written, self.conclude(answer)])


def is_eval(text: str) -> bool:
    """Whether a problem text belongs to the evaluation split."""
    return hashlib.sha256(text.encode()).digest()[0] % EVAL_SHARE == 0


def num_texts(kind: str, *, min_steps: int, max_steps: int) -> int:
    """How many different texts a kind can have, both splits together."""
    stories = sum(len(NAMES) if "{name}" in story else 1 for story in STORIES[kind])
    moves = 10 * len(SYMBOLS[kind])
    return 10 * stories * sum(moves**count for count in range(min_steps, max_steps + 1))


def draw(rng: random.Random, *, kind: str, min_steps: int, max_steps: int) -> Chain:
    """One random problem of either split."""
    start = rng.randrange(10)
    count = rng.randint(min_steps, max_steps)
    steps = [(rng.choice(SYMBOLS[kind]), rng.randrange(10)) for _ in range(count)]
    moves = ", then the ".join if kind == "cards" else ", ".join
    told = moves(MOVES[symbol].format(digit=digit) for symbol, digit in steps)
    text = rng.choice(STORIES[kind]).format(start=start, moves=told, name=rng.choice(NAMES))
    return Chain(kind=kind, text=text, start=start, steps=steps)


def chains(seed: int, *, kinds: tuple[str, ...], split: str, min_steps: int, max_steps: int) -> Iterator[Chain]:
    """An endless stream of distinct problems of one split (`train` or `eval`), kinds in equal shares."""
    rng = random.Random(f"opsd/arithmetic/{split}/{seed}")
    seen: set[str] = set()
    while True:
        chain = draw(rng, kind=rng.choice(kinds), min_steps=min_steps, max_steps=max_steps)
        if is_eval(chain.text) == (split == "eval") and chain.text not in seen:
            seen.add(chain.text)
            yield chain
