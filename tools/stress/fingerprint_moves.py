"""Ways in which tensors of the same elements can differ: order, place, shape. See fingerprint_mutations.py."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random
from typing import Any

import numpy as np
from fingerprint_parts import Pair, Part, two


def swap(part: Part, random: Random) -> Pair:
    """Two elements change places."""
    flat = part.flat
    if len(flat) < 2:
        return None
    a, b = two(len(flat), random)
    flat[[a, b]] = flat[[b, a]]
    return part, part.with_flat(flat)


def permute(part: Part, random: Random) -> Pair:
    """All elements in another order."""
    order = np.random.default_rng(random.getrandbits(32)).permutation(prod(part.size))
    return part, part.with_flat(part.flat[order])


def shift(part: Part, random: Random) -> Pair:
    """The same part at another place of a tensor that is zero elsewhere."""
    if not part.size:
        return None
    room = tuple(extent + random.choice((1, 3, 64, 4096, 70_000)) for extent in part.size)
    spots = [
        tuple(random.randint(0, whole - extent) for whole, extent in zip(room, part.size, strict=True)) for _ in "ab"
    ]
    return replace(part, shape=room, offset=spots[0]), replace(part, shape=room, offset=spots[1])


def zeros(part: Part, random: Random) -> Pair:
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


def rows(part: Part, random: Random) -> Pair:
    """Two rows along some dim change places."""
    long = [dim for dim, extent in enumerate(part.size) if extent > 1]
    if not long:
        return None
    dim = random.choice(long)
    order = list(range(part.size[dim]))
    a, b = two(len(order), random)
    order[a], order[b] = b, a
    return part, replace(part, data=np.take(part.data, order, axis=dim))


def transpose(part: Part, random: Random) -> Pair:
    """Two dims of one extent change places; the shape stays."""
    equal = [(a, b) for a in range(len(part.size)) for b in range(a) if part.size[a] == part.size[b] > 1]
    if not equal:
        return None
    a, b = random.choice(equal)
    return part, replace(part, data=np.ascontiguousarray(part.data.swapaxes(a, b)))


def move_block(part: Part, random: Random) -> Pair:
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


def reshape(part: Part, random: Random) -> Pair:
    """The same elements in row-major order under another shape, often with dims of extent 1."""
    count = prod(part.size)
    shape: list[int] = []
    while count > 1 and len(shape) < 4:
        divisors = [d for d in (1, 2, 3, 4, 5, 7, 8, 16, 31, 64) if count % d == 0]
        shape.append(random.choice(divisors))
        count //= shape[-1]
    shape.append(count)
    size = tuple(random.sample(shape, len(shape)))
    return part, Part(part.dtype, size, (0,) * len(size), part.data.reshape(*size, -1))
