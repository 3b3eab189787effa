"""What a conversion will need: room and time."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ckptguard.core.index import Span
from ckptguard.engine.workers import default_threads
from ckptguard.engine.write_digests import FileHasher
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.remote import RemotePath

_SAMPLE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """What will be needed.

    Attributes:
        disk_bytes: Bytes to be written.
        free_bytes: Bytes that the file system of the target has free; None at a URL.
        seconds: A guess, from the speed at which a sample of the source was read and digested here; a slow disk takes longer.
    """

    disk_bytes: int
    free_bytes: int | None
    seconds: float


def estimate(checkpoint: Checkpoint, dst: Path, disk_bytes: int, *, verify: bool, threads: int | None) -> Estimate:
    """Needs of a conversion whose source is open.

    Args:
        checkpoint: The source.
        dst: The target; its nearest existing parent is asked for free space.
        disk_bytes: Bytes that the plan writes.
        verify: Whether the result will be proved, which reads source and target once more.
        threads: Worker threads.
    """
    passes = 3 if verify else 1
    seconds = disk_bytes * passes * _seconds_per_byte(checkpoint) / (threads or default_threads())
    return Estimate(disk_bytes, _free_bytes(dst), seconds)


def _free_bytes(dst: Path) -> int | None:
    if isinstance(dst, RemotePath):
        return None
    there = dst.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _seconds_per_byte(checkpoint: Checkpoint) -> float:
    name = max(checkpoint.files.listing, key=lambda n: checkpoint.files.listing[n].size_bytes)
    count = min(_SAMPLE_BYTES, checkpoint.files.size(name))
    started = time.perf_counter()
    hasher = FileHasher(count)
    hasher.update(memoryview(checkpoint.files.read_span(Span(name, 0, count))))
    hasher.finish()
    return (time.perf_counter() - started) / max(count, 1)
