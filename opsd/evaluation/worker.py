"""The program of the grading worker: compares answers through math-verify, one JSON line in, one out, until its input ends.

Started by file path, so that it imports nothing of this project and no torch. It is the main thread of its own process, which
math-verify's timer (SIGALRM) needs, and the grader kills it when an answer takes too long.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY_BYTES = 2 << 30  # of address space: an expression that blows up fails here, not in the machine
SECONDS = 5  # math-verify's own limit of one parse or one comparison, as the released evaluator sets it


def compare(answer: str, gold: str) -> tuple[bool, bool]:
    """The released evaluator's comparison: (equal, whether anything could be read in `answer`).

    Both are strings, taken as LaTeX; math-verify turns most of its own failures into "nothing read".
    """
    from math_verify import parse, verify

    try:
        read = parse(as_latex(answer), fallback_mode="no_fallback", parsing_timeout=SECONDS)
        wanted = parse(as_latex(gold), fallback_mode="no_fallback", parsing_timeout=SECONDS)
        return verify(wanted, read, timeout_seconds=SECONDS), bool(read)
    except Exception:  # the rule itself: whatever math-verify raises, the two are compared as strings
        return bare(answer) == bare(gold), True


def as_latex(text: str) -> str:
    return text if "$" in text else f"${text}$"


def bare(text: str) -> str:
    return text.replace("$", "").replace(" ", "").lower().strip()


def main() -> None:
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a parser prints is no reply
    compare("1", "1")  # imports everything before the first clock starts
    print("ready", file=replies)
    for line in sys.stdin:
        print(json.dumps(compare(**json.loads(line))), file=replies)


if __name__ == "__main__":
    main()
