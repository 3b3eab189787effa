"""The zip files that torch.save writes, read in place: where each record's bytes are, without loading anything.

Records are stored uncompressed and aligned, so a tensor's elements can be read straight out of the file. Source:
caffe2/serialize/inline_container.cc and torch/serialization.py (2.14.1): ``<name>/data.pkl`` holds the pickle,
``<name>/data/<key>`` one record per storage, ``<name>/byteorder`` "little" or "big".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.problems import Problem
from ckptguard.formats.pickles import load

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_NO_COMPRESSION = 0
_MAX_DIRECTORY_BYTES = 1 << 30

ReadAt = Callable[[int, int], bytes]  # (offset_bytes, length_bytes) inside the zip -> exactly that many bytes


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A stored record.

    Attributes:
        name: Name without the archive's own leading folder, such as ``data/0``.
        data_bytes: First byte of the record's data, counted from the start of the zip.
        length_bytes: Length of the data.
        crc32: CRC-32 of the data, or None where the writer was told to leave it out (then 0 stands there).
    """

    name: str
    data_bytes: int
    length_bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class TorchZip:
    """What a zip made by torch.save holds.

    Attributes:
        records: By name without the leading folder.
        value: The unpickled object, inert (see ``formats.pickles``).
    """

    records: dict[str, ZipRecord]
    value: Any

    def storage(self, key: str) -> ZipRecord:
        """The record of a storage. Raises KeyError if there is none."""
        return self.records[f"data/{key}"]


def read_torch_zip(read_at: ReadAt, length_bytes: int, *, where: str, file: str, tensor: str | None = None) -> TorchZip:
    """Reads the directory and the pickle of a zip, and none of its storages.

    Args:
        read_at: Reads bytes of the zip by offset and length.
        length_bytes: Length of the whole zip.
        where: What is read, for messages.
        file: Relative path for the problem record.
        tensor: Tensor or object concerned, for the problem record.

    Raises:
        DamagedError: The zip is not whole, or its pickle is not.
        UnsafePickleError: Its pickle names something outside the allow-list.
        UnsupportedError: The data are big-endian.
    """
    try:
        records = {r.name: r for r in _records(read_at, length_bytes)}
        pickle = records["data.pkl"]
        order = records.get("byteorder")
        byte_order = read_at(order.data_bytes, order.length_bytes) if order else b"little"
        if byte_order == b"big":
            raise UnsupportedError(
                f"{where}: was written on a big-endian machine", next_step="Save it again on a little-endian one."
            )
        if byte_order != b"little":
            raise ValueError(f"its byte order is {byte_order[:16]!r}")
        data = read_at(pickle.data_bytes, pickle.length_bytes)
    except (struct.error, KeyError, ValueError, UnicodeDecodeError) as error:
        reason = "it holds no data.pkl" if isinstance(error, KeyError) else str(error)
        message = f"{where}: not a whole file of torch.save: {reason}"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=file, tensor=tensor)]) from error
    return TorchZip(records, load(data, where=where, file=file, tensor=tensor))


def _records(read_at: ReadAt, length: int) -> list[ZipRecord]:
    """Parses the central directory. Zip64 as torch writes it for large files."""
    count, size, offset = _directory(read_at, length)
    if size > _MAX_DIRECTORY_BYTES or offset + size > length:
        raise ValueError(f"a directory of {size} bytes at {offset} in a file of {length} bytes")
    directory, at, out = read_at(offset, size), 0, []
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, at)
        if fields[0] != b"PK\x01\x02":
            raise ValueError(f"no directory entry at byte {offset + at}")
        method, crc, packed, plain, name_length, extra_length, comment_length = fields[4], *fields[7:13]
        local = fields[16]
        at += _CENTRAL.size
        name = directory[at : at + name_length].decode()
        extra = directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        plain, packed, local = _wide(extra, plain, packed, local)
        if method != _NO_COMPRESSION or plain != packed:
            raise ValueError(f"record {name} is compressed (method {method}), which torch.save never does")
        head = read_at(local, _LOCAL.size) if local + _LOCAL.size <= length else b""
        if head[:4] != b"PK\x03\x04":
            raise ValueError(f"no record {name} at byte {local}")
        local_names = _LOCAL.unpack(head)[9:11]
        begin = local + _LOCAL.size + sum(local_names)
        if begin + plain > length:
            raise ValueError(f"record {name} needs bytes {begin} to {begin + plain} of {length}")
        out.append(ZipRecord(name.partition("/")[2] or name, begin, plain, crc or None))
    return out


def _directory(read_at: ReadAt, length: int) -> tuple[int, int, int]:
    """(number of entries, size in bytes, offset in bytes) of the central directory. torch writes no zip comment."""
    if length < _END.size:
        raise ValueError(f"{length} bytes are too few for a zip")
    end = _END.unpack(read_at(length - _END.size, _END.size))
    if end[0] != b"PK\x05\x06":
        raise ValueError("the end-of-directory mark is missing from its last bytes")
    count, size, offset = end[4], end[5], end[6]
    if count == 0xFFFF or size == 0xFFFFFFFF or offset == 0xFFFFFFFF:
        mark, _, where64, _ = _END64_LOCATOR.unpack(
            read_at(length - _END.size - _END64_LOCATOR.size, _END64_LOCATOR.size)
        )
        if mark != b"PK\x06\x07" or where64 + _END64.size > length:
            raise ValueError("the 64-bit end-of-directory mark is missing")
        end64 = _END64.unpack(read_at(where64, _END64.size))
        count, size, offset = end64[7], end64[8], end64[9]
    return count, size, offset


def _wide(extra: bytes, plain: int, packed: int, local: int) -> tuple[int, int, int]:
    """Takes 64-bit values from the zip64 extra field (id 1) where the 32-bit ones are all ones."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            plain = next(wide, plain) if plain == 0xFFFFFFFF else plain
            packed = next(wide, packed) if packed == 0xFFFFFFFF else packed
            local = next(wide, local) if local == 0xFFFFFFFF else local
        at += 4 + size
    return plain, packed, local
