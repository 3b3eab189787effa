"""The record table of a zip that torch.save wrote, held to all that a loader relies on; nothing of it is unpickled.

Every field counts here that can keep torch from loading the file, so that
what passes, and has the CRC-32 of all its records, is read by torch as it was written. Left unchecked are only bytes that no
loader looks at: time stamps, "made by" and "needed" versions, internal attributes, what stands in the local headers beside
their mark, name and lengths, their filler, and the data descriptors.

Source: caffe2/serialize/inline_container.cc, third_party/miniz ``mz_zip_reader_read_central_dir`` (torch 2.14.1): records stand
one behind the other in the order of the directory; behind it come the 64-bit end records (torch always writes them) and the
plain one, without a comment.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptguard.core.errors import DamagedError
from ckptguard.core.problems import Problem

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


_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_WIDE, _MANY = 0xFFFFFFFF, 0xFFFF  # the value itself stands in a 64-bit field
_KNOWN_FLAGS = 0x0808  # the name is UTF-8; the CRC follows the data
_IS_FOLDER = 0x10  # of the external attributes
_MAX_DIRECTORY_BYTES = 1 << 30
_LOCAL_MARK, _END_MARK = b"PK\x03\x04", b"PK\x05\x06"


def is_zip(read_at: ReadAt, length_bytes: int) -> bool:
    """Whether bytes begin or end as a zip does: damage to one of the marks does not make it something else."""
    if length_bytes < _END.size:
        return False
    return read_at(0, 4) == _LOCAL_MARK or read_at(length_bytes - _END.size, 4) == _END_MARK


def stored_records(
    read_at: ReadAt, length_bytes: int, *, where: str, file: str, tensor: str | None = None
) -> list[ZipRecord]:
    """The records of a zip, in the order in which they stand; they do not overlap.

    Args:
        read_at: Reads bytes of the zip by offset and length.
        length_bytes: Length of the whole zip.
        where: What is read, for messages.
        file: Relative path for the problem record.
        tensor: Tensor or object concerned, for the problem record.

    Raises:
        DamagedError: It is not a zip that torch can load.
    """
    try:
        table = _end(read_at, length_bytes)
        records = list(_entries(read_at, table))
        if not any(record.name == "data.pkl" for record in records):
            raise ValueError("it holds no data.pkl")
    except (struct.error, ValueError) as error:  # UnicodeDecodeError is a ValueError
        message = f"{where}: not a whole file of torch.save: {error}"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=file, tensor=tensor)]) from error
    return records


@dataclass(frozen=True, slots=True)
class _Table:
    """Where the directory stands: number of entries, length and offset in bytes."""

    count: int
    size_bytes: int
    offset_bytes: int


def _end(read_at: ReadAt, length: int) -> _Table:
    """Reads the records at the very end, which must agree with each other and touch the directory."""
    if length < _END.size:
        raise ValueError(f"{length} bytes are too few for a zip")
    at = length - _END.size
    mark, disk, first_disk, here, count, size, offset, comment = _END.unpack(read_at(at, _END.size))
    if mark != _END_MARK:
        raise ValueError("the end-of-directory mark is missing from its last bytes")
    if (disk, first_disk, here, comment) != (0, 0, count, 0):
        raise ValueError("the end of its directory speaks of several disks, or of a comment")
    before = at - _END64_LOCATOR.size - _END64.size
    if before >= 0 and read_at(at - _END64_LOCATOR.size, 4) == b"PK\x06\x07":
        wide, at = _end64(read_at, before), before
        short = min(wide.count, _MANY), min(wide.size_bytes, _WIDE), min(wide.offset_bytes, _WIDE)
        if (count, size, offset) != short:
            raise ValueError("the two records at the end of its directory contradict each other")
    elif count == _MANY or _WIDE in (size, offset):
        raise ValueError("the 64-bit end-of-directory mark is missing")
    else:
        wide = _Table(count, size, offset)
    if wide.size_bytes > _MAX_DIRECTORY_BYTES or wide.offset_bytes + wide.size_bytes != at:
        text = f"its directory of {wide.size_bytes} bytes at {wide.offset_bytes} should end at byte {at}"
        raise ValueError(f"{text} of {length}")
    return wide


def _end64(read_at: ReadAt, at: int) -> _Table:
    locator = _END64_LOCATOR.unpack(read_at(at + _END64.size, _END64_LOCATOR.size))
    mark, size_of_it, _, _, disk, first_disk, here, count, size, offset = _END64.unpack(read_at(at, _END64.size))
    if locator[1:] != (0, at, 1):
        raise ValueError(f"the 64-bit end of its directory is said to be at byte {locator[2]}, not {at}")
    if (mark, size_of_it, disk, first_disk, here) != (b"PK\x06\x06", _END64.size - 12, 0, 0, count):
        raise ValueError("the 64-bit end of its directory is damaged")
    return _Table(count, size, offset)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the directory says of a record: its full name, where its header stands, the length and CRC-32 of its data."""

    name: str
    local_bytes: int
    length_bytes: int
    crc32: int


def _entries(read_at: ReadAt, table: _Table) -> Iterator[ZipRecord]:
    """Walks the directory, which its entries must fill, and the records, which must stand in its order before it."""
    directory = read_at(table.offset_bytes, table.size_bytes)
    at, free, folder = 0, 0, None
    for _ in range(table.count):
        entry, at = _entry(directory, at)
        head, _, name = entry.name.partition("/")
        folder = head if folder is None else folder
        if head != folder or not name:
            raise ValueError(f"record {entry.name} is not in the folder {folder} as the others are")
        begin = _data_begin(read_at, entry, table.offset_bytes)
        end = begin + entry.length_bytes
        if entry.local_bytes < free or end > table.offset_bytes:
            needs = f"record {entry.name} takes bytes {entry.local_bytes} to {end}"
            raise ValueError(f"{needs}; those from {free} to {table.offset_bytes} are free")
        free = end
        yield ZipRecord(name, begin, entry.length_bytes, entry.crc32 or None)
    if at != len(directory):
        raise ValueError(f"its directory has {len(directory)} bytes, its {table.count} entries fill {at}")


def _entry(directory: bytes, at: int) -> tuple[_Entry, int]:
    """The entry at an offset of the directory, and the offset of the next one."""
    mark, _, _, flags, method, _, _, crc, packed, plain, *lengths, disk, _, outside, local = _CENTRAL.unpack_from(
        directory, at
    )
    begin = at + _CENTRAL.size
    extra = begin + lengths[0]
    end = extra + lengths[1]
    if mark != b"PK\x01\x02" or lengths[2] or end > len(directory):
        raise ValueError(f"no entry at byte {at} of its directory")
    name = directory[begin:extra].decode()
    if flags & ~_KNOWN_FLAGS or method or disk or outside & _IS_FOLDER:
        raise ValueError(f"record {name} is not stored as torch.save does it (method {method}, flags {flags:#x})")
    plain, packed, local = _wide(directory[extra:end], plain, packed, local)
    if packed != plain:
        raise ValueError(f"record {name} has {packed} bytes that should become {plain}")
    return _Entry(name, local, plain, crc), end


def _data_begin(read_at: ReadAt, entry: _Entry, limit: int) -> int:
    """Where a record's data begin, behind its own header, which must carry the name that the directory gives it."""
    name = entry.name.encode()
    size = _LOCAL.size + len(name)
    head = read_at(entry.local_bytes, size) if entry.local_bytes + size <= limit else bytes(size)
    mark, *_, name_length, extra_length = _LOCAL.unpack_from(head)
    if mark != _LOCAL_MARK or name_length != len(name) or head[_LOCAL.size :] != name:
        raise ValueError(f"no record {entry.name} at byte {entry.local_bytes}")
    return entry.local_bytes + size + int(extra_length)


def _wide(extra: bytes, plain: int, packed: int, local: int) -> tuple[int, int, int]:
    """Takes values from the zip64 field (id 1) where all their bits are ones, in the order of APPNOTE 4.5.3."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            plain = next(values, plain) if plain == _WIDE else plain
            packed = next(values, packed) if packed == _WIDE else packed
            local = next(values, local) if local == _WIDE else local
        at += 4 + size
    return plain, packed, local
