"""Boxes: rectangular parts of a global tensor, and whether a set of them covers it exactly once. Pure arithmetic.

A box is an offset and a size per dim, in elements of the global tensor; dim ``d`` spans the half-open range
``[offset[d], offset[d] + size[d])``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offset: First element per dim.
        size: Number of elements per dim; a 0-d box has one element, a box with a zero size none.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element per dim."""
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        if not len(self.offset) == len(self.size) == len(shape):
            return False
        for o, s, n in zip(self.offset, self.size, shape, strict=True):  # a plain loop: called for every chunk
            if o < 0 or s < 0 or o + s > n:
                return False
        return True

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None if there is none. 0-d boxes always meet."""
        begin = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(b >= e for b, e in zip(begin, end, strict=True)):
            return None
        return Box(begin, tuple(e - b for b, e in zip(begin, end, strict=True)))

    def relative_to(self, origin: Box) -> Box:
        """The same part in coordinates whose zero is ``origin.offset``."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin.offset, strict=True)), self.size)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.size, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def unravel(flat: int, size: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a row-major element number inside a box of this size."""
    out = []
    for extent in reversed(size):
        flat, at = divmod(flat, extent)
        out.append(at)
    return tuple(reversed(out))


def bounding_box(box: Box, begin: int, end: int) -> Box:
    """The smallest box that holds the row-major elements ``[begin, end)`` of ``box``, in the box's own coordinates.

    Args:
        box: Where the elements stand in the global tensor.
        begin: First element, counted row-major inside the box.
        end: One past the last element; ``end > begin``.
    """
    first, last = unravel(begin, box.size), unravel(end - 1, box.size)
    offset, size = list(box.offset), list(box.size)
    for dim, (low, high) in enumerate(zip(first, last, strict=True)):
        offset[dim] = box.offset[dim] + low
        size[dim] = high - low + 1
        if low != high:  # later dims run over their whole extent somewhere in between
            break
    return Box(tuple(offset), tuple(size))


def overlaps(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yields the index pairs of boxes that share an element.

    Sorted along the dim with the most distinct offsets and swept, so grids of any size take n log n.
    """
    filled = [i for i, box in enumerate(boxes) if box.numel]
    if len(filled) < 2:
        return
    dims = len(boxes[filled[0]].size)
    if dims == 0:
        yield from ((filled[0], other) for other in filled[1:])
        return
    if len({boxes[i].size for i in filled}) == 1 and _is_grid(boxes, filled):
        return
    sweep = max(range(dims), key=lambda d: len({boxes[i].offset[d] for i in filled}))
    filled.sort(key=lambda i: boxes[i].offset[sweep])
    active: list[int] = []
    for i in filled:
        start = boxes[i].offset[sweep]
        active = [j for j in active if boxes[j].end[sweep] > start]
        yield from ((min(i, j), max(i, j)) for j in active if boxes[i].intersect(boxes[j]))
        active.append(i)


def meetings(first: Sequence[Box], second: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """Yields (index in first, index in second, common part) for every pair of boxes that share an element.

    The second boxes must not overlap each other. They are sorted along the dim where they have the most distinct offsets,
    so each of the first looks at its neighbours only; one that is also a box of the second meets nothing else.
    """
    found = Meetings(second)
    for i, box in enumerate(first):
        for j, common in found.of(box):
            yield i, j, common


class Meetings:
    """As ``meetings``, for boxes that come one by one: the second boxes are sorted once."""

    def __init__(self, second: Sequence[Box]) -> None:
        self._boxes = second
        filled = [j for j, box in enumerate(second) if box.numel]
        dims = len(second[filled[0]].size) if filled else 0
        self._sweep = max(range(dims), key=lambda d: len({second[j].offset[d] for j in filled}), default=None)
        self._filled = filled
        self._offsets: list[int] = []
        self._longest = 0
        self._same = {second[j]: j for j in filled}
        if self._sweep is not None:
            sweep = self._sweep
            filled.sort(key=lambda j: second[j].offset[sweep])
            self._offsets = [second[j].offset[sweep] for j in filled]
            self._longest = max(second[j].size[sweep] for j in filled)

    def of(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(index in second, common part) of every one that shares an element with a box."""
        if (twin := self._same.get(box)) is not None:
            yield twin, box
            return
        if self._sweep is None:
            yield from ((j, box) for j in self._filled)
            return
        low = bisect_right(self._offsets, box.offset[self._sweep] - self._longest)
        high = bisect_left(self._offsets, box.end[self._sweep])
        for j in self._filled[low:high]:
            common = box.intersect(self._boxes[j])
            if common is not None:
                yield j, common


def split_rows(box: Box, most: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most ``most`` elements (at least one each), in row-major order."""
    if box.numel <= most or not box.size:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.size) if extent > 1)
    row = box.numel // box.size[dim]
    if row > most:
        for at in range(box.size[dim]):
            yield from split_rows(_with_dim(box, dim, box.offset[dim] + at, box.offset[dim] + at + 1), most)
        return
    rows = max(1, most // row)
    for at in range(0, box.size[dim], rows):
        yield _with_dim(box, dim, box.offset[dim] + at, box.offset[dim] + min(at + rows, box.size[dim]))


def _is_grid(boxes: Sequence[Box], chosen: Sequence[int]) -> bool:
    """Whether boxes of one size stand on distinct cells of the grid that this size makes (so none overlap)."""
    size = boxes[chosen[0]].size
    offsets = {boxes[i].offset for i in chosen}
    return len(offsets) == len(chosen) and all(
        o % s == 0 for offset in offsets for o, s in zip(offset, size, strict=True)
    )


def missing_part(boxes: Sequence[Box], shape: Sequence[int]) -> Box | None:
    """A box of the tensor that no given box covers, or None when they cover all of it.

    Args:
        boxes: Boxes inside the shape, free of overlaps.
        shape: Global shape.
    """
    if sum(box.numel for box in boxes) >= prod(shape):
        return None
    return _first_gap(list(boxes), whole(shape))


def _first_gap(boxes: list[Box], area: Box) -> Box | None:
    """Splits the area along the borders of one box that cuts it, until a part is free or all is covered."""
    inside = [(box, part) for box in boxes if (part := box.intersect(area))]
    if not inside:
        return area if area.numel else None
    if sum(part.numel for _, part in inside) >= area.numel:
        return None
    candidates = [box for box, _ in inside]
    part = inside[len(inside) // 2][1]  # the middle one: halves the work where chunks stand in order
    for dim in range(len(area.size)):
        for low, high in ((area.offset[dim], part.offset[dim]), (part.end[dim], area.end[dim])):
            if high > low:
                gap = _first_gap(candidates, _with_dim(area, dim, low, high))
                if gap:
                    return gap
        area = _with_dim(area, dim, part.offset[dim], part.end[dim])
    return None


def _with_dim(box: Box, dim: int, begin: int, end: int) -> Box:
    offset, size = list(box.offset), list(box.size)
    offset[dim], size[dim] = begin, end - begin
    return Box(tuple(offset), tuple(size))
