"""One file of a staging directory: filled with blocks from a source, each checked before it is written, then given its name.

Until then it is ``NAME.partial``. Blocks of it that an earlier attempt left, and that are what they must be, are not got again:
the digests alone say which, so no journal is needed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from ckptguard.core.errors import CkptguardError, EnvironmentFailedError
from ckptguard.engine.write_calls import start_writeback, store
from ckptguard.view.directories import free_bytes
from ckptguard.view.fetching import BrokenError
from ckptguard.view.server import Arriving
from ckptguard.view.values import Digest

PARTIAL = ".partial"
WINDOW_BYTES = 1 << 20  # checked and written while it is in a core's cache
UNIT_BYTES = 8 << 20  # of one request
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Source(Protocol):
    """Where the bytes come from."""

    @property
    def how(self) -> str:
        """What ``Delivered.how`` says of it."""

    @property
    def title(self) -> str:
        """For messages."""

    def read(self, offset_bytes: int, lengths_bytes: Sequence[int], buffer: memoryview) -> Iterator[memoryview]:
        """Yields neighbouring ranges; as ``Peer.read``."""


class SourceError(Exception):
    """A source cannot give a file, in a sentence. The run goes on with the other files.

    ``unreachable``: for want of the node that has it, not for what the file is.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


@dataclass(slots=True)
class Unit:
    """Neighbouring blocks that are asked for at once.

    Attributes:
        first: Number of the first block.
        stop: Number of the block after the last.
        missing: Numbers of those that are still to come; None until it is known what an earlier attempt left.
    """

    first: int
    stop: int
    missing: list[int] | None = None


class Filling:
    """A file that is being filled by several threads.

    Args:
        name: In the view.
        final: Where it will be.
        digest: What it must be.
        source: Where it comes from.
        arriving: Hears which blocks are there.
        needed_bytes: Tells, for messages, how many bytes are still to come in all.
    """

    def __init__(
        self,
        name: str,
        final: Path,
        digest: Digest,
        source: Source,
        arriving: Arriving,
        needed_bytes: Callable[[], int],
    ) -> None:
        self.name = name
        self.final = final
        self.partial = partial_of(final)
        self.digest = digest
        self.source = source
        self.moved_bytes = 0
        self._arriving = arriving
        self._needed_bytes = needed_bytes
        self._blocks = bytes.fromhex(digest.blocks)
        self._earlier_bytes = 0
        self._lock = threading.Lock()
        self._open_units = len(range(0, self._block_count, self._unit_blocks))

    @property
    def _block_bytes(self) -> int:
        return self.digest.block_bytes or max(1, self.digest.size_bytes)

    @property
    def _block_count(self) -> int:
        return -(-self.digest.size_bytes // self._block_bytes)

    @property
    def _unit_blocks(self) -> int:
        return max(1, UNIT_BYTES // self._block_bytes)

    def begin(self) -> Iterator[Unit]:
        """Makes the file, or takes what an earlier attempt left of it. Returns what there is to fill.

        Raises:
            EnvironmentFailedError: It cannot be written there.
        """
        with self._writing():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            if _own(self.final):
                os.replace(self.final, self.partial)
            elif not _own(self.partial):
                remove(self.partial)
            remove(self.final)
            handle = self._open(os.O_CREAT)
            try:
                self._earlier_bytes = os.fstat(handle).st_size
                if self._earlier_bytes > self.digest.size_bytes:
                    os.ftruncate(handle, self.digest.size_bytes)
            finally:
                os.close(handle)
        firsts = range(0, self._block_count, self._unit_blocks)
        return (Unit(first, min(first + self._unit_blocks, self._block_count)) for first in firsts)

    def fill(self, unit: Unit, buffer: memoryview) -> bool:
        """Gets what is missing of a unit. True if that was the last one that was to be filled.

        Args:
            unit: Which; remembers how far it came when an error is raised.
            buffer: At least ``UNIT_BYTES``.

        Raises:
            NotYetError: The source is still getting it itself.
            SourceError: The source cannot give it, or gives something else, twice.
            EnvironmentFailedError: It cannot be written.
        """
        with self._writing():
            handle = self._open()
        try:
            if unit.missing is None:
                unit.missing = self._absent(unit, handle, buffer)
            self._get(unit.missing, handle, buffer)
            with self._writing():
                start_writeback(handle, unit.first * self._block_bytes, (unit.stop - unit.first) * self._block_bytes)
        finally:
            with self._writing():
                os.close(handle)
        self._arriving.have(unit.first, unit.stop)
        with self._lock:
            self._open_units -= 1
            return not self._open_units

    def finish(self) -> str:
        """Makes it durable and gives it its name. Returns how it came.

        Raises:
            EnvironmentFailedError: The file system cannot keep it.
        """
        with self._writing():
            handle = self._open()
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(self.partial, self.final)
        self._arriving.whole(self.final)
        return self.source.how if self.moved_bytes or not self.digest.size_bytes else "kept"

    def _absent(self, unit: Unit, handle: int, buffer: memoryview) -> list[int]:
        """Blocks of a unit that the file does not hold yet."""
        if not self.digest.is_known:
            return list(range(unit.first, unit.stop))
        absent: list[int] = []
        for first, stop in self._windows(range(unit.first, unit.stop)):
            if not self.digest.block_bytes:
                there = self._earlier_bytes >= self.digest.size_bytes
                return [] if there and self._whole_digest(handle, buffer) == self.digest.blake3 else [0]
            begin, end = self._span(first, stop)
            written = (
                end if end <= self._earlier_bytes else self._earlier_bytes // self._block_bytes * self._block_bytes
            )
            view = buffer[: max(0, written - begin)]
            with self._writing():
                count = os.preadv(handle, [view], begin) if view else 0
            known = first + -(-len(view) // self._block_bytes) if count == len(view) else first
            absent += differing(self.digest, self._blocks, first, view) if known > first else []
            absent += range(known, stop)
        return absent

    def _whole_digest(self, handle: int, buffer: memoryview) -> str:
        hasher, size = blake3(), self.digest.size_bytes
        for at in range(0, size, WINDOW_BYTES):
            view = buffer[: min(WINDOW_BYTES, size - at)]
            with self._writing():
                hasher.update(view[: os.preadv(handle, [view], at)])
        return hasher.hexdigest()

    def _get(self, missing: list[int], handle: int, buffer: memoryview) -> None:
        """Gets missing blocks and strikes them off. What breaks off, and what comes wrong, is tried once more."""
        broken = wrong = False
        while missing:
            try:
                for first, stop in _runs(missing):
                    if self.digest.block_bytes:
                        self._get_blocks(missing, first, stop, handle, buffer)
                    else:
                        self._get_whole(missing, handle, buffer)
            except BrokenError as error:
                if broken:
                    raise SourceError(str(error), unreachable=True) from error
                broken = True
                continue
            if missing and wrong:
                raise SourceError(self._wrong(missing[0]))
            wrong = True

    def _get_blocks(self, missing: list[int], first: int, stop: int, handle: int, buffer: memoryview) -> None:
        windows = list(self._windows(range(first, stop)))
        spans = [self._span(*window) for window in windows]
        views = self._read(spans[0][0], [end - begin for begin, end in spans], buffer)
        for (low, high), (begin, _), view in zip(windows, spans, views, strict=True):
            wrong = set(differing(self.digest, self._blocks, low, view))
            good = [number for number in range(low, high) if number not in wrong]
            for begin_block, end_block in _runs(good):
                at, end = self._span(begin_block, end_block)
                with self._writing():
                    store(handle, view[at - begin : end - begin], at)
            struck = set(good)
            missing[:] = [number for number in missing if number not in struck]

    def _get_whole(self, missing: list[int], handle: int, buffer: memoryview) -> None:
        """A file without blocks, in one piece."""
        hasher, size, at = blake3(), self.digest.size_bytes, 0
        lengths = [min(WINDOW_BYTES, size - begin) for begin in range(0, size, WINDOW_BYTES)]
        for view in self._read(0, lengths, buffer):
            hasher.update(view)
            with self._writing():
                store(handle, view, at)
            at += len(view)
        if hasher.hexdigest() == self.digest.blake3:
            missing.clear()

    def _read(self, offset_bytes: int, lengths_bytes: Sequence[int], buffer: memoryview) -> Iterator[memoryview]:
        try:
            for view in self.source.read(offset_bytes, lengths_bytes, buffer):
                with self._lock:
                    self.moved_bytes += len(view)
                yield view
        except CkptguardError as error:
            raise SourceError(error.message) from error

    def _windows(self, blocks: range) -> Iterator[tuple[int, int]]:
        """Runs of blocks, half-open, that are read and checked at once."""
        step = max(1, WINDOW_BYTES // self._block_bytes)
        for first in range(blocks.start, blocks.stop, step):
            yield first, min(first + step, blocks.stop)

    def _span(self, first: int, stop: int) -> tuple[int, int]:
        return first * self._block_bytes, min(stop * self._block_bytes, self.digest.size_bytes)

    def _wrong(self, number: int) -> str:
        begin, end = self._span(number, number + 1)
        if not self.digest.block_bytes:
            return f"{self.source.title} gave other bytes than were checked, twice: BLAKE3 is not {self.digest.blake3}"
        return (
            f"block {number} (bytes {begin} to {end}) came wrong twice from {self.source.title}: its copy is not what was"
            " checked, or the way from there damages bytes"
        )

    def _open(self, flags: int = 0) -> int:
        return os.open(self.partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with writing(self.final, self._needed_bytes):
            yield


@contextmanager
def writing(path: Path, needed_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns an OSError of the block, which writes to a staging directory, into one error that ends the run.

    Raises:
        EnvironmentFailedError: Names the path; where the disk is full, also what is needed and what is free.
    """
    try:
        yield
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror}"
        if error.errno in _FULL:
            message += f"; {needed_bytes()} bytes are still to come, {free_bytes(path)} are free there"
        raise EnvironmentFailedError(
            message,
            next_step="Free space or permission there, or give a view on another file system. What has come is kept: the"
            " next attempt goes on from it.",
        ) from error


def partial_of(final: Path) -> Path:
    """What a file is called until it is whole."""
    return final.with_name(final.name + PARTIAL)


def differing(digest: Digest, blocks: bytes, first: int, view: memoryview) -> list[int]:
    """Numbers of the blocks in a view that are not what a digest says.

    Args:
        digest: Of the file.
        blocks: Its block digests as bytes.
        first: Number of the block with which the view begins.
        view: Whole blocks; the file's last one may be shorter.
    """
    size, wrong = digest.block_bytes, list[int]()
    if not digest.is_known:
        return wrong
    for at in range(0, len(view), size):
        number = first + at // size
        expected = int.from_bytes(blocks[8 * number : 8 * number + 8], "little")
        if xxh3_64_intdigest(view[at : at + size]) != expected:
            wrong.append(number)
    return wrong


def digest_problem(digest: Digest) -> str:
    """Why a digest cannot be used; "" if it can."""
    if digest.size_bytes < 0 or digest.block_bytes < 0 or digest.block_bytes > UNIT_BYTES:
        return f"its digest has {digest.size_bytes} bytes in blocks of {digest.block_bytes}"
    count = -(-digest.size_bytes // digest.block_bytes) if digest.block_bytes else 0
    if digest.is_known and len(digest.blocks) != 16 * count:
        return f"its digest has {len(digest.blocks) / 16:g} block digests, {count} expected"
    return ""


def _own(path: Path) -> bool:
    """Whether it is a file that may be written to: no symlink, and no link to a file that somebody else has."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def remove(path: Path) -> None:
    """Removes what stands where a file is to be made, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_own(path: Path, size_bytes: int) -> bool:
    """Whether a whole file of that size is there that nobody else has."""
    return _own(path) and path.lstat().st_size == size_bytes


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring numbers, half-open."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
