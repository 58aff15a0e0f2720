"""Two graders of one response against a known answer.

`frozen`, the headline, is the rule of the evaluator released with arXiv 2601.18734: what stands in the last `\\boxed{...}` of the
whole response, compared with the gold answer by math-verify. It is kept as it is, faults included, so that scores compare with
published ones.

`strict` reads the last box after the last `</think>` and is an integer rule: equal if both are the same integer, whatever the
typography (see `opsd.evaluation.answers.integer`). Where the gold is no integer it is equality of the two LaTeX strings without
layout: it misses equal values in another form (`0.5` for `\\frac{1}{2}`), so that beside such a benchmark it is a lower bound.

Deviations of `frozen`, none of which can make a wrong answer right: a box of more than `MAX_CHARS` characters, or one that takes
more than `LIMIT_S`, is wrong and marked unread. The released evaluator gives math-verify 5 s a call, and hangs where its timer does
not fire.

`python -m opsd.evaluation.grading FILE.jsonl` grades rows of `id`, `gold`, `response` and prints one JSON object a row.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from opsd.evaluation.answers import MAX_CHARS, final_box, is_right, released_box, vote

LIMIT_S = 2.0  # wall time of one comparison
START_S = 120.0  # wall time a worker may need to import its parts on a busy machine
WHOLE = re.compile(r"(-?)0*(\d{1,18})", re.ASCII)


@dataclass(kw_only=True, slots=True)
class Grade:
    frozen: bool  # right under the released evaluator's rule
    strict: bool  # right under the integer rule
    boxed: bool  # the released rule found a box
    unread: bool  # it found one and could read nothing in it
    extracted: str | None  # what the strict rule found in its box
    canonical: str | None  # the same as votes are counted; None: no vote


@dataclass(kw_only=True, slots=True)
class Grader:
    """Grades responses. Answers that need math-verify go to one worker process, started when the first of them comes.

    The standard library's pools import the parent's main module, and with it torch, into their workers; this one starts a bare
    program.
    """

    known: dict[tuple[str, str], tuple[bool, bool]] = field(default_factory=dict)  # (answer, gold) -> (equal, read)
    worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def grade(self, text: str, gold: str) -> Grade:
        """Grades one response."""
        answer = released_box(text)
        equal, read = (False, False) if answer is None else self.compare(answer, gold)
        final = final_box(text)
        return Grade(
            frozen=equal,
            strict=is_right(final, gold),
            boxed=answer is not None,
            unread=answer is not None and not read,
            extracted=final,
            canonical=None if final is None else vote(final, gold),
        )

    def compare(self, answer: str, gold: str) -> tuple[bool, bool]:
        """Whether math-verify finds the two equal, and whether it could read the answer; whole numbers are decided here."""
        left, right = WHOLE.fullmatch(answer), WHOLE.fullmatch(gold)
        if left and right:
            return int(left[1] + left[2]) == int(right[1] + right[2]), True
        if not answer or len(answer) > MAX_CHARS:
            return False, False
        if (answer, gold) not in self.known:
            self.known[answer, gold] = self.ask(answer, gold)
        return self.known[answer, gold]

    def ask(self, answer: str, gold: str) -> tuple[bool, bool]:
        """The worker's verdict; (False, False) where it takes too long or dies over it."""
        if self.worker is not None and self.worker.poll() is not None:
            self.stop()
        worker = self.worker = self.worker or start_worker()
        assert worker.stdin is not None
        worker.stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
        worker.stdin.flush()
        reply = read_line(worker, LIMIT_S)
        if reply is None:
            self.stop()
            return False, False
        equal, read = json.loads(reply)
        return equal, read

    def stop(self) -> None:
        """Ends the worker, whatever it is busy with; the next answer that needs one starts another."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.communicate()
            self.worker = None


def start_worker() -> subprocess.Popen[bytes]:
    """A worker that has imported what it needs. `-P` keeps this folder, with its math.py, off its import path."""
    command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("worker.py"))]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if read_line(worker, START_S) != b"ready\n":
        worker.kill()
        worker.communicate()
        raise RuntimeError(f"the grading worker did not start within {START_S:.0f} s: {' '.join(command)}")
    return worker


def read_line(worker: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
    """The worker's next line, or None where it does not come within the limit or the worker ends. Replies are one short write."""
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], limit_s)
    return (worker.stdout.readline() or None) if ready else None


def main(path: str) -> None:
    with Grader() as grader, Path(path).open(encoding="utf-8") as rows:
        for line in rows:
            row = json.loads(line)
            began = time.perf_counter()
            grade = grader.grade(row["response"], row["gold"])
            shown = {key: getattr(grade, key) for key in ("strict", "frozen", "extracted", "canonical")}
            print(json.dumps({"id": row["id"], **shown, "seconds": round(time.perf_counter() - began, 4)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
