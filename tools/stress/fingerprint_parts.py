"""Tensors and parts of tensors as the trials of the fingerprint draw and change them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptguard.core.dtypes import BY_NAME, DType

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A tensor or a part of one.

    Attributes:
        dtype: Element type.
        shape: Global shape.
        offset: Where the part stands in it.
        data: Bytes of the part, of shape (*size, itemsize); never changed in place.
    """

    dtype: DType
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Bytes

    @property
    def size(self) -> tuple[int, ...]:
        """Extents of the part."""
        return self.data.shape[:-1]

    @property
    def flat(self) -> Bytes:
        """A copy of the bytes, of shape (elements, itemsize)."""
        return self.data.reshape(-1, self.dtype.itemsize).copy()

    def with_flat(self, flat: Bytes) -> Part:
        """The same part with other elements."""
        return replace(self, data=flat.reshape(self.data.shape))

    def says_the_same(self, other: Part) -> bool:
        """Whether both mean the same global tensor, all outside of the part being equal (or zero, if it moved)."""
        if (self.dtype, self.shape, self.size) != (other.dtype, other.shape, other.size):
            return False
        same = np.array_equal(self.data, other.data)
        return same and (self.offset == other.offset or not self.data.any())


# Of two tensors, the first may be made anew to be a fitting one. None: this draw gives no such pair.
Pair = tuple[Part, Part] | None


class Kind(NamedTuple):
    """A way to differ.

    Attributes:
        name: For the table.
        make: Makes a pair of a drawn part.
        dtypes: Element types that can differ in this way.
        square: Whether it needs two dims of one extent.
    """

    name: str
    make: Callable[[Part, Random], Pair]
    dtypes: Collection[str] = tuple(BY_NAME)
    square: bool = False


def two(count: int, random: Random) -> tuple[int, int]:
    """Two different numbers below ``count``, often 4096 or a power of two apart: where digits and lines meet."""
    a = random.randrange(count)
    b = (a + (1 << random.randrange(14))) % count if random.random() < 0.3 else random.randrange(count)
    return a, b if b != a else (a + 1) % count
