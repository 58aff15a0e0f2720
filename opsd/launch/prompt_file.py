"""`prompt=file prompt.path=FILE`: a template of the user's own, read once, when a run is launched.

The frozen config then holds the texts themselves: a file that changes later changes no run, and what was asked is on record.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

TEXTS = ("student", "teacher")
OPTIONAL = "analysis"
REFERENCE = re.compile(r"(?<!\\)\$\{([\w ]*)([^}]*)\}")


def inline(cfg: DictConfig) -> None:
    """Puts the texts of the template file into the composed config, and the file's own name in place of `file`.

    Raises:
        ValueError: there is no such file, or it holds something else than texts under the keys of a template.
    """
    if OmegaConf.select(cfg, "prompt.kind") != "file":
        return
    if OmegaConf.is_missing(cfg.prompt, "path") or cfg.prompt.path is None:
        raise ValueError("prompt.path is not set: prompt=file needs it; add prompt.path=FILE, a yaml with student and teacher.")
    path = Path(str(cfg.prompt.path)).expanduser()
    texts = read(path, cfg)
    with open_dict(cfg.prompt):
        cfg.prompt.name = path.stem
        cfg.prompt.path = str(path.absolute())
        for key in (*TEXTS, OPTIONAL):
            cfg.prompt[key] = texts.get(key)


def read(path: Path, cfg: DictConfig) -> dict[str, str]:
    """The texts of a template file. Raises ValueError as `inline` does."""
    keys = f"{' and '.join(TEXTS)} and, where the teacher writes first, {OPTIONAL}"
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "there is no such file"
        raise ValueError(f"prompt.path={path}: {what} ({path.absolute()}); give a yaml file with {keys}.")
    try:
        values: Any = OmegaConf.load(path)
    except MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        raise ValueError(f"prompt.path={path}: line {line} is not YAML ({error.problem}); correct the file.") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt.path={path}: is not YAML in UTF-8 ({str(error).splitlines()[0]}); correct the file.") from error
    except OmegaConfBaseException as error:
        raise ValueError(
            f"prompt.path={path}: a `${{...}}` in it cannot be read ({str(error).splitlines()[0]}); it refers to another value of "
            "the config, as ${eval.instruction} does; write `$ {` for anything else."
        ) from error
    except OSError as error:  # a file whose whole content is one value, too
        raise ValueError(
            f"prompt.path={path}: cannot be read ({error.strerror or error}); give a yaml file with {keys}."
        ) from error
    if not isinstance(values, DictConfig):
        raise ValueError(f"prompt.path={path}: holds no keys; give it {keys}.")
    texts: Any = OmegaConf.to_container(values, resolve=False)
    for key, value in texts.items():
        if key not in (*TEXTS, OPTIONAL):
            raise ValueError(
                f"prompt.path={path}: {key} is no key of a template file, which holds {keys}; set the rest beside it, as in "
                "prompt.privileged=answer."
            )
        for reference in REFERENCE.finditer(str(value)):
            if reference[1] not in cfg or ":" in reference[2]:
                raise ValueError(
                    f"prompt.path={path}: {key} holds {reference[0]}, which reads as another value of the config, and there is "
                    "none of that name; write `$ {` for anything else."
                )
        if not isinstance(value, str):
            raise ValueError(f"prompt.path={path}: {key} is no text; put it in quotes, or after `|-` on lines of its own.")
    for key in TEXTS:
        if key not in texts:
            raise ValueError(f"prompt.path={path}: has no {key}; it holds {keys}.")
    return texts
