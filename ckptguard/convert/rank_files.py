"""What a rank's file of a ``torch_dist`` target holds, and what must hold of all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptguard.core.boxes import Box, overlaps, whole
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.plan import Made


@dataclass(frozen=True, slots=True)
class RankFile:
    """What one rank's file holds: objects, then chunks in the order in which the rank reads them."""

    rank: int
    objects: tuple[str, ...]
    chunks: tuple[Made, ...]


def grouped(chunks: Sequence[Made]) -> tuple[Made, ...]:
    """Megatron writes all parts of a key together, keys as they first come."""
    place: dict[str, int] = {}
    for chunk in chunks:
        place.setdefault(chunk.name, len(place))
    return tuple(sorted(chunks, key=lambda chunk: place[chunk.name]))


def refuse_holes(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises UnsupportedError unless the boxes that all ranks save are the whole of a tensor, once."""
    stored, numel = sum(box.numel for box in boxes), whole(shape).numel
    if stored != numel or next(overlaps(boxes), None):
        raise UnsupportedError(
            f"{name}: the ranks of this layout own {stored} of its {numel} elements",
            next_step="Choose another layout; with this one Megatron would lose part of the model.",
        )
