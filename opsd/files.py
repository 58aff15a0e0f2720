"""Files that appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes beside and renames: whoever reads `path`, at whatever moment, finds the old content or the new."""
    part = path.with_name(path.name + ".part")
    if isinstance(content, str):
        part.write_text(content)
    else:
        part.write_bytes(content)
    part.replace(path)


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=1) + "\n")
