"""The fixed pseudo-random residues of the fingerprint, modulo p = 2**61 - 1, and arithmetic modulo p on plain ints.

The specification with test vectors is docs/fingerprint.md.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ckptguard.fingerprint.values import PRIME

LANES = 2
DIGIT = 4096  # base of the digits into which an index is split
DIGIT_BITS = 12
_KEY_CONTEXT = "ckptguard 2026-11 fingerprint cgfp1-m61-l2-d4096-w16 residues"
_MAX_WORDS = 8  # of one element: complex128


@lru_cache(maxsize=256)
def digit_residues(lane: int, dim: int, place: int) -> npt.NDArray[np.uint64]:
    """Residues of the 4096 values of a digit.

    Args:
        lane: 0 or 1.
        dim: Tensor dim, 0 first.
        place: Digit place; 0 is the lowest.

    Returns:
        uint64 of shape (4096,), each below p.
    """
    return _expand(f"lane {lane} dim {dim} place {place}", DIGIT)


@lru_cache(maxsize=8)
def word_residues(lane: int) -> npt.NDArray[np.uint64]:
    """Residues of the words of one element; uint64 of shape (8,)."""
    return _expand(f"lane {lane} word", _MAX_WORDS)


def _expand(label: str, count: int) -> npt.NDArray[np.uint64]:
    """BLAKE3's extended output for a label under the fixed context: little-endian 64-bit values, low 61 bits kept."""
    from blake3 import blake3

    stream = blake3(label.encode(), derive_key_context=_KEY_CONTEXT).digest(length=8 * count)
    values = np.frombuffer(stream, "<u8") & np.uint64(PRIME)
    values = np.where(values == PRIME, np.uint64(0), values)
    values.setflags(write=False)
    return values


def places(extent: int) -> int:
    """How many base-4096 digits an index below ``extent`` has; at least one."""
    return max(1, -(-(max(extent, 1) - 1).bit_length() // DIGIT_BITS))
