"""Cases of the Triton kernel: a tensor or a part of one, made alike by the test and by the process it starts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ckptguard.core.dtypes import BY_NAME


class Case(NamedTuple):
    """A part of a tensor.

    Attributes:
        dtype: Element type.
        shape: Global shape.
        offset: Where the part stands.
        size: Its extents.
        transposed: Whether its last two dims are stored swapped, so that it is not contiguous.
        slab_bytes: Largest copy that is made of a part that is not contiguous.
        run_words: Words of a line that one program sums.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    transposed: bool = False
    slab_bytes: int = 64 << 20
    run_words: int = 8192


def tensor(case: Case) -> torch.Tensor:
    """The part, with content that its own fields determine. Words of all ones are common, to provoke overflow."""
    dtype = BY_NAME[case.dtype]
    rng = np.random.default_rng(_seed(case))
    count = int(np.prod(case.size, dtype=np.int64)) * dtype.itemsize
    raw = rng.integers(0, 256, count, dtype=np.uint8)
    raw[rng.random(count) < 0.5] = 255
    if case.dtype == "bool":
        raw &= 1
    size = list(case.size)
    if case.transposed:
        size[-2:] = size[:-3:-1]
    made = torch.from_numpy(raw).view(getattr(torch, case.dtype)).reshape(size)
    return made.transpose(-2, -1) if case.transposed else made


def _seed(case: Case) -> int:
    return len(case.dtype) + 7 * sum(case.size) + 1009 * sum(case.offset)
