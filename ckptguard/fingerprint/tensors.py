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
from ckptguard.fingerprint.residues import DIGIT, DIGIT_BITS, LANES, PRIME, digit_residues, places, word_residues

_MIN_LINE_WORDS = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The content of a global tensor.

    Attributes:
        dtype: torch's name of the element type.
        shape: Global shape.
        sums: The weighted sum modulo 2**61 - 1 of each lane.
    """

    dtype: str
    shape: tuple[int, ...]
    sums: tuple[int, int]

    @property
    def hex(self) -> str:
        """Both lanes, 16 hexadecimal digits each."""
        return f"{self.sums[0]:016x}{self.sums[1]:016x}"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}:{self.hex}"

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of two disjoint parts of one tensor.

        Raises:
            ValueError: They are parts of tensors of different dtype or shape.
        """
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"{self} and {other} are no parts of one tensor")
        return Fingerprint(self.dtype, self.shape, add(self.sums, other.sums))


def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Adds two pairs of sums modulo p."""
    return (a[0] + b[0]) % PRIME, (a[1] + b[1]) % PRIME


class BoxSum:
    """Weights of a box of a tensor, made once, and the weighted sums over ranges of its elements.

    Holds about 16 bytes per index of the box in each dim, and a table shared with other boxes. ``of`` may be called from
    several threads at once.

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
        self._per_step = step
        if split < 0:  # 0-d: one line of one step
            self._line, self._offset = 1, 0
            self._table = _zero_dim_table(dtype.words)
            self._high = np.ones((LANES, 1), np.uint64)
            self._sizes = self._starts = np.empty(0, np.int64)
            self._weights = np.empty((LANES, 0), np.uint64)
            return
        self._line, self._offset = box.size[split], box.offset[split]
        later = tuple((d, box.offset[d], box.size[d], shape[d]) for d in range(split + 1, len(shape)))
        self._table = _table(split, dtype.words, later)
        self._high = _high_weights(split, box.offset[split], box.size[split], shape[split])
        self._sizes = np.array(box.size[:split], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)[:-1]]).astype(np.int64) if split else self._sizes
        parts = [_index_weights(d, box.offset[d], box.size[d], shape[d]) for d in range(split)]
        self._weights = np.concatenate(parts, axis=1) if parts else np.empty((LANES, 0), np.uint64)

    def of(self, data: npt.NDArray[np.uint8] | memoryview, begin: int = 0) -> tuple[int, int]:
        """Sums over a range of elements.

        Args:
            data: Bytes of the elements, row-major, little-endian; its address need not be aligned.
            begin: First element, counted row-major inside the box; a multiple of ``step_elements``.

        Returns:
            The sum of each lane.
        """
        if not len(data):
            return 0, 0
        words = np.frombuffer(data, self.word_dtype)
        sums = np.zeros(LANES, np.uint64)
        kernels.accumulate(
            words, begin // self.step_elements, self._table, self._per_step, self._line, self._offset,
            self._sizes, self._weights, self._starts, self._high, sums,
        )  # fmt: skip
        return int(sums[0]), int(sums[1])


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


@lru_cache(maxsize=64)
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
        array: Elements; any numpy dtype of the right itemsize, any strides.
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
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Fingerprint(dtype.name, shape, BoxSum(dtype, shape, box).of(data))
