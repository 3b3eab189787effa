"""Proves that what was written gives its sources back: fingerprints of both, streamed, compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from ckptguard.core.plan import Made
from ckptguard.engine.filling import Filler, row_bytes
from ckptguard.engine.workers import SILENT, Buffers, Progress, run
from ckptguard.fingerprint.tensors import BoxSum, step_elements
from ckptguard.fingerprint.values import Fingerprint, add

_WINDOW_BYTES = 4 << 20


class Summing:
    """A ``Fill`` that also adds up the fingerprints of the tensors whose chunks it fills."""

    def __init__(self, filler: Filler) -> None:
        self._filler = filler
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[int, int]] = {chunk.name: (0, 0) for chunk in filler.chunks}
        self._weights: dict[int, BoxSum] = {}
        self._left_bytes = sum(chunk.size_bytes for chunk in filler.chunks)

    def __call__(self, key: int, begin_bytes: int, out: memoryview, /) -> None:
        """As ``Filler``; pieces begin and end at multiples of ``step_bytes``."""
        self._filler(key, begin_bytes, out)
        chunk = self._filler.chunks[key]
        weights = self._weights.get(key) or self._weights.setdefault(key, BoxSum(chunk.dtype, chunk.shape, chunk.box))
        part = weights.of(out, begin_bytes // chunk.dtype.itemsize)
        with self._lock:
            self._sums[chunk.name] = add(self._sums[chunk.name], part)
            self._left_bytes -= len(out)
            if begin_bytes + len(out) == chunk.size_bytes:
                self._weights.pop(key, None)

    @property
    def complete(self) -> bool:
        """Whether every chunk has been filled here; a run that goes on after another has not."""
        return not self._left_bytes

    def fingerprints(self) -> dict[str, Fingerprint]:
        """By tensor name, once every chunk has been filled."""
        chunks = {chunk.name: chunk for chunk in self._filler.chunks}
        return {
            name: Fingerprint(chunks[name].dtype.name, chunks[name].shape, value)
            for name, value in sorted(self._sums.items())
        }


def step_bytes(chunk: Made) -> int:
    """Pieces of a chunk that can be filled and fingerprinted on their own are multiples of this."""
    step = step_elements(chunk.dtype, chunk.box.size) * chunk.dtype.itemsize
    return lcm(step, row_bytes(chunk))


@dataclass(frozen=True, slots=True)
class _Task:
    key: int
    begin_bytes: int
    end_bytes: int


def fingerprints_of(
    filler: Filler, *, threads: int | None = None, progress: Progress = SILENT
) -> dict[str, Fingerprint]:
    """Fingerprints of the tensors that a filler's chunks are, without writing them anywhere.

    Memory: per thread a buffer of about 4 MiB, or of the widest row if that is more.

    Args:
        filler: Of chunks that make up whole tensors.
        threads: Worker threads.
        progress: Hears of the bytes done.
    """
    steps = [step_bytes(chunk) if chunk.size_bytes else 1 for chunk in filler.chunks]
    buffers = Buffers(max([_WINDOW_BYTES, *steps]))
    summing = Summing(filler)

    def work(task: _Task) -> None:
        summing(task.key, task.begin_bytes, buffers.view[: task.end_bytes - task.begin_bytes])
        progress.advance(task.end_bytes - task.begin_bytes)

    for _ in run(_tasks(filler.chunks, steps), work, threads=threads):
        pass
    return summing.fingerprints()


def _tasks(chunks: Sequence[Made], steps: Sequence[int]) -> Iterator[_Task]:
    for key, (chunk, step) in enumerate(zip(chunks, steps, strict=True)):
        window = max(_WINDOW_BYTES // step, 1) * step
        for begin in range(0, chunk.size_bytes, window):
            yield _Task(key, begin, min(begin + window, chunk.size_bytes))


def different(expected: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint]) -> list[str]:
    """Names whose fingerprints differ or that one side lacks, sorted."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
