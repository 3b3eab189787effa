"""A snapshot's safetensors files: which tensor goes into which file, and the bytes before their elements. Pure.

Sources: huggingface_hub/serialization/_base.py (1.33) for the cut into files and their names, safetensors/src/tensor.rs
``prepare`` (0.6) for the order inside a file and the header: the same tensors give the same bytes as ``save_file``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.core.plan import Made
from ckptguard.core.writing import Elements, Literal, TargetFile
from ckptguard.engine.proving import step_bytes

INDEX_NAME = "model.safetensors.index.json"
_PATTERN = "model{suffix}.safetensors"
_ALIGNMENT_BYTES = 8
# The order of safetensors' own enum of dtypes; those that align to more bytes come first in a file.
_ORDER = (
    "BOOL", "F4", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64",
    "F64", "I64", "U64",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a snapshot.

    Attributes:
        names: Tensor names by file, in the order in which they stand there.
        total_bytes: Of all tensors.
    """

    names: Mapping[str, tuple[str, ...]]
    total_bytes: int


def split(tensors: Sequence[Made], max_shard_bytes: int) -> Shards:
    """Cuts a model into files, none larger than asked unless one tensor alone is.

    Args:
        tensors: In the order in which they are to be dealt out.
        max_shard_bytes: Most bytes of tensors in a file.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {made.name: made for made in tensors}
    found = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda made: made.size_bytes,
        filename_pattern=_PATTERN,
        max_shard_size=max_shard_bytes,
    )
    files = {file: _ordered([by_name[n] for n in names]) for file, names in found.filename_to_tensors.items()}
    return Shards(files, sum(made.size_bytes for made in tensors))


def _ordered(tensors: Sequence[Made]) -> tuple[str, ...]:
    return tuple(m.name for m in sorted(tensors, key=lambda m: (-_ORDER.index(m.dtype.safetensors), m.name)))


def target_files(shards: Shards, tensors: Sequence[Made]) -> tuple[TargetFile, ...]:
    """The files of a write plan; elements are known by their tensor's number in ``tensors``."""
    number = {made.name: key for key, made in enumerate(tensors)}
    return tuple(
        _file(file, [(number[name], tensors[number[name]]) for name in names]) for file, names in shards.names.items()
    )


def safetensors_file(path: str, tensors: Sequence[Made], *, first_key: int) -> TargetFile:
    """One file of tensors that are numbered one after the other."""
    numbered = {made.name: (key, made) for key, made in enumerate(tensors, first_key)}
    return _file(path, [numbered[name] for name in _ordered(tensors)])


def _file(path: str, tensors: Sequence[tuple[int, Made]]) -> TargetFile:
    elements = [Elements(key, made.size_bytes, step_bytes(made) if made.size_bytes else 1) for key, made in tensors]
    return TargetFile(path, (Literal(header_bytes([made for _, made in tensors])), *elements))


def header_bytes(tensors: Sequence[Made]) -> bytes:
    """All of a safetensors file that comes before its data: length, then JSON padded with spaces."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for made in tensors:
        end = at + made.size_bytes
        # Of packed fp4 the header counts single values.
        shape = [*made.shape[:-1], made.shape[-1] * 2] if made.dtype.kind == "packed" else list(made.shape)
        table[made.name] = {"dtype": made.dtype.safetensors, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def index_bytes(shards: Shards) -> bytes:
    """``model.safetensors.index.json``; only a snapshot of several files has one."""
    weight_map = {name: file for file, names in shards.names.items() for name in names}
    content = {"metadata": {"total_size": shards.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()
