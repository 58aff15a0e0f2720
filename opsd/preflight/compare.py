"""Two prompts of one problem held against each other: which token ids differ, and what the differences are called.

A prompt is taken apart at what the chat template writes around the user's text and at the problem's own text: `head` (system turn,
header), `front` (the user's words before the problem), the problem, `back` (those after it), `tail` (end of the turn, the
assistant's header, a think block). Difference by difference the token ids themselves decide, through difflib.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from opsd import chat
from opsd.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NARROW = 4  # equal tokens between two differences that are too few to be shown as agreement
OPEN, CLOSE = "<think>", "</think>"
TAIL_TOKENS = 8  # before the response


@dataclass(kw_only=True, slots=True)
class Pieces:
    """A prompt's text, piece by piece. Where the problem's own text is not found, all of the user's is `front`."""

    head: str
    front: str
    back: str
    tail: str


@dataclass(kw_only=True, slots=True)
class Hunk:
    """A stretch of two prompts: equal tokens, or what each has in place of the other's."""

    equal: bool
    left_ids: list[int]
    right_ids: list[int]


class Comparer:
    """Compares prompts under one tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        frames = [self.text(chat.render(tokenizer, chat.PLACEHOLDER, thinking=on)).split(chat.PLACEHOLDER) for on in (False, True)]
        self.heads = sorted({head for head, _ in frames}, key=len, reverse=True)
        self.tails = sorted({tail for _, tail in frames}, key=len, reverse=True)

    def text(self, ids: list[int]) -> str:
        """The ids as text, special tokens and all."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> str:
        """One token with its white space made visible."""
        text = self.text([token_id])
        if "\N{REPLACEMENT CHARACTER}" in text:  # half of a character: the tokenizer's own spelling tells more
            text = str(self.tokenizer.convert_ids_to_tokens(token_id))
        return visible(text)

    def pieces(self, ids: list[int], problem: Problem) -> Pieces:
        whole = self.text(ids)
        head = next((head for head in self.heads if whole.startswith(head)), "")
        tail = next((tail for tail in self.tails if whole.endswith(tail)), "")
        user = whole[len(head) : len(whole) - len(tail)]
        front, found, back = user.partition(problem.text.strip())
        return Pieces(head=head, front=front, back=back if found else "", tail=tail)

    def differences(self, left_ids: list[int], right_ids: list[int], problem: Problem, *, end: str = "instruction") -> list[str]:
        """In words, what the left prompt has otherwise than the right one. Empty where their ids are equal.

        Args:
            end: what the words after the problem are called.
        """
        if left_ids == right_ids:
            return []
        left, right = self.pieces(left_ids, problem), self.pieces(right_ids, problem)
        told = []
        if left.head != right.head:
            told.append(spaced("system turn", left.head, right.head) or f"system turn ({brief(left.head)} / {brief(right.head)})")
        if left.front != right.front:
            told.append(
                spaced("in front", left.front, right.front) or f"words in front ({brief(left.front)} / {brief(right.front)})"
            )
        if left.back != right.back:
            told.append(spaced("at the end", left.back, right.back) or f"{end} ({brief(left.back)} / {brief(right.back)})")
        if left.tail != right.tail:
            told.append(
                spaced("before the response", left.tail, right.tail)
                or f"think block ({thought(left.tail)} / {thought(right.tail)})"
            )
        return told or ["the same text in other tokens"]


def hunks(left_ids: list[int], right_ids: list[int]) -> list[Hunk]:
    """Both prompts cut into stretches that are equal and stretches that differ, in order."""
    found: list[Hunk] = []
    for operation, left, left_end, right, right_end in SequenceMatcher(None, left_ids, right_ids, autojunk=False).get_opcodes():
        inside = left > 0 and left_end < len(left_ids)
        equal = operation == "equal" and not (inside and left_end - left < NARROW)
        if found and not found[-1].equal and not equal:
            found[-1].left_ids += left_ids[left:left_end]
            found[-1].right_ids += right_ids[right:right_end]
        else:
            found.append(Hunk(equal=equal, left_ids=left_ids[left:left_end], right_ids=right_ids[right:right_end]))
    return found


def thought(tail: str) -> str:
    """The state of the think block at the end of a prompt."""
    if OPEN not in tail and CLOSE not in tail:
        return "none"
    if tail.rfind(OPEN) > tail.rfind(CLOSE):
        return "open"
    return "closed, empty" if not tail[tail.rfind(OPEN) + len(OPEN) : tail.rfind(CLOSE)].strip() else "closed"


def spaced(where: str, left: str, right: str) -> str | None:
    """Set apart, since white space alone is easily overseen."""
    return (
        f"only white space {where} ({visible(left)[-12:]!r} / {visible(right)[-12:]!r})" if left.split() == right.split() else None
    )


def visible(text: str) -> str:
    """White space as signs."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def brief(text: str, chars: int = 28) -> str:
    """A text's first words, quoted; `nothing` where there is none."""
    words = " ".join(text.split())
    return f'"{words if len(words) <= chars else words[: chars - 3].rstrip() + "..."}"' if words else "nothing"
