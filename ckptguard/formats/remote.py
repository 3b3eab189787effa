"""Checkpoints at URLs (``s3://``, ``gs://``, ``memory://``...), through whichever fsspec file system serves them.

Source: fsspec/spec.py and asyn.py (2026.9) for ``info``, ``ls``, ``find``, ``cat_file`` and ``cat_ranges``;
s3fs/core.py (2026.9). Credentials, endpoints and time-outs are those of fsspec's configuration and of the store's own library;
none is taken from a URL. fsspec is imported when the first URL is met.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from ckptguard.core.errors import (
    CkptguardError,
    DamagedError,
    EnvironmentFailedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ckptguard.core.index import FileEntry, Span
from ckptguard.core.problems import Problem
from ckptguard.formats.storage import FOREIGN_FOLDERS, Directory

UNFINISHED = ".ckptguard-journal/run.json"  # below a target at a URL for as long as it is not whole
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SMALL_BYTES = 64 << 10  # shorter reads are served from blocks: they are headers, and their neighbours come next
_BLOCK_BYTES = 256 << 10
_MOST_BLOCKS = 64
_RANGE_BYTES = 4 << 20  # longer reads are cut into ranges, which an asynchronous file system gets side by side


def path_of(text: str | os.PathLike[str]) -> Path:
    """What a path or URL on the command line names: a local path (also for ``file://``), or a ``RemotePath``.

    Raises:
        UsageError: No file system serves such URLs, or the URL carries a password.
        EnvironmentFailedError: The package that serves them is not installed, or refuses to begin.
    """
    if isinstance(text, RemotePath):
        return text
    text = os.fspath(text)
    if not _URL.match(text):
        return Path(text)
    scheme, _, rest = text.partition("://")
    if scheme.lower() in ("file", "local"):
        return Path(unquote(rest))
    if urlsplit(text).password is not None:
        raise UsageError(
            f"a {scheme}:// URL with a password in it",
            next_step="Leave it out of the URL: put it where the store's own tools look for it, or in fsspec's configuration.",
        )
    return _opened(scheme.lower(), text)


def _opened(scheme: str, text: str) -> RemotePath:
    import fsspec

    if scheme in ("http", "https"):
        raise UnsupportedError(
            f"{_without_query(text)}: a web server does not list its files",
            next_step="Give the store's own URL (s3://, gs://), or a hub id org/name.",
        )
    try:
        # Other processes write too: what a store lists must never be a memory of what it listed.
        files, key = fsspec.url_to_fs(text, use_listings_cache=False)
    except ImportError as error:
        raise EnvironmentFailedError(
            f"{scheme}:// URLs need a package that is not installed: {error}",
            next_step="Install it beside ckptguard; for s3:// that is pip install 'ckptguard[s3]'.",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{scheme}:// is not a kind of URL that fsspec knows ({error})",
            next_step="See fsspec.available_protocols().",
        ) from error
    except Exception as error:  # fsspec's file systems have no common error: each raises its library's own
        raise _failed(f"{scheme}://", "cannot be used", error) from error
    return RemotePath(Store(files, scheme), key)


@dataclass(frozen=True, slots=True)
class Store:
    """A file system and the scheme of its URLs."""

    files: Any
    scheme: str

    def url(self, key: str) -> str:
        """The URL of a path in the file system."""
        return f"{self.scheme}://{key.lstrip('/')}"

    @contextmanager
    def asked(self, key: str, doing: str, *, there: bool = True) -> Iterator[None]:
        """Turns whatever the file system raises in the block into errors of ours that name the URL.

        Args:
            key: Path in the file system.
            doing: What the block does, as in "cannot be read".
            there: The path is expected to be there.

        Raises:
            NotFoundError: It is not.
            EnvironmentFailedError: Anything else: network, credentials, a fault of the store.
        """
        try:
            yield
        except CkptguardError:
            raise
        except FileNotFoundError as error:
            if not there:
                raise _failed(self.url(key), doing, error) from error
            raise NotFoundError(f"{self.url(key)}: no such file, though the checkpoint names it") from error
        except Exception as error:  # fsspec's file systems have no common error: each raises its library's own
            raise _failed(self.url(key), doing, error) from error


def _failed(url: str, doing: str, error: Exception) -> EnvironmentFailedError:
    """The error in our words. Libraries put signed URLs into their messages: what follows a ``?`` is left out."""
    lines = _without_query(str(error)).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    denied = isinstance(error, PermissionError) or "credential" in type(error).__name__.lower()
    step = "Check your credentials for this store" if denied else "Check the network and the store's endpoint"
    return EnvironmentFailedError(f"{url}: {doing}: {said}", next_step=f"{step}, then run the command again.")


def _without_query(text: str) -> str:
    return re.sub(r"\?\S*", "", text)


class RemotePath(PosixPath):
    """A path in a store that reads like a local one. Its text is the URL.

    What is not offered here ends in ``__fspath__``, which says that the file is on no local disk: a URL is never taken for
    the local path ``s3:/...``.
    """

    __slots__ = ("_known", "store")

    def __init__(self, store: Store, *segments: str | os.PathLike[str]) -> None:
        super().__init__(*segments)
        self.store = store
        self._known: Mapping[str, Any] | None = None

    def with_segments(self, *segments: str | os.PathLike[str]) -> Self:
        """A path of the same store; pathlib makes all derived paths with it."""
        return type(self)(self.store, *segments)

    @property
    def key(self) -> str:
        """The path as the file system names it."""
        return super().__str__()

    def __str__(self) -> str:
        return self.store.url(self.key)

    def __fspath__(self) -> str:
        raise UnsupportedError(
            f"{self}: this needs files on a local disk",
            next_step="Copy it to a disk with the store's own tools, then give that directory.",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return path_of, (str(self),)

    def _info(self) -> Mapping[str, Any] | None:
        """What the store says of it; None if nothing is there."""
        if self._known is not None:
            return self._known
        with self.store.asked(self.key, "cannot be looked up"), suppress(FileNotFoundError):
            found: Mapping[str, Any] = self.store.files.info(self.key)
            return found
        return None

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether an object, or anything below it, is there."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether it is an object."""
        return (self._info() or {}).get("type") == "file"

    def is_dir(self) -> bool:
        """Whether objects are below it."""
        return (self._info() or {}).get("type") == "directory"

    def is_mount(self) -> bool:
        """Never."""
        return False

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def resolve(self, strict: bool = False) -> Self:
        """Itself."""
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size and time of last change of an object; 0 for a time that the store does not tell."""
        with self.store.asked(self.key, "cannot be looked up"):
            size = self.store.files.info(self.key)["size"]
            try:
                changed = self.store.files.modified(self.key).timestamp()
            except NotImplementedError:
                changed = 0.0
        values = (stat.S_IFREG, 0, 0, 1, 0, 0, size, *[int(changed)] * 3)
        return os.stat_result(values, {"st_mtime_ns": int(changed * 1_000_000) * 1000})

    def iterdir(self) -> Generator[Self, None, None]:
        """What is directly below it. Each knows from the listing what it is, so that asking again costs no request."""
        with self.store.asked(self.key, "cannot be listed"):
            entries = self.store.files.ls(self.key, detail=True)
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            path = self.with_segments(self.key, name)
            if path.key.strip("/") != self.key.strip("/"):  # a marker of the directory itself
                path._known = entry
                yield path

    def read_bytes(self) -> bytes:
        """All bytes of a small object."""
        with self.store.asked(self.key, "cannot be read"):
            return bytes(self.store.files.cat_file(self.key))

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The text of a small object."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        """Makes an object, at once and whole."""
        with self.store.asked(self.key, f"cannot be written ({len(data)} bytes)", there=False):
            self.store.files.pipe_file(self.key, bytes(data))
        return len(data)


class RemoteDirectory(Directory):
    """Objects below one URL, read by ranges. Short reads go through a few blocks that are kept.

    Args:
        root: The URL.
        only: The one object directly below it that counts; all by default.
    """

    local = False

    def __init__(self, root: RemotePath, *, only: str | None = None) -> None:  # holds no handles, unlike its base
        self.root: RemotePath = root
        self._store = root.store
        self.only = only
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Forgets the blocks."""
        with self._lock:
            self._blocks.clear()

    @cached_property
    def listing(self) -> Mapping[str, FileEntry]:
        """Every object below the root, as in ``Directory``."""
        if self.only is not None:
            return {self.only: FileEntry(self.only, (self.root / self.only).stat().st_size)}
        prefix = f"{self.root.key.rstrip('/')}/"
        with self._store.asked(self.root.key, "cannot be listed"):
            entries = self._store.files.find(self.root.key, detail=True)
        found = {}
        for key, entry in entries.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and entry["type"] == "file" and name and not name.endswith("/"):
                found[name] = FileEntry(name, int(entry["size"]))
        return {n: e for n, e in sorted(found.items()) if n.partition("/")[0] not in FOREIGN_FOLDERS or "/" not in n}

    def exists(self, name: str) -> bool:
        """Whether the object is there."""
        return (self.root / name).is_file()

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        """As ``Directory.read_into``.

        Raises:
            DamagedError: The object ends before the buffer is full.
            NotFoundError: It is not there, or no longer.
            EnvironmentFailedError: The store cannot be reached, or refuses.
        """
        end, size = offset_bytes + len(buffer), self.size(name)
        if end > size:
            raise self._short(Span(name, offset_bytes, len(buffer)), size)
        if len(buffer) < _SMALL_BYTES:
            self._from_blocks(name, offset_bytes, buffer)
            return
        self._ranges(name, offset_bytes, buffer)

    def _from_blocks(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            number, inside = divmod(offset_bytes + done, _BLOCK_BYTES)
            part = self._block(name, number)[inside : inside + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def _block(self, name: str, number: int) -> bytes:
        with self._lock:
            block = self._blocks.get((name, number))
            if block is not None:
                self._blocks.move_to_end((name, number))
                return block
        begin = number * _BLOCK_BYTES
        data = bytearray(min(_BLOCK_BYTES, self.size(name) - begin))
        self._ranges(name, begin, memoryview(data))
        with self._lock:
            self._blocks[name, number] = bytes(data)
            while len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        return bytes(data)

    def _ranges(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        key = self._key(name)
        begins = range(offset_bytes, offset_bytes + len(buffer), _RANGE_BYTES)
        ends = [min(begin + _RANGE_BYTES, offset_bytes + len(buffer)) for begin in begins]
        with self._store.asked(key, f"reading {len(buffer)} bytes at {offset_bytes} failed"):
            try:
                if len(ends) == 1:
                    parts = [self._store.files.cat_file(key, start=offset_bytes, end=ends[0])]
                else:
                    parts = self._store.files.cat_ranges([key] * len(ends), list(begins), ends)
                for part in parts:
                    if isinstance(part, Exception):  # asynchronous file systems return what went wrong
                        raise part
            except OSError:
                self._refuse_shortened(name, Span(name, offset_bytes, len(buffer)))
                raise
        for begin, end, part in zip(begins, ends, parts, strict=True):
            if len(part) != end - begin:
                raise self._short(Span(name, offset_bytes, len(buffer)), begin + len(part))
            buffer[begin - offset_bytes : end - offset_bytes] = part

    def _refuse_shortened(self, name: str, span: Span) -> None:
        """A range beyond the end is an error of the store: tells an object that was replaced by a shorter one."""
        size = span.end_bytes
        with suppress(Exception):  # the store may be gone altogether; then that is what is told
            size = int(self._store.files.info(self._key(name))["size"])
        if size < span.end_bytes:
            raise self._short(span, size)

    def _key(self, name: str) -> str:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            message = f"{name}: leads out of the checkpoint directory"
            raise DamagedError(message, problems=[Problem("escape", message, file=name)])
        return f"{self.root.key.rstrip('/')}/{name}"

    def checked_path(self, name: str) -> Path:
        """The object's path.

        Raises:
            DamagedError: The name leads out of the directory.
        """
        return self.root.with_segments(self._key(name))

    @contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """No handle: -1, from which every read fails."""
        yield -1


def directory(path: Path) -> Directory:
    """The files below a local path or a URL."""
    return RemoteDirectory(path) if isinstance(path, RemotePath) else Directory(path)


def refuse_unfinished(where: Path) -> None:
    """Raises DamagedError if a target at a URL is not whole yet: stores have no rename that would make it appear at once."""
    if not isinstance(where, RemotePath):
        return
    for root in (where, where.parent):
        if root.key.strip("./") and (root / UNFINISHED).is_file():
            message = f"{root}: unfinished: {UNFINISHED} is there, which the command that writes it removes at the end"
            raise DamagedError(
                message,
                problems=[Problem("missing-file", message, file=UNFINISHED)],
                next_step="Run the command that was writing it again with the same arguments: it goes on where it stopped.",
            )
