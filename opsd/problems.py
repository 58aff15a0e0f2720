"""Problem sets: rows of a JSONL file or of a dataset on the hub, read into `Problem`s. Every user mistake is one ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opsd.hub import snapshot
from opsd.sieve import Sieve
from opsd.types import Problem

FIELDS = ("id", "problem", "solution", "answer")


def read_jsonl(
    path: str,
    *,
    key: str,
    columns: Mapping[str, str],
    required: tuple[str, ...],
    max_rows: int | None,
    sieve: Sieve | None = None,
) -> list[Problem]:
    """The problems of a file with one JSON object a line, in file order; blank lines are allowed.

    Args:
        path: the file.
        key: the config key that holds the path, e.g. `data.path`; messages name it and its neighbours (`data.columns.problem`).
        columns: which column holds which of `id`, `problem`, `solution`, `answer`. A field that is left out is never read; a row
            without an id is called by its line number.
        required: the fields that every row must have, not empty. `problem` always is.
        max_rows: the first n rows that the sieve lets through; what stands after them is not looked at. None: all.
        sieve: leaves rows out, whatever they lack, and counts them. None: every row is taken.

    Raises:
        ValueError: a file that is missing or not UTF-8, a line that is no JSON object, a row without a required field, two rows
            with one id, or no row at all, or none that the sieve lets through. Names key, file and line.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"{key}={path}: is a directory; give the JSONL file itself.")
    if not file.is_file():
        raise ValueError(f"{key}={path}: there is no such file (looked at {file.absolute()}); give an existing JSONL file.")
    rows, source = _lines(file, key), f"{key}={path}"
    return _problems(rows, source=source, key=key, columns=columns, required=required, max_rows=max_rows, sieve=sieve)


def read_hub(
    repo: str,
    *,
    key: str,
    revision: str | None,
    split: str,
    columns: Mapping[str, str],
    required: tuple[str, ...],
    max_rows: int | None,
    subset: str | None = None,
    sieve: Sieve | None = None,
) -> list[Problem]:
    """The problems of a dataset on the hub, through `datasets` (extra [hub]); its local cache serves where the hub does not answer.

    Args:
        repo: `owner/name`.
        key: the config key of the local file that can be given instead, e.g. `eval.path`.
        revision: commit, tag or branch; None: the main branch.
        split: the dataset's own name of the part, e.g. `train`.
        columns, required, max_rows, sieve: as for `read_jsonl`.
        subset: the dataset's own name of a configuration, e.g. `main`, where it has several.

    Raises:
        ValueError: as `read_jsonl`, and within 20 s when neither the hub nor the cache has the dataset.
    """
    source = f"{key.rpartition('.')[0]}.repo={repo}"
    remedy = f"set {key}=FILE to a local JSONL file."
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{source}: reading from the hub needs `pip install -e '.[hub]'` in the project's directory; run that, or {remedy}"
        ) from error
    directory = snapshot(
        repo, repo_type="dataset", revision=revision, patterns=None, needs=None, key=source.partition("=")[0], remedy=remedy
    )
    try:
        rows = load_dataset(str(directory), name=subset, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        part = f"split {split!r}" if subset is None else f"subset {subset!r}, split {split!r}"
        reason = " ".join(str(error).split())
        raise ValueError(f"{source}: its {part} cannot be read ({reason}); correct it, or {remedy}") from error
    numbered = ((f"row {number}", row) for number, row in enumerate(rows, start=1))
    return _problems(numbered, source=source, key=key, columns=columns, required=required, max_rows=max_rows, sieve=sieve)


def _lines(file: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Each line that is not blank as (where it stands, parsed value). Cut at newline bytes only: text may hold other separators."""
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            where = f"line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{key}={file}: {where} is not UTF-8 ({error.reason}); save the file as UTF-8.") from error
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:  # ValueError: also a number with too many digits
                reason = str(error).replace("line 1 column", "column")
                remedy = "every line must be one complete JSON object; correct or remove it."
                raise ValueError(f"{key}={file}: {where} is not valid JSON ({reason}); {remedy}") from error
            yield where, row


def _problems(
    rows: Iterable[tuple[str, Any]],
    *,
    source: str,
    key: str,
    columns: Mapping[str, str],
    required: tuple[str, ...],
    max_rows: int | None,
    sieve: Sieve | None,
) -> list[Problem]:
    """Rows checked and typed. `source` starts every message: a key and its value."""
    group = key.rpartition(".")[0]
    needed = {"problem", *required}
    for field in columns:
        if field not in FIELDS:
            raise ValueError(f"{group}.columns.{field}={columns[field]}: no such field; the fields are {', '.join(FIELDS)}.")
    for field in sorted(needed - set(columns)):
        raise ValueError(f"{group}.columns.{field}: is not set; say which column holds the {field}.")
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        place = f"{source}: {where}"
        if not isinstance(row, dict):
            raise ValueError(f"{place} is a JSON {_kind(row)}, not an object; write {{...}} with one value a column.")
        if sieve is not None and not sieve.keeps(row, place=place):
            continue
        values: dict[str, str | None] = dict.fromkeys(FIELDS)
        for field, column in columns.items():
            values[field] = _text(row.get(column), field=field, place=place, column=column)
        if sieve is not None and not sieve.fits(values):
            continue
        for field, column in columns.items():
            if field not in needed:
                continue
            if column not in row:
                has = ", ".join(map(str, row)) or "none"
                remedy = f"set {group}.columns.{field} to the column that holds the {field}"
                raise ValueError(f"{place} has no column {column!r} (it has: {has}); {remedy}.")
            if values[field] is None:
                remedy = f"fill it in, remove the row, or set {group}.columns.{field} to another column"
                raise ValueError(f"{place} has an empty {field} (column {column!r}); {remedy}.")
        name = values["id"] or where.replace(" ", "-")
        if name in seen:
            raise ValueError(f"{place} has the id {name!r} of {seen[name]}; ids must differ: correct or remove one.")
        seen[name] = where
        text = values["problem"]
        assert text is not None
        problems.append(Problem(id=name, text=text, solution=values["solution"], answer=values["answer"]))
        if len(problems) == max_rows:
            break
    if sieve is not None and sieve.counts["read"]:
        sieve.check(kept=len(problems))
    if not problems:
        raise ValueError(f"{source}: holds no rows; give a file with at least one problem ({key}=FILE).")
    return problems


def _text(value: Any, *, field: str, place: str, column: str) -> str | None:
    """A cell as text, or None where it is empty. Numbers are fine as ids and answers."""
    if isinstance(value, int | float) and not isinstance(value, bool) and field in ("id", "answer"):
        return str(value)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{place}: column {column!r} is a {_kind(value)}; the {field} must be text.")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{place}: column {column!r} holds half of a surrogate pair, which no tokenizer reads; correct the text.")
    return value if value.strip() else None


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
