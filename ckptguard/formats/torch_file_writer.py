"""A file of torch.save as parts of a target file: any pickled object, and the storages of its tensors filled in later.

With the pickle that torch.save makes of the same object, the file is byte for byte the one that torch.save writes to that
path, but for the first half of its serialization id, which nothing that loads a file reads. torch is not imported.

Source: torch/serialization.py ``_save`` and caffe2/serialize/inline_container.cc (torch 2.14.1): the records of a zip that
is written to a path begin with the file's name, without its suffix.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from ckptguard.core.writing import Closing, Elements, Ending, Literal, Part, TargetFile
from ckptguard.formats.zip_records import Record, after_storages, before_storages

_NO_HASH = 0


@dataclass(frozen=True, slots=True)
class StorageToWrite:
    """A storage of the file: the elements of one or more tensors.

    Attributes:
        key: As the pickle names it.
        content: Its bytes, or parts of elements that are filled in later and make it up in order.
    """

    key: str
    content: bytes | tuple[Elements, ...]

    @property
    def length_bytes(self) -> int:
        """Length of the storage."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return sum(part.length_bytes for part in self.content)


def torch_file(path: str, pickle: bytes, storages: Iterable[StorageToWrite]) -> TargetFile:
    """The file that torch.save would write.

    Args:
        path: POSIX path relative to the directory that is made; its name decides about the names of the records.
        pickle: Of the object, protocol 2, with the persistent ids of ``storages``.
        storages: In the order of their keys, as the pickle meets them.

    Raises:
        ValueError: Two storages have one key.
    """
    archive = PurePosixPath(path).stem
    head, records = before_storages(archive, pickle)
    literal = bytearray(head)  # what stands before the next elements
    parts: list[Part] = []
    filled: list[int] = []  # numbers of the records whose CRC-32 the closing parts tell, in order
    at = len(head)
    for storage in storages:
        record = Record(archive, f"data/{storage.key}", at, storage.length_bytes)
        at = record.end_bytes
        literal += record.header()
        if isinstance(storage.content, bytes):
            record = replace(record, crc32=zlib.crc32(storage.content))
            literal += storage.content + record.descriptor()
        elif storage.length_bytes:
            closing = Closing(len(record.descriptor()), partial(_descriptor, record), elements=len(storage.content))
            parts += [Literal(bytes(literal)), *storage.content, closing]
            literal.clear()
            filled.append(len(records))
        records.append(record)
    if len({record.name for record in records}) < len(records):
        raise ValueError(f"{path}: two storages have the same key")
    length = len(after_storages(records, _NO_HASH))
    ending = Ending(length, partial(_ending, tuple(records), tuple(filled)))
    return TargetFile(path, (*parts, *([Literal(bytes(literal))] if literal else []), ending))


def _descriptor(record: Record, crc32: int) -> bytes:
    return replace(record, crc32=crc32).descriptor()


def _ending(records: Sequence[Record], filled: Sequence[int], crcs: Sequence[int]) -> bytes:
    """What follows the last storage, once the CRC-32 of all those that were filled in are known."""
    known = list(records)
    for number, crc32 in zip(filled, crcs, strict=True):
        known[number] = replace(known[number], crc32=crc32)
    return after_storages(known, _NO_HASH)
