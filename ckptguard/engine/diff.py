"""Two checkpoints compared tensor by tensor, whatever their layouts and formats. Streams; holds a few megabytes per thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ckptguard.core.boxes import Box, meetings, split_rows, unravel
from ckptguard.core.errors import UsageError
from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.engine import padding
from ckptguard.engine.structure import refuse_gaps
from ckptguard.engine.values import different_bits, largest_difference
from ckptguard.engine.workers import SILENT, Progress, run
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Located

Status = Literal["same", "different", "padding", "unused", "only in a", "only in b", "dtype", "shape"]
Ranges = tuple[tuple[int, int], ...]
_PIECE_BYTES = 4 << 20
_TASK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements that differ in some part of a tensor.

    Attributes:
        elements: How many.
        bits: How many bits of them.
        first: Row-major smallest global coordinates of one.
        largest: Largest absolute difference; None where elements are no numbers.
    """

    elements: int = 0
    bits: int = 0
    first: tuple[int, ...] | None = None
    largest: float | None = None

    def __add__(self, other: Counts) -> Counts:
        firsts = [f for f in (self.first, other.first) if f is not None]
        sizes = [x for x in (self.largest, other.largest) if x is not None]
        return Counts(
            self.elements + other.elements, self.bits + other.bits, min(firsts, default=None), max(sizes, default=None)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of two checkpoints.

    Attributes:
        name: Its name.
        status: "padding" and "unused" mean that all elements a model uses are equal.
        dtypes: Of a and b; None where the side has no such tensor.
        shapes: Likewise.
        used: Differences among the elements that count.
        padding: Differences among vocabulary padding rows; rows that only one side has count as differing.
        unused: Differences among elements that are stored and belong to no parameter.
    """

    name: str
    status: Status
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    used: Counts = Counts()
    padding: Counts = Counts()
    unused: Counts = Counts()

    @property
    def differs(self) -> bool:
        """Whether anything that counts differs."""
        return self.status not in ("same", "padding", "unused")


@dataclass(frozen=True, slots=True)
class _Task:
    a: TensorEntry
    b: TensorEntry
    pairs: tuple[tuple[Chunk, Chunk, Box], ...]


def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    keep: Callable[[str], bool] = lambda _: True,
    unused_ranges: Mapping[str, Ranges] | None = None,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> list[TensorDiff]:
    """Compares every tensor, in sorted order of names.

    Args:
        a: An open checkpoint.
        b: Another.
        keep: Which names to compare.
        unused_ranges: For 1-D tensors, the half-open element ranges that belong to no parameter in either.
        threads: Worker threads; as many as cores by default.
        progress: Hears of the bytes done (of one side).

    Raises:
        DamagedError: A tensor is not stored whole on a side.
        UsageError: No name is in both.
    """
    names = sorted(n for n in a.index.tensors.keys() | b.index.tensors.keys() if keep(n))
    both = [n for n in names if n in a.index.tensors and n in b.index.tensors]
    if not both:
        raise UsageError(
            f"{a.index.location} and {b.index.location} have no tensor name in common",
            next_step="Compare checkpoints of one format, or look at the names with `ckptguard inspect --tensors '*'`.",
        )
    for side in (a, b):
        refuse_gaps(side.index, {n: side.index.tensors[n] for n in both})
    pairs = {n: (a.index.tensors[n], b.index.tensors[n]) for n in both}
    comparable = {n: p for n, p in pairs.items() if p[0].dtype == p[1].dtype and padding.same_but_rows(*p)}
    progress.start("comparing", sum(p[0].size_bytes for p in comparable.values()))
    rules = padding.Rules(a.index.facts, b.index.facts, unused_ranges or {})
    totals = {n: (Counts(), Counts(), Counts()) for n in comparable}

    def work(task: _Task) -> tuple[str, tuple[Counts, Counts, Counts]]:
        return task.a.name, _compare(a, b, task, rules, progress)

    for name, counts in run(_tasks(comparable), work, threads=threads):
        used, pad, spare = totals[name]
        totals[name] = (used + counts[0], pad + counts[1], spare + counts[2])
    return [_verdict(name, a, b, totals.get(name), rules) for name in names]


def _tasks(pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]) -> Iterator[_Task]:
    """Batches of chunk pairs that meet, about ``_TASK_BYTES`` each."""
    for one, other in pairs.values():
        batch: list[tuple[Chunk, Chunk, Box]] = []
        size = 0
        boxes = [c.box for c in one.chunks], [c.box for c in other.chunks]
        for i, j, common in meetings(*boxes):
            for part in split_rows(common, _TASK_BYTES // one.dtype.itemsize):
                batch.append((one.chunks[i], other.chunks[j], part))
                size += part.numel * one.dtype.itemsize
                if size >= _TASK_BYTES:
                    yield _Task(one, other, tuple(batch))
                    batch, size = [], 0
        if batch:
            yield _Task(one, other, tuple(batch))


def _compare(
    a: Checkpoint, b: Checkpoint, task: _Task, rules: padding.Rules, progress: Progress
) -> tuple[Counts, Counts, Counts]:
    used, pad, spare = Counts(), Counts(), Counts()
    itemsize = task.a.dtype.itemsize
    for chunk_a, chunk_b, common in task.pairs:
        at_a, at_b = a.reader.locate(task.a, chunk_a), b.reader.locate(task.b, chunk_b)
        for part in split_rows(common, max(1, _PIECE_BYTES // itemsize)):
            left, right = _box(a, at_a, chunk_a, part), _box(b, at_b, chunk_b, part)
            if not np.array_equal(left, right):
                counts = _count(task.a, part, left, right, rules)
                used, pad, spare = used + counts[0], pad + counts[1], spare + counts[2]
            progress.advance(len(left))
    return used, pad, spare


def _box(side: Checkpoint, at: Located, chunk: Chunk, part: Box) -> npt.NDArray[np.uint8]:
    inside = part.relative_to(chunk.box)
    return side.reader.read_box(at, inside.offset, inside.size)


def _count(
    entry: TensorEntry, part: Box, left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8], rules: padding.Rules
) -> tuple[Counts, Counts, Counts]:
    """Sorts the differing elements of a piece into those used, vocabulary padding, and unused ones."""
    itemsize = entry.dtype.itemsize
    rows = left.reshape(-1, itemsize), right.reshape(-1, itemsize)
    where = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    kinds = rules.kinds(entry, part, where)
    out = []
    for kind in (0, 1, 2):
        chosen = where[kinds == kind]
        if not len(chosen):
            out.append(Counts())
            continue
        x, y = (np.ascontiguousarray(side[chosen]).reshape(-1) for side in rows)
        first = first_of(part, int(chosen[0]))
        out.append(Counts(len(chosen), different_bits(x, y), first, largest_difference(x, y, entry.dtype)))
    return out[0], out[1], out[2]


def first_of(part: Box, number: int) -> tuple[int, ...]:
    """Global coordinates of a row-major element number inside a box."""
    return tuple(o + i for o, i in zip(part.offset, unravel(number, part.size), strict=True))


def _verdict(
    name: str, a: Checkpoint, b: Checkpoint, counts: tuple[Counts, Counts, Counts] | None, rules: padding.Rules
) -> TensorDiff:
    one, other = a.index.tensors.get(name), b.index.tensors.get(name)
    dtypes = (one.dtype.name if one else None, other.dtype.name if other else None)
    shapes = (one.shape if one else None, other.shape if other else None)
    if one is None or other is None:
        return TensorDiff(name, "only in b" if one is None else "only in a", dtypes, shapes)
    if one.dtype != other.dtype:
        return TensorDiff(name, "dtype", dtypes, shapes)
    if counts is None or (one.shape != other.shape and not rules.only_padding_rows(one, other)):
        return TensorDiff(name, "shape", dtypes, shapes)
    used, pad, spare = counts
    if one.shape != other.shape:
        extra = abs(one.numel - other.numel)
        pad = pad + Counts(extra, 0, (min(one.shape[0], other.shape[0]),) + (0,) * (len(one.shape) - 1))
    status: Status = (
        "different" if used.elements else "padding" if pad.elements else "unused" if spare.elements else "same"
    )
    return TensorDiff(name, status, dtypes, shapes, used, pad, spare)
