"""What bytes are compared with when nobody sealed them: stored CRCs, integrity.json, the names of the hub cache's blobs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ckptguard.core.problems import Problem
from ckptguard.engine import contents
from ckptguard.engine.structure import rank_of
from ckptguard.engine.workers import Buffers, Progress, run
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.storage import Directory

INTEGRITY = "integrity.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check(checkpoint: Checkpoint, found: contents.Found, progress: Progress) -> tuple[list[Problem], list[str], int]:
    """Compares with whatever is there.

    Args:
        checkpoint: An open checkpoint without a manifest.
        found: Where its chunks stand.
        progress: Hears of the bytes done.

    Returns:
        The problems, what was proved, and how many bytes were compared with something.
    """
    problems, checked = contents.check_crcs(checkpoint, found, progress)
    proved = [f"CRC-32 of {checked} bytes compared with the one stored beside them"] if checked else []
    files = checkpoint.files
    listed, wrong = _integrity(files)
    problems += wrong
    for source, digests in ((INTEGRITY, listed), ("the name of its blob in the hub's cache", _blobs(files))):
        if digests:
            problems += _compare(files, digests, source, progress)
            checked += sum(files.size(name) for name in digests if name in files.listing)
            proved.append(f"SHA-256 of {len(digests)} files compared with {source}")
    text = "not sealed: there is no manifest to compare bytes with; `ckptguard seal` writes one"
    return [*problems, Problem("note", text)], proved, checked


def _integrity(files: Directory) -> tuple[dict[str, str], list[Problem]]:
    """Megatron Core's SHA-256 manifest (core/dist_checkpointing/validation.py, 0.18 and later): ``{"files": {name: digest}}``.

    Megatron looks only at the files that it lists, so one that lists too few is a problem here.
    """
    if INTEGRITY not in files.listing:
        return {}, []
    try:
        table = json.loads(files.read(INTEGRITY))["files"]
        listed = {str(name): str(digest) for name, digest in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, [Problem("unreadable", f"{INTEGRITY}: not a manifest ({error})", file=INTEGRITY)]
    data = {name for name in files.listing if name.endswith(".distcp") or name == ".metadata"}
    gone = sorted(data - listed.keys())
    return listed, [Problem("manifest", f"{INTEGRITY}: does not list {name}", file=name) for name in gone]


def _blobs(files: Directory) -> dict[str, str]:
    """Files of the hub's cache: those kept by LFS or Xet are named by their SHA-256 (huggingface_hub/file_download.py)."""
    targets = {n: Path(e.link_target).name for n, e in files.listing.items() if e.link_target and e.inside}
    return {
        name: blob for name, blob in targets.items() if _SHA256.fullmatch(blob) and files.listing[name].size_bytes >= 0
    }


def _compare(files: Directory, digests: Mapping[str, str], source: str, progress: Progress) -> list[Problem]:
    progress.start("comparing SHA-256", sum(files.size(name) for name in digests if name in files.listing))
    buffers = Buffers()

    def work(name: str) -> Problem | None:
        if name not in files.listing:
            return Problem("missing-file", f"{name}: missing; {source} lists it", file=name, rank=rank_of(name))
        if _sha256(files, name, buffers.view, progress) == digests[name]:
            return None
        return Problem("changed", f"{name}: its SHA-256 is not that of {source}", file=name, rank=rank_of(name))

    return [problem for problem in run(sorted(digests), work) if problem]


def _sha256(files: Directory, name: str, buffer: memoryview, progress: Progress) -> str:
    import hashlib

    hasher, done, size = hashlib.sha256(), 0, files.size(name)
    while done < size:
        part = buffer[: min(len(buffer), size - done)]
        files.read_into(name, done, part)
        hasher.update(part)
        done += len(part)
        progress.advance(len(part))
    return hasher.hexdigest()
