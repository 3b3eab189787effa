"""The bytes that torch.save puts around a tensor's data: what stands before them and, given their CRC-32, what follows.

With these a stored chunk is written as head, data, tail, in one pass and without torch, and is the file that torch.save
writes for a contiguous CPU tensor that owns its whole storage and needs no gradient, which is what Megatron hands it.

Source: torch/serialization.py (``_save``), torch/_tensor.py (``_reduce_ex_internal``) (torch 2.14.1); ``zip_records`` says
what surrounds a record.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ckptguard.core.dtypes import BY_STORAGE_CLASS, DType
from ckptguard.formats.zip_records import Record, after_storages, before_storages

_ARCHIVE = "archive"  # torch names a zip that it writes to a stream so, whatever the file is called
# The first half of the serialization id; the records of one tensor are always the same.
_NAMES_HASH = 15728199511854643026
_STORAGE_CLASS = {dtype: name for name, dtype in BY_STORAGE_CLASS.items()}


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
    records: tuple[Record, ...]

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
    head, records = before_storages(_ARCHIVE, _pickle(dtype, size, in_list=in_list))
    data = Record(_ARCHIVE, "data/0", len(head), prod(size) * dtype.itemsize)
    known = (*records, data)
    return Frame(head + data.header(), data.length_bytes, len(_tail(known, 0)), known)


def _tail(before: tuple[Record, ...], crc32: int) -> bytes:
    *records, data = before
    data = replace(data, crc32=crc32)
    return data.descriptor() + after_storages([*records, data], _NAMES_HASH)


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
