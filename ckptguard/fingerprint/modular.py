"""Products modulo p = 2**61 - 1 of numpy arrays, for the weights; the words themselves go through compiled loops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckptguard.fingerprint.values import PRIME

Residues = npt.NDArray[np.uint64]
_HALF, _MASK, _P = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(PRIME)


def multiply(a: Residues, b: Residues) -> Residues:
    """Element by element a * b mod p for a, b < p, broadcast: schoolbook halves in 64 bits, then 2**61 = 1."""
    a0, a1, b0, b1 = a & _MASK, a >> _HALF, b & _MASK, b >> _HALF
    low = a0 * b0
    mid = a0 * b1 + a1 * b0 + (low >> _HALF)  # below 2**62 + 2**32
    high = a1 * b1 + (mid >> _HALF)
    low = (mid << _HALF) | (low & _MASK)
    out = (low & _P) + (high << np.uint64(3)) + (low >> np.uint64(61))
    out = (out & _P) + (out >> np.uint64(61))
    result: Residues = np.where(out >= _P, out - _P, out)
    return result


def outer(a: Residues, b: Residues) -> Residues:
    """All products a[i] * b[j] mod p, flat and row-major."""
    return multiply(a[:, None], b[None, :]).reshape(-1)
