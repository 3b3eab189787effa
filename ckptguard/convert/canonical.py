"""A checkpoint's state as global tensors, however it is stored, described and not read. Pure.

Global tensors have the names and shapes of Megatron's ``torch_dist``; the state of an optimizer stands beside each model
tensor, in its shape, as ``optimizer.state.{param,exp_avg,exp_avg_sq}.<model key>`` (the form ``fully_reshardable``). Every
tensor is a set of cells: boxes that are either a stored chunk or put together from parts of stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ckptguard.core.boxes import Box, Meetings, whole
from ckptguard.core.dtypes import DType
from ckptguard.core.index import Chunk, Encoding, TensorEntry
from ckptguard.core.pieces import Assembly, Piece, row_major
from ckptguard.core.plan import Made, Source, Stored

# Offsets of nothing and steps of one, by number of dims: one tuple for all pieces.
_CONSTANT = [((0,) * dims, (1,) * dims) for dims in range(17)]


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a global tensor.

    Attributes:
        box: Which part.
        of: The chunk that is this part, or an assembly in coordinates whose zero is the box's corner.
    """

    box: Box
    of: Stored | Assembly


@dataclass(frozen=True)
class GlobalTensor:
    """A global tensor and the cells that make it up, each element in exactly one.

    Attributes:
        name: Its name in ``torch_dist``.
        dtype: Element type.
        shape: Global shape.
        cells: Its parts.
        entry: The stored tensor that is this one, chunk for cell, whatever its name there; None if parts are cut.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    cells: tuple[Cell, ...]
    entry: TensorEntry | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return whole(self.shape).numel

    @cached_property
    def meetings(self) -> Meetings:
        """Which cells a box meets."""
        return Meetings([cell.box for cell in self.cells])


class SourceTable(Mapping[str, Source]):
    """Names stored chunks as they come into use, so that pieces can say what they are parts of."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, Box], str] = {}
        self._sources: dict[str, Source] = {}

    def name_of(self, source: Stored) -> str:
        """The name of a chunk; the same for the same tensor and box."""
        key = (source.entry.name, source.chunk.box)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = str(len(self._names))
            self._sources[name] = source
        return name

    def __getitem__(self, name: str) -> Source:
        return self._sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class State:
    """The global tensors of one checkpoint.

    Attributes:
        tensors: By name.
        sources: What the pieces of ``assembly`` name.
    """

    def __init__(self, tensors: Mapping[str, GlobalTensor], sources: SourceTable) -> None:
        self.tensors = tensors
        self.sources = sources

    def assembly(self, name: str, box: Box) -> Assembly:
        """What a box of a tensor is made of, in coordinates whose zero is the box's corner.

        Rows beyond those that are stored (a vocabulary that is padded further) are zeros.

        Raises:
            KeyError: There is no such tensor.
        """
        tensor = self.tensors[name]
        found = Assembly(box.size, tuple(self._meeting(tensor, box)))
        return _with_zero_rows(found, tensor.shape[0] - box.offset[0]) if box.size else found

    def _meeting(self, tensor: GlobalTensor, box: Box) -> Iterator[Piece]:
        """Pieces of a box, from every cell that it meets."""
        for j, common in tensor.meetings.of(box):
            cell = tensor.cells[j]
            if common == cell.box == box and isinstance(cell.of, Stored):
                yield self._all_of(cell.of)
                continue
            inside, corner = common.relative_to(cell.box), common.relative_to(box).offset
            if isinstance(cell.of, Stored):
                yield self._part(cell.of, inside, corner)
                continue
            for piece in cell.of.pieces:
                part = piece.within(inside)
                if part is not None:
                    moved = zip(part.offset, inside.offset, corner, strict=True)
                    yield replace(part, offset=tuple(o - a + c for o, a, c in moved))

    def _all_of(self, stored: Stored) -> Piece:
        """A chunk that goes along uncut: most of them do, and there may be hundreds of thousands."""
        source, strides = in_order(stored)
        size = stored.chunk.box.size
        none, one = _CONSTANT[len(size)]
        return Piece(none, size, one, self.sources.name_of(source), 0, strides)

    def _part(self, stored: Stored, inside: Box, corner: tuple[int, ...]) -> Piece:
        source, strides = in_order(stored)
        first = sum(o * s for o, s in zip(inside.offset, strides, strict=True))
        return Piece(corner, inside.size, (1,) * len(corner), self.sources.name_of(source), first, strides)

    def uncut(self, made: Made) -> Stored | None:
        """The stored chunk that a chunk to be made is, as it stands and in the same place; None if it is put together."""
        pieces = made.assembly.pieces
        if len(pieces) != 1 or not pieces[0].source or made.run is not None:
            return None
        source = self.sources[pieces[0].source]
        same = isinstance(source, Stored) and source.chunk.box == made.box and source.dtype == made.dtype
        return source if same and isinstance(source, Stored) and pieces[0].numel == made.box.numel else None

    def made(self, name: str, shape: tuple[int, ...] | None = None) -> Made:
        """A whole tensor as a chunk to be made, cut or padded to another shape where one is given."""
        tensor = self.tensors[name]
        box = whole(shape if shape is not None else tensor.shape)
        return Made(name, tensor.dtype, box.size, box, self.assembly(name, box))


def in_order(stored: Stored) -> tuple[Stored, tuple[int, ...]]:
    """A chunk as a source without strides of its own, and the strides at which its elements stand in that.

    A rank's own tensor in a legacy file is cut in place: its chunk skips over elements of the same storage. As a source it
    is the run of elements from its first to its last, so that parts of it are read without the rest.
    """
    chunk = stored.chunk
    if chunk.encoding is not Encoding.RAW or chunk.strides is None:
        return stored, row_major(chunk.box.size)
    length = 1 + sum((n - 1) * s for n, s in zip(chunk.box.size, chunk.strides, strict=True))
    # The box's offset keeps the names of sources apart: chunks of one tensor begin at different elements.
    flat = Chunk(Box((chunk.first_element,), (length,)), chunk.span, first_element=chunk.first_element)
    name = f"{chunk.span.file}:{chunk.span.offset_bytes}"
    entry = TensorEntry(name, stored.entry.dtype, (chunk.first_element + length,), (flat,))
    return Stored(entry, flat), chunk.strides


def plain(entry: TensorEntry, name: str | None = None) -> GlobalTensor:
    """A tensor that is stored under its global shape."""
    cells = tuple(Cell(chunk.box, Stored(entry, chunk)) for chunk in entry.chunks)
    return GlobalTensor(name or entry.name, entry.dtype, entry.shape, cells, entry)


def _with_zero_rows(assembly: Assembly, rows: int) -> Assembly:
    """The same, with zeros in all rows from ``rows`` on."""
    if not assembly.shape or rows >= assembly.shape[0]:
        return assembly
    first = max(rows, 0)
    size = (assembly.shape[0] - first, *assembly.shape[1:])
    offset, none = (first, *(0 for _ in size[1:])), (0,) * len(size)
    zeros = Piece(offset, size, (1,) * len(size), "", 0, none)
    return Assembly(assembly.shape, (*assembly.pieces, zeros))
