"""The fingerprint of every tensor of a checkpoint, read once, in file order, on all cores, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.engine import contents, structure
from ckptguard.engine.workers import SILENT, Buffers, Progress, run
from ckptguard.fingerprint.tensors import BoxSum
from ckptguard.fingerprint.values import Fingerprint, add
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Located

_TASK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Task:
    """A range of elements ``[begin, end)`` of one chunk, counted row-major inside it."""

    entry: TensorEntry
    at: Located
    weights: BoxSum
    begin: int
    end: int


def fingerprint_checkpoint(
    checkpoint: Checkpoint,
    *,
    keep: Callable[[TensorEntry], bool] = lambda _: True,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, Fingerprint]:
    """Fingerprints of the tensors of a checkpoint, by name in sorted order.

    Memory: one read buffer per thread, and per chunk under work about 16 bytes per index of its box in each dim.

    Args:
        checkpoint: An open checkpoint.
        keep: Which tensors.
        threads: Worker threads; as many as cores by default.
        progress: Hears of the bytes done.

    Raises:
        DamagedError: A tensor is not stored whole, or a chunk is not what the index says; lists all problems.
    """
    chosen = {name: entry for name, entry in checkpoint.index.tensors.items() if keep(entry)}
    structure.refuse_gaps(checkpoint.index, chosen)
    sums: dict[str, tuple[int, int]] = dict.fromkeys(sorted(chosen), (0, 0))
    progress.start("fingerprinting", sum(entry.size_bytes for entry in chosen.values()))
    buffers = Buffers()

    def work(task: _Task) -> tuple[str, tuple[int, int]]:
        return task.entry.name, _sum(checkpoint, task, buffers.view, progress)

    for name, part in run(_tasks(checkpoint, chosen), work, threads=threads):
        sums[name] = add(sums[name], part)
    return {name: Fingerprint(chosen[name].dtype.name, chosen[name].shape, value) for name, value in sums.items()}


def _tasks(checkpoint: Checkpoint, chosen: Mapping[str, TensorEntry]) -> Iterator[_Task]:
    for entry, chunk in contents.places(checkpoint.index):
        if entry.name in chosen and chunk.box.numel:
            yield from _chunk_tasks(entry, chunk, checkpoint.reader.locate(entry, chunk))


def _chunk_tasks(entry: TensorEntry, chunk: Chunk, at: Located) -> Iterator[_Task]:
    weights = BoxSum(entry.dtype, entry.shape, chunk.box)
    step = weights.step_elements
    count = max(step, _TASK_BYTES // entry.dtype.itemsize // step * step)
    for begin in range(0, chunk.box.numel, count):
        yield _Task(entry, at, weights, begin, min(begin + count, chunk.box.numel))


def _sum(checkpoint: Checkpoint, task: _Task, buffer: memoryview, progress: Progress) -> tuple[int, int]:
    """The sums of a task: straight from the file where its elements stand there in order, else through the reader."""
    itemsize, step = task.entry.dtype.itemsize, task.weights.step_elements
    if task.at.strides is None and task.at.memory is None:
        offset = task.at.span.offset_bytes + (task.at.first_element + task.begin) * itemsize
        with checkpoint.files.reading(task.at.span.file) as handle:
            straight = task.weights.of_file(handle, offset, task.begin, task.end, buffer)
        if straight is not None:
            progress.advance((task.end - task.begin) * itemsize)
            return straight
    per_read = len(buffer) // itemsize // step * step
    total = (0, 0)
    for begin in range(task.begin, task.end, per_read):
        part = buffer[: min(per_read, task.end - begin) * itemsize]
        checkpoint.reader.read_elements(task.at, begin, part)
        total = add(total, task.weights.of(part, begin))
        progress.advance(len(part))
    return total
