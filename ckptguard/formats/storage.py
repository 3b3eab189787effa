"""The only place that touches the files of a checkpoint: listing, positioned reads, containment."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar

from ckptguard.core.errors import DamagedError, EnvironmentFailedError, NotFoundError
from ckptguard.core.index import FileEntry, Span
from ckptguard.core.problems import Problem

_OPEN_FILES = 256
FOREIGN_FOLDERS = frozenset({".git", ".cache"})


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that it is there whole or not at all: temporary name, fsync, rename, fsync of the directory.

    Raises:
        EnvironmentFailedError: Disk full, no permission, read-only file system; nothing is left behind.
    """
    from ckptguard.formats.remote import RemotePath  # which imports this module

    if isinstance(path, RemotePath):
        path.write_bytes(data)  # objects appear whole or not at all by themselves
        return
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise EnvironmentFailedError(
            f"{path}: cannot be written: {error.strerror}",
            next_step="Free space or permission there, or write elsewhere with -o.",
        ) from error


class Directory:
    """Files below one directory, read by position.

    Thread-safe; every method is idempotent. Names are POSIX paths relative to the root and never lead out of it: a
    symlink that does is refused, except into ``blobs`` (the Hugging Face cache's own store, two levels up).
    """

    local: ClassVar[bool] = True  # whether its files have handles (``reading``)

    def __init__(self, root: Path, *, blobs: Path | None = None) -> None:
        self.root = root
        self._real_root = root.resolve()
        self._blobs = blobs.resolve() if blobs else None
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all handles; later reads open them again."""
        with self._lock:
            for handle in self._handles.values():
                os.close(handle.number)
            self._handles.clear()

    @cached_property
    def listing(self) -> Mapping[str, FileEntry]:
        """Every file below the root, by relative path, sorted; symlinks to files resolved, to directories not entered.

        ``.git`` and ``.cache`` directly below the root are left out: a clone's history, huggingface_hub's download state.
        """
        found: dict[str, FileEntry] = {}
        pending = [""]
        while pending:
            below = pending.pop()
            with os.scandir(self.root / below) as entries:
                for entry in entries:
                    name = f"{below}/{entry.name}" if below else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if name not in FOREIGN_FOLDERS:
                            pending.append(name)
                    else:
                        found[name] = self._entry(name, entry)
        return dict(sorted(found.items()))

    def _entry(self, name: str, entry: os.DirEntry[str]) -> FileEntry:
        if not entry.is_symlink():
            return FileEntry(name, entry.stat().st_size)
        target = Path(os.path.realpath(entry.path))
        size = target.stat().st_size if target.is_file() else -1
        return FileEntry(name, size, str(target), self._contains(target))

    def _contains(self, real: Path) -> bool:
        return real.is_relative_to(self._real_root) or (self._blobs is not None and real.is_relative_to(self._blobs))

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.root / name).is_file()

    def size(self, name: str) -> int:
        """Size of a file in bytes.

        Raises:
            NotFoundError: The file is not there.
        """
        entry = self.listing.get(name)
        if entry is None or entry.size_bytes < 0:
            raise NotFoundError(f"{self.root / name}: no such file, though the checkpoint names it")
        return entry.size_bytes

    def read(self, name: str) -> bytes:
        """All bytes of a (small) file."""
        return self.read_span(Span(name, 0, self.size(name)))

    def read_span(self, span: Span) -> bytes:
        """The bytes of a span.

        Raises:
            DamagedError: The file ends before the span does.
        """
        size = self.size(span.file)
        if span.offset_bytes < 0 or span.length_bytes < 0 or span.end_bytes > size:
            raise self._short(span, size)
        out = bytearray(span.length_bytes)
        self.read_into(span.file, span.offset_bytes, memoryview(out))
        return bytes(out)

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fills the buffer from the file, beginning at the offset.

        Raises:
            DamagedError: The file ends before the buffer is full.
            EnvironmentFailedError: The file system reports an error.
        """
        try:
            with self.reading(name) as handle:
                done = 0
                while done < len(buffer):
                    count = os.preadv(handle, [buffer[done:]], offset_bytes + done)
                    if count == 0:
                        raise self._short(Span(name, offset_bytes, len(buffer)), offset_bytes + done)
                    done += count
        except OSError as error:
            raise EnvironmentFailedError(
                f"{self.root / name}: reading {len(buffer)} bytes at {offset_bytes} failed: {error.strerror}",
                next_step="Check the file system, then run the command again.",
            ) from error

    def _short(self, span: Span, size: int) -> DamagedError:
        message = f"{self.root / span.file}: {size} bytes, but bytes {span.offset_bytes} to {span.end_bytes} are needed"
        problem = Problem("size", message, file=span.file, bytes_range=(span.offset_bytes, span.end_bytes))
        return DamagedError(
            message, problems=[problem], next_step="The file is cut short: get it again from its source."
        )

    @contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """A handle that stays open for the time of the block; the longest unused ones are closed beyond a limit."""
        with self._lock:
            handle = self._handles.pop(name, None) or _Handle(self._open(name))
            self._handles[name] = handle
            handle.readers += 1
            idle = [n for n, h in self._handles.items() if not h.readers] if len(self._handles) > _OPEN_FILES else []
            for old in idle[: len(self._handles) - _OPEN_FILES]:
                os.close(self._handles.pop(old).number)
        try:
            yield handle.number
        finally:
            with self._lock:
                handle.readers -= 1

    def checked_path(self, name: str) -> Path:
        """The real path of a file.

        Raises:
            DamagedError: The name or a symlink leads out of the directory.
        """
        parts = PurePosixPath(name)
        real = Path(os.path.realpath(self.root / name))
        if parts.is_absolute() or ".." in parts.parts or not self._contains(real):
            message = f"{name}: leads out of the checkpoint directory (to {real})"
            raise DamagedError(message, problems=[Problem("escape", message, file=name)])
        return real

    def _open(self, name: str) -> int:
        try:
            return os.open(self.checked_path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{self.root / name}: no such file, though the checkpoint names it") from error
        except OSError as error:
            raise EnvironmentFailedError(f"{self.root / name}: cannot be opened: {error.strerror}") from error


@dataclass(slots=True)
class _Handle:
    """An open file and how many reads are under way on it."""

    number: int
    readers: int = 0
