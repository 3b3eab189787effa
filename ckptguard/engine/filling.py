"""Fills buffers with the elements of planned chunks, from the files that their sources stand in. Thread-safe."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.pieces import Piece, boxes_of_run
from ckptguard.core.plan import Computed, Made, Sources, Stored
from ckptguard.engine import computing
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Located

Array = npt.NDArray[Any]
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_BFLOAT16 = BY_NAME["bfloat16"]
# Runs of elements at least so long are read one by one, straight to their place. At a URL a request takes its time.
_DIRECT_BYTES, _REMOTE_DIRECT_BYTES = 1 << 14, 1 << 20
# Shorter ones are taken out of ranges that cover many of them: what stays in a core's cache, or what one request brings.
_COVER_BYTES, _REMOTE_COVER_BYTES = 1 << 20, 4 << 20
_SPARSE, _LINE_BYTES = 16, 512  # unless so many times as much would be read as is used, of runs at least so long


class Filler:
    """The ``Fill`` of a list of chunks (``core.writing``): rows of them, put together from their sources.

    Args:
        chunks: By the key under which they are asked for.
        sources: What the chunks' pieces name.
        checkpoint: In which the sources stand.
    """

    def __init__(self, chunks: Sequence[Made], sources: Sources, checkpoint: Checkpoint) -> None:
        self.chunks = chunks
        self._sources = sources
        self._files = checkpoint.files
        self._locate = lru_cache(maxsize=1 << 16)(checkpoint.reader.locate)
        self._reader = checkpoint.reader
        self._cover = _Cover()

    def __call__(self, key: int, begin_bytes: int, out: memoryview, /) -> None:
        """Fills ``out`` with bytes ``[begin_bytes, begin_bytes + len(out))`` of a chunk; whole rows (``row_bytes``)."""
        chunk = self.chunks[key]
        if chunk.run is not None:
            self._fill_run(chunk, chunk.run, begin_bytes, out)
            return
        dim, row = _rows(chunk)
        first, count = begin_bytes // row, len(out) // row
        size = (*chunk.box.size[:dim], count, *chunk.box.size[dim + 1 :]) if chunk.box.size else ()
        window = Box(tuple(first if d == dim else 0 for d in range(len(size))), size)
        target: Array = np.frombuffer(out, _WORDS[chunk.dtype.itemsize]).reshape(size)
        if chunk.scale is None:
            self._assemble(chunk, window, target, chunk.dtype)
            return
        values: Array = np.empty(size, np.uint16)
        self._assemble(chunk, window, values, _BFLOAT16)
        target[...] = computing.to_fp8(values, chunk, first, self._read_rows)

    def _fill_run(self, chunk: Made, first: int, begin_bytes: int, out: memoryview) -> None:
        """As ``__call__``, for a chunk that is a row of elements of the tensor that its assembly describes."""
        flat: Array = np.frombuffer(out, _WORDS[chunk.dtype.itemsize])
        start = first + begin_bytes // chunk.dtype.itemsize
        for offset, size, before in boxes_of_run(chunk.assembly.shape, start, len(flat)):
            self._assemble(chunk, Box(offset, size), flat[before : before + prod(size)].reshape(size), chunk.dtype)

    def stands_for(self, chunk: Made, begin: int, small: Array, values: Array) -> bool:
        """Whether fp8 words, rows from ``begin`` on of a weight with scales, stand for these words of bfloat16."""
        return bool(np.array_equal(computing.from_fp8(small, chunk, begin, self._read_rows), values))

    def _assemble(self, chunk: Made, window: Box, target: Array, dtype: DType) -> None:
        for piece in chunk.assembly.pieces:
            part = piece.within(window)
            if part is not None:
                place = tuple(
                    slice(o - w, o - w + (n - 1) * s + 1, s)
                    for o, n, s, w in zip(part.offset, part.size, part.step, window.offset, strict=True)
                )
                self._copy(part, target[place], dtype)

    def _copy(self, part: Piece, target: Array, dtype: DType) -> None:
        if not part.source:
            target[...] = 0
            return
        source = self._sources[part.source]
        if source.dtype == dtype and isinstance(source, Stored):
            self._copy_stored(source, part, target)
            return
        values: Array = np.empty(part.size, _WORDS[source.dtype.itemsize])
        if isinstance(source, Stored):
            self._copy_stored(source, part, values)
        else:
            self._compute(source, part, values)
        target[...] = values if source.dtype == dtype else computing.cast(values, source.dtype, dtype)

    def _copy_stored(self, source: Stored, part: Piece, target: Array) -> None:
        at: Located = self._locate(source.entry, source.chunk)
        if at.strides is not None or at.memory is not None:
            target[...] = self._odd(source, at, part)
            return
        itemsize = at.dtype.itemsize
        first = at.span.offset_bytes + (at.first_element + part.first) * itemsize
        run, lines = _run(part)
        local = self._files.local
        direct_bytes = _DIRECT_BYTES if local else _REMOTE_DIRECT_BYTES
        if target.flags.c_contiguous and (lines == 1 or run * itemsize >= direct_bytes):
            flat = memoryview(target.reshape(-1).view(np.uint8))
            step = run * itemsize
            for line, skipped in enumerate(_starts(part, run)):
                self._files.read_into(at.span.file, first + skipped * itemsize, flat[line * step : (line + 1) * step])
            return
        if not local or _last(part) < _SPARSE * part.numel:
            for piece, place in _covered(part, (_COVER_BYTES if local else _REMOTE_COVER_BYTES) // itemsize):
                self._copy_cover(at, piece, target[place])
            return
        if run * itemsize >= _LINE_BYTES:
            self._copy_lines(at, part, run, target)
            return
        # A transpose takes an element here and there. Of a file that is cut short meanwhile nothing can be said then.
        last = _last(part)
        with self._files.reading(at.span.file) as handle:
            page = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            length = first - page + (last + 1) * itemsize
            # A window of the file of its own: what was touched does not stay in memory.
            with _mapped(handle, length, page) as mapped:
                items: Array = np.frombuffer(mapped, _WORDS[itemsize], count=last + 1, offset=first - page)
                strides = [s * itemsize for s in part.strides]
                view = np.lib.stride_tricks.as_strided(items, part.size, strides, writeable=False)
                target[...] = view
                del view, items

    def _copy_lines(self, at: Located, part: Piece, run: int, target: Array) -> None:
        """Reads the runs of a piece one by one."""
        itemsize = at.dtype.itemsize
        items = self._cover.of(part.numel, itemsize)
        flat, step = memoryview(items.view(np.uint8)), run * itemsize
        first = at.span.offset_bytes + (at.first_element + part.first) * itemsize
        for line, skipped in enumerate(_starts(part, run)):
            self._files.read_into(at.span.file, first + skipped * itemsize, flat[line * step : (line + 1) * step])
        target[...] = items.reshape(part.size)

    def _copy_cover(self, at: Located, part: Piece, target: Array) -> None:
        """Reads the range that covers a piece at once, and takes the piece out of it."""
        itemsize = at.dtype.itemsize
        items = self._cover.of(_last(part) + 1, itemsize)
        first = at.span.offset_bytes + (at.first_element + part.first) * itemsize
        self._files.read_into(at.span.file, first, memoryview(items.view(np.uint8)))
        strides = [s * itemsize for s in part.strides]
        target[...] = np.lib.stride_tricks.as_strided(items, part.size, strides, writeable=False)

    def _odd(self, source: Stored, at: Located, part: Piece) -> Array:
        """A source that is stored strided or compressed: read whole, it is rare and was small so far."""
        data = bytearray(at.numel * at.dtype.itemsize)
        self._reader.read_elements(at, 0, memoryview(data))
        items: Array = np.frombuffer(data, _WORDS[at.dtype.itemsize])[part.first :]
        return np.lib.stride_tricks.as_strided(items, part.size, [s * at.dtype.itemsize for s in part.strides])

    def _compute(self, source: Computed, part: Piece, target: Array) -> None:
        """Computes the rows of a source that a piece meets, a few at a time, and takes its elements out of them."""
        width = source.shape[-1] if source.shape else 1
        for piece, place in _in_rows(part, width):
            last = piece.first + _last(piece)
            begin, end = piece.first // width, last // width + 1
            rows = computing.rows(source, begin, end, self._read_rows).reshape(-1)
            items = rows[piece.first - begin * width :]
            target[place] = np.lib.stride_tricks.as_strided(
                items, piece.size, [s * items.itemsize for s in piece.strides], writeable=False
            )

    def _read_rows(self, source: Stored, begin: int, end: int) -> Array:
        """Elements ``[begin, end)`` of a stored source, counted row-major, flat."""
        out: Array = np.empty(end - begin, _WORDS[source.dtype.itemsize])
        at = self._locate(source.entry, source.chunk)
        self._reader.read_elements(at, begin, memoryview(out.view(np.uint8)))
        return out


class _Cover(threading.local):
    """A buffer per thread for ranges that cover what is used of them; it grows to the largest."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def of(self, count: int, itemsize: int) -> Array:
        """Room for so many elements; what it holds lasts until the next call."""
        if len(self._buffer) < count * itemsize:
            self._buffer = bytearray(count * itemsize)
        return np.frombuffer(self._buffer, _WORDS[itemsize], count=count)


class _mapped(mmap.mmap):  # noqa: N801 -- a context manager that reads like a function
    """A read-only window of a file."""

    def __new__(cls, handle: int, length: int, offset: int) -> _mapped:
        return super().__new__(cls, handle, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=offset)


def row_bytes(chunk: Made) -> int:
    """Bytes of a row: the smallest part of a chunk that it is asked for in."""
    return _rows(chunk)[1]


def _rows(chunk: Made) -> tuple[int, int]:
    """The dim along which a chunk is filled, the first with more than one index, and the bytes of one index of it."""
    size = chunk.box.size
    dim = next((d for d, n in enumerate(size) if n > 1), len(size) - 1)
    return dim, prod(size[dim + 1 :]) * chunk.dtype.itemsize if size else chunk.dtype.itemsize


def _run(part: Piece) -> tuple[int, int]:
    """(elements that follow each other in source and target, number of such runs) of a piece."""
    run, dim = 1, len(part.size)
    while dim and (part.size[dim - 1] == 1 or part.strides[dim - 1] == run):
        dim -= 1
        run *= part.size[dim]
    return run, part.numel // run


def _starts(part: Piece, run: int) -> list[int]:
    """First source element of every run, counted from the piece's first."""
    starts, length = [0], 1
    for n, stride in zip(part.size, part.strides, strict=True):
        if length * run == part.numel:
            break
        starts = [at + i * stride for at in starts for i in range(n)]
        length *= n
    return starts


def _last(part: Piece) -> int:
    """The last source element of a piece, counted from its first."""
    return sum((n - 1) * s for n, s in zip(part.size, part.strides, strict=True))


def _covered(part: Piece, most: int) -> Iterator[tuple[Piece, tuple[slice, ...]]]:
    """Cuts a piece into pieces that span at most so many source elements, each with its place in the piece."""
    rest = [(part, (0,) * len(part.size))]
    while rest:
        piece, at = rest.pop()
        if _last(piece) < most:
            yield piece, tuple(slice(a, a + n) for a, n in zip(at, piece.size, strict=True))
            continue
        dim = max(range(len(piece.size)), key=lambda d: (piece.size[d] - 1) * piece.strides[d])
        half = piece.size[dim] // 2
        for begin, count in ((half, piece.size[dim] - half), (0, half)):
            size = (*piece.size[:dim], count, *piece.size[dim + 1 :])
            moved = (*at[:dim], at[dim] + begin, *at[dim + 1 :])
            rest.append((replace(piece, size=size, first=piece.first + begin * piece.strides[dim]), moved))


def _in_rows(part: Piece, width: int) -> list[tuple[Piece, Any]]:
    """Cuts a piece along its first long dim, so that no more than about a megabyte of rows is computed at once."""
    last = _last(part)
    most = max(width, 1 << 19)
    dim = next((d for d, n in enumerate(part.size) if n > 1), None)
    if last < most or dim is None or part.strides[dim] < width:
        return [(part, ...)]
    count = max(1, most // part.strides[dim])
    out = []
    for begin in range(0, part.size[dim], count):
        n = min(count, part.size[dim] - begin)
        size = (*part.size[:dim], n, *part.size[dim + 1 :])
        place = tuple(slice(begin, begin + n) if d == dim else slice(None) for d in range(len(size)))
        out.append((replace(part, size=size, first=part.first + begin * part.strides[dim]), place))
    return out
