"""A lock that only one process of a machine has, and by which the others learn who that is."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptguard.core.errors import EnvironmentFailedError
from ckptguard.engine.write_calls import writing
from ckptguard.view.records import moment

_MOST_BYTES = 4096


@contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Holds the lock of a file for as long as the block runs. It ends with the process; the file stays.

    Args:
        path: The file; made if it is not there.
        doing: What the process that has it does, for others: ``is preparing /ckpt/view``.

    Raises:
        EnvironmentFailedError: Another process has it; names it. Or the file system has no locks.
    """
    with writing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _take(handle, path, doing)
        yield
    finally:
        os.close(handle)


def _take(handle: int, path: Path, doing: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EnvironmentFailedError(
            f"{_holder(handle)} {doing}",
            next_step="Wait until it has ended, or end it; then run this command again.",
        ) from None
    except OSError as error:
        raise EnvironmentFailedError(
            f"{path}: cannot be locked: {error.strerror}",
            next_step="Put the view on a file system that has flock (Lustre: mount it with -o flock).",
        ) from error
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": moment()}
    with writing(path):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)


def _holder(handle: int) -> str:
    """Who has the lock, as far as it has said so yet."""
    try:
        holder = json.loads(os.pread(handle, _MOST_BYTES, 0))
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
