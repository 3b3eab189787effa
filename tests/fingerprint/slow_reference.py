"""A second implementation of the fingerprint, written from docs/fingerprint.md alone: slow, plain, no ckptguard, no numpy.

Its only use is to agree with the fast one. Everything is Python integers, one word at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product

from blake3 import blake3

P = 2**61 - 1
CONTEXT = "ckptguard 2026-11 fingerprint cgfp1-m61-l2-d4096-w16 residues"
ITEMSIZE = {
    1: (
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("int8", "uint8", "bool"),
    ),
    2: ("float16", "bfloat16", "int16", "uint16"),
    4: ("float32", "int32", "uint32"),
    8: ("float64", "int64", "uint64", "complex64"),
    16: ("complex128",),
}


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    (size,) = (size for size, names in ITEMSIZE.items() if dtype in names)
    return size


@cache
def residues(label: str, count: int) -> tuple[int, ...]:
    """The residues that a label stands for."""
    output = blake3(label.encode("utf-8"), derive_key_context=CONTEXT).digest(length=8 * count)
    values = []
    for k in range(count):
        value = int.from_bytes(output[8 * k : 8 * k + 8], "little") % 2**61
        values.append(0 if value == P else value)
    return tuple(values)


def places(extent: int) -> int:
    """P(n): digits of an index along a dim of this extent."""
    bits = (extent - 1).bit_length() if extent > 0 else 0
    count = 1
    while 12 * count < bits:
        count += 1
    return count


def words(element: bytes) -> list[int]:
    """The words of an element's little-endian bytes."""
    if len(element) == 1:
        return [element[0]]
    return [element[k] + 256 * element[k + 1] for k in range(0, len(element), 2)]


def weight(lane: int, shape: Sequence[int], coordinates: Sequence[int], j: int) -> int:
    """Weight of word j of an element."""
    value = residues(f"lane {lane} word", 8)[j]
    for dim, (index, extent) in enumerate(zip(coordinates, shape, strict=True)):
        for place in range(places(extent)):
            index, digit = divmod(index, 4096)
            value = value * residues(f"lane {lane} dim {dim} place {place}", 4096)[digit] % P
    return value


def sums(shape: Sequence[int], elements: Iterable[tuple[Sequence[int], bytes]]) -> tuple[int, int]:
    """Both sums over elements, each given as (global coordinates, little-endian bytes)."""
    totals = [0, 0]
    for coordinates, element in elements:
        for j, word in enumerate(words(element)):
            for lane in (0, 1):
                totals[lane] = (totals[lane] + word * weight(lane, shape, coordinates, j)) % P
    return totals[0], totals[1]


def box_elements(
    dtype: str, offset: Sequence[int], size: Sequence[int], data: bytes
) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """The elements of a box, from their bytes in row-major order."""
    width = itemsize(dtype)
    every = product(*(range(begin, begin + length) for begin, length in zip(offset, size, strict=True)))
    for number, coordinates in enumerate(every):
        yield coordinates, data[number * width : (number + 1) * width]


def hex_form(values: tuple[int, int]) -> str:
    """Both sums as text."""
    return "".join(format(value, "x").zfill(16) for value in values)


def fingerprint_hex(dtype: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], data: bytes) -> str:
    """The text form of the sums over a box."""
    return hex_form(sums(shape, box_elements(dtype, offset, size, data)))


def root(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """The root of (name, dtype, shape, hex) entries."""
    text = b"cgfp1-m61-l2-d4096-w16 root\n"
    for name, dtype, shape, digits in sorted(entries, key=lambda entry: entry[0].encode("utf-8")):
        escaped = name.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
        text += "\t".join([escaped, dtype, ",".join(str(extent) for extent in shape), digits]).encode("utf-8") + b"\n"
    return str(blake3(text).hexdigest())
