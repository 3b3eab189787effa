"""Lists in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_RANKS = 8


def some(values: Sequence[Any], most: int) -> str:
    """The first few, and how many more: ``3, 4 and 7 more``."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    found = sorted(set(ranks))
    return f"rank{'' if len(found) == 1 else 's'} {some(found, _RANKS)}"
