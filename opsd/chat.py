"""Chat prompts as token ids. A problem's text can say anything and still stays inside its turn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLACEHOLDER = "PLACEHOLDERoftheUSERtext"  # no template writes this itself, and none reads a meaning into it


def render(tokenizer: PreTrainedTokenizerBase, text: str, *, thinking: bool) -> list[int]:
    """One user turn and the header of the assistant's, as token ids.

    Text without chat markers gives exactly the ids of `apply_chat_template`. Where the text spells a marker (`<|im_end|>`,
    `<think>`, any added token), it is cut inside the marker before it is tokenised, so that its letters arrive as plain text.

    Args:
        tokenizer: with a chat template that puts the user's text in once.
        text: the user's turn.
        thinking: the template's thinking switch; a template without one ignores it (see `has_thinking_switch`).

    Raises:
        ValueError: no chat template, one that cannot render a single user turn, or text that cannot be kept out of the markers.
    """
    before, after, text = _frame(tokenizer, text, thinking=thinking)
    markers = _markers(tokenizer)
    expected = [token for token in _encode(tokenizer, before + PLACEHOLDER + after) if token in markers]
    whole = before + text + after
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
            f"a prompt's text turns into chat markers of the tokenizer (some of {', '.join(spelled_out)}) and cannot be kept apart "
            f"from them; remove the markers from the problem that starts with {text[:60]!r}."
        )
    return ids


def has_thinking_switch(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template tells thinking on from thinking off. Raises ValueError as `render` does."""
    return _apply(tokenizer, PLACEHOLDER, thinking=True) != _apply(tokenizer, PLACEHOLDER, thinking=False)


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


def _apply(tokenizer: PreTrainedTokenizerBase, content: str, *, thinking: bool) -> str:
    """The template's own text. `enable_thinking` is the switch of most templates, `thinking` that of some."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError(
            f"model.path={tokenizer.name_or_path}: its tokenizer has no chat template; an instruction-tuned model is needed."
        )
    turn = [{"role": "user", "content": content}]
    try:
        rendered = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False, enable_thinking=thinking, thinking=thinking
        )
    except TemplateError as error:
        raise ValueError(
            f"model.path={tokenizer.name_or_path}: its chat template cannot render one user turn ({error}); use another model."
        ) from error
    assert isinstance(rendered, str)
    return rendered


def _frame(tokenizer: PreTrainedTokenizerBase, text: str, *, thinking: bool) -> tuple[str, str, str]:
    """What the template writes before and after the user's text, and the text as the template keeps it (some strip it)."""
    rendered = _apply(tokenizer, PLACEHOLDER, thinking=thinking)
    if rendered.count(PLACEHOLDER) != 1:
        raise ValueError(
            f"model.path={tokenizer.name_or_path}: its chat template writes the user's text {rendered.count(PLACEHOLDER)} times, "
            "and once is needed; use another model."
        )
    before, after = rendered.split(PLACEHOLDER)
    spaced_before, spaced_after = _apply(tokenizer, f"\n{PLACEHOLDER}\n", thinking=thinking).split(PLACEHOLDER)
    if spaced_before == before:
        text = text.lstrip()
    if spaced_after == after:
        text = text.rstrip()
    return before, after, text


def _markers(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that never come out of plain text. Added runs of white space are ordinary text in some tokenizers."""
    return {
        token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special or added.content.strip()
    }


def _by_length(markers: dict[int, str]) -> list[str]:
    return sorted(markers.values(), key=len, reverse=True)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
