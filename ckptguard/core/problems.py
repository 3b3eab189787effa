"""One thing that is wrong with a checkpoint, as a value. Problems are collected and reported together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ckptguard.core.boxes import Box

Kind = Literal[
    "changed",  # bytes differ from the ones that were sealed
    "crc",  # bytes differ from the checksum stored beside them
    "missing-file",
    "missing-tensor",  # a format's own table names it, no file holds it
    "missing-chunk",  # part of a tensor is stored nowhere
    "overlap",  # part of a tensor is stored twice
    "out-of-bounds",  # a chunk reaches past its tensor, or a tensor past its file
    "size",  # a file or chunk is shorter or longer than it must be
    "layout",  # a stored chunk is not what the index says of it
    "extra-file",
    "escape",  # a path or symlink that leaves the checkpoint directory
    "unsafe-pickle",
    "unreadable",  # not parsable at all
    "masters",  # a weight is not its fp32 master rounded
    "manifest",  # the manifest itself is damaged or is not the expected one
    "note",  # worth saying, not damage
]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where.

    Attributes:
        kind: Machine-readable sort of problem; ``note`` alone is not damage.
        message: One sentence with the value found and the value expected.
        file: POSIX path relative to the checkpoint directory.
        block: Index of the damaged block of the file, if digests placed it.
        bytes_range: Half-open byte range of the file, ``[begin, end)``.
        tensor: Name of the tensor or object concerned.
        box: The part of the tensor, in elements of the global tensor.
        rank: The rank that wrote the file, as its name says.
    """

    kind: Kind
    message: str
    file: str | None = None
    block: int | None = None
    bytes_range: tuple[int, int] | None = None
    tensor: str | None = None
    box: Box | None = None
    rank: str | None = None

    @property
    def is_damage(self) -> bool:
        """Whether it makes the checkpoint damaged (everything but a note does)."""
        return self.kind != "note"

    def as_dict(self) -> dict[str, object]:
        """The fields that are set, with boxes as offset and size lists; ready for JSON."""
        out: dict[str, object] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Box):
                value = {"offset": list(value.offset), "size": list(value.size)}
            if value is not None:
                out[item.name] = list(value) if isinstance(value, tuple) else value
        return out
