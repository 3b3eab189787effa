"""The sum of the parts of a whole tensor that a rank holds; what ``megatron.placed_state`` is given to sum with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptguard.fingerprint.live import collect, live_sum


def placed_sum(parts: Sequence[tuple[tuple[int, ...], Any]], shape: Sequence[int]) -> str:
    """What disjoint parts add to the fingerprint of the whole: 32 hexadecimal digits. Waits for the device.

    Args:
        parts: Offset in the whole and elements, which have as many dims; at least one.
        shape: Of the whole.
    """
    total, *others = collect([live_sum(tensor, shape, offset) for offset, tensor in parts])
    for other in others:
        total += other
    return total.hex
