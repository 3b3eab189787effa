"""What a ``torch_dist`` checkpoint consists of, as bytes: where items stand in its files, the index, the marker.

Nothing here opens a file or imports torch or Megatron. What is made is what Megatron Core 0.19.2 makes of the same state, so
that it and its predecessors back to 0.15, and torch's own Distributed Checkpoint, read it.

Source: megatron/core/dist_checkpointing/{core,serialization}.py, strategies/{torch,filesystem_async,state_dict_saver}.py
(0.19.2); torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py (2.14.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.index import Span
from ckptguard.formats.torch_dist_index import IndexPickle
from ckptguard.formats.zip_frames import frame


@dataclass(frozen=True, slots=True)
class ChunkToWrite:
    """A box of a tensor that is to be stored.

    Attributes:
        name: The tensor's key.
        dtype: Its element type.
        shape: Its global shape.
        box: Which part of it.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box

    @property
    def length_bytes(self) -> int:
        """Bytes it takes in the file, frame and data."""
        return frame(self.dtype, self.box.size).length_bytes


@dataclass(frozen=True, slots=True)
class BlobToWrite:
    """An object that is to be stored.

    Attributes:
        name: Its key, with the shard that it is, such as ``common_state/shard_0_1``.
        data: Its bytes; in Megatron the file of ``torch.save([value])``.
    """

    name: str
    data: bytes

    @property
    def length_bytes(self) -> int:
        """Bytes it takes in the file."""
        return len(self.data)


ItemToWrite = ChunkToWrite | BlobToWrite


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item and its place."""

    item: ItemToWrite
    span: Span


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """A data file: its items one behind the other, without gaps.

    Attributes:
        name: Path relative to the checkpoint directory, such as ``__3_0.distcp``.
        items: In the order of the file.
        size_bytes: Its size.
    """

    name: str
    items: tuple[PlacedItem, ...]
    size_bytes: int


def file_name(rank: int, number: int = 0) -> str:
    """The name Megatron gives to the ``number``-th file that a rank writes; a rank writes one unless told otherwise."""
    return f"__{rank}_{number}.distcp"


def ordered(items: Iterable[ItemToWrite]) -> tuple[ItemToWrite, ...]:
    """The order in which Megatron writes a rank's items to its file: objects first, then chunks, each as planned."""
    listed = tuple(items)
    blobs = tuple(item for item in listed if isinstance(item, BlobToWrite))
    return (*blobs, *(item for item in listed if not isinstance(item, BlobToWrite)))


def place(file: str, items: Iterable[ItemToWrite]) -> PlacedFile:
    """Gives every item its place.

    Args:
        file: Path relative to the checkpoint directory.
        items: In the order in which they are to stand.

    Raises:
        ValueError: A chunk's box is not inside its tensor.
    """
    placed, at = [], 0
    for item in items:
        if isinstance(item, ChunkToWrite) and not item.box.within(item.shape):
            raise ValueError(f"{item.name}: the box {item.box} is not inside a tensor of shape {list(item.shape)}")
        placed.append(PlacedItem(item, Span(file, at, item.length_bytes)))
        at += item.length_bytes
    return PlacedFile(file, tuple(placed), at)


def metadata_bytes(files: Sequence[PlacedFile]) -> bytes:
    """The ``.metadata`` file: torch's ``Metadata``, equal for equal files.

    Of what Megatron itself writes two things are left out, which loading needs neither in 0.19 nor before: the directory
    and the random id of the save (``storage_meta``), and ``all_local_plans``, from which a later save of the same run may
    take its plan if it finds them.

    Args:
        files: All data files, by rank, as Megatron lists them.

    Raises:
        ValueError: Two items have one place in the index, or the chunks of a tensor differ in its dtype or shape.
    """
    out = IndexPickle()
    tensors, blobs = _by_name(files)
    for name, items in tensors.items():
        first, boxes = items[0], [item.box for item in items]
        if any((item.dtype, item.shape) != (first.dtype, first.shape) for item in items):
            raise ValueError(f"{name}: its chunks differ in dtype or global shape")
        if len({box.offset for box in boxes}) < len(boxes):
            raise ValueError(f"{name}: two of its chunks begin at the same place")
        out.tensor(name, first.dtype, first.shape, boxes)
    for name in blobs:
        out.blob(name)
    for file in files:
        for placed in file.items:
            item = placed.item
            out.stored(item.name, item.box.offset if isinstance(item, ChunkToWrite) else None, placed.span)
    return out.whole()


def _by_name(files: Sequence[PlacedFile]) -> tuple[dict[str, list[ChunkToWrite]], list[str]]:
    tensors: dict[str, list[ChunkToWrite]] = {}
    blobs: list[str] = []
    for file in files:
        for placed in file.items:
            if isinstance(placed.item, BlobToWrite):
                blobs.append(placed.item.name)
            else:
                tensors.setdefault(placed.item.name, []).append(placed.item)
    if len({*tensors, *blobs}) < len(tensors) + len(blobs):
        raise ValueError("two objects, or an object and a tensor, have the same name")
    return tensors, blobs


def config_bytes() -> bytes:
    """The ``metadata.json`` file, whose presence says that the checkpoint is complete: it has to be written last.

    It holds the two fields of 0.19. Readers before that know two more, ``common_backend`` and its version, and have defaults
    for them; a field that they do not know they refuse.
    """
    return json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode()
