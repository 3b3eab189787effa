"""Runs a write plan: fills, digests and stores windows of files on a few threads, in memory that does not grow with them.

Every thread takes the next window of the current file, lets the caller fill it, waits until all bytes before it are digested,
digests it, and stores it. So one large file keeps all cores busy, though BLAKE3 and CRC-32 run in the file's order; and because
windows are handed out in that order, the window whose turn it is always has a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from ckptguard.core.errors import UsageError
from ckptguard.core.writing import (
    Fill,
    TargetFile,
    Window,
    WritePlan,
    widest_piece,
    windows,
)
from ckptguard.engine.staging import Staging
from ckptguard.engine.workers import BUFFER_BYTES, SILENT, Progress, aligned_buffer, default_threads
from ckptguard.engine.write_calls import create, start_writeback, store, writing
from ckptguard.engine.write_digests import FileHasher
from ckptguard.engine.write_windows import Closings, provide
from ckptguard.fingerprint.manifest import FileDigest

_PAGE_BYTES = 4096
_WRITEBACK_BYTES = 16 << 20


def write(
    plan: WritePlan,
    staging: Staging,
    fill: Fill,
    *,
    memory_bytes: int = 2 << 30,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, FileDigest]:
    """Writes all files of a plan into the staging directory, but those that an earlier run finished.

    Every file is on the disk and in the journal when this returns. When it raises, the finished ones are.

    Args:
        plan: What to write; of the same identity as the staging directory.
        staging: Where.
        fill: Provides the elements.
        memory_bytes: Most bytes of buffers.
        threads: Worker threads; as many as cores by default.
        progress: Hears of the bytes done.

    Returns:
        Digests of all files, in the plan's order, computed from memory on the way to the disk.

    Raises:
        UsageError: The memory does not hold one step of the elements.
        EnvironmentFailedError: Too little room on the disk (before the first byte, as far as can be known), or an error of the
            file system.
    """
    assert plan.identity == staging.identity
    sizes = {file.path: file.size_bytes for file in plan.files}
    count = max(1, min(threads or default_threads(), memory_bytes // (2 * _PAGE_BYTES)))
    share_bytes = memory_bytes // count // _PAGE_BYTES * _PAGE_BYTES
    window_bytes = max(min(BUFFER_BYTES, share_bytes - _PAGE_BYTES), widest_piece(plan))
    buffer_bytes = -(-window_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES
    if buffer_bytes > memory_bytes:
        raise UsageError(
            f"{memory_bytes} bytes of memory are too few: one piece of this plan needs {buffer_bytes}",
            next_step=f"Allow at least {buffer_bytes} bytes.",
        )
    digests = staging.resume(sizes, progress=progress, threads=threads)
    rest = [file for file in plan.files if file.path not in digests]
    left_bytes = sum(sizes[file.path] for file in rest)
    staging.require_space(left_bytes)
    progress.start("writing", left_bytes)
    run = _Run(rest, staging, fill, window_bytes, progress)
    digests |= run.on_threads(min(count, memory_bytes // buffer_bytes), buffer_bytes)
    return {name: digests[name] for name in sizes}


class _Stopped(Exception):  # noqa: N818 -- no error: another thread has raised it
    """Another thread failed, or the user interrupted."""


class _OpenFile:
    """A file on its way: what was handed out, digested and stored of it."""

    def __init__(self, target: TargetFile, window_bytes: int) -> None:
        self.target = target
        self.size_bytes = target.size_bytes
        self.windows = windows(target, window_bytes)
        self.handle = -1
        self.digested_bytes = 0
        self.stored_bytes = 0
        self._hasher = FileHasher(self.size_bytes)
        self._closings = Closings()
        self._writeback = threading.Lock()
        self._begun_bytes = 0

    def digest(self, window: Window, view: memoryview) -> None:
        """Digests the window whose turn it is, after its closing parts and its ending are made."""
        self._closings.make(window, view)
        self._hasher.update(view)

    def start_writeback(self, end_bytes: int) -> None:
        """Sends what was stored to the disk while the rest is made, so that the last fsync has little left to do.

        One thread at a time: two in the kernel's writeback of one file only wait for each other.
        """
        if end_bytes - self._begun_bytes >= _WRITEBACK_BYTES and self._writeback.acquire(blocking=False):
            try:
                start_writeback(self.handle, self._begun_bytes, end_bytes - self._begun_bytes)
                self._begun_bytes = end_bytes
            finally:
                self._writeback.release()

    def finish(self) -> FileDigest:
        """Waits for the disk and closes the file."""
        os.fsync(self.handle)
        self.close()
        return self._hasher.finish()

    def close(self) -> None:
        """Closes the file."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)


class _Run:
    """The threads' common state: which window is next, which files are open. Guarded by ``_changed``."""

    def __init__(
        self, files: Sequence[TargetFile], staging: Staging, fill: Fill, window_bytes: int, progress: Progress
    ) -> None:
        self._staging = staging
        self._fill = fill
        self._progress = progress
        self._tasks = self._all_windows(files, window_bytes)
        self._changed = threading.Condition()
        self._stopped = False
        self._open: set[_OpenFile] = set()
        self._digests: dict[str, FileDigest] = {}

    def on_threads(self, count: int, buffer_bytes: int) -> dict[str, FileDigest]:
        """Does all of it and returns the digests by path; raises what a thread raised first."""
        try:
            with ThreadPoolExecutor(count, thread_name_prefix="ckptguard-write") as pool:
                workers = [pool.submit(self._work, aligned_buffer(buffer_bytes)) for _ in range(count)]
                try:
                    for worker in as_completed(workers):
                        worker.result()
                except BaseException:
                    self._stop()
                    raise
        finally:
            for file in self._open:
                file.close()
        return self._digests

    def _all_windows(self, files: Sequence[TargetFile], window_bytes: int) -> Iterator[tuple[_OpenFile, Window]]:
        for target in files:
            file = _OpenFile(target, window_bytes)
            path = self._staging.path / target.path
            with writing(path, file.size_bytes):
                file.handle = create(path, file.size_bytes)
            self._open.add(file)
            for window in file.windows:
                yield file, window

    def _work(self, buffer: memoryview) -> None:
        """One thread: window after window."""
        try:
            while (task := self._next()) is not None:
                file, window = task
                begin = (
                    window.offset_bytes % _PAGE_BYTES
                )  # buffer and file cross pages together: the kernel copies faster
                view = buffer[begin : begin + window.length_bytes]
                provide(self._fill, window.pieces, view)
                self._in_turn(file, window, view)
                self._store(file, window, view)
        except _Stopped:
            pass
        except BaseException:
            self._stop()
            raise

    def _next(self) -> tuple[_OpenFile, Window] | None:
        with self._changed:
            return None if self._stopped else next(self._tasks, None)

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _in_turn(self, file: _OpenFile, window: Window, view: memoryview) -> None:
        """Digests a window when all bytes before it are digested."""
        with self._changed:
            while file.digested_bytes != window.offset_bytes:
                if self._stopped:
                    raise _Stopped
                self._changed.wait()
        file.digest(window, view)
        with self._changed:
            file.digested_bytes += len(view)
            self._changed.notify_all()

    def _store(self, file: _OpenFile, window: Window, view: memoryview) -> None:
        path = self._staging.path / file.target.path
        with writing(path, file.size_bytes):
            store(file.handle, view, window.offset_bytes)
            file.start_writeback(window.offset_bytes + len(view))
        self._progress.advance(len(view))
        with self._changed:
            file.stored_bytes += len(view)
            finished = file.stored_bytes == file.size_bytes
        if finished:
            with writing(path, file.size_bytes):
                digest = file.finish()
            self._staging.note(file.target.path, digest)
            with self._changed:
                self._open.discard(file)
                self._digests[file.target.path] = digest
