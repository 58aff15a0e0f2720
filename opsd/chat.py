"""Chat prompts as token ids. A problem's text can say anything and still stays inside its turn, and a response starts where the
prompt ends: `check_boundary` refuses the templates under which one of the two would not hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLACEHOLDER = "PLACEHOLDERoftheUSERtext"  # no template writes this itself, and none reads a meaning into it
ANSWER = "PLACEHOLDERoftheANSWER"
THOUGHT = re.compile(r"<think>\s*</think>")  # which some templates put before an answer that came without one
THINKING = ("<think>", "</think>")
FIRST = ("The", "1")  # what responses start with; white space may join with a template's last line break in any tokenizer


def render(tokenizer: PreTrainedTokenizerBase, text: str, *, thinking: bool, ending: bool | None = None) -> list[int]:
    """One user turn and the header of the assistant's, as token ids.

    Text without chat markers gives exactly the ids of `apply_chat_template`. Where the text spells a marker (`<|im_end|>`,
    `<think>`, any added token), it is cut inside the marker before it is tokenised, so that its letters arrive as plain text.

    Args:
        tokenizer: with a chat template that puts the user's text in once.
        text: the user's turn.
        thinking: the template's thinking switch; a template without one ignores it (see `has_thinking_switch`).
        ending: the switch whose `boundary` stands at the end instead of `thinking`'s own (`prompt.boundary=aligned`).

    Raises:
        ValueError: no chat template, one that cannot render a single user turn, text that cannot be kept out of the markers, or a
            template that says elsewhere, too, what `ending` would contradict.
    """
    before, after, text = _frame(tokenizer, text, thinking=thinking)
    if ending is not None and ending != thinking:
        other, after = _ends(tokenizer, PLACEHOLDER, thinking=ending)
        if other != before:
            raise ValueError(
                f"prompt.boundary=aligned: the chat template of {tokenizer.name_or_path} tells thinking on from off in front of "
                "the user's text as well, which the other side's ending would contradict; set prompt.boundary=released, or the "
                "same thinking on both sides."
            )
    markers = _markers(tokenizer)
    expected = [token for token in _encode(tokenizer, before + PLACEHOLDER + after) if token in markers]
    return _encode_apart(tokenizer, before, text, after, expected=expected)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Text as token ids, letters throughout: a marker that it spells is cut as in `render`. Raises ValueError as `render` does."""
    return _encode_apart(tokenizer, "", text, "", expected=[])


def end_of_turn(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]) -> int:
    """The token with which the chat template ends an assistant's turn, one of `stop_ids`.

    Raises:
        ValueError: it ends one without any, or as `render`.
    """
    after = _apply(tokenizer, [PLACEHOLDER, ANSWER], thinking=False, header=False).rpartition(ANSWER)[2]
    for token in _encode(tokenizer, after):
        if token in stop_ids:
            return token
    raise ValueError(
        f"model.path={tokenizer.name_or_path}: its chat template ends an assistant's turn with {after!r}, which holds none of the "
        f"tokens that end a response ({', '.join(map(str, tokenizer.convert_ids_to_tokens(stop_ids)))}); use another model."
    )


def has_thinking_switch(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template tells thinking on from thinking off. Raises ValueError as `render` does."""
    return _apply(tokenizer, [PLACEHOLDER], thinking=True) != _apply(tokenizer, [PLACEHOLDER], thinking=False)


def boundary(tokenizer: PreTrainedTokenizerBase, *, thinking: bool) -> str:
    """What the template writes between the user's text and the response. Raises ValueError as `render` does."""
    return _ends(tokenizer, PLACEHOLDER, thinking=thinking)[1]


def check_boundary(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a template under which it would not be told where the response starts, thinking on or off.

    Raises:
        ValueError: as `render`, or the template writes no header for the assistant, ends the user's turn in plain text, or ends in
            text that the tokenizer joins with the response's first letters.
    """
    who = f"model.path={tokenizer.name_or_path}: its chat template"
    ends = {token for token, marker in _markers(tokenizer).items() if marker not in THINKING}
    for thinking in (True, False):
        end = boundary(tokenizer, thinking=thinking)
        prompt = _apply(tokenizer, [PLACEHOLDER], thinking=thinking)
        if prompt == _apply(tokenizer, [PLACEHOLDER], thinking=thinking, header=False):
            conversation = _apply(tokenizer, [PLACEHOLDER, ANSWER], thinking=thinking, header=False)
            missing = conversation.partition(PLACEHOLDER)[2].partition(ANSWER)[0].removeprefix(end)
            if THOUGHT.sub("", missing).strip():
                raise ValueError(
                    f"{who} has no generation prompt: before an assistant's answer it writes {missing!r}, and before a response it "
                    "would not; use another model, or have its template read add_generation_prompt."
                )
        if not ends & set(_encode(tokenizer, end)):
            raise ValueError(
                f"{who} ends the user's turn in plain text ({end!r}), which a problem can spell as well; use a model that has a "
                "token for it."
            )
        ids = _encode(tokenizer, prompt)
        for first in FIRST:
            if _encode(tokenizer, prompt + first)[: len(ids)] != ids:
                raise ValueError(
                    f"{who} ends in {end[-12:]!r}, which its tokenizer joins with the first letters of a response ({first!r}), so "
                    "that none would start where the prompt ends; use another model, or end its template in a line break."
                )


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a turn, ascending: the tokenizer's end token and those of the model's generation config.

    Raises:
        ValueError: neither names one.
    """
    found: set[int] = set()
    value: Any
    for value in (tokenizer.eos_token_id, model.config.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if not found:
        raise ValueError(f"model.path={model.name_or_path}: names no end-of-turn token; set eos_token_id in its generation config.")
    return sorted(found)


def _apply(tokenizer: PreTrainedTokenizerBase, contents: list[str], *, thinking: bool, header: bool = True) -> str:
    """The template's own text of turns, the user's first. `enable_thinking` is the switch of most templates, `thinking` of some."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError(
            f"model.path={tokenizer.name_or_path}: its tokenizer has no chat template; an instruction-tuned model is needed."
        )
    turns = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]
    try:
        rendered = tokenizer.apply_chat_template(
            turns, add_generation_prompt=header, tokenize=False, enable_thinking=thinking, thinking=thinking
        )
    except TemplateError as error:
        raise ValueError(
            f"model.path={tokenizer.name_or_path}: its chat template cannot render one user turn ({error}); use another model."
        ) from error
    assert isinstance(rendered, str)
    return rendered


def _ends(tokenizer: PreTrainedTokenizerBase, content: str, *, thinking: bool) -> tuple[str, str]:
    """What the template writes before and after the placeholder in the user's turn."""
    rendered = _apply(tokenizer, [content], thinking=thinking)
    if rendered.count(PLACEHOLDER) != 1:
        raise ValueError(
            f"model.path={tokenizer.name_or_path}: its chat template writes the user's text {rendered.count(PLACEHOLDER)} times, "
            "and once is needed; use another model."
        )
    before, _, after = rendered.partition(PLACEHOLDER)
    return before, after


def _frame(tokenizer: PreTrainedTokenizerBase, text: str, *, thinking: bool) -> tuple[str, str, str]:
    """What the template writes before and after the user's text, and the text as the template keeps it (some strip it)."""
    before, after = _ends(tokenizer, PLACEHOLDER, thinking=thinking)
    spaced_before, spaced_after = _ends(tokenizer, f"\n{PLACEHOLDER}\n", thinking=thinking)
    if spaced_before == before:
        text = text.lstrip()
    if spaced_after == after:
        text = text.rstrip()
    return before, after, text


def _encode_apart(tokenizer: PreTrainedTokenizerBase, before: str, text: str, after: str, *, expected: list[int]) -> list[int]:
    """All three as one piece of token ids; `text` is cut inside whatever marker it spells, so that `expected` are the only ones."""
    markers, whole = _markers(tokenizer), before + text + after
    ids = _encode(tokenizer, whole)
    if [token for token in ids if token in markers] == expected:
        return ids
    spelled = re.compile("(?=(" + "|".join(re.escape(marker) for marker in _by_length(markers)) + "))")
    start, end = len(before), len(before) + len(text)
    found = [match.span(1) for match in spelled.finditer(whole)]
    cuts = [max(first + 1, start) for first, last in found if first < end and last > start]  # only those that touch the text
    ids = [
        token
        for left, right in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        for token in _encode(tokenizer, whole[left:right])
    ]
    if [token for token in ids if token in markers] != expected:
        spelled_out = sorted({markers[token] for token in ids if token in markers})
        raise ValueError(
            f"a problem's text turns into chat markers of the tokenizer (some of {', '.join(spelled_out)}) and cannot be kept "
            f"apart from them; remove the markers from the text that starts with {text[:60]!r}."
        )
    return ids


def _markers(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that never come out of plain text. Added runs of white space are ordinary text in some tokenizers."""
    return {
        token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special or added.content.strip()
    }


def _by_length(markers: dict[int, str]) -> list[str]:
    return sorted(markers.values(), key=len, reverse=True)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
