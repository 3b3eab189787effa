"""The bytes that torch.save puts around a tensor's data: what stands before them and, given their CRC-32, what follows.

With these a stored chunk is written as head, data, tail, in one pass and without torch, and is the file that torch.save
writes for a contiguous CPU tensor that owns its whole storage and needs no gradient, which is what Megatron hands it.

Source: torch/serialization.py (``_save``), torch/_tensor.py (``_reduce_ex_internal``), caffe2/serialize/inline_container.cc
and its miniz (torch 2.14.1). Records are stored plainly, each one's data at a multiple of 64 bytes, reached by a filler
field ``FB``; their CRC-32 follows them in a data descriptor. From 4 GiB on sizes and offsets stand in zip64 fields.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ckptguard.core.dtypes import BY_STORAGE_CLASS, DType

ALIGNMENT_BYTES = 64
_ARCHIVE = "archive/"  # torch names a zip that it writes to a stream so, whatever the file is called
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_WIDE = 0xFFFFFFFF  # values from here on stand in a zip64 field, and this in their own place
_UTF8_NAME, _CRC_FOLLOWS = 0x0800, 0x0008
_MADE_BY, _NEEDS = 0x031E, 0x002D  # the zip versions that miniz states: Unix 3.0, and 4.5 for zip64
_WORD = (1 << 64) - 1
# The first half of the serialization id is a hash over the record names, in the order of libstdc++'s hash table; the records
# of one tensor are always the same.
_NAMES_HASH = 15728199511854643026
_STORAGE_CLASS = {dtype: name for name, dtype in BY_STORAGE_CLASS.items()}


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of a zip: its place and, once known, the CRC-32 of its data."""

    name: str
    begin_bytes: int
    length_bytes: int
    crc32: int

    @property
    def flags(self) -> int:
        return _UTF8_NAME | (_CRC_FOLLOWS if self.length_bytes else 0)

    def header(self) -> bytes:
        """The local header, filled up so that the data begin at a multiple of 64 bytes."""
        name = (_ARCHIVE + self.name).encode()
        wide = self._wide_fields(local=True)
        filler = -(self.begin_bytes + _LOCAL.size + len(name) + len(wide) + 4) % ALIGNMENT_BYTES
        extra = wide + struct.pack("<2sH", b"FB", filler) + b"Z" * filler
        return _LOCAL.pack(b"PK\x03\x04", 0, self.flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra

    def descriptor(self) -> bytes:
        """What follows the data; nothing after a record without data."""
        if not self.length_bytes:
            return b""
        layout = _DESCRIPTOR64 if max(self.begin_bytes, self.length_bytes) >= _WIDE else _DESCRIPTOR
        return layout.pack(b"PK\x07\x08", self.crc32, self.length_bytes, self.length_bytes)

    def entry(self) -> bytes:
        """The entry in the directory at the zip's end."""
        name, wide, length = (_ARCHIVE + self.name).encode(), self._wide_fields(), min(self.length_bytes, _WIDE)
        fields = (0, 0, self.flags, 0, 0, 0, self.crc32, length, length, len(name), len(wide), 0, 0, 0, 0)
        return _CENTRAL.pack(b"PK\x01\x02", *fields, min(self.begin_bytes, _WIDE)) + name + wide

    def _wide_fields(self, *, local: bool = False) -> bytes:
        """The zip64 field. A local one is written before miniz knows the stored size, and says 0 for it."""
        values = [self.length_bytes, 0 if local else self.length_bytes] if self.length_bytes >= _WIDE else []
        values += [self.begin_bytes] if self.begin_bytes >= _WIDE else []
        return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


@dataclass(frozen=True, slots=True)
class Frame:
    """What torch.save writes around the data of a tensor.

    Attributes:
        head: All bytes before the data; their number is where the data begin, a multiple of 64.
        data_bytes: Length of the data.
        tail_bytes: Length of what follows them.
        records: The zip's records so far, the data's last; its CRC-32 is not known yet.
    """

    head: bytes
    data_bytes: int
    tail_bytes: int
    records: tuple[_Record, ...]

    @property
    def data_begin_bytes(self) -> int:
        """First byte of the data, counted from the frame's start."""
        return len(self.head)

    @property
    def length_bytes(self) -> int:
        """Length of head, data and tail."""
        return len(self.head) + self.data_bytes + self.tail_bytes

    def tail(self, crc32: int) -> bytes:
        """The bytes after the data.

        Args:
            crc32: CRC-32 of the data, as ``zlib.crc32`` counts it; 0 for empty data.
        """
        return _tail(self.records, crc32)


def frame(dtype: DType, size: tuple[int, ...]) -> Frame:
    r"""The frame of a contiguous CPU tensor.

    Byte for byte torch's own, but for one case: of data of at least 8 bytes that begin with ``PK\x07\x08`` torch counts
    the next 4 as a CRC-32 too when it makes the serialization id. Nothing that loads a tensor reads that id.

    Args:
        dtype: Element type.
        size: Elements per dim; () for a 0-d tensor.
    """
    return _frame(dtype, size, in_list=False)


def empty_tensor_in_list() -> bytes:
    """The file of ``torch.save([torch.empty(0, dtype=torch.uint8)])``.

    It is what Megatron stores for the ``_extra_state`` of a Transformer Engine module (2.0 and later) that has no fp8 state:
    a ShardedObject's data in a list (megatron/core/dist_checkpointing/strategies/torch.py, 0.19.2).
    """
    whole = _frame(BY_STORAGE_CLASS["ByteStorage"], (0,), in_list=True)
    return whole.head + whole.tail(0)


@lru_cache(maxsize=4096)
def _frame(dtype: DType, size: tuple[int, ...], *, in_list: bool) -> Frame:
    parts, records, at = [], [], 0
    for name, data in (
        ("data.pkl", _pickle(dtype, size, in_list=in_list)),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT_BYTES).encode()),
        ("byteorder", b"little"),
    ):
        record = _Record(name, at, len(data), zlib.crc32(data))
        stored = record.header() + data + record.descriptor()
        parts.append(stored)
        records.append(record)
        at += len(stored)
    record = _Record("data/0", at, prod(size) * dtype.itemsize, 0)
    head, known = b"".join([*parts, record.header()]), (*records, record)
    return Frame(head, record.length_bytes, len(_tail(known, 0)), known)


def _tail(before: tuple[_Record, ...], crc32: int) -> bytes:
    *records, data = before
    data = _Record(data.name, data.begin_bytes, data.length_bytes, crc32)
    parts = [data.descriptor()]
    at = data.begin_bytes + len(data.header()) + data.length_bytes + len(parts[0])
    version = b"3\n"
    records += [data, _Record("version", at, len(version), zlib.crc32(version))]
    for value in (version, None):  # the serialization id needs the CRC-32 of all records before it
        if value is None:
            value = f"{_NAMES_HASH:020d}{_combined(records):020d}".encode()
            records.append(_Record(".data/serialization_id", at, len(value), zlib.crc32(value)))
        stored = records[-1].header() + value + records[-1].descriptor()
        parts.append(stored)
        at += len(stored)
    directory = b"".join(record.entry() for record in records)
    count, size, end = len(records), len(directory), at + len(directory)
    return b"".join(
        [
            *parts,
            directory,
            _END64.pack(b"PK\x06\x06", _END64.size - 12, _MADE_BY, _NEEDS, 0, 0, count, count, size, at),
            _END64_LOCATOR.pack(b"PK\x06\x07", 0, end, 1),
            _END.pack(b"PK\x05\x06", 0, 0, count, count, size, min(at, _WIDE), 0),
        ]
    )


def _combined(records: list[_Record]) -> int:
    """What ``hash_combine`` makes of the CRC-32 of every record with data; torch sees them pass in the descriptors."""
    seed = 0
    for record in records:
        if record.length_bytes:
            seed ^= (record.crc32 + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _WORD
    return seed


def _pickle(dtype: DType, size: tuple[int, ...], *, in_list: bool) -> bytes:
    """The pickle of the tensor (protocol 2), opcode for opcode: names and tuples are memoized as Python's pickler does."""
    out = _Opcodes()
    if in_list:
        out.raw(b"]").memoize()
    typed = _STORAGE_CLASS.get(dtype)
    out.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3").raw(b"((").text("storage")
    out.name(*(("torch", typed) if typed else ("torch.storage", "UntypedStorage"))).text("0").text("cpu")
    out.number(prod(size) * (1 if typed else dtype.itemsize)).raw(b"t").memoize().raw(b"Q").number(0)  # Q: a storage
    out.numbers(size).numbers(_strides(size)).raw(b"\x89")  # needs no gradient
    out.name("collections", "OrderedDict").raw(b")R").memoize()  # no backward hooks
    if not typed:
        out.name("torch", dtype.name)
    out.raw(b"t").memoize().raw(b"R").memoize()
    return b"".join([b"\x80\x02", *out.parts, b"a" if in_list else b"", b"."])


class _Opcodes:
    """Collects opcodes of pickle protocol 2."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo = 0

    def raw(self, opcodes: bytes) -> _Opcodes:
        self.parts.append(opcodes)
        return self

    def memoize(self) -> _Opcodes:
        self._memo += 1
        return self.raw(b"q" + bytes([self._memo - 1]))

    def name(self, module: str, name: str) -> _Opcodes:
        return self.raw(f"c{module}\n{name}\n".encode()).memoize()

    def text(self, value: str) -> _Opcodes:
        return self.raw(b"X" + struct.pack("<L", len(value)) + value.encode()).memoize()

    def number(self, value: int) -> _Opcodes:
        return self.raw(pickle.dumps(value, 2)[2:-1])

    def numbers(self, values: tuple[int, ...]) -> _Opcodes:
        """A tuple: up to three items have opcodes of their own, and the empty one is never memoized."""
        if not values:
            return self.raw(b")")
        short = len(values) <= 3
        self.raw(b"" if short else b"(")
        for value in values:
            self.number(value)
        return self.raw(bytes([0x84 + len(values)]) if short else b"t").memoize()


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Elements to skip per dim, as torch gives them to a contiguous tensor: a zero size counts as one."""
    out, step = [], 1
    for extent in reversed(size):
        out.append(step)
        step *= max(extent, 1)
    return tuple(reversed(out))
