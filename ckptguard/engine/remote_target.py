"""Writes a target at a URL: streams of windows, one file a thread, nothing on the local disk.

A store has neither rename nor partial writes. Objects appear whole when they are closed, so the target is made where it will
be: large files first, each noted by an object of the journal below ``.ckptguard-journal/``, small files without which the whole
is not readable last. The journal's head says that the target is unfinished; removing it is what makes the target whole.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

from blake3 import blake3

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.core.writing import (
    Fill,
    TargetFile,
    WritePlan,
    check_relative,
    widest_piece,
    windows,
)
from ckptguard.engine.workers import BUFFER_BYTES, SILENT, Buffers, Progress, default_threads
from ckptguard.engine.write_digests import FileHasher
from ckptguard.engine.write_windows import Closings, provide
from ckptguard.fingerprint.manifest import FileDigest
from ckptguard.formats.remote import UNFINISHED, RemoteDirectory, RemotePath

_FORMAT = "ckptguard-remote-journal/1"
_FOLDER = UNFINISHED.partition("/")[0] + "/"
_PART_BYTES = 8 << 20  # of an upload: S3 takes no less than 5 MiB, Google no odd multiple of 256 KiB
_MOST_PARTS = 9_000  # S3 takes 10,000 parts (its limits for multipart uploads)
_COPIES = 3  # of a part, on its way through the store's library
_LEAST_THREADS = 8  # they wait for the network more than they work


class RemoteStaging:
    """A target at a URL that is not whole yet. Use as a context manager; leaving it keeps what is there for a later run.

    There is no lock: of two runs of one identity at once, each writes the same bytes to the same names.

    Attributes:
        path: The target, which is made in place.
        identity: Of the run that it belongs to.
    """

    def __init__(self, path: RemotePath, identity: str, noted: Mapping[str, FileDigest]) -> None:
        self.path = path
        self.identity = identity
        self._noted = dict(noted)
        self._files = path.store.files

    @classmethod
    def open(cls, dst: RemotePath, identity: str, *, what: str) -> RemoteStaging:
        """Begins a target, or finds what an earlier run left of it.

        Args:
            dst: The target; nothing is there but what an earlier run of this identity left.
            identity: Digest of everything that the result depends on.
            what: The run in the user's words, for messages of a later run.

        Raises:
            UsageError: Something is there already, or another run's leftovers are.
            EnvironmentFailedError: The store cannot be reached, or refuses.
        """
        with RemoteDirectory(dst) as files:
            there = files.listing
            head = _parsed(files.read(UNFINISHED)) if UNFINISHED in there else {}
            journal = [name for name in there if name.startswith(_FOLDER)]
            if not head:
                staging = cls(dst, identity, {})
                staging._remove(journal)  # of a run that was killed when all but this was done
                _refuse_present(dst, len(there) - len(journal))
                head = {"format": _FORMAT, "identity": identity, "what": what}
                (dst / UNFINISHED).write_bytes(json.dumps(head).encode())
                return staging
            if (head.get("format"), head.get("identity")) != (_FORMAT, identity):
                raise UsageError(
                    f"{dst}: left by {head.get('what', 'another run')}, which was started with other arguments",
                    next_step="Run that one again with its arguments, or remove what is there.",
                )
            entries = (_parsed(files.read(name)) for name in journal if name != UNFINISHED)
            return cls(dst, identity, dict(_finished(entry) for entry in entries if entry))

    def __enter__(self) -> RemoteStaging:
        return self

    def __exit__(self, *exc: object) -> None:
        """Does nothing: there is no lock to give back."""

    def resume(self, sizes_bytes: Mapping[str, int]) -> dict[str, FileDigest]:
        """Finished files of an earlier run that are still there in full. Removes all others, and what is not planned.

        An object appears only when all of it was taken, so its size is checked and its bytes are not read again.

        Args:
            sizes_bytes: Size of every planned file, by path.
        """
        with RemoteDirectory(self.path) as files:
            there = {name: entry.size_bytes for name, entry in files.listing.items()}
        whole = {
            name: digest
            for name, digest in self._noted.items()
            if sizes_bytes.get(name) == digest.size_bytes == there.get(name)
        }
        kept = {UNFINISHED, *whole, *map(_note_name, whole)}
        self._remove([name for name in there if name not in kept])
        self._noted = dict(whole)
        return whole

    @contextmanager
    def uploading(self, name: str, size_bytes: int) -> Iterator[Callable[[memoryview], None]]:
        """A stream into a file, which appears when the block ends. When it raises, the file does not appear.

        Args:
            name: Path relative to the target.
            size_bytes: How many bytes will come.
        """
        key, doing = (self.path / name).key, f"cannot be written ({size_bytes} bytes)"
        asked = self.path.store.asked
        with asked(key, doing, there=False):
            file = self._files.open(key, "wb", block_size=part_bytes(size_bytes))

        def upload(view: memoryview) -> None:
            with asked(key, doing, there=False):
                file.write(view)

        try:
            yield upload
            with asked(key, doing, there=False):
                file.close()
        except BaseException:
            self._abandon(file, key)
            raise

    def _abandon(self, file: Any, key: str) -> None:
        """Gives up an upload. Left to itself the file would complete it, cut short, when it is collected."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):  # the store may be what failed; what the upload took is not visible there
            if isinstance(file, AbstractBufferedFile):
                file.discard()
            else:
                file.close()
                self._files.rm_file(key)
        if isinstance(file, AbstractBufferedFile):
            file.closed = True

    def note(self, name: str, digest: FileDigest) -> None:
        """Records a finished file. Thread-safe."""
        entry = {
            "file": name,
            "bytes": digest.size_bytes,
            "blake3": digest.blake3,
            "block_bytes": digest.block_bytes,
            "blocks": base64.b64encode(digest.blocks).decode(),
        }
        (self.path / _note_name(name)).write_bytes(json.dumps(entry).encode())
        self._noted[name] = digest

    def commit(self, last: Mapping[str, bytes]) -> None:
        """Writes the small last files in the order given, then says that the target is whole by removing the journal.

        Args:
            last: Content by path relative to the target; what makes the whole readable comes last.

        Raises:
            EnvironmentFailedError: The store cannot be reached or refuses, or a file is no longer as it was written.
        """
        with RemoteDirectory(self.path) as files:
            there = {name: entry.size_bytes for name, entry in files.listing.items()}
        for name, digest in self._noted.items():
            if there.get(name) != digest.size_bytes:
                raise EnvironmentFailedError(
                    f"{self.path / name}: {there.get(name, 'no')} bytes, but {digest.size_bytes} were written",
                    next_step="See who else writes there, then run the same command again.",
                )
        for name, data in last.items():
            check_relative(name)
            (self.path / name).write_bytes(data)
        self._remove([UNFINISHED])
        self._remove([name for name in there if name.startswith(_FOLDER) and name != UNFINISHED])

    def distrust(self) -> None:
        """Removes everything: what was written is not what it should be, and no later run may go on from it."""
        with RemoteDirectory(self.path) as files:
            there = [name for name in files.listing if name != UNFINISHED]
        self._remove(there)
        self._remove([UNFINISHED])

    def _remove(self, names: list[str]) -> None:
        if names:
            with self.path.store.asked(self.path.key, "cannot be tidied up", there=False):
                self._files.rm([(self.path / name).key for name in names])


def write_remote(
    plan: WritePlan,
    staging: RemoteStaging,
    fill: Fill,
    *,
    memory_bytes: int = 2 << 30,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, FileDigest]:
    """Writes all files of a plan to where the target will be, but those that an earlier run finished.

    Every file is in the store and in the journal when this returns. When it raises, the finished ones are.

    Args:
        plan: What to write; of the same identity as the staging.
        staging: Where.
        fill: Provides the elements.
        memory_bytes: Most bytes of buffers.
        threads: Files that are under way at once; by default as many as cores, eight at least.
        progress: Hears of the bytes done.

    Returns:
        Digests of all files, in the plan's order, computed from memory on the way to the store.

    Raises:
        UsageError: The memory does not hold one window and one part of an upload.
        EnvironmentFailedError: The store cannot be reached, or refuses.
    """
    assert plan.identity == staging.identity
    sizes = {file.path: file.size_bytes for file in plan.files}
    window_bytes = max(BUFFER_BYTES, widest_piece(plan))
    needed_bytes = window_bytes + _COPIES * part_bytes(max(sizes.values(), default=0))
    if needed_bytes > memory_bytes:
        raise UsageError(
            f"{memory_bytes} bytes of memory are too few: one file of this plan needs {needed_bytes} on its way to a store",
            next_step=f"Allow at least {needed_bytes} bytes.",
        )
    digests = staging.resume(sizes)
    rest = [file for file in plan.files if file.path not in digests]
    progress.start("writing", sum(file.size_bytes for file in rest))
    count = min(threads or max(default_threads(), _LEAST_THREADS), memory_bytes // needed_bytes)
    buffers, stop = Buffers(window_bytes), threading.Event()

    def work(file: TargetFile) -> None:
        try:
            digest = _stream(file, staging, fill, buffers.view, stop, progress)
            staging.note(file.path, digest)
        except BaseException:
            stop.set()
            raise
        digests[file.path] = digest

    with ThreadPoolExecutor(count, thread_name_prefix="ckptguard-upload") as pool:
        tasks = [pool.submit(work, file) for file in rest]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            stop.set()
            for task in tasks:
                task.cancel()
            raise
    return {name: digests[name] for name in sizes}


class _Stopped(Exception):  # noqa: N818 -- no error: another thread has raised it
    """Another thread failed, or the user interrupted."""


def _stream(
    file: TargetFile, staging: RemoteStaging, fill: Fill, buffer: memoryview, stop: threading.Event, progress: Progress
) -> FileDigest:
    """Makes, digests and uploads one file, window after window."""
    hasher, closings = FileHasher(file.size_bytes), Closings()
    with staging.uploading(file.path, file.size_bytes) as upload:
        for window in windows(file, len(buffer)):
            if stop.is_set():
                raise _Stopped
            view = buffer[: window.length_bytes]
            provide(fill, window.pieces, view)
            closings.make(window, view)
            hasher.update(view)
            upload(view)
            progress.advance(len(view))
    return hasher.finish()


def part_bytes(size_bytes: int) -> int:
    """Size in which a file is uploaded: whole parts of 8 MiB, few enough for the largest file."""
    return max(1, -(-size_bytes // (_PART_BYTES * _MOST_PARTS))) * _PART_BYTES


def _refuse_present(dst: RemotePath, count: int) -> None:
    if count or dst.is_file():
        raise UsageError(
            f"{dst}: is there already ({count or 1} objects); only an absent or empty place can become the target",
            next_step="Give another target, or move this one away.",
        )


def _note_name(name: str) -> str:
    return f"{_FOLDER}{blake3(name.encode()).hexdigest()[:32]}.json"


def _parsed(data: bytes) -> dict[str, Any]:
    """An object of the journal; empty if it is none."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _finished(entry: Mapping[str, Any]) -> tuple[str, FileDigest]:
    blocks = base64.b64decode(entry["blocks"])
    return entry["file"], FileDigest(entry["bytes"], entry["blake3"], entry["block_bytes"], blocks)
