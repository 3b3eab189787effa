"""Ways in which a tensor can differ from another, each made at random; used by fingerprint_trials.py."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import fingerprint_moves as moves
import numpy as np
from fingerprint_parts import Bytes, Kind, Pair, Part, two

from ckptguard.core.dtypes import BY_NAME

# Per floating dtype: its sign bit, and how many bits of mantissa; the bits between are the exponent.
_FLOATS = {
    "float64": (63, 52),
    "float32": (31, 23),
    "float16": (15, 10),
    "bfloat16": (15, 7),
    "float8_e5m2": (7, 2),
    "complex64": (31, 23),
    "complex128": (63, 52),
}
_SIGNED_ZERO = {name: sign for name, (sign, _) in _FLOATS.items()} | {"float8_e4m3fn": 7, "float4_e2m1fn_x2": 3}


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
    a, b = two(len(flat), random)
    flat[a] ^= mask
    flat[b] ^= mask
    return part, part.with_flat(flat)


def _cancelling_steps(part: Part, random: Random) -> Pair:
    """One more in a byte here, one less in the same byte there: a plain sum does not see it."""
    flat = part.flat
    if len(flat) < 2:
        return None
    a, b = two(len(flat), random)
    byte = random.randrange(part.dtype.itemsize)
    if flat[a, byte] == 255 or flat[b, byte] == 0:
        return None
    flat[a, byte] += 1
    flat[b, byte] -= 1
    return part, part.with_flat(flat)


def _equal_pair(part: Part, random: Random) -> Pair:
    """[a, a] against [b, b] at the same two positions: an XOR is zero for both."""
    first, second = part.flat, part.flat
    if len(first) < 2:
        return None
    a, b = two(len(first), random)
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
    """Two NaNs; every other time one is quiet and the other signals."""
    sign, mantissa = _FLOATS[part.dtype.name]
    a = random.randrange(1, 1 << mantissa)
    b = a ^ 1 << (mantissa - 1) if random.random() < 0.5 else random.randrange(1, 1 << mantissa)
    if b == 0:  # an infinity
        return None
    infinity = (1 << sign) - (1 << mantissa) | random.getrandbits(1) << sign
    flat = part.flat
    number = _number(part, random, flat)
    number[:] = _little(infinity | a, len(number))
    before = part.with_flat(flat.copy())
    number[:] = _little(infinity | b, len(number))
    return before, part.with_flat(flat)


def _dtype(part: Part, random: Random) -> Pair:
    others = [d for d in BY_NAME.values() if d.itemsize == part.dtype.itemsize and d != part.dtype]
    return (part, replace(part, dtype=random.choice(others))) if others else None


KINDS = (
    Kind("single bit flip", _flip),
    Kind("two elements swapped", moves.swap),
    Kind("paired flips, cancel under XOR", _paired_flips),
    Kind("steps that cancel under a sum", _cancelling_steps, tuple(set(BY_NAME) - {"bool"})),
    Kind("all elements permuted", moves.permute),
    Kind("[a, a] against [b, b]", _equal_pair),
    Kind("sign of zero", _zero_sign, tuple(_SIGNED_ZERO)),
    Kind("NaN payload", _nan_payload, tuple(_FLOATS)),
    Kind("rows swapped", moves.rows),
    Kind("transposed", moves.transpose, square=True),
    Kind("block moved", moves.move_block),
    Kind("shifted offset", moves.shift),
    Kind("zeros of another length", moves.zeros),
    Kind("same bytes, other dtype", _dtype),
    Kind("same bytes, other shape", moves.reshape),
)
