"""Pickling torch's ``Metadata`` without torch: an emitter for the few kinds of value that a ``.metadata`` file holds.

Python's own pickler wants to import what it names, and takes some 40 steps for each chunk. The opcodes here (protocol 4) name
torch's classes as text; strings, sizes and element types that come again are taken from the memo.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py (2.14.1), docs of Python's pickletools.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Hashable, Sequence

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.index import Span

VERSION = "1.0.0"  # CURRENT_DCP_VERSION in filesystem.py
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class IndexPickle:
    """Collects the entries of a ``Metadata`` and makes its pickle.

    All ``tensor`` and ``blob`` calls come before the first ``stored``: the pickle is one stream, written as it is told.
    """

    def __init__(self) -> None:
        self._memo: dict[Hashable, int] = {}
        self._out = bytearray(b"\x80\x04")
        self._new(_METADATA, "Metadata")
        self._text("state_dict_metadata")
        self._raw(b"}")
        self._declaring = True

    def tensor(self, name: str, dtype: DType, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        """Declares a tensor and its chunks, in the order in which readers shall try them."""
        self._text(name)
        self._new(_METADATA, "TensorStorageMetadata")
        self._text("properties")
        self._properties(dtype)
        self._raw(b"s")
        self._text("size")
        self._size(shape)
        self._raw(b"s")
        self._text("chunks")
        self._raw(b"](")
        for box in boxes:
            self._new(_METADATA, "ChunkStorageMetadata")
            self._text("offsets")
            self._size(box.offset)
            self._raw(b"s")
            self._text("sizes")
            self._size(box.size)
            self._raw(b"sb")
        self._raw(b"esbs")

    def blob(self, name: str) -> None:
        """Declares an object."""
        self._text(name)
        self._global(_METADATA, "BytesStorageMetadata")
        self._raw(b")\x81s")

    def stored(self, name: str, offset: tuple[int, ...] | None, span: Span) -> None:
        """Says where the chunk at this offset is stored, or the object (which has no offset)."""
        if self._declaring:
            self._begin_storage()
        self._new(_METADATA, "MetadataIndex")
        self._text("fqn")
        self._text(name)
        self._raw(b"s")
        self._text("index")
        self._raw(b"Ns")
        if offset is not None:  # where there is none, torch's class has it as its own attribute
            self._text("offset")
            self._size(offset)
            self._raw(b"s")
        self._raw(b"b")
        self._new(_FILESYSTEM, "_StorageInfo")
        for attribute in ("relative_path", "offset", "length"):
            self._text(attribute)
            if attribute == "relative_path":
                self._text(span.file)
            else:
                self._number(span.offset_bytes if attribute == "offset" else span.length_bytes)
            self._raw(b"s")
        self._raw(b"bs")

    def whole(self) -> bytes:
        """The pickle."""
        if self._declaring:
            self._begin_storage()
        self._raw(b"s")
        self._text("storage_meta")
        self._raw(b"Ns")
        self._text("version")
        self._text(VERSION)
        self._raw(b"sb.")
        return bytes(self._out)

    def _begin_storage(self) -> None:
        self._declaring = False
        self._raw(b"s")
        self._text("planner_data")
        self._raw(b"Ns")
        self._text("storage_data")
        self._raw(b"}")

    def _raw(self, opcodes: bytes) -> None:
        self._out += opcodes

    def _recall(self, key: Hashable) -> bool:
        """Takes a value from the memo, if it is there."""
        at = self._memo.get(key)
        if at is None:
            return False
        self._out += b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<L", at)
        return True

    def _memoize(self, key: Hashable) -> None:
        self._memo[key] = len(self._memo)
        self._out += b"\x94"

    def _text(self, value: str) -> None:
        if not self._recall(value):
            data = value.encode()
            self._out += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<L", len(data))
            self._out += data
            self._memoize(value)

    def _number(self, value: int) -> None:
        if value < 256:
            self._out += b"K" + bytes([value])
        elif value < 1 << 31:
            self._out += b"J" + struct.pack("<l", value)
        else:
            self._out += pickle.dumps(value, 2)[2:-1]

    def _global(self, module: str, name: str) -> None:
        key = ("global", module, name)
        if not self._recall(key):
            self._text(module)
            self._text(name)
            self._raw(b"\x93")
            self._memoize(key)

    def _new(self, module: str, name: str) -> None:
        """An instance without attributes, and the dict that is to become them."""
        self._global(module, name)
        self._raw(b")\x81}")

    def _size(self, values: tuple[int, ...]) -> None:
        """A ``torch.Size``."""
        if self._recall(values):
            return
        self._global("torch", "Size")
        self._raw(b"(")
        for value in values:
            self._number(value)
        self._raw(b"t\x85R")
        self._memoize(values)

    def _properties(self, dtype: DType) -> None:
        """``TensorProperties`` of a plain CPU tensor: dtype, strided, no gradient, contiguous, not pinned."""
        if self._recall(dtype):
            return
        self._global(_METADATA, "TensorProperties")
        self._raw(b")\x81(")
        self._global("torch", dtype.name)
        self._global("torch.serialization", "_get_layout")
        self._text("torch.strided")
        self._raw(b"\x85R\x89")
        self._global(_METADATA, "_MEM_FORMAT_ENCODING")
        self._raw(b"K\x00\x85R\x89tb")
        self._memoize(dtype)
