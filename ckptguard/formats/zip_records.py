"""Records of the zips that torch.save writes: headers, what follows the data, and the directory at the end.

Source: caffe2/serialize/inline_container.cc and its miniz (torch 2.14.1). Records are stored plainly, each one's data at a
multiple of 64 bytes, reached by a filler field ``FB``; their CRC-32 follows them in a data descriptor. From 4 GiB on sizes
and offsets stand in zip64 fields.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_WIDE = 0xFFFFFFFF  # values from here on stand in a zip64 field, and this in their own place
_MANY = 0xFFFF  # as _WIDE, for the number of records
_UTF8_NAME, _CRC_FOLLOWS = 0x0800, 0x0008
_MADE_BY, _NEEDS = 0x031E, 0x002D  # the zip versions that miniz states: Unix 3.0, and 4.5 for zip64
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a zip: its place and, once known, the CRC-32 of its data.

    Attributes:
        archive: The folder that all names of the zip begin with, such as ``archive``.
        name: Name without it, such as ``data/0``.
        begin_bytes: Where its header begins.
        length_bytes: Length of its data.
        crc32: Of its data, as ``zlib.crc32`` counts it; 0 while it is not known, and for a record without data.
    """

    archive: str
    name: str
    begin_bytes: int
    length_bytes: int
    crc32: int = 0

    @property
    def end_bytes(self) -> int:
        """Where the next record begins."""
        return self.begin_bytes + len(self.header()) + self.length_bytes + len(self.descriptor())

    def header(self) -> bytes:
        """The local header, filled up so that the data begin at a multiple of 64 bytes."""
        name = self._name
        wide = self._wide_fields(local=True)
        filler = -(self.begin_bytes + _LOCAL.size + len(name) + len(wide) + 4) % ALIGNMENT_BYTES
        extra = wide + struct.pack("<2sH", b"FB", filler) + b"Z" * filler
        return _LOCAL.pack(b"PK\x03\x04", 0, self._flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra

    def descriptor(self) -> bytes:
        """What follows the data; nothing after a record without data. Its length does not depend on the CRC-32."""
        if not self.length_bytes:
            return b""
        layout = _DESCRIPTOR64 if max(self.begin_bytes, self.length_bytes) >= _WIDE else _DESCRIPTOR
        return layout.pack(b"PK\x07\x08", self.crc32, self.length_bytes, self.length_bytes)

    def entry(self) -> bytes:
        """The entry in the directory at the zip's end."""
        name, wide, length = self._name, self._wide_fields(), min(self.length_bytes, _WIDE)
        fields = (0, 0, self._flags, 0, 0, 0, self.crc32, length, length, len(name), len(wide), 0, 0, 0, 0)
        return _CENTRAL.pack(b"PK\x01\x02", *fields, min(self.begin_bytes, _WIDE)) + name + wide

    @property
    def _name(self) -> bytes:
        return f"{self.archive}/{self.name}".encode()

    @property
    def _flags(self) -> int:
        return _UTF8_NAME | (_CRC_FOLLOWS if self.length_bytes else 0)

    def _wide_fields(self, *, local: bool = False) -> bytes:
        """The zip64 field. A local one is written before miniz knows the stored size, and says 0 for it."""
        values = [self.length_bytes, 0 if local else self.length_bytes] if self.length_bytes >= _WIDE else []
        values += [self.begin_bytes] if self.begin_bytes >= _WIDE else []
        return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def stored(archive: str, items: Iterable[tuple[str, bytes]], begin_bytes: int = 0) -> tuple[bytes, list[Record]]:
    """Records whose data are known: their bytes, one behind the other from ``begin_bytes`` on, and the records."""
    parts, records, at = [], [], begin_bytes
    for name, data in items:
        record = Record(archive, name, at, len(data), zlib.crc32(data))
        parts.append(record.header() + data + record.descriptor())
        records.append(record)
        at += len(parts[-1])
    return b"".join(parts), records


def before_storages(archive: str, pickle: bytes) -> tuple[bytes, list[Record]]:
    """What torch.save writes before the first storage, from the zip's first byte on.

    Source: torch/serialization.py ``_save`` (2.14.1).
    """
    alignment = str(ALIGNMENT_BYTES).encode()
    return stored(
        archive,
        [("data.pkl", pickle), (".format_version", b"1"), (".storage_alignment", alignment), ("byteorder", b"little")],
    )


def after_storages(records: Sequence[Record], names_hash: int) -> bytes:
    """What torch.save writes behind the last storage, to the zip's end. Its length does not depend on any CRC-32.

    Args:
        records: All records so far.
        names_hash: The first half of the serialization id, which nothing that loads a file reads; torch's own is a hash over
            the record names in the order of libstdc++'s hash table.
    """
    archive = records[0].archive
    version, known = stored(archive, [("version", b"3\n")], records[-1].end_bytes)
    known = [*records, *known]
    value = f"{names_hash:020d}{_combined(known):020d}".encode()
    identity, last = stored(archive, [(".data/serialization_id", value)], known[-1].end_bytes)
    return version + identity + _directory([*known, *last])


def _directory(records: Sequence[Record]) -> bytes:
    directory = b"".join(record.entry() for record in records)
    at, count, size = records[-1].end_bytes, len(records), len(directory)
    few = min(count, _MANY)
    return b"".join(
        [
            directory,
            _END64.pack(b"PK\x06\x06", _END64.size - 12, _MADE_BY, _NEEDS, 0, 0, count, count, size, at),
            _END64_LOCATOR.pack(b"PK\x06\x07", 0, at + size, 1),
            _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _WIDE), min(at, _WIDE), 0),
        ]
    )


def _combined(records: Sequence[Record]) -> int:
    """What ``hash_combine`` makes of the CRC-32 of every record with data; torch sees them pass in the descriptors."""
    seed = 0
    for record in records:
        if record.length_bytes:
            seed ^= (record.crc32 + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _WORD
    return seed
