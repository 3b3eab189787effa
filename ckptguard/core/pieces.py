"""Tensors put together from parts of other tensors: which element comes from where. Pure arithmetic.

An ``Assembly`` says of every element of a target tensor which element of which source it is a copy of. Views, cuts,
concatenations and transposes of tensors are operations on assemblies, so running a conversion on assemblies instead of
tensors gives its plan; swapping the two sides gives the plan of the way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ckptguard.core.boxes import Box

_MOST_PIECES = 1 << 20


class TooManyPiecesError(ValueError):
    """A conversion scatters a tensor into more pieces than can be planned."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a target tensor that is a strided part of one source, or zeros.

    Along each target dim ``d`` the piece is at ``offset[d] + i * step[d]`` for ``0 <= i < size[d]``; the element at
    (i_0, ..., i_n-1) is element ``first + sum(i_d * strides[d])`` of the source, row-major.

    Attributes:
        offset: First index per target dim.
        size: Number of indices per target dim.
        step: Distance of indices per target dim; 1 in every dim of an assembly that was traced.
        source: Name of the source; "" stands for zeros.
        first: Element of the source at the piece's first index.
        strides: Elements of the source to go on by per index of each dim.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]
    source: str
    first: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def within(self, box: Box) -> Piece | None:
        """The part of the piece that lies in a box of the target; None if there is none."""
        offset, size, first = [], [], self.first
        for o, n, s, stride, low, extent in zip(
            self.offset, self.size, self.step, self.strides, box.offset, box.size, strict=True
        ):
            begin = max(0, -(-(low - o) // s))
            end = min(n, -(-(low + extent - o) // s))
            if begin >= end:
                return None
            offset.append(o + begin * s)
            size.append(end - begin)
            first += begin * stride
        return replace(self, offset=tuple(offset), size=tuple(size), first=first)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor and the pieces that make it up: each element is in exactly one of them."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources in order of first use, without the zeros."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces if piece.source))


def of_source(name: str, shape: Sequence[int]) -> Assembly:
    """The whole of a source, as it is. The name "" gives zeros."""
    shape = tuple(shape)
    strides = row_major(shape) if name else (0,) * len(shape)
    piece = Piece((0,) * len(shape), shape, (1,) * len(shape), name, 0, strides)
    return Assembly(shape, (piece,) if prod(shape) else ())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    out, step = [], 1
    for extent in reversed(shape):
        out.append(step)
        step *= extent
    return tuple(reversed(out))


def permute(a: Assembly, dims: Sequence[int]) -> Assembly:
    """Dims in another order, as ``torch.permute``."""

    def turn(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[d] for d in dims)

    pieces = tuple(
        replace(p, offset=turn(p.offset), size=turn(p.size), strides=turn(p.strides)) for p in a.pieces
    )  # steps are all 1
    return Assembly(turn(a.shape), pieces)


def narrow(a: Assembly, dim: int, begin: int, end: int, step: int = 1) -> Assembly:
    """Indices ``begin, begin + step, ...`` below ``end`` of a dim, as ``a[begin:end:step]``."""
    count = max(0, -(-(end - begin) // step))
    pieces = []
    for p in a.pieces:
        low = max(0, -(-(p.offset[dim] - begin) // step))  # index in the result
        high = min(count, -(-(p.offset[dim] + p.size[dim] - begin) // step))
        if low < high:
            skipped = begin + low * step - p.offset[dim]
            pieces.append(
                replace(
                    p,
                    offset=_put(p.offset, dim, low),
                    size=_put(p.size, dim, high - low),
                    first=p.first + skipped * p.strides[dim],
                    strides=_put(p.strides, dim, p.strides[dim] * step),
                )
            )
    return Assembly(_put(a.shape, dim, count), tuple(pieces))


def concatenate(parts: Sequence[Assembly], dim: int) -> Assembly:
    """One after the other along a dim, as ``torch.cat``."""
    pieces, at = [], 0
    for part in parts:
        pieces += [replace(p, offset=_put(p.offset, dim, p.offset[dim] + at)) for p in part.pieces]
        at += part.shape[dim]
    return Assembly(_put(parts[0].shape, dim, at), _joined(pieces))


def expand(a: Assembly, shape: Sequence[int]) -> Assembly:
    """Dims of one index repeated, and dims put before them, as ``torch.expand``."""
    shape = tuple(shape)
    more = len(shape) - len(a.shape)
    old = (1,) * more + a.shape
    pieces = []
    for p in a.pieces:
        repeated = [n != o for n, o in zip(shape, old, strict=True)]
        size = tuple(n if again else s for n, s, again in zip(shape, (1,) * more + p.size, repeated, strict=True))
        strides = tuple(0 if again else s for s, again in zip((0,) * more + p.strides, repeated, strict=True))
        pieces.append(replace(p, offset=(0,) * more + p.offset, size=size, step=(1,) * len(shape), strides=strides))
    return Assembly(shape, tuple(pieces))


def reshape(a: Assembly, shape: Sequence[int]) -> Assembly:
    """The same elements in row-major order under another shape, as ``torch.reshape``.

    Raises:
        ValueError: The numbers of elements differ.
        TooManyPiecesError: The pieces would have to be cut too often.
    """
    shape = tuple(shape)
    if prod(shape) != prod(a.shape):
        raise ValueError(f"{list(a.shape)} cannot be reshaped to {list(shape)}")
    if not prod(shape):
        return Assembly(shape, ())
    groups = list(_groups(a.shape, shape))
    pieces: list[Piece] = []
    for p in a.pieces:
        for parts in product(*(tuple(_regroup(a.shape, shape, p, old, new)) for old, new in groups)):
            pieces.append(
                Piece(
                    sum((part[0] for part in parts), ()),
                    sum((part[1] for part in parts), ()),
                    (1,) * len(shape),
                    p.source,
                    p.first + sum(part[3] for part in parts),
                    sum((part[2] for part in parts), ()),
                )
            )
            if len(pieces) > _MOST_PIECES:
                raise TooManyPiecesError(f"more than {_MOST_PIECES} pieces in a tensor of shape {list(shape)}")
    return Assembly(shape, _joined(pieces))


def invert(assemblies: Mapping[str, Assembly], shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Piece, ...]]:
    """The way back: for every source, the pieces that give it back from the targets.

    Args:
        assemblies: By the target's name.
        shapes: Of every source.

    Returns:
        Pieces by source name, with the targets as their sources. An element that several targets hold stands in several.

    Raises:
        TooManyPiecesError: A piece is no regular part of its source.
    """
    out: dict[str, list[Piece]] = {name: [] for name in shapes}
    for target, assembly in assemblies.items():
        strides = row_major(assembly.shape)
        for p in assembly.pieces:
            if not p.source:
                continue
            first = sum(o * s for o, s in zip(p.offset, strides, strict=True))
            lines = [
                _Line(n, stride, step * there)
                for n, stride, step, there in zip(p.size, p.strides, p.step, strides, strict=True)
                if n > 1 and stride  # of elements that are used again and again, the first is enough
            ]
            out[p.source] += _lattices(target, first, lines, p.first, tuple(shapes[p.source]))
    return {name: tuple(pieces) for name, pieces in out.items()}


@dataclass(frozen=True, slots=True)
class _Line:
    """Elements that stand at even distances on both sides: ``count`` of them, in elements of the side's own tensor."""

    count: int
    here: int
    there: int


def _lattices(target: str, there: int, lines: Sequence[_Line], here: int, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Pieces of a tensor of this shape whose elements from ``here`` on lie along the lines; ``there`` is their source."""
    strides = row_major(shape)
    taken: dict[int, _Line] = {}
    for line in sorted(lines, key=lambda line: -line.count):
        dim = next(d for d, extent in enumerate(shape) if extent > 1 and strides[d] <= line.here)
        step, uneven = divmod(line.here, strides[dim])
        at = here // strides[dim] % shape[dim]
        fits = not uneven and dim not in taken and at + (line.count - 1) * step < shape[dim]
        if not fits:
            others = [other for other in lines if other is not line]
            for count, skipped, extra in _cut(line, at, step, 0 if uneven or dim in taken else shape[dim]):
                moved = here + skipped * line.here, there + skipped * line.there
                more = [part for part in (replace(line, count=count), extra) if part and part.count > 1]
                yield from _lattices(target, moved[1], [*others, *more], moved[0], shape)
            return
        taken[dim] = line
    offset = tuple(here // stride % extent for stride, extent in zip(strides, shape, strict=True))
    yield Piece(
        offset,
        tuple(taken[d].count if d in taken else 1 for d in range(len(shape))),
        tuple(taken[d].here // strides[d] if d in taken else 1 for d in range(len(shape))),
        target,
        there,
        tuple(taken[d].there if d in taken else 0 for d in range(len(shape))),
    )


def _cut(line: _Line, at: int, step: int, extent: int) -> Iterator[tuple[int, int, _Line | None]]:
    """Cuts a line that runs over the end of its dim: (count, lines' elements before it, rows of that count or None).

    An extent of 0 says that it is no line of the dim at all: each of its elements goes alone.
    """
    if not extent:
        yield from ((1, i, None) for i in range(line.count))
        return
    done = min(line.count, -(-(extent - at) // step)) if at else 0
    if done:
        yield done, 0, None
    per_row, uneven = divmod(extent, step)
    if not uneven and (rows := (line.count - done) // per_row):
        yield per_row, done, _Line(rows, per_row * line.here, per_row * line.there)
        done += rows * per_row
    while done < line.count:
        begin = (at + done * step) % extent
        count = min(line.count - done, -(-(extent - begin) // step))
        yield count, done, None
        done += count


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The shortest runs of old and new dims that hold the same number of elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        left = right = 1
        if i < len(old) and j < len(new):
            left, right, i, j = old[i], new[j], i + 1, j + 1
        while left != right or (i == len(old)) != (j == len(new)):
            if (left < right and i < len(old)) or j == len(new):
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        yield range(i0, i), range(j0, j)


_Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _regroup(old_shape: Sequence[int], new_shape: Sequence[int], p: Piece, old: range, new: range) -> Iterator[_Part]:
    """(offset, size, strides, elements to add to the first) of a piece's part in a group of dims, in the new dims."""
    if len(old) == len(new) == 1:
        d = old.start
        yield (p.offset[d],), (p.size[d],), (p.strides[d],), 0
        return
    extents = [new_shape[d] for d in new]
    weights = row_major(extents)
    for start, length, skipped, stride in _runs([(old_shape[d], p.offset[d], p.size[d], p.strides[d]) for d in old]):
        for offset, size, begin in boxes_of_run(extents, start, length):
            strides = tuple(weight * stride for weight in weights)
            yield offset, size, strides, skipped + begin * stride


def _runs(dims: Sequence[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Cuts a box of dims (extent, offset, size, stride) into runs: (flat start, length, source elements before, stride)."""
    inner = prod(extent for extent, *_ in dims)
    if not dims:
        yield 0, 1, 0, 0
        return
    (extent, offset, size, stride), rest = dims[0], dims[1:]
    inner //= extent
    for start, length, skipped, within in _runs(rest):
        if size == 1:
            yield offset * inner + start, length, skipped, within
        elif length == inner and (inner == 1 or stride == within * inner):
            yield offset * inner, size * inner, skipped, stride if inner == 1 else within
        else:
            for i in range(size):
                yield (offset + i) * inner + start, length, skipped + i * stride, within


def boxes_of_run(
    extents: Sequence[int], start: int, length: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Boxes (offset, size, elements of the run before it) that a row-major run of elements fills, at most two a dim and one.

    Args:
        extents: Shape of the tensor that is counted row-major.
        start: First element of the run.
        length: Number of its elements.
    """
    if not extents:
        yield (), (), 0
        return
    row, at = prod(extents[1:]), start
    end = start + length
    if len(extents) == 1:
        yield (start,), (length,), 0
        return
    if at % row or end - at < row:  # the head, within one row
        stop = min(end, (at // row + 1) * row)
        for offset, size, begin in boxes_of_run(extents[1:], at % row, stop - at):
            yield (at // row, *offset), (1, *size), begin + at - start
        at = stop
    if (rows := (end - at) // row) > 0:
        yield (at // row, *(0 for _ in extents[1:])), (rows, *extents[1:]), at - start
        at += rows * row
    if at < end:
        for offset, size, begin in boxes_of_run(extents[1:], 0, end - at):
            yield (at // row, *offset), (1, *size), begin + at - start


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Neighbours in the list that go on in target and source alike, made one."""
    out: list[Piece] = []
    for p in pieces:
        while out and (both := _join(out[-1], p)):
            out.pop()
            p = both
        out.append(p)
    return tuple(out)


def _join(a: Piece, b: Piece) -> Piece | None:
    if a.source != b.source:
        return None
    apart = [d for d in range(len(a.size)) if a.offset[d] != b.offset[d] or a.size[d] != b.size[d]]
    if len(apart) != 1 or b.offset[apart[0]] != a.offset[apart[0]] + a.size[apart[0]]:
        return None
    (dim,) = apart
    for d in range(len(a.size)):
        if d != dim and a.size[d] > 1 and a.strides[d] != b.strides[d]:
            return None
    stride = a.strides[dim] if a.size[dim] > 1 else b.first - a.first
    goes_on = b.first - a.first == stride * a.size[dim] and (b.size[dim] == 1 or b.strides[dim] == stride)
    if a.source and (not goes_on or stride < 1):
        return None
    return replace(a, size=_put(a.size, dim, a.size[dim] + b.size[dim]), strides=_put(a.strides, dim, stride))
