"""Bits to numbers, for saying how far two tensors are apart. numpy has no bfloat16 and no fp8, so they are decoded here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptguard.core.dtypes import DType

_NATIVE = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "u1", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
# (exponent bits, mantissa bits, bias); OCP 8-bit floating point specification and torch's c10/util/Float8_*.h
_FP8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


def as_numbers(data: npt.NDArray[np.uint8], dtype: DType) -> npt.NDArray[Any] | None:
    """Elements as numpy numbers; None where an element is no single number (packed fp4).

    Args:
        data: Bytes of the elements.
        dtype: Their type.

    Returns:
        float64 for all real floating types, the native type for integers, complex128 for complex.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN turns quiet on the way
        return _numbers(data, dtype)


def _numbers(data: npt.NDArray[np.uint8], dtype: DType) -> npt.NDArray[Any] | None:
    if dtype.name in _NATIVE:
        native = data.view(_NATIVE[dtype.name])
        if dtype.kind == "float":
            return native.astype(np.float64)
        return native.astype(np.complex128) if dtype.kind == "complex" else native
    if dtype.name == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name in _FP8:
        return np.take(_fp8_table(dtype.name), data)
    if dtype.name == "float8_e8m0fnu":
        return np.take(_e8m0_table(), data)
    return None


@lru_cache(maxsize=4)
def _fp8_table(name: str) -> npt.NDArray[np.float64]:
    exponent_bits, mantissa_bits, bias = _FP8[name]
    out = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        top = exponent == (1 << exponent_bits) - 1
        all_ones = top and mantissa == (1 << mantissa_bits) - 1
        if (name.endswith("fnuz") and code == 0x80) or (name == "float8_e4m3fn" and all_ones):
            value = float("nan")
        elif name == "float8_e5m2" and top:
            value = sign * float("inf") if mantissa == 0 else float("nan")
        elif exponent == 0:
            value = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        out[code] = value
    return out


@lru_cache(maxsize=1)
def _e8m0_table() -> npt.NDArray[np.float64]:
    out = 2.0 ** (np.arange(256, dtype=np.float64) - 127)
    out[255] = np.nan
    return out


def largest_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], dtype: DType) -> float | None:
    """Largest absolute difference of two runs of elements; inf where one side is infinite or not a number, None for packed."""
    x, y = as_numbers(a, dtype), as_numbers(b, dtype)
    if x is None or y is None or not len(x):
        return None
    if dtype.kind in ("int", "uint", "bool"):
        return float(max(abs(int(p) - int(q)) for p, q in _extremes(x, y)))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(x - y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    gap = np.where(same, 0.0, np.where(np.isfinite(gap), gap, np.inf))
    return float(gap.max())


def _extremes(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> list[tuple[Any, Any]]:
    """The pairs among which the integer difference is largest; float64 picks them, exact arithmetic measures them."""
    gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
    near = np.flatnonzero(gap >= gap.max() * (1 - 1e-9))[:64]
    return [(x[i], y[i]) for i in near]


def different_bits(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> int:
    """How many bits differ."""
    return int(np.bitwise_count(np.bitwise_xor(a, b)).sum(dtype=np.int64))
