"""Parts of ranks' own tensors, in place, as chunks of global ones; and copies of the same part on several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.megatron.structure import Part, RankStructure, Structures


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Copies of one box of a global tensor, held by several ranks. They ought to be equal; nobody has looked.

    Attributes:
        name: Global name.
        dtype: Element type.
        shape: Global shape.
        kept: The copy that the index has: the one that Megatron would save.
        others: The further copies.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kept: Chunk
    others: tuple[Chunk, ...]


@dataclass(slots=True)
class Gathered:
    """Copies of each box of each global tensor, as they are found."""

    copies: dict[tuple[str, Box], list[tuple[bool, Chunk]]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], DType]] = field(default_factory=dict)

    def add(self, name: str, part: Part, stored: TensorEntry, chunk: Chunk) -> None:
        """Notes one copy.

        Raises:
            UnsupportedError: The tensor has another dtype on another rank.
        """
        known = self.shapes.setdefault(name, (part.shape, stored.dtype))
        if known != (part.shape, stored.dtype):
            raise UnsupportedError(
                f"{stored.name} is {stored.dtype}, but other ranks hold {name} as {known[1]}; one global tensor has one dtype"
            )
        self.copies.setdefault((name, part.box), []).append((part.main, chunk))

    def result(self) -> tuple[dict[str, TensorEntry], tuple[ReplicaGroup, ...]]:
        """The global tensors with one chunk per box, and the boxes of which there are more copies."""
        chunks: dict[str, list[Chunk]] = {}
        replicas = []
        for (name, _), found in self.copies.items():
            kept = next((chunk for main, chunk in found if main), found[0][1])
            chunks.setdefault(name, []).append(kept)
            others = tuple(chunk for _, chunk in found if chunk is not kept)
            if others:
                shape, dtype = self.shapes[name]
                replicas.append(ReplicaGroup(name, dtype, shape, kept, others))
        tensors = {
            name: TensorEntry(name, self.shapes[name][1], self.shapes[name][0], tuple(boxes))
            for name, boxes in chunks.items()
        }
        return tensors, tuple(replicas)


def folder_of(rank: RankStructure, structures: Structures) -> str:
    """``mp_rank_TT[_PPP][_EEE]``, as ``get_checkpoint_name`` makes it."""
    name = f"mp_rank_{rank.at['tp']:02d}"
    if any(other.at["pp"] for other in structures.ranks):
        name += f"_{rank.at['pp']:03d}"
    if any(other.at["ep"] for other in structures.ranks):
        name += f"_{rank.at['ep']:03d}"
    return name


def cut(stored: TensorEntry, box: Box, local: Box, *, first: int = 0, shape: tuple[int, ...] | None = None) -> Chunk:
    """A chunk for part of a rank's tensor, in place.

    Args:
        stored: The rank's tensor, or the 1-D state that holds it.
        box: What the part is in the global tensor.
        local: What it is in the rank's tensor.
        first: Element of the 1-D state at which the rank's tensor begins.
        shape: Shape of the rank's tensor inside the 1-D state; ``stored``'s own by default.
    """
    (chunk,) = stored.chunks
    own = chunk.strides if shape is None and chunk.strides is not None else _row_major(shape or stored.shape)
    begin = chunk.first_element + first + sum(o * s for o, s in zip(local.offset, own, strict=True))
    strides = (0,) * (len(box.size) - len(own)) + own
    dense = all(n == 1 or a == b for n, a, b in zip(box.size, strides, _row_major(box.size), strict=True))
    return replace(chunk, box=box, first_element=begin, strides=None if dense else strides)


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [], 1
    for extent in reversed(size):
        out.append(step)
        step *= extent
    return tuple(reversed(out))
