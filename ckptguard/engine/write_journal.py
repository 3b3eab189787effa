"""The journal of a run that writes: which files are finished, and what their digests are. One line a file, appended.

A line is the XXH3-64 of its text in 16 hexadecimal digits, a blank, and the text: a JSON object. The first line says whose
journal it is. A line that was cut by a crash does not match its digest and ends the reading.

Where several ranks write, each but the first has a journal of its own beside the first one's (``of_rank``).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.engine.write_calls import writing
from ckptguard.fingerprint.manifest import FileDigest

NAME = ".ckptguard-journal"
OF_RANKS = f"{NAME}.*"  # a glob pattern
_FORMAT = "ckptguard-journal/1"


class Journal:
    """An open and locked journal. Thread-safe."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle = handle
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Opens or makes a journal and takes its lock.

        Raises:
            UsageError: Another process holds the lock.
            EnvironmentFailedError: The file system refuses.
        """
        with writing(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(handle, path):
                raise BlockingIOError  # the other one finished and moved it away in between
        except BlockingIOError:
            os.close(handle)
            raise UsageError(
                f"{path.parent}: another process is writing there",
                next_step="Wait until it has ended; then this one goes on where that one stopped, if anything is left.",
            ) from None
        except OSError as error:
            os.close(handle)
            raise EnvironmentFailedError(
                f"{path}: cannot be locked: {error.strerror}",
                next_step="Write to a file system that has flock (Lustre: mount it with -o flock).",
            ) from error
        return cls(path, handle)

    def begin(self, identity: str, what: str) -> dict[str, FileDigest]:
        """Finished files that the journal lists, by path, after it was made this run's if it was empty.

        A last line that was cut is removed, so that what is appended begins a line of its own.

        Raises:
            UsageError: It is another run's, or of another version of ckptguard.
        """
        with writing(self._path):
            data = _read_all(self._handle)
            lines, whole_bytes = _whole_lines(data)
            os.ftruncate(self._handle, whole_bytes)
        if not lines:
            self._append({"format": _FORMAT, "identity": identity, "what": what})
        elif (lines[0].get("format"), lines[0].get("identity")) != (_FORMAT, identity):
            raise UsageError(
                f"{self._path.parent}: left by {lines[0].get('what', 'another run')}, which was started with other arguments",
                next_step="Remove that directory, then run the command again.",
            )
        return finished(lines)

    def add(self, name: str, digest: FileDigest) -> None:
        """Notes a file whose bytes are on the disk."""
        blocks = base64.b64encode(digest.blocks).decode()
        self._append(
            {
                "file": name,
                "bytes": digest.size_bytes,
                "blake3": digest.blake3,
                "block_bytes": digest.block_bytes,
                "blocks": blocks,
            }
        )

    def mark(self, token: str) -> None:
        """Notes a word by which other ranks know that they read this very file, and waits for the disk."""
        self._append({"mark": token})
        self.sync()

    def conclude(self, result: bytes) -> None:
        """Notes what a rank found out beside its files, as the last line, and waits for the disk."""
        self._append({"result": base64.b64encode(result).decode()})
        self.sync()

    def sync(self) -> None:
        """Waits until all lines are on the disk, where other machines see them."""
        with writing(self._path):
            os.fsync(self._handle)

    def _append(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode()
        line = memoryview(f"{xxh3_64_hexdigest(text)} ".encode() + text + b"\n")
        with self._lock, writing(self._path, len(line)):
            while line:
                line = line[os.write(self._handle, line) :]

    def close(self) -> None:
        """Gives the lock back. May be called again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def of_rank(rank: int) -> str:
    """The file name of a rank's journal."""
    return f"{NAME}.{rank}" if rank else NAME


def entries(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal that another process may be writing; empty if there is none."""
    try:
        return _whole_lines(path.read_bytes())[0]
    except OSError:
        return []


def header(path: Path) -> dict[str, Any]:
    """The first line of a journal that may be another's: its ``identity`` and ``what``; empty if there is none."""
    return next(iter(entries(path)), {})


def finished(lines: Sequence[Mapping[str, Any]]) -> dict[str, FileDigest]:
    """The finished files that the lines of a journal note, by path."""
    return {
        line["file"]: FileDigest(line["bytes"], line["blake3"], line["block_bytes"], base64.b64decode(line["blocks"]))
        for line in lines
        if "file" in line
    }


def is_marked(lines: Sequence[Mapping[str, Any]], token: str) -> bool:
    """Whether ``Journal.mark`` noted that word."""
    return any(line.get("mark") == token for line in lines)


def conclusion(lines: Sequence[Mapping[str, Any]]) -> bytes | None:
    """What ``Journal.conclude`` noted; None if it has not (yet)."""
    return base64.b64decode(lines[-1]["result"]) if lines and "result" in lines[-1] else None


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _read_all(handle: int) -> bytes:
    out, size = bytearray(), os.fstat(handle).st_size
    while len(out) < size and (part := os.pread(handle, size - len(out), len(out))):
        out += part
    return bytes(out)


def _whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The entries up to the first line that is not whole, and how many bytes they take."""
    entries: list[dict[str, Any]] = []
    taken_bytes = 0
    for line in data.splitlines(keepends=True):
        digest, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or digest != xxh3_64_hexdigest(text).encode():
            break
        entries.append(json.loads(text))
        taken_bytes += len(line)
    return entries, taken_bytes
