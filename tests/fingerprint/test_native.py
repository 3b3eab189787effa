"""The C loop and the numba loop give the same sums; whoever lacks one of them loses nothing but time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint import kernels, modular, native
from ckptguard.fingerprint.residues import digit_residues
from ckptguard.fingerprint.tensors import BoxSum
from ckptguard.fingerprint.values import PRIME

needs_native = pytest.mark.skipif(native.library() is None, reason="no C compiler when ckptguard was installed")


def test_the_c_loop_was_built_here() -> None:
    """Where the tests run there is a compiler, so a broken build must not hide behind numba."""
    assert native.library() is not None


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], Box]:
    dims = draw(st.integers(0, 3))
    shape, offset, size = [], [], []
    for dim in range(dims):
        extent = draw(st.sampled_from([1, 2, 3, 17, 64, 100, 700, 5000] if dim == dims - 1 else [1, 2, 3, 9, 5000]))
        begin = draw(st.integers(0, extent - 1))
        shape.append(extent)
        offset.append(begin)
        size.append(draw(st.integers(1, min(extent - begin, 4200 if dim == dims - 1 else 5))))
    return (
        draw(st.sampled_from(["int8", "bfloat16", "float32", "int64", "complex128"])),
        tuple(shape),
        Box(tuple(offset), tuple(size)),
    )


@needs_native
@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_both_loops_agree(case, seed: int, shift: int) -> None:
    name, shape, box = case
    dtype = BY_NAME[name]
    raw = np.random.default_rng(seed).integers(0, 256, box.numel * dtype.itemsize + shift, dtype=np.uint8)
    data = memoryview(raw)[shift:]  # at any address
    weights = BoxSum(dtype, shape, box)
    sums = np.zeros(2, np.uint64)
    kernels.accumulate_prepared(weights.prepared, np.frombuffer(data, weights.word_dtype), 0, sums)
    assert weights.of(data) == (int(sums[0]), int(sums[1]))


@needs_native
def test_largest_words_do_not_overflow() -> None:
    for name in ("bfloat16", "uint8"):
        dtype = BY_NAME[name]
        shape = (16, 8192)
        box = Box((0, 0), shape)
        data = np.full(16 * 8192 * dtype.itemsize, 255, np.uint8)
        weights = BoxSum(dtype, shape, box)
        sums = np.zeros(2, np.uint64)
        kernels.accumulate_prepared(weights.prepared, data.view(weights.word_dtype), 0, sums)
        assert weights.of(data) == (int(sums[0]), int(sums[1]))


@needs_native
def test_a_file_sums_as_its_bytes_do(tmp_path: Path) -> None:
    dtype, shape = BY_NAME["float32"], (700, 33)
    weights = BoxSum(dtype, shape, Box((0, 0), shape))
    data = np.random.default_rng(0).integers(0, 256, 700 * 33 * 4, dtype=np.uint8)
    (tmp_path / "f").write_bytes(b"head" + data.tobytes())
    handle = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        for size in (64, 1000, 1 << 20):
            buffer = memoryview(bytearray(size + 33 * 4))
            assert weights.of_file(handle, 4, 0, 700 * 33, buffer) == weights.of(data)
        assert weights.of_file(handle, 8, 0, 700 * 33, buffer) is None  # the file ends too early
    finally:
        os.close(handle)
    assert weights.of_file(handle, 4, 0, 700 * 33, buffer) is None  # no longer open


def test_without_the_library_numba_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, shape = BY_NAME["bfloat16"], (5, 4100)
    box = Box((0, 0), shape)
    data = np.random.default_rng(0).integers(0, 256, 5 * 4100 * 2, dtype=np.uint8)
    expected = BoxSum(dtype, shape, box).of(data)
    monkeypatch.setattr(native, "library", lambda: None)
    weights = BoxSum(dtype, shape, box)
    assert weights.of(data) == expected
    assert weights.of_file(0, 0, 0, 10, memoryview(bytearray(10))) is None


def test_products_are_those_of_whole_numbers() -> None:
    rng = np.random.default_rng(1)
    a = np.concatenate([digit_residues(0, 0, 0)[:500], np.array([0, 1, PRIME - 1, PRIME - 1], np.uint64)])
    b = np.concatenate(
        [rng.integers(0, PRIME, 500, dtype=np.uint64), np.array([5, PRIME - 1, PRIME - 1, 1], np.uint64)]
    )
    assert modular.multiply(a, b).tolist() == [int(x) * int(y) % PRIME for x, y in zip(a, b, strict=True)]
    assert modular.outer(a[:3], b[:2]).tolist() == [int(x) * int(y) % PRIME for x in a[:3] for y in b[:2]]
