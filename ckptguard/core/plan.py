"""A planned conversion: chunks to be made, and the sources they are made of. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.core.pieces import Assembly


@dataclass(frozen=True, slots=True)
class Stored:
    """A source that stands in a checkpoint: one chunk of one of its tensors, taken as a tensor of its own."""

    entry: TensorEntry
    chunk: Chunk

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the chunk."""
        return self.chunk.box.size


@dataclass(frozen=True, slots=True)
class Computed:
    """A source whose values are computed from stored ones, a few rows at a time.

    Attributes:
        kind: As ``hf_structure.Derived``.
        of: The stored sources, the weights first.
        shape: Of the result.
        dtype: Of the result.
    """

    kind: str
    of: tuple[Stored, ...]
    shape: tuple[int, ...]
    dtype: DType


Source = Stored | Computed
Sources = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Made:
    """A chunk to be made.

    Attributes:
        name: Of the global tensor.
        dtype: As it is to be stored; sources are cast to it.
        shape: Of the global tensor.
        box: Which part.
        assembly: What it is made of, in coordinates whose zero is the box's corner.
        scale: Of an fp8 weight: its elements are assembled in bfloat16 and divided by these scales.
        run: Of a chunk that is a row of elements out of a tensor of more dims, which is what ``assembly`` then describes: the
            row-major number of the chunk's first element in it. None if the assembly has the box's own shape.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    assembly: Assembly
    scale: Stored | None = None
    run: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.box.numel * self.dtype.itemsize
