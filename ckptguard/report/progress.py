"""A progress bar on stderr for long work; nothing where stderr is no terminal or --json was asked for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptguard.engine.workers import SILENT, Progress


class Bar:
    """Shows phase, bytes, rate and time left. Thread-safe."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._lock = threading.Lock()
        self._task = self._rich.add_task("", total=None, visible=False)
        self._pending = 0

    def start(self, label: str, total_bytes: int) -> None:
        """A phase begins."""
        self._rich.reset(self._task, description=label, total=total_bytes, visible=True)

    def advance(self, count_bytes: int) -> None:
        """So many more bytes are done; the display hears of it every 8 MiB."""
        with self._lock:
            self._pending += count_bytes
            if self._pending < 8 << 20:
                return
            count_bytes, self._pending = self._pending, 0
        self._rich.advance(self._task, count_bytes)

    def __enter__(self) -> Bar:
        self._rich.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._rich.stop()


@contextmanager
def progress_bar(*, wanted: bool = True) -> Iterator[Progress]:
    """A bar, or silence where nobody would see it."""
    if wanted and sys.stderr.isatty():
        with Bar() as bar:
            yield bar
    else:
        yield SILENT
