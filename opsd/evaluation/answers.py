"""Reading answers out of responses: which box counts, and which answer stands in it.

Two ways of finding the box, one a grader (see `opsd.evaluation.grading`), and one canonical form of what a box holds, in which
votes are counted and which the strict grader compares.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 2000  # of a box; more is no answer that anyone would write, and some parsers take minutes over it
THINK, THOUGHT = "<think>", "</think>"

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
OPENING = re.compile(r"\s*\{")
ANY_BRACE = re.compile(r"[{}]")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)

LOOKALIKES = str.maketrans("０１２３４５６７８９\N{MINUS SIGN}", "0123456789-", "\u200b\u200c\u200d\u2060\ufeff")
SEPARATOR = r"(?:,|\{,\}|\\,)"
THOUSANDS = re.compile(rf"(?<![\d.,}}])\d{{1,3}}(?:{SEPARATOR}\d{{3}})+(?!\d|{SEPARATOR}\d)")
LAYOUT = re.compile(r"\\(?:displaystyle|textstyle|left|right|quad|qquad)(?![A-Za-z])|\\[,;:!> \\]|[~$\s]")
DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°")
MODULUS = re.compile(r"\\pmod\s*(?:\{[^{}]*\}|\d)")
WORDS = re.compile(r"\\(?:text|textrm|textnormal|textit|textbf|mbox)\s*\{([^{}]*)\}((?:\^\{?[23]\}?)?)")
FONTS = re.compile(r"\\(?:math(?:bf|rm|it|sf|tt|normal)|boldsymbol|bm|bold|underline)\s*\{([^{}]*)\}")
GROUP = re.compile(r"(?<![\^_A-Za-z}])\{([^{}]*)\}")
SHORT = re.compile(r"(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])")
SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?) *(?:\\times|\\cdot) *10 *\^ *(?:\{ *(\d{1,2}) *\}|(\d))\.?", re.ASCII)
EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
TWO_VALUES = re.compile(r"[,;]|\b(?:or|and)\b")
ENCLOSED = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]")
INTEGER = re.compile(
    r"(?P<label>(?:[A-Za-z]{2,}[ :]+)*)(?P<sign>[+-]?) *(?P<digits>\d+)(?:\.0*)?(?P<unit>(?: +[A-Za-z]{3,})*)\.?", re.ASCII
)
# Words beside a number that make it another number, or more than one.
NOT_UNITS = frozenset(
    ("or", "and", "not", "minus", "negative", "plus", "times", "mod", "over", "half", "thirds", "dozen", "hundred", "thousand")
    + ("million", "billion", "trillion", "percent", "per", "squared", "cubed", "factorial", "least", "most", "than", "less", "more")
)


def released_box(text: str) -> str | None:
    """The released evaluator's reading: what stands in the last `\\boxed`, if that one is written `\\boxed{...}` and closed.

    Braces are counted as characters, escaped or not. There is no return to an earlier box.
    """
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    first = start + len("\\boxed{")
    depth = 1
    for brace in ANY_BRACE.finditer(text, first):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[first : brace.start()].strip()
    return None


def final_box(text: str) -> str | None:
    """The strict reading: what stands in the last box after the last `</think>`; None where that box is empty, unclosed or too
    long.

    A response that starts to think and never stops has no final part. `\\fbox` and `\\framebox` are boxes too, white space may
    stand before the brace, and escaped braces are not counted. There is no return to an earlier box.
    """
    thought = text.rfind(THOUGHT)
    if thought < 0 and THINK in text:
        return None
    ends = [box.end() for box in BOX.finditer(text, max(thought, 0))]
    opening = OPENING.match(text, ends[-1]) if ends else None
    if opening is None:
        return None
    depth = 1
    for brace in BRACES.finditer(text, opening.end()):
        if brace.group() in "{}":
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                content = text[opening.end() : brace.start()].strip()
                return content if 0 < len(content) <= MAX_CHARS else None
    return None


def canonical(answer: str) -> str:
    """The form in which two answers are one vote: the digits of an integer (`073`, `73.0`, `m+n=73`, `\\text{73 minutes}` are 73);
    of anything else its LaTeX without layout, fonts and spaces. Nothing is calculated: `70+3` stays `70+3`."""
    number = integer(answer)
    return plain(answer) if number is None else str(number)


def vote(answer: str, gold: str) -> str:
    """The form in which an answer is compared with this gold: canonical, unless the gold is an equation, which no integer is."""
    return plain(answer) if "=" in gold else canonical(answer)


def is_right(answer: str | None, gold: str) -> bool:
    """The strict rule: the box states what the gold states."""
    return answer is not None and vote(answer, gold) == vote(gold, gold)


def integer(answer: str) -> int | None:
    """The integer that a box states, or None where it states something else, two values, or none.

    Allowed around the one number: fonts, layout, enclosing parentheses, a sign, thousands separators, `.000`, scientific notation,
    a left-hand side, degrees, a residue's modulus, a label in words, a unit in words. Not allowed: other arithmetic, percent,
    relations.
    """
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), answer.translate(LOOKALIKES))
    text = DEGREES.sub(" ", MODULUS.sub(" ", text))
    text = unwrapped(LAYOUT.sub(" ", text))
    *left, text = EQUALS.split(text)
    if any(TWO_VALUES.search(part) for part in left):
        return None
    scientific = SCIENTIFIC.fullmatch(text.strip())
    if scientific:
        value = Fraction(scientific[1]) * 10 ** int(scientific[2] or scientific[3])
        return value.numerator if value.denominator == 1 else None
    text = text.strip()
    while (enclosed := ENCLOSED.fullmatch(text)) is not None:
        text = (enclosed[1] or enclosed[2] or "").strip()
    found = INTEGER.fullmatch(text)
    if found is None or NOT_UNITS.intersection(f"{found['label']} {found['unit']}".lower().replace(":", " ").split()):
        return None
    return int(found["sign"] + found["digits"])


def unwrapped(text: str) -> str:
    """LaTeX without font commands and without braces that only group. A unit's power (`\\text{ cm}^2`) goes with it."""
    before = None
    while text != before:
        before = text
        text = WORDS.sub(lambda match: f" {words(match[1])} " + (match[2] if re.search(r"\d", match[1]) else ""), text)
        text = GROUP.sub(r" \1 ", FONTS.sub(r" \1 ", text))
    return text


def words(text: str) -> str:
    """What stands in `\\text`, its shortest words replaced, so that a unit (`m`) is not taken for a variable."""
    return SHORT.sub(lambda match: match[0] if match[0].lower() in NOT_UNITS else "unit", text)


def plain(answer: str) -> str:
    """LaTeX without what does not change its meaning."""
    text = LAYOUT.sub("", WORDS.sub(r"\1\2", answer.translate(LOOKALIKES)))
    return re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text).rstrip(".")
