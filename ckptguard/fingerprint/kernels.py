"""The compiled loops of the fingerprint. Machine code is cached on disk by numba; all run without the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ckptguard.fingerprint.residues import DIGIT, DIGIT_BITS

if TYPE_CHECKING:
    from ckptguard.fingerprint.tensors import Prepared

Words = npt.NDArray[Any]  # uint8 or uint16, flat
Table = npt.NDArray[np.uint32]
Residues = npt.NDArray[np.uint64]

# A product of a 16-bit word and a 32-bit half residue is below 2**48, so 8192 of them stay below 2**61.
MAX_RUN = 8192


@njit(nogil=True, cache=True, inline="always")
def _reduce(x):  # type: ignore[no-untyped-def]
    """Return x mod p for x < 2**64."""
    p = np.uint64(0x1FFFFFFFFFFFFFFF)
    x = (x & p) + (x >> np.uint64(61))
    return x - p if x >= p else x


@njit(nogil=True, cache=True, inline="always")
def mulmod(a, b):  # type: ignore[no-untyped-def]
    """Return a * b mod p for a, b < p, in 64-bit arithmetic: schoolbook halves, then 2**61 = 1."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    a0, a1 = a & mask, a >> half
    b0, b1 = b & mask, b >> half
    low = a0 * b0
    mid = a0 * b1 + a1 * b0 + (low >> half)  # below 2**62 + 2**32
    high = a1 * b1 + (mid >> half)
    low = (mid << half) | (low & mask)
    # high * 2**64 + low = (high * 8 + low >> 61) * 2**61 + (low mod 2**61)
    return _reduce((low & np.uint64(0x1FFFFFFFFFFFFFFF)) + (high << np.uint64(3)) + (low >> np.uint64(61)))


@njit(nogil=True, cache=True, inline="always")
def _lane(low, high):  # type: ignore[no-untyped-def]
    """Return low + high * 2**32 mod p."""
    return _reduce(_reduce(low) + mulmod(_reduce(high), np.uint64(1) << np.uint64(32)))


@njit(nogil=True, cache=True)
def _run(words, t0, t1, t2, t3, out):  # type: ignore[no-untyped-def]
    """Four dot products of the words with table rows: (low, high) of lane 0, then of lane 1.

    Plain slices and one counter from 0, or LLVM does not vectorise it (a tenth of the speed).
    """
    a = np.uint64(0)
    b = np.uint64(0)
    c = np.uint64(0)
    d = np.uint64(0)
    for i in range(words.size):
        w = np.uint64(words[i])
        a += w * np.uint64(t0[i])
        b += w * np.uint64(t1[i])
        c += w * np.uint64(t2[i])
        d += w * np.uint64(t3[i])
    out[0], out[1], out[2], out[3] = a, b, c, d


@njit(nogil=True, cache=True)
def _run_pair(one, two, t0, t1, t2, t3, out):  # type: ignore[no-untyped-def]
    """As ``_run`` for two runs of one length and the same table rows, which are read once for both."""
    a = np.uint64(0)
    b = np.uint64(0)
    c = np.uint64(0)
    d = np.uint64(0)
    e = np.uint64(0)
    f = np.uint64(0)
    g = np.uint64(0)
    h = np.uint64(0)
    for i in range(one.size):
        v, w = np.uint64(one[i]), np.uint64(two[i])
        x = np.uint64(t0[i])
        a += v * x
        e += w * x
        x = np.uint64(t1[i])
        b += v * x
        f += w * x
        x = np.uint64(t2[i])
        c += v * x
        g += w * x
        x = np.uint64(t3[i])
        d += v * x
        h += w * x
    out[0], out[1], out[2], out[3] = a, b, c, d
    out[4], out[5], out[6], out[7] = e, f, g, h


@njit(nogil=True, cache=True)
def _line_weight(line, sizes, weights, starts):  # type: ignore[no-untyped-def]
    """Product of the weights of the earlier dims' indices, per lane."""
    w0 = w1 = np.uint64(1)
    for dim in range(sizes.size - 1, -1, -1):
        at = starts[dim] + line % sizes[dim]
        line //= sizes[dim]
        w0 = mulmod(w0, weights[0, at])
        w1 = mulmod(w1, weights[1, at])
    return w0, w1


@njit(nogil=True, cache=True)
def accumulate(  # type: ignore[no-untyped-def]
    words, first, table, per_step, line_steps, step_offset, sizes, weights, starts, high, sums
):
    """Adds the weighted sum of words to ``sums``, modulo p.

    The words are a row-major range of a box. The box is seen as lines: a line runs over ``line_steps`` indices of the
    split dim, each step holding ``per_step`` words (the later dims and the words of an element). A line's weight is the
    product of one weight per earlier dim.

    Args:
        words: Flat words; they begin at the start of a step.
        first: Number of the first step, counted row-major over the whole box.
        table: uint32 (4, steps_in_table * per_step): low and high half of the residue of lane 0, then of lane 1, by the
            low digit of the index along the split dim.
        per_step: Words per step.
        line_steps: Extent of the box along the split dim.
        step_offset: Global offset of the box along the split dim.
        sizes: int64 (dims before the split): extents of the box.
        weights: uint64 (2, sum of sizes): per earlier dim and index in the box, its weight; dims one after the other.
        starts: int64 (dims before the split): where each dim's weights begin.
        high: uint64 (2, n): weight of the digits above the lowest, by index >> 12 minus that of ``step_offset``.
        sums: uint64 (2,): changed in place.
    """
    dots = np.empty(8, np.uint64)
    runs = np.empty((2, 4), np.int64)  # begin, steps, digit, line
    total = words.size // per_step
    run_steps = max(1, MAX_RUN // per_step)
    base = step_offset >> DIGIT_BITS
    done = 0
    line = -1
    w0 = w1 = np.uint64(1)
    while done < total:
        count = 0
        while count < 2 and done < total:  # two runs at a time, if they lie alike on the table
            at = (first + done) // line_steps
            index = step_offset + first + done - at * line_steps
            digit = index & (DIGIT - 1)
            steps = min(total - done, at * line_steps + line_steps - first - done, DIGIT - digit, run_steps)
            if count and (digit != runs[0, 2] or steps != runs[0, 1]):
                break
            runs[count, 0], runs[count, 1], runs[count, 2], runs[count, 3] = done, steps, digit, at
            done += steps
            count += 1
        begin, end = runs[0, 2] * per_step, (runs[0, 2] + runs[0, 1]) * per_step
        t0, t1, t2, t3 = table[0, begin:end], table[1, begin:end], table[2, begin:end], table[3, begin:end]
        one = words[runs[0, 0] * per_step : (runs[0, 0] + runs[0, 1]) * per_step]
        if count == 2:
            _run_pair(one, words[runs[1, 0] * per_step : (runs[1, 0] + runs[1, 1]) * per_step], t0, t1, t2, t3, dots)
        else:
            _run(one, t0, t1, t2, t3, dots)
        for r in range(count):
            if runs[r, 3] != line:
                line = runs[r, 3]
                w0, w1 = _line_weight(line, sizes, weights, starts)
            index = step_offset + first + runs[r, 0] - line * line_steps
            place = (index >> DIGIT_BITS) - base
            sums[0] = _reduce(sums[0] + mulmod(mulmod(_lane(dots[4 * r], dots[4 * r + 1]), high[0, place]), w0))
            sums[1] = _reduce(sums[1] + mulmod(mulmod(_lane(dots[4 * r + 2], dots[4 * r + 3]), high[1, place]), w1))


def accumulate_prepared(prepared: Prepared, words: Words, first: int, sums: npt.NDArray[np.uint64]) -> None:
    """``accumulate`` with the weights of a box."""
    p = prepared
    table = np.ascontiguousarray(p.table)
    accumulate(words, first, table, p.per_step, p.line_steps, p.step_offset, p.sizes, p.weights, p.starts, p.high, sums)
