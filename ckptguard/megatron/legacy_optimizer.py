"""Optimizer state of legacy files (``distrib_optim.pt``) under the names of ``fully_reshardable``.

Source: megatron/core/optimizer/distrib_optimizer.py ``get_parameter_state_dp_zero`` (0.19.2, "buckets_coalesced"): per
buffer one 1-D tensor per state, its buckets one after the other *without* the padding at their ends. With two optimizers
(dense and expert parameters) the file is a list of two, with None where this rank is not the one to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.megatron.legacy_parts import Gathered, cut, folder_of
from ckptguard.megatron.structure import Buffer, Place, RankStructure, Structures

FILE = "distrib_optim.pt"
_PATH = re.compile(r"(?:(\d+)\.)?(\d+)\.(\([^)]*\))\.(\w+)")
Key = tuple[str, int, int, str, str]  # folder, optimizer, buffer, dtypes, state


def place(index: Index, structures: Structures, gathered: Gathered) -> tuple[set[str], list[Problem]]:
    """Places the state of every parameter whose buffer is stored.

    All of it or nothing: one buffer that is not as Megatron lays it out leaves all state under the rank's names.

    Returns:
        The names it took from the index, and why it took none, as a note.
    """
    stored = {name: entry for name, entry in index.tensors.items() if f"/{FILE}:" in name}
    if not stored:
        return set(), []
    if structures.no_buckets:
        return set(), [_note(structures.no_buckets)]
    buffers = dict(_buffers(structures))
    found: list[tuple[str, Buffer, TensorEntry]] = []
    for name, entry in stored.items():
        key = _key(name)
        buffer = buffers.get(key[:4]) if key else None
        if key is None or buffer is None:
            return set(), [_note(f"{name} is in no buffer of Megatron's")]
        if entry.shape != (sum(bucket.numel for bucket in buffer.buckets),):
            return set(), [_note(f"{name} has shape {list(entry.shape)}, which is not that of Megatron's buffer")]
        found.append((key[4], buffer, entry))
    for state, buffer, entry in found:
        spread(state, buffer, entry, gathered)
    return set(stored), []


def _key(name: str) -> Key | None:
    folder, _, rest = name.partition("/")
    match = _PATH.fullmatch(rest.partition(":")[2])
    return (folder, int(match[1] or 0), int(match[2]), match[3], match[4]) if match else None


def _buffers(structures: Structures) -> Iterator[tuple[tuple[str, int, int, str], Buffer]]:
    """Every buffer, under the folder, optimizer, number and dtypes that say where it is stored."""
    for rank in structures.ranks:
        yield from _of(rank, structures, rank.dense, 0, "dense_dp")
        yield from _of(rank, structures, rank.expert, 1, "expert_dp")


def _of(
    rank: RankStructure, structures: Structures, buffers: tuple[Buffer, ...], optimizer: int, axis: str
) -> Iterator[tuple[tuple[str, int, int, str], Buffer]]:
    if rank.at[axis] == 0:
        for number, buffer in enumerate(buffers):
            yield (folder_of(rank, structures), optimizer, number, buffer.dtype), buffer


def spread(state: str, buffer: Buffer, entry: TensorEntry, gathered: Gathered) -> None:
    """Places the parts of one state of a coalesced buffer."""
    for place_, first in _places(buffer):
        tensor = place_.tensor
        for part in tensor.parts:
            chunk = cut(entry, part.box, part.local, first=first, shape=tensor.shape)
            gathered.add(f"optimizer.state.{state}.{part.key}", part, entry, chunk)


def _places(buffer: Buffer) -> Iterator[tuple[Place, int]]:
    """Each parameter with its first element in the coalesced buffer."""
    start = 0
    for bucket in buffer.buckets:
        for place_ in bucket.places:
            yield place_, start + place_.begin
        start += bucket.numel


def _note(reason: str) -> Problem:
    return Problem("note", f"optimizer state keeps the names of its ranks, because its buckets are not known: {reason}")
