"""System calls of writing that Python's os module does not offer as needed, with their errors as messages."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ckptguard.core.errors import EnvironmentFailedError

# Largest single write. For larger ones the kernel looks for larger stretches of free memory to cache them in: with most of the
# memory in use, writes of 1 MiB took three to five times the system time (ext4, Linux 6.18).
_WRITE_BYTES = 128 << 10
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h
_CANNOT_PREALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EPERM})


@contextmanager
def writing(path: Path, size_bytes: int | None = None) -> Iterator[None]:
    """Turns an OSError of the block into an EnvironmentFailedError that names the path and the size that it is to have."""
    try:
        yield
    except OSError as error:
        size = "" if size_bytes is None else f" ({size_bytes} bytes)"
        raise EnvironmentFailedError(
            f"{path}: cannot be written{size}: {error.strerror}",
            next_step="Free space or permission there, then run the same command again: it goes on where it stopped.",
        ) from error


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return libc


def create(path: Path, size_bytes: int) -> int:
    """Opens a new or emptied file for writing, its space reserved where the file system can.

    posix_fallocate would write a byte into every block where the file system cannot; hence the bare call. The size stays 0 and
    grows with what is written, so that a broken-off file does not look whole.

    Raises:
        OSError: Among others ENOSPC or EDQUOT, before a byte is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        while size_bytes and _libc().fallocate(handle, _FALLOC_FL_KEEP_SIZE, 0, size_bytes):
            code = ctypes.get_errno()
            if code in _CANNOT_PREALLOCATE:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    except BaseException:
        os.close(handle)
        raise
    return handle


def store(handle: int, view: memoryview, offset_bytes: int) -> None:
    """Writes all bytes of the view at an offset."""
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done : done + _WRITE_BYTES], offset_bytes + done)


def start_writeback(handle: int, offset_bytes: int, length_bytes: int) -> None:
    """Has the kernel begin to write a range to the disk, without waiting for it. Only a hint: errors show in fsync."""
    _libc().sync_file_range(handle, offset_bytes, length_bytes, _SYNC_FILE_RANGE_WRITE)


def sync_directory(path: Path) -> None:
    """Makes the entries of a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
