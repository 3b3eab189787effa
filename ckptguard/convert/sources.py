"""Every format's tensors as global ones: what ``canonical`` describes, made from an index. Pure.

Sources: megatron/core/optimizer/distrib_optimizer.py ``sharded_param_state_fully_reshardable`` and
``sharded_param_state_dp_reshardable`` (0.19.2), ``sharded_param_state_fs_model_space`` (0.12 to 0.15);
megatron/core/dist_checkpointing/strategies/resharding.py ``TensorReformulationMetadata`` (0.12).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from ckptguard.convert.canonical import Cell, GlobalTensor, SourceTable, State, in_order, plain
from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.pieces import Assembly, Piece, concatenate, narrow, reshape, row_major
from ckptguard.core.plan import Stored
from ckptguard.core.problems import Problem
from ckptguard.megatron.buckets import bucket_of, layouts_in, refuse_other_layout
from ckptguard.megatron.structure import Bucket, Part, Structures

PREFIX = "optimizer.state."
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_RENAMED = {"fp32_param": "param"}
_STATES = ("param", "exp_avg", "exp_avg_sq")


def state_name(state: str, key: str) -> str:
    """The global name of an optimizer state of a model tensor."""
    return f"{PREFIX}{state}.{key}"


def split_state(name: str) -> tuple[str, str] | None:
    """(state, model key) of a stored optimizer state in model space, with today's names; None for any other tensor."""
    match = _STATE.fullmatch(name)
    return (_RENAMED.get(match[1], match[1]), match[2]) if match else None


def needs_structures(index: Index) -> bool:
    """Whether the index alone does not say where the parameters stand in what is stored."""
    return any(bucket_of(name) is not None for name in index.tensors)


def state_of(index: Index, structures: Structures | None = None) -> State:
    """The global tensors of a ``torch_dist`` checkpoint, or of an index under its names (``legacy_names.to_global``).

    Args:
        index: The checkpoint.
        structures: What Megatron says of its own layout; where ``needs_structures``.

    Raises:
        UnsupportedError: A form of optimizer state that cannot be taken apart; names it.
        DamagedError: Parts of a tensor are missing.
    """
    sources = SourceTable()
    tensors: dict[str, GlobalTensor] = {}
    buckets: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in index.tensors.items():
        bucket, found = bucket_of(name), split_state(name)
        if bucket is not None:
            buckets.setdefault(bucket, {})[name.removeprefix(f"{bucket}.")] = entry
        elif found is not None:
            state, key = found
            tensor = _in_model_space(entry, state_name(state, key), index.tensors.get(key), sources)
            tensors[tensor.name] = tensor
        elif ".dp_group_idx_" in name or ":" in name:
            raise UnsupportedError(
                f"{index.location}: {name}: this form of optimizer state ({index.facts.optimizer_format}) cannot be taken"
                " apart",
                next_step="Convert the weights alone with --optimizer none.",
            )
        else:
            tensors[name] = plain(entry)
    if buckets:
        assert structures is not None, "needs_structures"
        tensors |= _from_buckets(index, buckets, structures, sources)
    return State(tensors, sources)


def _in_model_space(entry: TensorEntry, name: str, weight: TensorEntry | None, sources: SourceTable) -> GlobalTensor:
    if weight is None:
        raise DamagedError(
            f"{entry.name}: optimizer state of a model tensor that is not stored",
            problems=[Problem("missing-tensor", "its model tensor is not stored", tensor=entry.name)],
        )
    if entry.shape == weight.shape:
        return plain(entry, name)
    return _unflattened(entry, name, weight, sources)


def _unflattened(entry: TensorEntry, name: str, weight: TensorEntry, sources: SourceTable) -> GlobalTensor:
    """State of 0.8 to 0.14: per fragment of the model tensor one row of elements, which data parallel ranks cut.

    The stored shape is the number of fragments per dim of the model tensor, then the elements of a fragment.
    """
    fragments = entry.shape[:-1]
    fits = len(fragments) == len(weight.shape) and all(
        f and n % f == 0 for f, n in zip(fragments, weight.shape, strict=True)
    )
    if not fits or prod(entry.shape) != prod(weight.shape):
        raise UnsupportedError(
            f"{entry.name}: shape {list(entry.shape)} is neither that of its model tensor, {list(weight.shape)}, nor"
            " fragments of it"
        )
    local = tuple(n // f for f, n in zip(fragments, weight.shape, strict=True))
    runs: dict[tuple[int, ...], list[tuple[int, Stored]]] = {}
    for chunk in entry.chunks:
        for at in product(*map(range, chunk.box.offset[:-1], chunk.box.end[:-1])):
            runs.setdefault(at, []).append((chunk.box.offset[-1], Stored(entry, chunk)))
    cells = []
    for at, found in runs.items():
        parts = []
        for _, stored in sorted(found, key=lambda item: item[0]):
            box = stored.chunk.box
            row = sum((i - o) * s for i, o, s in zip(at, box.offset[:-1], row_major(box.size[:-1]), strict=True))
            parts.append(_run(stored, row * box.size[-1], box.size[-1], sources))
        flat = concatenate(parts, 0)
        box = Box(tuple(i * n for i, n in zip(at, local, strict=True)), local)
        if flat.shape[0] != prod(local):
            message = f"{entry.name}: {flat.shape[0]} of {prod(local)} elements of its part {box} are stored"
            raise DamagedError(message, problems=[Problem("missing-chunk", message, tensor=entry.name, box=box)])
        cells.append(Cell(box, reshape(flat, local)))
    return GlobalTensor(name, entry.dtype, weight.shape, tuple(cells))


def _run(stored: Stored, first: int, length: int, sources: SourceTable) -> Assembly:
    """Elements ``[first, first + length)`` of a chunk, row-major, as a 1-D assembly."""
    source, _ = in_order(stored)
    return Assembly((length,), (Piece((0,), (length,), (1,), sources.name_of(source), first, (1,)),))


def _from_buckets(
    index: Index, buckets: Mapping[str, Mapping[str, TensorEntry]], structures: Structures, sources: SourceTable
) -> dict[str, GlobalTensor]:
    """State of ``dp_reshardable``: one row of elements per bucket, in which each parameter has its place."""
    layouts = layouts_in(structures)
    refuse_other_layout(index, {entry.name: b for b, states in buckets.items() for entry in states.values()}, layouts)
    _refuse_other_places(index, buckets, layouts)
    cells: dict[str, list[Cell]] = {}
    kinds: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for bucket, states in buckets.items():
        for state, entry in states.items():
            for part, assembly in _parts_in(layouts[bucket], entry, sources):
                name = state_name(state, part.key)
                kinds[name] = (entry.dtype, part.shape)
                cells.setdefault(name, []).append(Cell(part.box, assembly))
    return {name: GlobalTensor(name, *kinds[name], tuple(parts)) for name, parts in cells.items()}


def _refuse_other_places(
    index: Index, buckets: Mapping[str, Mapping[str, TensorEntry]], layouts: Mapping[str, Bucket]
) -> None:
    """Raises unless chunks end where parameters do: Megatron stores no two of them in one chunk."""
    wrong = []
    for bucket, states in buckets.items():
        for entry in states.values():
            cuts = {edge for chunk in entry.chunks for edge in (chunk.box.offset[0], chunk.box.end[0])}
            places = [place for place in layouts[bucket].places if not {place.begin, place.end} <= cuts]
            wrong += [f"{place.tensor.name}, elements {place.begin} to {place.end} of {entry.name}" for place in places]
    if wrong:
        raise UnsupportedError(
            f"{index.location}: the optimizer state was written by a model whose parameters have another order than that of"
            f" the model which its args describe: {len(wrong)} would not stand where a chunk begins and one ends, such as"
            f" {wrong[0]}",
            next_step="Have Megatron save it as fully_reshardable (--dist-ckpt-optim-fully-reshardable), or convert the"
            " weights alone with --optimizer none.",
        )


def _parts_in(bucket: Bucket, entry: TensorEntry, sources: SourceTable) -> Iterator[tuple[Part, Assembly]]:
    """Every part of a global tensor that stands in a bucket and that Megatron would save from this rank."""
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.box.offset)
    begins = [chunk.box.offset[0] for chunk in chunks]
    for place in bucket.places:
        parts = [part for part in place.tensor.parts if part.main]
        if not parts:
            continue
        runs, at = [], place.begin
        number = bisect_right(begins, at) - 1
        while at < place.end:
            chunk = chunks[number]
            begin, end = at - begins[number], min(place.end - begins[number], chunk.box.size[0])
            runs.append(_run(Stored(entry, chunk), begin, end - begin, sources))
            at, number = at + end - begin, number + 1
        whole = reshape(concatenate(runs, 0), place.tensor.shape)
        for part in parts:
            yield part, local_part(whole, part)


def local_part(tensor: Assembly, part: Part) -> Assembly:
    """A part of a rank's own tensor, in the shape of its box in the global one."""
    out = tensor
    for dim, (begin, length) in enumerate(zip(part.local.offset, part.local.size, strict=True)):
        if (begin, length) != (0, out.shape[dim]):
            out = narrow(out, dim, begin, begin + length)
    return with_prepended(out, len(part.box.size))


def into_local(piece: Piece, local: Box) -> Piece:
    """The other way: a piece of a box of a global tensor as one of the rank's own, which has no prepended dims.

    Args:
        piece: In coordinates whose zero is the box's corner.
        local: Where the box stands in the rank's own tensor.
    """
    more = len(piece.size) - len(local.size)
    return replace(
        piece,
        offset=tuple(o + at for o, at in zip(piece.offset[more:], local.offset, strict=True)),
        size=piece.size[more:],
        step=piece.step[more:],
        strides=piece.strides[more:],
    )


def with_prepended(a: Assembly, dims: int) -> Assembly:
    """The same with dims of one index put before its own, until it has so many."""
    more = dims - len(a.shape)
    if not more:
        return a
    none, one = (0,) * more, (1,) * more
    pieces = tuple(
        replace(p, offset=none + p.offset, size=one + p.size, step=one + p.step, strides=none + p.strides)
        for p in a.pieces
    )
    return Assembly(one + a.shape, pieces)


def states_in(state: State) -> tuple[str, ...]:
    """The optimizer states that a checkpoint has, in Megatron's order."""
    found = dict.fromkeys(split[0] for name in state.tensors if (split := split_state(name)))
    return tuple(sorted(found, key=lambda kind: (_STATES.index(kind) if kind in _STATES else len(_STATES), kind)))
