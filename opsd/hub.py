"""The Hugging Face hub, with an answer within seconds whether it can be reached or not: its own client would wait for ever."""

from __future__ import annotations

import re
from pathlib import Path

TIMEOUT_S = 5.0  # the probe's; a hub that takes longer counts as out of reach
IDENTIFIER = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name


def is_hub_id(text: str) -> bool:
    """Whether a path that exists nowhere here can be meant for the hub: what looks like a local path never is."""
    return not text.startswith((".", "/", "~")) and IDENTIFIER.fullmatch(text) is not None


def snapshot(
    repo: str, *, repo_type: str, revision: str | None, patterns: list[str] | None, needs: str | None, key: str, remedy: str
) -> Path:
    """A directory with the repository's files of exactly that revision: downloaded, or from the local cache where the hub is away.

    Args:
        repo: `owner/name`.
        repo_type: `model` or `dataset`.
        revision: commit, tag or branch; None: the main branch.
        patterns: which files are needed, as globs; None: all.
        needs: the repository must have a file whose name ends so, e.g. `.safetensors`; None: any will do.
        key: the config key that says what to read; it starts every message.
        remedy: what to set instead, the end of every message.

    Raises:
        ValueError: no such repository or revision, no right to read it, or (within 10 s) neither hub nor cache has it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of whichever http library the client uses
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{key}={repo}" + (f" (revision {revision})" if revision else "")
    ask = HfApi().model_info if repo_type == "model" else HfApi().dataset_info
    reason = None
    try:
        info = ask(repo, revision=revision, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise ValueError(f"{at}: the hub asks you to accept its terms and log in (`hf auth login`); do so, or {remedy}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{at}: the hub has no such revision of this {repo_type}; correct it, or {remedy}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{at}: the hub has no such {repo_type}, or it is private; correct it, or {remedy}") from error
    except HFValidationError as error:
        raise ValueError(f"{at}: is no hub name ({error}); give owner/name, or {remedy}") from error
    except (HTTPError, OfflineModeIsEnabled) as error:  # HTTPError: whatever the network or a failing hub gives
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}"
    else:
        if needs is not None and not any(file.rfilename.endswith(needs) for file in info.siblings or []):
            raise ValueError(f"{at}: the hub's {repo_type} has no {needs} file, and none other is read; {remedy}")
    try:
        found = snapshot_download(
            repo, repo_type=repo_type, revision=revision, allow_patterns=patterns, local_files_only=reason is not None
        )
    except (LocalEntryNotFoundError, HTTPError) as error:
        why = f"cannot be reached ({reason})" if reason else f"broke off the download ({error})"
        raise ValueError(f"{at}: the hub {why} and the local cache does not hold it; {remedy}") from error
    return Path(found)
