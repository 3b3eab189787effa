"""Puts a file of this node into the staging directory without moving its bytes: a reflink, or else a hard link.

A reflink (ioctl FICLONE: linux/fs.h; btrfs, XFS, NFS 4.2...) comes first: it stays as it is when its original is written to.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from ckptguard.view.filling import UNIT_BYTES, WINDOW_BYTES, SourceError, differing, partial_of, remove, writing
from ckptguard.view.server import Stamp
from ckptguard.view.values import Digest

_FICLONE = 0x40049409
_CANNOT_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EBADF}
)
# EPERM: a file system without links, or protected_hardlinks (Documentation/admin-guide/sysctl/fs.rst).
_CANNOT_LINK = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP}
)


def clone_or_link(
    real: Path,
    final: Path,
    digest: Digest,
    stamp: Stamp | None,
    needed_bytes: Callable[[], int],
    recheck: memoryview | None = None,
) -> str:
    """Makes ``final`` a clone of, or a link to, a file. Returns ``cloned`` or ``linked``; "" where neither can be.

    Args:
        real: The file, symlinks resolved.
        final: Where it is to be; what is there is replaced.
        digest: What it was when it was checked.
        stamp: From before it was checked; by default only its size counts.
        needed_bytes: Tells, for messages, how many bytes are still to come in all.
        recheck: A buffer of ``UNIT_BYTES``, to read all of it again; None to trust size and stamp.

    Raises:
        SourceError: It has changed since it was checked, or cannot be read.
        EnvironmentFailedError: The staging directory cannot be written.
    """
    before = _stamp_of(real)
    if before.size_bytes != digest.size_bytes or (stamp is not None and before != stamp):
        raise SourceError(
            f"{real} changed since it was checked: {before.size_bytes} bytes, {digest.size_bytes} checked"
        )
    partial = partial_of(final)
    with writing(final, needed_bytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        how = "cloned" if _clone(real, partial) else "linked" if _link(real, partial) else ""
    if not how:
        return ""
    try:
        made = _stamp_of(partial)
        if made.size_bytes != digest.size_bytes or _stamp_of(real) != before:
            raise SourceError(f"{real} changed while it was {how}")
        if recheck is not None:
            _recheck(partial, real, digest, recheck)
    except SourceError:
        partial.unlink(missing_ok=True)
        raise
    with writing(final, needed_bytes):
        if final.is_dir():
            remove(final)
        os.replace(partial, final)
        partial.unlink(missing_ok=True)  # between two names of one file a rename does nothing (rename(2))
    return how


def _stamp_of(path: Path) -> Stamp:
    try:
        return Stamp.of(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be looked up: {error.strerror}") from error


def _clone(real: Path, partial: Path) -> bool:
    try:
        source = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{real}: cannot be opened: {error.strerror}") from error
    try:
        target = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(target, _FICLONE, source)
            os.fsync(target)
        except OSError as error:
            partial.unlink()
            if error.errno not in _CANNOT_CLONE:
                raise
            return False
        finally:
            os.close(target)
    finally:
        os.close(source)
    return True


def _link(real: Path, partial: Path) -> bool:
    try:
        partial.hardlink_to(real)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True


def _recheck(partial: Path, real: Path, digest: Digest, buffer: memoryview) -> None:
    hasher, blocks, at = blake3(), bytes.fromhex(digest.blocks), 0
    step = max(1, WINDOW_BYTES // digest.block_bytes) * digest.block_bytes if digest.block_bytes else WINDOW_BYTES
    assert step <= UNIT_BYTES
    try:
        with partial.open("rb", buffering=0) as file:
            while count := file.readinto(buffer[:step]):
                view = buffer[:count]
                if not digest.block_bytes:
                    hasher.update(view)
                elif wrong := differing(digest, blocks, at // digest.block_bytes, view):
                    begin = wrong[0] * digest.block_bytes
                    raise SourceError(f"{real}: block {wrong[0]} (from byte {begin}) changed since it was checked")
                at += count
    except OSError as error:
        raise SourceError(f"{real}: cannot be read: {error.strerror}") from error
    if at != digest.size_bytes or (not digest.block_bytes and hasher.hexdigest() != digest.blake3):
        raise SourceError(f"{real} changed since it was checked: its digest is another one now")
