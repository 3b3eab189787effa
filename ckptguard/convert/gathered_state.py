"""Optimizer state that ranks gathered into one object each, under the names of ``fully_reshardable``.

Releases 0.6 to 0.14 save this form, ``dp_zero_gather_scatter``, without ``--ckpt-fully-parallel-save``. The object is a file of
torch.save that stands inside a data file, and holds what ``distrib_optim.pt`` of legacy files does.

Source: megatron/core/optimizer/distrib_optimizer.py ``sharded_param_state_dp_zero``, ``get_parameter_state_dp_zero`` (0.19.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index, ObjectEntry
from ckptguard.formats.chunks import Reader
from ckptguard.formats.legacy import entries
from ckptguard.megatron import legacy_optimizer
from ckptguard.megatron.legacy_parts import Gathered
from ckptguard.megatron.structure import Buffer, RankStructure, Structures

_OBJECT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1")
_PATH = re.compile(r"(?:0\.)?(\d+)\.(\([^)]*\))\.(\w+)")


def is_gathered(name: str) -> bool:
    """Whether an object holds the state that a group of ranks gathered."""
    return _OBJECT.fullmatch(name) is not None


def to_global(index: Index, reader: Reader, structures: Structures) -> Index:
    """The index with the state inside these objects as tensors of its own, in place; without any, the index itself.

    Args:
        index: Of a ``torch_dist`` checkpoint.
        reader: Of its files; only the objects' own directories and pickles are read.
        structures: What Megatron says of its layout.

    Raises:
        UnsupportedError: The state is not laid out as Megatron does it for this run.
        DamagedError: An object is not whole.
    """
    objects = [entry for name, entry in index.objects.items() if is_gathered(name)]
    if not objects:
        return index
    if structures.no_buckets:
        raise UnsupportedError(
            f"{index.location}: where the optimizer's state stands in {objects[0].name} is not known: {structures.no_buckets}",
            next_step="Convert the weights alone with --optimizer none.",
        )
    gathered = Gathered()
    for entry in objects:
        _place(index.location, entry, reader, structures, gathered)
    tensors, _ = gathered.result()
    return replace(index, tensors={**index.tensors, **tensors})


def _place(location: str, blob: ObjectEntry, reader: Reader, structures: Structures, gathered: Gathered) -> None:
    match = _OBJECT.fullmatch(blob.name)
    assert match is not None
    expert, group = bool(int(match[1] or 0)), int(match[2])
    buffers = next(_buffers(structures, group, expert=expert), None)
    if buffers is None or blob.transforms:
        raise UnsupportedError(f"{location}: {blob.name}: no rank of the run's layout has this state")
    archive = reader.open_zip(blob.span, where=f"{location}: {blob.name}")
    for entry in entries(blob.name, archive, blob.span):
        path = _PATH.fullmatch(entry.name.removeprefix(f"{blob.name}:"))
        number = int(path[1]) if path else len(buffers)
        fits = path and number < len(buffers) and path[2] == buffers[number].dtype
        if not path or not fits or entry.shape != (sum(bucket.numel for bucket in buffers[number].buckets),):
            raise UnsupportedError(
                f"{location}: {entry.name}, of shape {list(entry.shape)}, is no buffer of the optimizer as Megatron"
                f" {structures.megatron} lays it out",
                next_step="Convert the weights alone with --optimizer none.",
            )
        legacy_optimizer.spread(path[3], buffers[number], entry, gathered)


def _buffers(structures: Structures, group: int, *, expert: bool) -> Iterator[tuple[Buffer, ...]]:
    """The buffers of the rank that gathers for a group."""

    def is_first(rank: RankStructure) -> bool:
        kind = "expert" if expert else "dense"
        return rank.at[f"{kind}_dp"] == 0 and rank.at[f"{kind}_group"] == group

    for rank in filter(is_first, structures.ranks):
        yield rank.expert if expert else rank.dense
