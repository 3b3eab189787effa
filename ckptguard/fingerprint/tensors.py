"""Fingerprints of tensors: what they are, how parts add up, and the sums over the parts of a box."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.fingerprint import native
from ckptguard.fingerprint.modular import multiply, outer
from ckptguard.fingerprint.residues import DIGIT, DIGIT_BITS, LANES, digit_residues, places, word_residues
from ckptguard.fingerprint.values import Fingerprint

_MIN_LINE_WORDS = 64
_ROW_GAP = 80  # five cache lines


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Weights of a box, in the form that the loops take; ``kernels.accumulate`` says what each is.

    Attributes:
        per_step: Words per step.
        line_steps: Steps per line: extent of the box along the split dim.
        step_offset: Global offset of the box along the split dim.
        table: uint32 (4, 4096 * per_step), or (4, per_step) for a 0-d box.
        high: uint64 (2, number of ``index >> 12`` that the split dim meets).
        sizes: int64 (dims before the split).
        starts: int64 (dims before the split).
        weights: uint64 (2, sum of sizes).
    """

    per_step: int
    line_steps: int
    step_offset: int
    table: npt.NDArray[np.uint32]
    high: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    weights: npt.NDArray[np.uint64]


def step_elements(dtype: DType, size: Sequence[int]) -> int:
    """As ``BoxSum.step_elements``, for a box of this size, without what summing needs."""
    return max(1, _line(dtype, size)[1] // dtype.words)


def _line(dtype: DType, size: Sequence[int]) -> tuple[int, int]:
    """(last dim that is not part of a line, words of a step): short dims at the end are taken together."""
    split, step = len(size) - 1, dtype.words
    while split > 0 and size[split] * step < _MIN_LINE_WORDS:
        step *= size[split]
        split -= 1
    return split, step


class BoxSum:
    """Weights of a box of a tensor, made once, and the weighted sums over ranges of its elements.

    Holds about 16 bytes per index of the box in each dim, and a table shared with other boxes. ``of`` may be called
    from several threads at once.

    Args:
        dtype: Element type.
        shape: Global shape; how many digits an index has depends on it.
        box: Part of the tensor whose elements are summed.
    """

    def __init__(self, dtype: DType, shape: Sequence[int], box: Box) -> None:
        self.dtype, self.shape, self.box = dtype, tuple(shape), box
        self.word_dtype = np.uint8 if dtype.word_bytes == 1 else np.uint16
        split, step = _line(dtype, box.size)
        self.step_elements = max(1, step // dtype.words)
        self.prepared = _prepare(dtype, self.shape, box, split, step)
        self._native = native.weights_of(self.prepared, dtype.word_bytes) if native.library() else None

    def of(self, data: npt.NDArray[np.uint8] | memoryview, begin: int = 0) -> tuple[int, int]:
        """Sums over a range of elements.

        Args:
            data: Bytes of the elements, row-major, little-endian; its address need not be aligned.
            begin: First element, counted row-major inside the box; a multiple of ``step_elements``.

        Returns:
            The sum of each lane.

        Raises:
            ValueError: The range does not begin and end between two steps, or leaves the box.
        """
        if not len(data):
            return 0, 0
        words = np.frombuffer(data, self.word_dtype)
        first = self._first_step(words.size, begin)
        sums = np.zeros(LANES, np.uint64)
        if self._native is not None:
            native.library().ckptguard_accumulate(
                ctypes.byref(self._native), words.ctypes.data, words.size, first, sums.ctypes.data
            )
        else:
            from ckptguard.fingerprint import kernels

            kernels.accumulate_prepared(self.prepared, words, first, sums)
        return int(sums[0]), int(sums[1])

    def at(self, address: int) -> tuple[int, int] | None:
        """Sums over the whole box, from where its elements stand in memory, row-major; for thousands of small ones.

        Args:
            address: Of the first element. The caller makes sure that all of the box can be read there.

        Returns:
            The sum of each lane; None where only ``of`` can tell.
        """
        if self._native is None:
            return None
        sums = (ctypes.c_uint64 * LANES)()
        count = self.box.numel * self.dtype.words
        native.library().ckptguard_accumulate(ctypes.byref(self._native), address, count, 0, sums)
        return sums[0], sums[1]

    def of_file(
        self, handle: int, offset_bytes: int, begin: int, end: int, buffer: memoryview
    ) -> tuple[int, int] | None:
        """As ``of`` for elements ``[begin, end)`` that stand in a file, read and summed without the GIL.

        Args:
            handle: An open file.
            offset_bytes: Where element ``begin`` stands.
            begin: First element, a multiple of ``step_elements``.
            end: One past the last element, likewise.
            buffer: Writable memory to read through, of at least one step.

        Returns:
            The sum of each lane; None if this is not possible here, or reading failed: reading again says how.
        """
        if self._native is None or begin >= end:
            return None
        count = (end - begin) * self.dtype.words
        first = self._first_step(count, begin)
        sums = (ctypes.c_uint64 * LANES)()
        failed = native.library().ckptguard_accumulate_file(
            ctypes.byref(self._native), handle, offset_bytes, count, first,
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer), sums,
        )  # fmt: skip
        return None if failed else (sums[0], sums[1])

    def _first_step(self, words: int, begin: int) -> int:
        """Number of the step that element ``begin`` opens, if so many words from there on are whole steps of the box."""
        first, begins_inside = divmod(begin, self.step_elements)
        steps, ends_inside = divmod(words, self.prepared.per_step)
        if begins_inside or ends_inside or begin < 0 or (first + steps) * self.step_elements > self.box.numel:
            raise ValueError(
                f"{words} words from element {begin} on are no run of whole steps inside box {self.box}; "
                f"a step is {self.step_elements} elements of {self.dtype}"
            )
        return first


def _prepare(dtype: DType, shape: tuple[int, ...], box: Box, split: int, step: int) -> Prepared:
    """Weights of a box whose lines run along dim ``split`` in steps of ``step`` words; a split of -1 is a 0-d box."""
    none = np.empty(0, np.int64)
    if split < 0:  # one line of one step
        table, high = _zero_dim_table(dtype.words), np.ones((LANES, 1), np.uint64)
        return Prepared(step, 1, 0, table, high, none, none, np.empty((LANES, 0), np.uint64))
    offset, size = box.offset[split], box.size[split]
    later = tuple((d, box.offset[d], box.size[d], shape[d]) for d in range(split + 1, len(shape)))
    sizes = np.array(box.size[:split], np.int64)
    parts = [_index_weights(d, box.offset[d], box.size[d], shape[d]) for d in range(split)]
    return Prepared(
        per_step=step,
        line_steps=size,
        step_offset=offset,
        table=_table(split, dtype.words, later),
        high=_high_weights(split, offset, size, shape[split]),
        sizes=sizes,
        starts=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if split else none,
        weights=np.concatenate(parts, axis=1) if parts else np.empty((LANES, 0), np.uint64),
    )


@lru_cache(maxsize=64)  # the layers of a model share most of them
def _index_weights(dim: int, offset: int, size: int, extent: int) -> npt.NDArray[np.uint64]:
    """Weight of every index of ``[offset, offset + size)`` along a dim; uint64 (2, size)."""
    index = np.arange(offset, offset + size, dtype=np.int64)
    return _digits_product(dim, index, range(places(extent)))


@lru_cache(maxsize=64)
def _high_weights(dim: int, offset: int, size: int, extent: int) -> npt.NDArray[np.uint64]:
    """Weight of the digits above the lowest, for every ``index >> 12`` that the range meets; uint64 (2, n)."""
    last = offset + max(size, 1) - 1
    index = np.arange(offset >> DIGIT_BITS, (last >> DIGIT_BITS) + 1, dtype=np.int64) << DIGIT_BITS
    return _digits_product(dim, index, range(1, places(extent)))


def _digits_product(dim: int, index: npt.NDArray[np.int64], chosen: Iterable[int]) -> npt.NDArray[np.uint64]:
    out = np.ones((LANES, len(index)), np.uint64)
    for place in chosen:
        digit = (index >> (DIGIT_BITS * place)) & (DIGIT - 1)
        for lane in range(LANES):
            out[lane] = multiply(out[lane], digit_residues(lane, dim, place)[digit])
    return out


@lru_cache(maxsize=32)  # at most 4 MiB each
def _table(dim: int, words: int, later: tuple[tuple[int, int, int, int], ...]) -> npt.NDArray[np.uint32]:
    """Residues along the split dim's lowest digit, times those of the later dims and of the words; halves as uint32."""
    lanes = []
    for lane in range(LANES):
        row = digit_residues(lane, dim, 0)
        for later_dim, offset, size, extent in later:
            row = outer(row, _index_weights(later_dim, offset, size, extent)[lane])
        lanes.append(outer(row, word_residues(lane)[:words]))
    return _halves(lanes)


@lru_cache(maxsize=8)
def _zero_dim_table(words: int) -> npt.NDArray[np.uint32]:
    return _halves([word_residues(lane)[:words] for lane in range(LANES)])


def _halves(lanes: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint32]:
    """The four rows of a table, a view of a wider array: rows 4096 words apart would share the sets of a core's cache."""
    count = len(lanes[0])
    wide = np.zeros((2 * LANES, count + _ROW_GAP), np.uint32)
    for lane, values in enumerate(lanes):
        wide[2 * lane, :count] = values & np.uint64(0xFFFFFFFF)
        wide[2 * lane + 1, :count] = values >> np.uint64(32)
    return wide[:, :count]


def fingerprint_array(
    array: npt.NDArray[Any], dtype: DType, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
) -> Fingerprint:
    """Fingerprint of a numpy array, or its part of a global tensor's.

    Args:
        array: Elements; any numpy dtype of the right itemsize, any strides, either byte order.
        dtype: What the elements are (numpy has no bfloat16 and no fp8).
        shape: Global shape; the array's own by default.
        offset: Where the array stands in the global tensor; zero by default.

    Raises:
        ValueError: Itemsize or position do not fit.
    """
    shape = tuple(array.shape if shape is None else shape)
    box = Box(tuple(offset) if offset is not None else (0,) * array.ndim, array.shape)
    if array.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"elements of {array.dtype.itemsize} bytes are no {dtype}")
    if len(shape) != array.ndim or not box.within(shape):
        raise ValueError(f"box {box} is not inside a tensor of shape {list(shape)}")
    if not prod(box.size):
        return Fingerprint(dtype.name, shape, (0, 0))
    if array.dtype.str[0] == ">":  # the words are those of little-endian bytes
        array = array.byteswap()
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Fingerprint(dtype.name, shape, BoxSum(dtype, shape, box).of(data))
