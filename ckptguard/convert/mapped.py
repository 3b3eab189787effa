"""A model's global tensors as assemblies of a snapshot's tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptguard.core.boxes import Box, whole
from ckptguard.core.pieces import Assembly, Piece
from ckptguard.megatron.hf_structure import Cell, Structure


class Mapped:
    """Looks up what any box of a global tensor is made of.

    Attributes:
        structure: As Megatron and Bridge gave it.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._cells: dict[str, dict[tuple[int, ...], list[Cell]]] = {}
        for cell in structure.cells:
            self._cells.setdefault(cell.key, {}).setdefault(_prefix(cell), []).append(cell)

    def cells_of(self, key: str) -> Iterator[Cell]:
        """All cells of a global tensor."""
        for group in self._cells.get(key, {}).values():
            yield from group

    def assembly(self, key: str, box: Box) -> Assembly:
        """What a box of a global tensor is made of, in coordinates whose zero is the box's corner.

        Raises:
            KeyError: There is no such tensor in the model.
        """
        pieces: list[Piece] = []
        for cell, common in self._meeting(key, box):
            if cell.template is None:
                continue
            template = self.structure.templates[cell.template]
            prepended = len(cell.shape) - len(cell.local.size)
            inside = common.relative_to(cell.box)
            local = Box(
                tuple(o + i for o, i in zip(cell.local.offset, inside.offset[prepended:], strict=True)),
                inside.size[prepended:],
            )
            corner = common.relative_to(box).offset
            for piece in template.pieces:
                part = piece.within(local)
                if part is not None:
                    pieces.append(_placed(part, cell, local, corner, prepended))
        return Assembly(box.size, tuple(pieces))

    def _meeting(self, key: str, box: Box) -> Iterator[tuple[Cell, Box]]:
        """Cells that share elements with a box; found by their prepended indices where the box has one of each."""
        groups = self._cells[key]
        depth = len(next(iter(groups)))
        one = groups.get(box.offset[:depth]) if all(n == 1 for n in box.size[:depth]) else None
        for cell in one if one is not None else self.cells_of(key):
            common = cell.box.intersect(box)
            if common is not None:
                yield cell, common


def _prefix(cell: Cell) -> tuple[int, ...]:
    return cell.box.offset[: len(cell.shape) - len(cell.local.size)]


def _placed(part: Piece, cell: Cell, local: Box, corner: Sequence[int], prepended: int) -> Piece:
    """A piece of a parameter, moved to where the parameter stands in a chunk, with the source's own name."""
    none = (0,) * prepended
    moved = tuple(o - at + c for o, at, c in zip(part.offset, local.offset, corner[prepended:], strict=True))
    return replace(
        part,
        offset=(*corner[:prepended], *moved),
        size=((1,) * prepended) + part.size,
        step=((1,) * prepended) + part.step,
        strides=none + part.strides,
        source=cell.sources[int(part.source)] if part.source else "",
    )


def is_whole(assembly: Assembly) -> bool:
    """Whether every element is in a piece; pieces never overlap."""
    return sum(piece.numel for piece in assembly.pieces) == whole(assembly.shape).numel
