"""Numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def size(count_bytes: int) -> str:
    """Bytes with a binary unit: ``1.5 MiB``."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count_bytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count(number: int) -> str:
    """A number with its magnitude: ``134,515,008 (134.5 M)``."""
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= limit:
            return f"{number:,} ({number / limit:.1f} {unit})"
    return f"{number:,}"


def shape(extents: Sequence[int] | None) -> str:
    """``[32, 4096]``; a dash for none."""
    return "-" if extents is None else "[" + ", ".join(map(str, extents)) + "]"
