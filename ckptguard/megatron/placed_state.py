"""What a rank holds as parts of whole tensors, so that states under different layouts can be compared.

Parameters and buffers stand where ``sharded_state_dict`` of megatron-core 0.19.2 puts them, by ``global_offset`` and
``global_shape`` of a ``ShardedTensor`` (megatron/core/dist_checkpointing/mapping.py), whose first ``prepend_axis_num`` axes
only the whole has. A ``ShardedTensorFactory`` (gate and up of megatron/core/transformer/mlp.py, Mamba's ``in_proj`` of
megatron/core/ssm/utils.py) cuts its tensor into views first; what it does to a parameter it does to masters and states, whole
or flat. Keys are those of a ``torch_dist`` checkpoint, of masters and states without the ``optimizer.state.<kind>.`` before
them. Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptguard.core.boxes import Box, unravel
from ckptguard.core.pieces import boxes_of_run
from ckptguard.core.watching import Group, LiveItem
from ckptguard.megatron.live_optimizer import LiveOptimizer, OwnedTensor
from ckptguard.megatron.live_state import named_parameters
from ckptguard.megatron.live_values import is_plain

Part = tuple[tuple[int, ...], Any]  # offset in the whole, per dim; elements, with as many dims
Summed = Callable[[Sequence[Part], Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """What a rank holds of a whole tensor.

    Attributes:
        kind: ``parameter``, ``buffer``, ``master``, or ``optimizer`` and the key of a state.
        key: Of the parameter or buffer in a ``torch_dist`` checkpoint.
        dtype: torch's name of the element type.
        shape: Global shape.
        parts: Disjoint parts.
    """

    kind: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a box of a local tensor stands in a whole one.

    Attributes:
        key: Of the whole.
        shape: Of the whole.
        local: In the local tensor.
        offset: Of the box in the whole.
        prepended: How many dims only the whole has; they come first.
    """

    key: str
    shape: tuple[int, ...]
    local: Box
    offset: tuple[int, ...]
    prepended: int

    def part(self, box: Box, tensor: Any) -> Part:
        """``tensor`` is the elements of a box inside this piece, given in coordinates of the local tensor."""
        inside = box.relative_to(self.local).offset
        at = (*self.offset[: self.prepended], *map(sum, zip(self.offset[self.prepended :], inside, strict=True)))
        return at, tensor[(None,) * self.prepended]


def placed_items(
    model_chunks: Sequence[Any], optimizer: Any, summed: Summed
) -> tuple[tuple[LiveItem, ...], tuple[str, ...]]:
    """Items ``global <kind> <key>`` and what could not be placed, in words.

    The value is ``{"dtype", "shape", "boxes": [[offset, size], ...], "sum"}``. Boxes are sorted and joined, so that replicas
    have equal ones; a rank that holds a replica of another cut has no value.

    Args:
        model_chunks: As ``setup_model_and_optimizer`` returns them.
        optimizer: Megatron's, or None.
        summed: Gives the sum of parts of a tensor of a global shape, as hexadecimal digits.
    """
    placed, unplaced = placed_state(model_chunks, optimizer)

    def item(tensor: PlacedTensor) -> LiveItem:
        def read() -> dict[str, Any]:
            boxes = joined([Box(offset, tuple(part.shape)) for offset, part in tensor.parts])
            return {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "boxes": [[list(box.offset), list(box.size)] for box in boxes],
                "sum": summed(tensor.parts, tensor.shape),
            }

        group: Group = tensor.kind.split(" ")[0]  # type: ignore[assignment]
        return LiveItem(f"global {tensor.kind} {tensor.key}", group, read)

    return tuple(map(item, placed)), unplaced


def placed_state(model_chunks: Sequence[Any], optimizer: Any) -> tuple[tuple[PlacedTensor, ...], tuple[str, ...]]:
    """Parameters, buffers, masters and states as parts of whole tensors, views of live ones; and in words what has no place."""
    import torch

    params = named_parameters(model_chunks)
    live = LiveOptimizer(optimizer, {id(param): name for name, param in params.items()}, params)
    placed: dict[tuple[str, str], PlacedTensor] = {}
    unplaced: list[str] = []
    entries: dict[int, Any] = {}
    for chunk in model_chunks:
        buffers = set(map(id, torch.nn.Module.buffers(chunk)))  # DDP has an attribute of that name
        for entry in _entries(chunk):
            entries[id(entry.data)] = entry
            kind = "buffer" if id(entry.data) in buffers else "parameter"
            _place(kind, entry, entry.data.detach(), None, placed, unplaced)
    for held in live.tensors():
        entry = entries.get(id(held.param))
        if entry is None:
            unplaced.append(f"global {held.kind}: one that belongs to no parameter of the checkpoint")
        elif held.tensor.numel() == _count(held) and not _of_other_cut(entry, held):
            _place(held.kind, entry, held.tensor.detach(), held.owned, placed, unplaced)
    return tuple(placed.values()), tuple(dict.fromkeys(unplaced))


def _entries(chunk: Any) -> Iterator[Any]:
    """Sharded tensors and factories of a model chunk whose data are the live tensors."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = chunk.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": group})
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            yield entry


def _count(held: OwnedTensor) -> int:
    """Elements of a state that has one for each of the parameter's; others, such as ``step``, have no place."""
    return int(held.param.numel()) if held.owned is None else held.owned.end - held.owned.start


def _of_other_cut(entry: Any, held: OwnedTensor) -> bool:
    """Whether it is the flat shard of a replica on other tensor or pipeline ranks, which may be cut at other elements."""
    return held.owned is not None and isinstance(entry.replica_id, tuple) and any(entry.replica_id[:-1])


def _place(
    kind: str,
    entry: Any,
    tensor: Any,
    owned: Any,
    placed: dict[tuple[str, str], PlacedTensor],
    unplaced: list[str],
) -> None:
    """Adds the parts of one local tensor, all of its entry's or the flat elements ``owned``, to the wholes."""
    pieces = _pieces(entry)
    if pieces is None or not is_plain(tensor):
        unplaced.append(f"global {kind} {entry.key}: it is not cut into boxes of a plain tensor")
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    for piece in pieces:
        for box, elements in _in_boxes(tuple(entry.data.shape), tensor, owned):
            both = box.intersect(piece.local)
            if both is None:
                continue
            whole = placed.setdefault((kind, piece.key), PlacedTensor(kind, piece.key, dtype, piece.shape))
            inside = both.relative_to(box)
            cut = elements[tuple(slice(o, e) for o, e in zip(inside.offset, inside.end, strict=True))]
            whole.parts.append(piece.part(both, cut))


def _in_boxes(shape: tuple[int, ...], tensor: Any, owned: Any) -> Iterator[tuple[Box, Any]]:
    """A whole local tensor, or flat elements of it, as boxes of the local tensor."""
    if owned is None:
        yield Box((0,) * len(shape), shape), tensor.view(shape)
        return
    flat = tensor.view(-1)
    for offset, size, begin in boxes_of_run(shape, owned.start, owned.end - owned.start):
        box = Box(offset, size)
        yield box, flat[begin : begin + box.numel].view(size)


def _pieces(entry: Any) -> list[_Piece] | None:
    """Where the boxes of an entry's tensor stand; None if a factory makes something else of it than views of boxes."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not isinstance(entry, ShardedTensorFactory):
        return [_piece(entry, Box((0,) * entry.data.dim(), tuple(entry.data.shape)))]
    if not is_plain(entry.data):
        return None
    pieces = []
    with torch.no_grad():
        for built in nested_values(entry.build()):
            box = _box_of_view(entry.data, built.data)
            if box is None:
                return None
            pieces.append(_piece(built, box))
    return pieces


def _piece(sharded: Any, box: Box) -> _Piece:
    return _Piece(sharded.key, tuple(sharded.global_shape), box, tuple(sharded.global_offset), sharded.prepend_axis_num)


def _box_of_view(tensor: Any, view: Any) -> Box | None:
    """Which box of a contiguous tensor a view is; None if it is a copy or another sort of view."""
    if view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or view.dim() != tensor.dim():
        return None
    kept = all(
        size == 1 or one == other for size, one, other in zip(view.shape, view.stride(), tensor.stride(), strict=True)
    )
    if not kept or not tensor.is_contiguous():
        return None
    return Box(unravel(view.storage_offset() - tensor.storage_offset(), tuple(tensor.shape)), tuple(view.shape))


def joined(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes, with neighbours of one size made one, dim by dim; the same for every order in which they are given."""
    out = sorted(boxes, key=lambda box: (box.offset, box.size))
    for dim in reversed(range(len(out[0].size) if out else 0)):
        rest = sorted(out, key=lambda box: (_without(box.offset, dim), _without(box.size, dim), box.offset[dim]))
        out = []
        for box in rest:
            last = out[-1] if out else None
            if last is not None and _goes_on(last, box, dim):
                size = (*last.size[:dim], last.size[dim] + box.size[dim], *last.size[dim + 1 :])
                out[-1] = Box(last.offset, size)
            else:
                out.append(box)
    return sorted(out, key=lambda box: (box.offset, box.size))


def _goes_on(last: Box, box: Box, dim: int) -> bool:
    alike = _without(last.offset, dim) == _without(box.offset, dim) and _without(last.size, dim) == _without(
        box.size, dim
    )
    return alike and last.end[dim] == box.offset[dim]


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])
