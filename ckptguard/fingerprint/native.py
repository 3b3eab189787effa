"""The C form of the inner loop, if it was built: found beside this module and called through ctypes, without the GIL."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptguard.fingerprint.tensors import Prepared

_NUMBERS = "word_bytes per_step line_steps step_offset dims table_columns weight_columns high_columns"
_POINTERS = "table high weight sizes starts"


class Weights(ctypes.Structure):
    """``struct weights`` of words.c. Whoever holds it must hold the arrays that it points to."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    )


@lru_cache(maxsize=1)
def library() -> Any:
    """The loaded library, or None where it was not built (no C compiler when ckptguard was installed)."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_words{suffix}")
        if path.exists():
            loaded = ctypes.CDLL(str(path))
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            loaded.ckptguard_accumulate.argtypes = [pointer, pointer, number, number, pointer]
            loaded.ckptguard_accumulate.restype = None
            loaded.ckptguard_accumulate_file.argtypes = [
                pointer, ctypes.c_int, number, number, number, pointer, number, pointer
            ]  # fmt: skip
            loaded.ckptguard_accumulate_file.restype = number
            return loaded
    return None


def weights_of(prepared: Prepared, word_bytes: int) -> Weights:
    """The C view of prepared weights; valid as long as they are held."""
    p = prepared
    arrays = (p.table, p.high, p.weights, p.sizes, p.starts)
    assert p.table.strides[1] == p.table.itemsize
    assert all(a.flags.c_contiguous for a in arrays[1:])
    columns = (p.table.strides[0] // p.table.itemsize, p.weights.shape[1], p.high.shape[1])
    numbers = (word_bytes, p.per_step, p.line_steps, p.step_offset, len(p.sizes), *columns)
    return Weights(*numbers, *(a.ctypes.data for a in arrays))
