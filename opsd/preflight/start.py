"""A few lines at the start of every job: whether its prompts are what they are meant to be. What cannot work is refused there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opsd import chat
from opsd.config import Run
from opsd.preflight.compare import Comparer, thought, visible
from opsd.preflight.survey import Survey, Tokens, evaluation_prompts, num_evaluations, response_len, spread, survey, tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opsd.run import Parts
    from opsd.types import Prompt

PROBLEMS = 64  # looked at: a tenth of a second with the embedded model


def announce(parts: Parts) -> None:
    """Says how the prompts of student, teacher and evaluation differ, what does not fit, and how many tokens are ahead.

    Where the student does not train on the very prompt that the evaluation asks with (a tag of the run says so), a gain in training
    need not show in the score: long rollouts have turned it into a loss.

    Raises:
        ValueError: the chat template breaks the boundary between prompt and response, no problem fits the context, or a prompt of
            the evaluation does not.
    """
    run, tokenizer = parts.run, parts.loaded.tokenizer
    chat.check_boundary(tokenizer)
    found = survey(parts.stream, most=PROBLEMS)
    asked = evaluation_prompts(run, tokenizer, context=parts.loaded.context)
    comparer, prompt = Comparer(tokenizer), found.prompts[0]
    if run.eval.enabled:
        differences = evaluation_differences(run, comparer, prompt)
        parts.tracker.tag({"student_prompt_is_eval_prompt": str(not differences).lower()})
        parts.terminal.say(evaluation_line(run, differences))
    if prompt.teacher_ids is not None:
        parts.terminal.say(boundary_line(run, comparer, prompt))
    if not chat.has_thinking_switch(tokenizer):
        parts.terminal.say(switch_line(run))
    parts.terminal.say(lengths_line(found))
    measured = response_len(run, tokenizer, found)
    ahead = tokens(
        run,
        found,
        response=run.rollout.max_len if measured is None else measured,
        evaluation=run.eval.max_len,
        num_evaluated=len(asked),
    )
    parts.terminal.say(tokens_line(run, ahead, measured=measured is not None))


def asked_like(run: Run, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The evaluation's prompt for a problem that the run trains on."""
    return chat.render(tokenizer, run.eval.prompt_text(prompt.problem), thinking=run.eval.thinking)


def evaluation_differences(run: Run, comparer: Comparer, prompt: Prompt) -> list[str]:
    return comparer.differences(prompt.student_ids, asked_like(run, comparer.tokenizer, prompt), prompt.problem)


def evaluation_line(run: Run, differences: list[str]) -> str:
    start = f"prompt={run.prompt.name}: the student's prompt"
    if not differences:
        return f"{start} is token for token that of eval={run.eval.name}"
    return f"{start} DIFFERS from that of eval={run.eval.name} (student / evaluation): {'; '.join(differences)}"


def boundary_line(run: Run, comparer: Comparer, prompt: Prompt) -> str:
    """Whether the response follows the same on both sides."""
    assert prompt.teacher_ids is not None
    student, teacher = (comparer.pieces(ids, prompt.problem).tail for ids in (prompt.student_ids, prompt.teacher_ids))
    start, of_student = f"prompt={run.prompt.name}:", f"{visible(student)} (think block: {thought(student)})"
    if student == teacher:
        return f"{start} on both sides the response starts after {of_student}"
    return (
        f"{start} the response starts after another boundary on each side, student {of_student}, teacher {visible(teacher)} "
        f"({thought(teacher)}); prompt.boundary=aligned gives both the student's"
    )


def switch_line(run: Run) -> str:
    return f"model={run.model.name}: its chat template has no thinking switch, so thinking on and off are the same"


def lengths_line(found: Survey) -> str:
    """Lengths as least / median / most."""
    which = f"all {found.asked}" if found.asked == found.available else f"{found.asked} of {found.available}"
    teacher = f", teacher {spread(found.teacher_lens)}" if found.teacher_lens else ""
    lost = ": warning, MOST are never trained on; raise prompt.max_teacher_tokens or model.context, or lower rollout.max_len"
    lost = lost if 2 * len(found.dropped) > found.asked else ""
    return (
        f"prompts of {which} problems: student {spread(found.student_lens)} tokens{teacher} (least / median / most); "
        f"{share(len(found.shortened), found)} shortened, {share(len(found.dropped), found)} dropped{lost}"
    )


def share(count: int, found: Survey) -> str:
    return f"{count} ({100 * count / found.asked:.0f}%)" if count else "0"


def tokens_line(run: Run, ahead: Tokens, *, measured: bool) -> str:
    """`measured`: the responses are there already, and their lengths are known."""
    most = "about" if measured else "at most"
    scored = f"{about(ahead.student)} scored by the student, {about(ahead.teacher)} by the teacher"
    count = num_evaluations(run)
    evaluated = f"; {count} evaluations, at most {about(ahead.evaluation)} sampled in each" if count else ""
    total = about(run.train.steps * ahead.step)
    return f"tokens a step, {most}: {about(ahead.sampled)} sampled, {scored}; {total} in the run{evaluated}"


def about(count: float) -> str:
    """A number of tokens in two or three digits."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, "k")):
        if count >= size:
            scaled = count / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return f"{count:.0f}"
