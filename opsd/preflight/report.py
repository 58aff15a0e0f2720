"""What `do=check` prints of a run: its prompts side by side, where responses start, what is cut, and about what it will take."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opsd import chat
from opsd.config import Run
from opsd.inputs import problem_stream, told, training_problems
from opsd.preflight.baseline import Measured, measured
from opsd.preflight.compare import TAIL_TOKENS, Comparer, hunks, thought
from opsd.preflight.memory import LIBRARIES_MB, Memory, estimate
from opsd.preflight.pace import lengths, pace
from opsd.preflight.start import (
    about,
    asked_like,
    boundary_line,
    evaluation_differences,
    evaluation_line,
    lengths_line,
    switch_line,
)
from opsd.preflight.survey import Survey, Tokens, evaluation_prompts, num_evaluations, response_len, survey, tokens

if TYPE_CHECKING:
    from opsd.types import Problem, ProblemSet, Prompt

PIPED_COLUMNS = 130  # characters, where the output is no terminal
PROBLEMS = 512  # looked at
SHOWN = 3  # problems whose prompts are printed, and ids of those that are cut
HEAD, TAIL = 10, 8  # tokens of a long stretch that are printed


def report(run: Run) -> None:
    """Prints all of it.

    Raises:
        ValueError: the chat template breaks the boundary between prompt and response, no problem fits the context, a prompt of the
            evaluation does not, or the baseline cannot be read.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS, highlight=False, markup=False)
    tokenizer, context = run.model.tokenizer(), run.model.check()
    chat.check_boundary(tokenizer)
    data = training_problems(run)
    found = survey(problem_stream(run, data, tokenizer=tokenizer, context=context), most=PROBLEMS)
    asked = evaluation_prompts(run, tokenizer, context=context)
    base = None if run.baseline is None else measured(run.baseline)
    comparer = Comparer(tokenizer)
    heading(console, "prompts")
    for number, prompt in enumerate(found.prompts[:SHOWN], start=1):
        show_prompt(console, run, comparer, prompt, place=f"{number} of {min(SHOWN, len(found.prompts))}")
    heading(console, "where the response starts")
    show_boundary(console, run, comparer, found.prompts[0])
    heading(console, "lengths")
    show_lengths(console, run, comparer, data, found, base)
    heading(console, "tokens")
    longest = tokens(run, found, response=run.rollout.max_len, evaluation=run.eval.max_len, num_evaluated=len(asked))
    likely, source = lengths(run, base, response_len(run, tokenizer, found))
    expected = None if likely is None else tokens(run, found, response=likely[0], evaluation=likely[1], num_evaluated=len(asked))
    show_tokens(console, run, longest, expected, source)
    heading(console, "memory")
    longest_asked = max(map(len, asked), default=0)
    memory = estimate(
        run,
        run.model.skeleton(),
        longest_student=max(found.student_lens),
        longest_teacher=max(found.teacher_lens, default=0) + (run.prompt.analysis_len or 0),
        longest_asked=longest_asked,
    )
    show_memory(console, run, memory)
    heading(console, "time")
    show_time(console, run, base, expected or longest)


def refuse(run: Run) -> None:
    """Raises ValueError where `report` would, and prints nothing: for the other points of a sweep."""
    tokenizer, context = run.model.tokenizer(), run.model.check()
    chat.check_boundary(tokenizer)
    problem_stream(run, training_problems(run), tokenizer=tokenizer, context=context).first()
    evaluation_prompts(run, tokenizer, context=context)


def heading(console: Console, title: str) -> None:
    console.print()
    console.rule(title, align="left", characters="-")


def table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def show_prompt(console: Console, run: Run, comparer: Comparer, prompt: Prompt, *, place: str) -> None:
    """One problem as each side reads it, then token by token where they differ."""
    sides = {"student": prompt.student_ids}
    if prompt.teacher_ids is not None:
        sides["teacher"] = prompt.teacher_ids
    if run.eval.enabled:
        sides["evaluation"] = asked_like(run, comparer.tokenizer, prompt)
    texts = table("", "tokens", "text")
    for side, ids in sides.items():
        texts.add_row(side, str(len(ids)), Text(ends(comparer, ids).replace("\n", "⏎")))
    console.print(Text(f"problem {prompt.problem.id} ({place})"))
    console.print(texts)
    for side in ("evaluation", "teacher"):
        if side not in sides:
            continue
        end = "instruction" if side == "evaluation" else "words after the problem"
        differences = comparer.differences(prompt.student_ids, sides[side], prompt.problem, end=end)
        if not differences:
            console.print(Text(f"student and {side}: equal, token for token\n"))
            continue
        console.print(Text(f"student and {side} differ: {'; '.join(differences)}"))
        aligned = table("student", side, "")
        for hunk in hunks(prompt.student_ids, sides[side]):
            left, right = (spelled(comparer, ids) for ids in (hunk.left_ids, hunk.right_ids))
            if hunk.equal:
                aligned.add_row(Text(left), Text("="), f"{len(hunk.left_ids)} equal")
            else:
                aligned.add_row(Text(left), Text(right), f"{len(hunk.left_ids)} / {len(hunk.right_ids)}")
        console.print(aligned)
    console.print()


def ends(comparer: Comparer, ids: list[int]) -> str:
    """A prompt's text, the middle of a long one left out."""
    if len(ids) <= 8 * HEAD:
        return comparer.text(ids)
    head, tail = ids[: 4 * HEAD], ids[-3 * HEAD :]
    return f"{comparer.text(head)} [... {len(ids) - len(head) - len(tail)} tokens ...] {comparer.text(tail)}"


def spelled(comparer: Comparer, ids: list[int]) -> str:
    """Tokens one by one, the middle of a long stretch left out."""
    if len(ids) <= HEAD + TAIL + 2:
        return " ".join(map(comparer.token, ids))
    head, tail = (" ".join(map(comparer.token, part)) for part in (ids[:HEAD], ids[-TAIL:]))
    return f"{head} [... {len(ids) - HEAD - TAIL} ...] {tail}"


def show_boundary(console: Console, run: Run, comparer: Comparer, prompt: Prompt) -> None:
    sides = {"student": prompt.student_ids, "teacher": prompt.teacher_ids}
    last = table("", f"last {TAIL_TOKENS} tokens before the response, with ids", "think block")
    for side, ids in sides.items():
        if ids is not None:
            tail = " ".join(f"{comparer.token(token)}({token})" for token in ids[-TAIL_TOKENS:])
            last.add_row(side, Text(tail), thought(comparer.pieces(ids, prompt.problem).tail))
    console.print(last)
    if prompt.teacher_ids is not None:
        console.print(Text(boundary_line(run, comparer, prompt)))
    switch = chat.has_thinking_switch(comparer.tokenizer)
    console.print(Text(f"model={run.model.name}: its chat template has a thinking switch" if switch else switch_line(run)))
    if run.eval.enabled:
        console.print(Text(evaluation_line(run, evaluation_differences(run, comparer, prompt))))


def show_lengths(console: Console, run: Run, comparer: Comparer, data: ProblemSet, found: Survey, base: Measured | None) -> None:
    console.print(Text(told(run.data.name, data)))
    console.print(Text(lengths_line(found)))
    for what, problems in (("shortened", [prompt.problem for prompt in found.shortened]), ("dropped", found.dropped)):
        if problems:
            console.print(Text(f"{what}: {', '.join(size(comparer, problem) for problem in problems[:SHOWN])}, ..."))
    if base is not None:
        cut, boxed, length = (base.mean(f"rollout/{name}") for name in ("truncated", "boxed", "mean_len"))
        of_all = f"{cut:.0%} were cut at the limit, {boxed:.0%} reached a box; mean length {length:.0f}"
        console.print(Text(f"baseline {base.run_dir.name}: of its rollouts (max_len {base.run.rollout.max_len}) {of_all}"))


def size(comparer: Comparer, problem: Problem) -> str:
    """A problem's id and the tokens of its fields."""
    fields = {"problem": problem.text, "solution": problem.solution}
    lens = {name: len(chat.encode_text(comparer.tokenizer, text)) for name, text in fields.items() if text is not None}
    return f"{problem.id} ({', '.join(f'{name} {length}' for name, length in lens.items())})"


def show_tokens(console: Console, run: Run, longest: Tokens, expected: Tokens | None, source: str) -> None:
    steps, count = run.train.steps, num_evaluations(run)
    rows = (
        ("sampled for training", "sampled", steps),
        ("scored by the student", "student", steps),
        ("scored by the teacher", "teacher", steps),
        (f"sampled in each of {count} evaluations" if count else "sampled in an evaluation", "evaluation", count),
    )
    shown = table("", "a step, at most", "expected", "the run, at most", "expected")
    for label, name, times in rows:
        most, likely = getattr(longest, name), None if expected is None else getattr(expected, name)
        cells = [about(most), "-" if likely is None else about(likely), about(most * times)]
        shown.add_row(label, *cells, "-" if likely is None else about(likely * times))
    console.print(shown)
    console.print(Text(source))


def show_memory(console: Console, run: Run, memory: Memory) -> None:
    trained = f"{about(memory.num_trained)} of {about(memory.num_parameters)} parameters"
    rows = (
        ("weights", memory.weights, "the model's, adapters in float32"),
        ("gradients, AdamW", memory.training, f"{trained} are trained"),
        ("teacher", memory.teacher, "weights of its own" if memory.teacher else "shares the student's weights"),
        ("sampler", memory.sampler, "weights and key-value cache of its own (on a GPU rollout.gpu_memory decides)"),
        ("activations", memory.activations, "of one micro-batch (train.micro_tokens, engine.gradient_checkpointing)"),
        ("logits", memory.logits, "of one chunk (train.chunk_tokens)"),
        ("sampling", memory.cache, "keys and values, in turn with the two above (rollout.max_rows, rollout.cache_tokens)"),
        ("peak", memory.peak, f"a process on the CPU has about {LIBRARIES_MB} MB beside it, a GPU its context and what is wasted"),
    )
    shown = table("", "about", "")
    for name, size, what in rows:
        shown.add_row(name, amount(size), what)
    console.print(shown)
    of_one = f"of each of {run.launcher.processes} processes; " if run.launcher.processes > 1 else ""
    console.print(Text(f"{of_one}from the model's shapes alone, good to a factor of two or so"))


def show_time(console: Console, run: Run, base: Measured | None, expected: Tokens) -> None:
    if base is None:
        console.print(Text("not estimated: give baseline=RUN_DIR, a run of this model on this machine, whose pace is then scaled"))
        return
    try:
        ahead = pace(run, base, expected)
    except ValueError as error:
        console.print(Text(f"not estimated: {error}"))
        return
    console.print(
        Text(
            f"a step: about {duration(ahead.step_s)} (baseline: {duration(base.step_s)}, scaled by tokens); "
            f"{run.train.steps} steps: {duration(run.train.steps * ahead.step_s)}"
        )
    )
    if ahead.evaluation_s is not None:
        console.print(Text(f"an evaluation: about {duration(ahead.evaluation_s)}; {num_evaluations(run)} in the run"))
    elif run.eval.enabled:
        console.print(Text("an evaluation: not estimated, the baseline was not scored"))
    console.print(Text(f"the run: about {duration(ahead.total_s)}, start and checkpoints apart"))


def amount(size: int) -> str:
    """Bytes, in two digits."""
    mb = size / 2**20
    return f"{mb / 1024:.1f} GB" if mb >= 1000 else f"{float(f'{mb:.2g}'):g} MB"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
