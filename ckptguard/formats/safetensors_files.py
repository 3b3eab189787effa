"""The header of a safetensors file: which tensor stands where. The format's own rules are checked, nothing is loaded.

Source: the safetensors README ("Format"): 8 bytes little-endian header length, JSON, then data; ``data_offsets`` begin at the
end of the header, the tensors fill the data without holes or overlaps, the header is at most 100 MB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptguard.core.dtypes import BY_SAFETENSORS, DType
from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Span
from ckptguard.core.problems import Problem
from ckptguard.formats.storage import Directory

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file. ``shape`` is in elements of ``dtype`` (packed fp4: bytes)."""

    dtype: DType
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file holds."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(files: Directory, name: str, *, offset_bytes: int = 0) -> Header:
    """Reads and checks a header.

    Args:
        files: The directory.
        name: Relative path of the file.
        offset_bytes: Where the safetensors data begin in the file (torch DCP may write objects before them).

    Raises:
        DamagedError: Every broken rule is one of its problems.
    """
    size = files.size(name) - offset_bytes
    if size < 8:
        raise _broken(name, [f"{size} bytes are too few for a header"])
    length = int.from_bytes(files.read_span(Span(name, offset_bytes, 8)), "little")
    if length > _MAX_HEADER_BYTES or 8 + length > size:
        raise _broken(
            name, [f"it says that its header has {length} bytes; the file has {size} (limit {_MAX_HEADER_BYTES})"]
        )
    try:
        table = json.loads(files.read_span(Span(name, offset_bytes + 8, length)), object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise _broken(name, [f"its header is not JSON ({error})"]) from error
    if not isinstance(table, dict):
        raise _broken(name, ["its header is not a JSON object"])
    metadata = table.pop("__metadata__", {})
    begin, tensors, wrong = offset_bytes + 8 + length, {}, []
    for tensor, item in table.items():
        try:
            tensors[tensor] = _stored(name, begin, item)
        except (KeyError, TypeError, ValueError) as error:
            wrong.append(f"{tensor}: {error}")
    wrong += _holes(tensors, begin, offset_bytes + size)
    if wrong:
        raise _broken(name, wrong)
    return Header(tensors, metadata if isinstance(metadata, dict) else {})


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands in it twice")
    return table


def _stored(name: str, begin: int, item: dict[str, Any]) -> StoredTensor:
    dtype = BY_SAFETENSORS.get(item["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {item['dtype']!r} is not known")
    shape = tuple(int(n) for n in item["shape"])
    low, high = (int(n) for n in item["data_offsets"])
    if min(*shape, low, high - low, 0) < 0:
        raise ValueError(f"shape {list(shape)} at bytes {low} to {high}")
    if dtype.kind == "packed":  # the header counts values of 4 bits, torch pairs of them
        if not shape or shape[-1] % 2:
            raise ValueError(f"shape {list(shape)} of 4-bit values does not fill bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    if prod(shape) * dtype.itemsize != high - low:
        raise ValueError(f"{dtype} {list(shape)} needs {prod(shape) * dtype.itemsize} bytes, {high - low} are stored")
    return StoredTensor(dtype, shape, Span(name, begin + low, high - low))


def _holes(tensors: Mapping[str, StoredTensor], begin: int, end: int) -> list[str]:
    """Checks that the tensors fill the data part."""
    out, at = [], begin
    for tensor, item in sorted(tensors.items(), key=lambda pair: (pair[1].span.offset_bytes, pair[1].span.end_bytes)):
        if item.span.offset_bytes != at:
            out.append(f"{tensor}: begins at byte {item.span.offset_bytes}, the data before it end at {at}")
        at = item.span.end_bytes
    if at != end:
        out.append(f"its tensors end at byte {at}, the file at {end}")
    return out


def _broken(name: str, reasons: list[str]) -> DamagedError:
    problems = [Problem("unreadable", f"{name}: {reason}", file=name) for reason in reasons]
    return DamagedError(
        f"{name}: not a sound safetensors file: {'; '.join(reasons[:3])}",
        problems=problems,
        next_step="Download or write the file again.",
    )
