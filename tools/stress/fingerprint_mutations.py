"""Ways in which a tensor can differ from another, each made at random; used by fingerprint_trials.py."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any, NamedTuple

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


# Per floating dtype: sign bit, and bits of a NaN whose low bits are payload, and how many those are.
_FLOATS = {
    "float64": (63, 0x7FF8 << 48, 51),
    "float32": (31, 0x7FC0 << 16, 22),
    "float16": (15, 0x7E00, 9),
    "bfloat16": (15, 0x7FC0, 6),
    "float8_e5m2": (7, 0x7C, 2),
    "complex64": (31, 0x7FC0 << 16, 22),
    "complex128": (63, 0x7FF8 << 48, 51),
}
_SIGNED_ZERO = {name: sign for name, (sign, _, _) in _FLOATS.items()} | {"float8_e4m3fn": 7, "float4_e2m1fn_x2": 3}


def _two(count: int, random: Random) -> tuple[int, int]:
    """Two different numbers below ``count``, often 4096 or a power of two apart: where digits and lines meet."""
    a = random.randrange(count)
    b = (a + (1 << random.randrange(14))) % count if random.random() < 0.3 else random.randrange(count)
    return a, b if b != a else (a + 1) % count


def _bit_mask(part: Part, random: Random) -> Bytes:
    """One bit of an element; of a bool, the only one it has."""
    mask = np.zeros(part.dtype.itemsize, np.uint8)
    bit = 0 if part.dtype.kind == "bool" else random.randrange(8)
    mask[random.randrange(len(mask))] = 1 << bit
    return mask


def _flip(part: Part, random: Random) -> Pair:
    flat = part.flat
    flat[random.randrange(len(flat))] ^= _bit_mask(part, random)
    return part, part.with_flat(flat)


def _paired_flips(part: Part, random: Random) -> Pair:
    flat, mask = part.flat, _bit_mask(part, random)
    if len(flat) < 2:
        return None
    a, b = _two(len(flat), random)
    flat[a] ^= mask
    flat[b] ^= mask
    return part, part.with_flat(flat)


def _cancelling_steps(part: Part, random: Random) -> Pair:
    """One more in a byte here, one less in the same byte there: a plain sum does not see it."""
    flat = part.flat
    if len(flat) < 2:
        return None
    a, b = _two(len(flat), random)
    byte = random.randrange(part.dtype.itemsize)
    if flat[a, byte] == 255 or flat[b, byte] == 0:
        return None
    flat[a, byte] += 1
    flat[b, byte] -= 1
    return part, part.with_flat(flat)


def _swap(part: Part, random: Random) -> Pair:
    flat = part.flat
    if len(flat) < 2:
        return None
    a, b = _two(len(flat), random)
    flat[[a, b]] = flat[[b, a]]
    return part, part.with_flat(flat)


def _permute(part: Part, random: Random) -> Pair:
    order = np.random.default_rng(random.getrandbits(32)).permutation(prod(part.size))
    return part, part.with_flat(part.flat[order])


def _equal_pair(part: Part, random: Random) -> Pair:
    """[a, a] against [b, b] at the same two positions: an XOR is zero for both."""
    first, second = part.flat, part.flat
    if len(first) < 2:
        return None
    a, b = _two(len(first), random)
    first[[a, b]] = first[a]
    second[[a, b]] = second[b]
    return part.with_flat(first), part.with_flat(second)


def _little(value: int, count: int) -> Bytes:
    return np.frombuffer(value.to_bytes(count, "little"), np.uint8)


def _number(part: Part, random: Random, flat: Bytes) -> Bytes:
    """A view of one real number of the tensor: an element, or half of a complex one."""
    element: Bytes = flat[random.randrange(len(flat))]
    half = len(element) // 2
    if part.dtype.kind != "complex":
        return element
    begin = random.choice((0, half))
    part_of_it: Bytes = element[begin : begin + half]
    return part_of_it


def _zero_sign(part: Part, random: Random) -> Pair:
    flat = part.flat
    number = _number(part, random, flat)
    number[:] = 0
    before = part.with_flat(flat.copy())
    number[:] = _little(1 << _SIGNED_ZERO[part.dtype.name], len(number))
    return before, part.with_flat(flat)


def _nan_payload(part: Part, random: Random) -> Pair:
    sign, nan, payload_bits = _FLOATS[part.dtype.name]
    a, b = random.randrange(1 << payload_bits), random.randrange(1 << payload_bits)
    signs = random.getrandbits(1) << sign
    flat = part.flat
    number = _number(part, random, flat)
    number[:] = _little(nan | signs | a, len(number))
    before = part.with_flat(flat.copy())
    number[:] = _little(nan | signs | b, len(number))
    return before, part.with_flat(flat)


def _dtype(part: Part, random: Random) -> Pair:
    others = [d for d in BY_NAME.values() if d.itemsize == part.dtype.itemsize and d != part.dtype]
    return (part, replace(part, dtype=random.choice(others))) if others else None


def _shift(part: Part, random: Random) -> Pair:
    """The same part at another place of a tensor that is zero elsewhere."""
    if not part.size:
        return None
    room = tuple(extent + random.choice((1, 3, 64, 4096, 70_000)) for extent in part.size)
    spots = [
        tuple(random.randint(0, whole - extent) for whole, extent in zip(room, part.size, strict=True)) for _ in "ab"
    ]
    return replace(part, shape=room, offset=spots[0]), replace(part, shape=room, offset=spots[1])


def _zeros(part: Part, random: Random) -> Pair:
    """Zeros of two lengths, alone or behind some content, along the first dim."""
    if not part.size:
        return None
    lengths = [random.randint(0, 40), random.randint(0, 40)]
    keep = part.data[: part.size[0] if random.random() < 0.5 else 0]
    made = []
    for length in lengths:
        data = np.concatenate([keep, np.zeros((length, *part.data.shape[1:]), np.uint8)])
        made.append(Part(part.dtype, data.shape[:-1], (0,) * (data.ndim - 1), data))
    return made[0], made[1]


def _rows(part: Part, random: Random) -> Pair:
    long = [dim for dim, extent in enumerate(part.size) if extent > 1]
    if not long:
        return None
    dim = random.choice(long)
    order = list(range(part.size[dim]))
    a, b = _two(len(order), random)
    order[a], order[b] = b, a
    return part, replace(part, data=np.take(part.data, order, axis=dim))


def _transpose(part: Part, random: Random) -> Pair:
    equal = [(a, b) for a in range(len(part.size)) for b in range(a) if part.size[a] == part.size[b] > 1]
    if not equal:
        return None
    a, b = random.choice(equal)
    return part, replace(part, data=np.ascontiguousarray(part.data.swapaxes(a, b)))


def _move(part: Part, random: Random) -> Pair:
    """A box of the tensor and one of the same size beside it change places, or all rolls along a dim."""
    long = [dim for dim, extent in enumerate(part.size) if extent > 1]
    if not long:
        return None
    dim = random.choice(long)
    extent = part.size[dim]
    if random.random() < 0.3:
        return part, replace(part, data=np.roll(part.data, random.randrange(1, extent), axis=dim))
    width = random.randint(1, extent // 2)
    start = random.randint(0, extent - 2 * width)
    other = random.randint(start + width, extent - width)
    cut: list[Any] = [slice(random.randrange(n), None) for n in part.size]
    here, there = list(cut), list(cut)
    here[dim], there[dim] = slice(start, start + width), slice(other, other + width)
    data = part.data.copy()
    data[tuple(here)], data[tuple(there)] = part.data[tuple(there)], part.data[tuple(here)]
    return part, replace(part, data=data)


def _reshape(part: Part, random: Random) -> Pair:
    count = prod(part.size)
    shape: list[int] = []
    while count > 1 and len(shape) < 4:
        divisors = [d for d in (1, 2, 3, 4, 5, 7, 8, 16, 31, 64) if count % d == 0]
        shape.append(random.choice(divisors))
        count //= shape[-1]
    shape.append(count)
    size = tuple(random.sample(shape, len(shape)))
    return part, Part(part.dtype, size, (0,) * len(size), part.data.reshape(*size, -1))


KINDS = (
    Kind("single bit flip", _flip),
    Kind("two elements swapped", _swap),
    Kind("paired flips, cancel under XOR", _paired_flips),
    Kind("steps that cancel under a sum", _cancelling_steps, tuple(set(BY_NAME) - {"bool"})),
    Kind("all elements permuted", _permute),
    Kind("[a, a] against [b, b]", _equal_pair),
    Kind("sign of zero", _zero_sign, tuple(_SIGNED_ZERO)),
    Kind("NaN payload", _nan_payload, tuple(_FLOATS)),
    Kind("rows swapped", _rows),
    Kind("transposed", _transpose, square=True),
    Kind("block moved", _move),
    Kind("shifted offset", _shift),
    Kind("zeros of another length", _zeros),
    Kind("same bytes, other dtype", _dtype),
    Kind("same bytes, other shape", _reshape),
)
