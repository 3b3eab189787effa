"""Fingerprints of tensors: what they are, how parts add up, and the sums over the parts of a box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.fingerprint import kernels
from ckptguard.fingerprint.residues import DIGIT, DIGIT_BITS, LANES, digit_residues, places, word_residues
from ckptguard.fingerprint.values import Fingerprint

_MIN_LINE_WORDS = 64


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
        split, step = len(shape) - 1, dtype.words
        while split > 0 and box.size[split] * step < _MIN_LINE_WORDS:
            step *= box.size[split]
            split -= 1
        self.step_elements = max(1, step // dtype.words)
        self.prepared = _prepare(dtype, self.shape, box, split, step)

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
        p = self.prepared
        first, begins_inside = divmod(begin, self.step_elements)
        steps, ends_inside = divmod(words.size, p.per_step)
        if begins_inside or ends_inside or begin < 0 or (first + steps) * self.step_elements > self.box.numel:
            raise ValueError(
                f"{len(data)} bytes from element {begin} on are no run of whole steps inside box {self.box}; "
                f"a step is {self.step_elements} elements of {self.dtype}"
            )
        sums = np.zeros(LANES, np.uint64)
        kernels.accumulate(
            words, first, p.table, p.per_step, p.line_steps, p.step_offset, p.sizes, p.weights, p.starts, p.high, sums
        )
        return int(sums[0]), int(sums[1])


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


def _index_weights(dim: int, offset: int, size: int, extent: int) -> npt.NDArray[np.uint64]:
    """Weight of every index of ``[offset, offset + size)`` along a dim; uint64 (2, size)."""
    index = np.arange(offset, offset + size, dtype=np.int64)
    return _digits_product(dim, index, range(places(extent)))


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
            out[lane] = kernels.multiply_all(out[lane], digit_residues(lane, dim, place)[digit])
    return out


@lru_cache(maxsize=32)  # at most 4 MiB each
def _table(dim: int, words: int, later: tuple[tuple[int, int, int, int], ...]) -> npt.NDArray[np.uint32]:
    """Residues along the split dim's lowest digit, times those of the later dims and of the words; halves as uint32."""
    lanes = []
    for lane in range(LANES):
        row = digit_residues(lane, dim, 0)
        for later_dim, offset, size, extent in later:
            row = kernels.outer(row, _index_weights(later_dim, offset, size, extent)[lane])
        lanes.append(kernels.outer(row, word_residues(lane)[:words]))
    return _halves(lanes)


@lru_cache(maxsize=8)
def _zero_dim_table(words: int) -> npt.NDArray[np.uint32]:
    return _halves([word_residues(lane)[:words] for lane in range(LANES)])


def _halves(lanes: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint32]:
    rows: list[npt.NDArray[Any]] = []
    for lane in lanes:
        rows += [(lane & np.uint64(0xFFFFFFFF)).astype(np.uint32), (lane >> np.uint64(32)).astype(np.uint32)]
    return np.ascontiguousarray(np.stack(rows))


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
