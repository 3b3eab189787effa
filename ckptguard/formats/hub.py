"""Snapshots from the Hugging Face Hub, through huggingface_hub's own cache.

Source: huggingface_hub/_snapshot_download.py and errors.py (1.33). ``HF_ENDPOINT``, ``HF_HUB_CACHE``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` are honoured by that library and mean here what they mean everywhere else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from ckptguard.core.errors import CkptguardError, EnvironmentFailedError, NotFoundError, UnsupportedError, UsageError

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII)
_HOW_TO_WRITE = "Write it as org/name or org/name@revision."
_MAX_ID = 96  # huggingface_hub/utils/_validators.py
_FILE_NAME = re.compile(r".*\.(safetensors|json|bin|pth?|gguf|distcp|txt|ya?ml|zst|git)", re.IGNORECASE)
# What the formats here read, and what a model needs besides its weights. Pickles and GGUF are never asked for.
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
# Copies of the same weights for other loaders: onnx/, original/, Mistral's own consolidated.safetensors.
_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]


def looks_like_id(text: str) -> bool:
    """Whether the text can only be a hub id, ``org/name`` or ``org/name@revision``: well formed, and no local path.

    A bare ``name`` is taken for a path that is not there: that is what it nearly always is.
    """
    match = _ID.fullmatch(text)
    if match is None:
        return False
    repo, revision = match["repo"], match["revision"] or ""
    if len(repo) > _MAX_ID or any(bad in text for bad in ("--", "..")) or repo.endswith((".", "-")):
        return False
    if _FILE_NAME.fullmatch(repo) or revision.endswith("/"):
        return False
    return not (Path(text).exists() or Path(repo).exists())


def download(text: str) -> Path:
    """Downloads what is not in the cache yet, and gives the snapshot's directory.

    Args:
        text: ``org/name`` or ``org/name@revision``; the revision is a branch, a tag, a commit or ``refs/pr/N``.

    Raises:
        UsageError: It is no hub id, or access to it must be asked for first.
        NotFoundError: There is no such repository or revision.
        UnsupportedError: It holds no safetensors.
        EnvironmentFailedError: The hub cannot be reached, or offline mode is on and the cache does not have it.
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise UsageError(f"{text}: not a hub id", next_step=_HOW_TO_WRITE)
    repo, revision = match["repo"], match["revision"]
    import httpx
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot = _fetch(repo, revision, _COPIES)
        if not any(snapshot.glob("*.safetensors")):
            # The copies are all there is: releases in Mistral's own layout.
            snapshot = _fetch(repo, revision, _COPIES[:1])
    except HFValidationError as error:
        raise UsageError(f"{text}: not a hub id: {error}", next_step=_HOW_TO_WRITE) from error
    except (OSError, httpx.HTTPError) as error:
        raise _in_our_words(text, repo, revision, error) from error
    if not any(snapshot.glob("*.safetensors")):
        raise UnsupportedError(
            f"{text}: this repository holds no safetensors weights, and pickles and GGUF files are not read",
            next_step=f"Look among its pull requests for the hub's own conversion and give it as {repo}@refs/pr/N, "
            "or convert it in a sandbox with transformers: save_pretrained(DST, safe_serialization=True).",
        )
    return snapshot


def _fetch(repo: str, revision: str | None, leave_out: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    where = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=_WANTED,
        ignore_patterns=leave_out,
        library_name="ckptguard",
        tqdm_class=None if sys.stderr.isatty() else _no_bars(),
    )
    return Path(where)


def _no_bars() -> type[Any]:
    """A progress bar that shows nothing: bars in a log file are noise."""
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):  # type: ignore[misc, unused-ignore]  # untyped where tqdm's stubs are not installed
        """Always off."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call, unused-ignore]

    return NoBar


def _in_our_words(text: str, repo: str, revision: str | None, error: Exception) -> CkptguardError:
    """Maps the library's errors, most specific first: GatedRepoError is a RepositoryNotFoundError, all are OSErrors."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"{text}: access to this repository must be granted first",
            next_step=f"Accept its terms at {hub}/{repo} and log in with 'hf auth login', or set HF_TOKEN.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(
            f"{text}: {repo} has no revision {revision or 'main'!r}",
            next_step=f"Look at its branches and tags at {hub}/{repo}/tree/main.",
        )
    if isinstance(error, errors.DisabledRepoError):
        return NotFoundError(f"{text}: the hub has switched this repository off", next_step=f"See {hub}/{repo}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"{text}: no local path, and no model that you may see at {hub}",
            next_step="Check the spelling; for a private one, log in with 'hf auth login', or set HF_TOKEN.",
        )
    response = getattr(error, "response", None)
    if isinstance(error, errors.HfHubHTTPError) and response is not None:
        code = response.status_code
        step = "Check your token (HF_TOKEN, 'hf auth whoami')." if code in (401, 403) else "Try again later."
        return EnvironmentFailedError(f"{text}: {hub} answered with HTTP status {code}", next_step=step)
    return _unreachable(text, error)


def _unreachable(text: str, error: Exception) -> EnvironmentFailedError:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        missing = "only in part" if type(error).__name__ == "IncompleteSnapshotError" else "not"
        return EnvironmentFailedError(
            f"{text}: no local path, {missing} in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set",
            next_step="Unset HF_HUB_OFFLINE, or fill the cache from a machine with a network: 'hf download'.",
        )
    lines = str(error.__cause__ or error).strip().splitlines()
    return EnvironmentFailedError(
        f"{text}: cannot be downloaded from {constants.ENDPOINT}: {lines[0] if lines else type(error).__name__}",
        next_step="Check the network, the free space and HF_ENDPOINT, then run it again: whole files are kept.",
    )
