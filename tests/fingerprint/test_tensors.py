"""The sums over boxes: no cut of a tensor changes them, and the slow reference makes the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import slow_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.fingerprint.tensors import BoxSum, fingerprint_array
from ckptguard.fingerprint.values import PRIME, Fingerprint

dtypes = st.sampled_from(list(BY_NAME.values()))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def shapes(draw: st.DrawFn, limit: int = 30_000) -> tuple[int, ...]:
    """Shapes of 0 to 5 dims around the borders that the code has: lines of 64 words, digits of 4096."""
    extents: list[int] = []
    room = limit
    for _ in range(draw(st.integers(0, 5))):
        near = st.sampled_from([1, 2, 3, 8, 31, 32, 33, 63, 64, 65, 4095, 4096, 4097, 8193])
        extent = min(draw(near | st.integers(1, 20)), room)
        extents.append(extent)
        room //= extent
    return tuple(draw(st.permutations(extents)))


@st.composite
def placed(draw: st.DrawFn, limit: int = 30_000) -> tuple[tuple[int, ...], Box]:
    """A box and the shape of a far larger tensor that it is a part of."""
    size = draw(shapes(limit))
    shape, offset = [], []
    for extent in size:
        before = draw(st.sampled_from([0, 0, 1, 4090, 4096, 2**24 - 3, 2**40]) | st.integers(0, 10_000))
        after = draw(st.sampled_from([0, 0, 1, 4096, 2**30]))
        offset.append(before)
        shape.append(before + extent + after)
    return tuple(shape), Box(tuple(offset), size)


def _content(size: tuple[int, ...], dtype: DType, seed: int) -> npt.NDArray[Any]:
    """Elements as opaque items; half of the bytes are 255, so that sums are as large as they get."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, prod(size) * dtype.itemsize, dtype=np.uint8)
    data[rng.random(data.size) < 0.5] = 255
    return data.view(np.dtype((np.void, dtype.itemsize))).reshape(size)


def _cuts(draw: st.DrawFn, size: tuple[int, ...], offset: tuple[int, ...], depth: int = 4) -> Iterator[Box]:
    """Cuts a box in two along some dim, and the halves again."""
    long = [dim for dim, extent in enumerate(size) if extent > 1]
    if not long or depth == 0 or draw(st.integers(0, 4)) == 0:
        yield Box(offset, size)
        return
    dim = draw(st.sampled_from(long))
    at = draw(st.integers(1, size[dim] - 1))
    for begin, end in ((0, at), (at, size[dim])):
        moved = (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :])
        yield from _cuts(draw, (*size[:dim], end - begin, *size[dim + 1 :]), moved, depth - 1)


@settings(deadline=None)
@given(st.data(), dtypes, placed(), seeds)
def test_any_cut_in_any_order_adds_up(
    data: st.DataObject, dtype: DType, where: tuple[tuple[int, ...], Box], seed: int
) -> None:
    shape, box = where
    array = _content(box.size, dtype, seed)
    parts = list(data.draw(st.composite(lambda draw: list(_cuts(draw, box.size, (0,) * len(box.size))))()))
    total = Fingerprint(dtype.name, shape, (0, 0))
    for part in data.draw(st.permutations(parts)):
        cut = array[tuple(slice(o, o + s) for o, s in zip(part.offset, part.size, strict=True))]
        at = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
        total = total + fingerprint_array(cut, dtype, shape, at)
    assert total == fingerprint_array(array, dtype, shape, box.offset)


@settings(deadline=None, max_examples=60)
@given(dtypes, placed(limit=600), seeds)
def test_slow_reference_makes_the_same(dtype: DType, where: tuple[tuple[int, ...], Box], seed: int) -> None:
    shape, box = where
    array = _content(box.size, dtype, seed)
    slow = slow_reference.fingerprint_hex(dtype.name, shape, box.offset, box.size, array.tobytes())
    assert fingerprint_array(array, dtype, shape, box.offset).hex == slow


@settings(deadline=None)
@given(st.data(), dtypes, placed(), seeds)
def test_any_row_major_ranges_of_steps_add_up(
    data: st.DataObject, dtype: DType, where: tuple[tuple[int, ...], Box], seed: int
) -> None:
    shape, box = where
    raw = np.frombuffer(_content(box.size, dtype, seed).tobytes(), np.uint8)
    weights = BoxSum(dtype, shape, box)
    step = weights.step_elements
    steps = box.numel // step
    assert steps * step == box.numel
    cuts = sorted({0, steps, *data.draw(st.lists(st.integers(0, steps), max_size=6))})
    totals = [0, 0]
    for begin, end in pairwise(cuts):
        part = memoryview(raw)[begin * step * dtype.itemsize : end * step * dtype.itemsize]
        for lane, value in enumerate(weights.of(part, begin * step)):
            totals[lane] = (totals[lane] + value) % PRIME
    assert tuple(totals) == weights.of(raw)


@settings(deadline=None)
@given(dtypes, placed(limit=2000), seeds, st.integers(1, 7))
def test_address_need_not_be_aligned(dtype: DType, where: tuple[tuple[int, ...], Box], seed: int, shift: int) -> None:
    shape, box = where
    data = _content(box.size, dtype, seed).tobytes()
    moved = memoryview(bytes(shift) + data)[shift:]
    assert BoxSum(dtype, shape, box).of(moved) == BoxSum(dtype, shape, box).of(memoryview(data))


@settings(deadline=None)
@given(dtypes, shapes(limit=2000), seeds)
def test_strides_do_not_count(dtype: DType, size: tuple[int, ...], seed: int) -> None:
    array = _content(size, dtype, seed)
    spread = np.zeros([2 * extent for extent in size], array.dtype)[tuple(slice(1, None, 2) for _ in size)]
    if size:
        spread[...] = array
    else:
        spread = array
    assert fingerprint_array(spread, dtype) == fingerprint_array(array, dtype)
    fortran = np.asfortranarray(array).reshape(size)
    assert fingerprint_array(fortran, dtype) == fingerprint_array(array, dtype)


@pytest.mark.parametrize(
    ("name", "code"), [("float32", "f4"), ("int64", "i8"), ("complex128", "c16"), ("uint16", "u2")]
)
def test_byte_order_of_the_array_does_not_count(name: str, code: str) -> None:
    little = np.arange(1000).astype(f"<{code}").reshape(10, 100)
    assert fingerprint_array(little.astype(f">{code}"), BY_NAME[name]) == fingerprint_array(little, BY_NAME[name])


@pytest.mark.parametrize("size", [(0,), (3, 0), (0, 5), (2, 0, 4)])
def test_empty_is_zero(size: tuple[int, ...]) -> None:
    dtype = BY_NAME["float32"]
    assert fingerprint_array(np.empty(size, np.float32), dtype) == Fingerprint("float32", size, (0, 0))
    assert BoxSum(dtype, size, whole(size)).of(memoryview(b"")) == (0, 0)


@pytest.mark.parametrize("extent", [4096 * 4096 + 5, 8192 * 3])
def test_largest_words_in_long_lines_do_not_overflow(extent: int) -> None:
    """All words 65535 in one line; the expected sum comes from the sums of single residues, not from the loops."""
    from ckptguard.fingerprint.residues import digit_residues, places, word_residues

    made = fingerprint_array(np.full(extent, 0xFFFF, np.uint16), BY_NAME["uint16"]).sums
    for lane in (0, 1):
        low = [int(value) for value in digit_residues(lane, 0, 0)]
        full = sum(low)
        total = 0
        for begin in range(0, extent, 4096):
            weight, rest = 1, begin >> 12
            for place in range(1, places(extent)):
                rest, digit = divmod(rest, 4096)
                weight = weight * int(digit_residues(lane, 0, place)[digit]) % PRIME
            total += weight * (full if extent - begin >= 4096 else sum(low[: extent - begin]))
        assert made[lane] == total * int(word_residues(lane)[0]) * 0xFFFF % PRIME


def test_ranges_that_are_no_whole_steps_are_refused() -> None:
    weights = BoxSum(BY_NAME["bfloat16"], (100, 4), whole((100, 4)))
    assert weights.step_elements == 4
    data = bytes(2 * 400)
    for part, begin in ((data[:6], 0), (data[:8], 2), (data, 4), (data[:8], 400), (data[:8], -4), (data[:16], 396)):
        with pytest.raises(ValueError, match="no run of whole steps"):
            weights.of(memoryview(part), begin)


def test_what_does_not_fit_is_refused() -> None:
    dtype = BY_NAME["float32"]
    with pytest.raises(ValueError, match="elements of 8 bytes"):
        fingerprint_array(np.zeros(3, np.float64), dtype)
    for shape, offset in (((3, 4), (0, 1)), ((3, 4), (-1, 0)), ((3,), (0,)), ((3, 5, 1), (0, 0, 0)), ((2, 4), None)):
        with pytest.raises(ValueError, match=r"not inside|argument 2"):
            fingerprint_array(np.zeros((3, 4), np.float32), dtype, shape, offset)
    whole_one = fingerprint_array(np.zeros((3, 4), np.float32), dtype)
    with pytest.raises(ValueError, match="no parts of one tensor"):
        whole_one + fingerprint_array(np.zeros((4, 3), np.float32), dtype)


def test_text_form() -> None:
    made = Fingerprint("bfloat16", (3, 5), (1, PRIME - 1))
    assert str(made) == "bfloat16[3, 5]:00000000000000011ffffffffffffffe"
    assert str(Fingerprint("float32", (), (0, 0))) == "float32[]:" + "0" * 32
