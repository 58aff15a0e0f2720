"""Which kind of token a vocabulary id is: digits and operators, style words, or other.

Where the divergence sits tells what is being learnt: on digits and operators the mathematics, on style words the voice of whoever
wrote the solution. A token is judged alone, by the text it decodes to, without the white space around it and the
punctuation behind it:

- `digits`: it holds a digit, or is operators, brackets and dollar signs only, or a TeX command that computes (`frac`, `boxed`).
- `style`: a word of STYLE, in any case.
- `other`: everything else, pieces of a longer word and chat markers included.

Shapes: V vocabulary entries, T tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

KINDS = ("digits", "style", "other")
OPERATORS = re.compile(r"[-+*/=<>^_%|(){}\[\]\\$×÷·±−≤≥≠≈√∞∑∏∫]+")
TEX = re.compile(r"\\?(?:[dt]?frac|sqrt|cdot|binom|[lg]eq|neq|pmod|boxed)|\\(?:times|div|pm|sum|prod|left|right|le|ge|ne|bmod)")
PUNCTUATION = ".,;:"
# Words that steer a text and say nothing about its subject: connectives, turns, hesitation, addressing the reader.
STYLE_WORDS = (
    "so then thus therefore hence since because but however although though instead also again now next first second finally "
    "lastly alternatively meanwhile moreover furthermore similarly conversely indeed otherwise "
    "wait hmm hm oh ah okay ok alright well yes actually maybe perhaps probably likely seems hopefully "
    "let let's lets we we'll i'll i'm please note notice remember recall consider suppose assume see think check verify "
    "here clearly obviously basically simply just really"
)
STYLE = frozenset(STYLE_WORDS.split())


def kind_of(text: str) -> str:
    """The kind of a token that decodes to `text`."""
    core = text.strip().rstrip(PUNCTUATION)
    if any(letter.isdigit() for letter in core) or OPERATORS.fullmatch(core) or TEX.fullmatch(core):
        return "digits"
    return "style" if core.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lower() in STYLE else "other"


class TokenKinds:
    """The kinds of a vocabulary's entries, each decoded once, when it first comes up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocabulary: int) -> None:
        import torch

        self.tokenizer = tokenizer
        self.markers = set(tokenizer.added_tokens_decoder)
        self.kinds_V = torch.full((vocabulary,), -1, dtype=torch.int8)

    def of(self, ids_T: Tensor) -> Tensor:
        """Indices into KINDS, `[T]`, on the CPU."""
        import torch

        ids_T = ids_T.cpu()
        new = torch.unique(ids_T[self.kinds_V[ids_T] < 0]).tolist()
        for token in new:
            text = "" if token in self.markers else str(self.tokenizer.decode([token]))
            self.kinds_V[token] = KINDS.index(kind_of(text))
        return self.kinds_V[ids_T]
