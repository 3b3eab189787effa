"""The ranks of a replica whose tensor parallel degree is not the run's, or differs by part of the model. Pure.

Megatron builds even cuts only, so it is asked twice: for the full layout, which says what TP and ETP cut and along which dim,
and for the same layout with TP 1 and ETP 1, whose ranks hold what has to be cut. What must stay together follows from the
model's args. docs/design/008-nonuniform-tp.md says why.

Sources (megatron-core 0.19.2): megatron/core/transformer/attention.py, multi_latent_attention.py, mlp.py, moe/experts.py,
megatron/core/ssm/mamba_mixer.py, megatron/core/ssm/gated_delta_net/common.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptguard.convert.canonical import State
from ckptguard.convert.sources import split_state
from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.layout.ranks import Grid, smallest_dp
from ckptguard.layout.uneven import Axis, Cutting, Range, Units, cut, place
from ckptguard.megatron.model_numbers import dimensions_of, number
from ckptguard.megatron.structure import Bucket, Buffer, LocalTensor, Part, Place, RankStructure, Structures

_BLOCK = re.compile(r"(?P<block>.*\.(?P<kind>self_attention|mixer|mlp\.experts|mlp\.shared_experts|mlp))\.")
_NO_BLOCK = re.compile(r"(?:.*\.)?(?:word_embeddings|output_layer|eh_proj)\.(?:weight|bias)")
_WITHOUT_NUMBER = re.compile(r"(.*\blayers)\.(?!\d)(.+)")
_REST = "the rest of the model"
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Held:
    """What the ranks of a replica hold of a part of the model.

    Attributes:
        part: Its pattern, or words for all that no pattern matches.
        degree: Ranks that share a copy of its tensors; of the rest, of its dense ones.
        weight_bytes: By rank: of the rank's own tensors, those included that each rank holds whole.
        state_bytes: By rank: of the optimizer state of these, before data parallel ranks share it.
        crossing_bytes: By rank: of the rank's own weights, those that lie outside what the rank at the same place of a full
            replica holds. So many bytes of weights come from ranks at other places when a copy cut by the full degree becomes
            one cut by this degree, and as many of gradients (in the weights' type) when the two are added up.
    """

    part: str
    degree: int
    weight_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Uneven:
    """A replica that is cut.

    Attributes:
        structures: Its ranks.
        ranks: Their numbers, in the order of the bytes in ``held``.
        held: What they hold, part by part; the rest of the model comes last.
    """

    structures: Structures
    ranks: tuple[int, ...]
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a tensor is cut.

    Attributes:
        dim: Of the rank's own tensor.
        part: The number of the part of the model; None for the rest.
        degree: Ranks that share a copy.
        ranges: Elements along the dim, by place.
    """

    dim: int
    part: int | None
    degree: int
    ranges: tuple[Range, ...]


def uncut_args(args: Mapping[str, object]) -> dict[str, object]:
    """Args of the same layout with TP 1 and ETP 1, with the vocabulary's rows as they are."""
    return {**args, **_sizes(args, 1, 1)}


def replica_args(args: Mapping[str, object], tp: int) -> dict[str, object]:
    """What a data parallel replica with another TP has for its own: sizes, and switches that follow from them.

    ETP goes along where it is TP. The world is the smallest that has all model-parallel ranks.
    """
    full, etp = number(args, "tensor_model_parallel_size", 1), number(args, "expert_tensor_parallel_size")
    return _sizes(args, tp, tp if etp in (0, full) else etp)


def _sizes(args: Mapping[str, object], tp: int, etp: int) -> dict[str, object]:
    pp, cp = number(args, "pipeline_model_parallel_size", 1), number(args, "context_parallel_size", 1)
    dp = smallest_dp(tp, cp, etp, number(args, "expert_model_parallel_size", 1))
    out: dict[str, object] = {
        "tensor_model_parallel_size": tp, "expert_tensor_parallel_size": etp, "data_parallel_size": dp,
        "world_size": tp * pp * cp * dp,
    }  # fmt: skip
    if tp == 1:
        out |= {name: False for name in ("sequence_parallel", "tp_comm_overlap") if name in args}
    if "num_distributed_optimizer_instances" in args:
        out["num_distributed_optimizer_instances"] = 1
    return out


def cutting_of(
    full: Mapping[str, object], replica: Mapping[str, object], parts: Sequence[tuple[str, int]] = ()
) -> Cutting:
    """How a replica with these args is cut in a run with those."""
    dense = Axis(*(number(args, "tensor_model_parallel_size", 1) for args in (replica, full)))
    expert = Axis(
        number(replica, "expert_tensor_parallel_size") or dense.size,
        number(full, "expert_tensor_parallel_size") or dense.full,
    )
    return Cutting(dense, expert, tuple(parts))


def refuse_uneven(
    args: Mapping[str, object],
    replica_tp: Sequence[tuple[int, int]],
    tp_for: Sequence[tuple[str, int]],
    *,
    optimizer: str | None,
    to: str,
) -> None:
    """Raises if no replica can be cut so, whatever the model.

    Args:
        args: Of the full layout.
        replica_tp: (data parallel replica, its TP).
        tp_for: (pattern, degree).
        optimizer: Form of the target's optimizer state; None if it has none.
        to: Form of the target.

    Raises:
        UsageError: There is no such replica, or it has lost no rank; a form of target that has no other cuts.
        UnsupportedError: Optimizer state in ``dp_reshardable`` form.
    """
    if not replica_tp and not tp_for:
        return
    option = "--replica-tp" if replica_tp else "--tp-for"
    if to != "torch_dist":
        raise UsageError(
            f"{option} with --to {to}: that form holds the ranks of even cuts only",
            next_step="Leave it out, or choose --to torch_dist.",
        )
    tp, dp = number(args, "tensor_model_parallel_size", 1), number(args, "data_parallel_size", 1)
    wrong = [
        f"--replica-tp {replica}={degree}: "
        + (f"the {dp} data parallel replicas have the numbers 0 to {dp - 1}" if replica >= dp else _too_large(tp))
        for replica, degree in replica_tp
        if replica >= dp or degree >= tp
    ]
    if wrong:
        raise UsageError("; ".join(wrong), next_step="--tp, --dp and the other sizes are those of the full layout.")
    if optimizer == "dp_reshardable":
        raise UnsupportedError(
            f"{option} with optimizer state in dp_reshardable form: its tensors are the buckets of each rank, which Megatron"
            " lays out for even cuts only, so that nothing could read those of another cut",
            next_step="Choose --optimizer fully_reshardable, or --optimizer none for the weights alone.",
        )


def _too_large(tp: int) -> str:
    return f"not below --tp {tp} (1 to {tp - 1} work)" if tp > 1 else "a replica of --tp 1 has no rank to lose"


def state_bytes_of(state: State) -> int:
    """Bytes of optimizer state that a checkpoint holds per trainable element."""
    found = {split[0]: tensor.dtype for name, tensor in state.tensors.items() if (split := split_state(name))}
    return sum(dtype.itemsize for dtype in found.values())


def uneven(
    uncut: Structures, full: Structures, args: Mapping[str, object], cutting: Cutting, state_bytes: int
) -> Uneven:
    """The ranks of a replica.

    Args:
        uncut: What Megatron says of the layout with TP 1 and ETP 1 (``uncut_args``).
        full: What it says of the full layout.
        args: Of the replica.
        cutting: Its degrees.
        state_bytes: Bytes of optimizer state per trainable element; 0 if there is none.

    Raises:
        UsageError: A degree that a tensor does not have the units for, that is larger than the replica, or that differs within
            a block of the model; a pattern that matches nothing that is cut. All of a kind at once.
        UnsupportedError: It is not known what a tensor that TP cuts consists of.
    """
    cuts = _Cuts(uncut, full, args, cutting)
    ranks = _Ranks(uncut, args, cutting, cuts)
    made = sorted(ranks, key=lambda rank: rank.rank)
    structures = replace(uncut, ranks=tuple(made))
    return Uneven(structures, tuple(rank.rank for rank in made), _held(structures, args, cutting, cuts, state_bytes))


class _Cuts(dict[str, _Cut]):
    """How each tensor that TP or ETP cuts is cut, by its name with the number of its layer (``_name``)."""

    def __init__(self, uncut: Structures, full: Structures, args: Mapping[str, object], cutting: Cutting) -> None:
        super().__init__()
        dims = _cut_dims(uncut, full, cutting)
        parts = {_name(part): part for part in _all_parts(uncut) if part.key in dims}
        extents = {name: part.local.size[dims[part.key]] for name, part in parts.items()}
        numbers = {name: cutting.part_of(name) for name in parts}
        degrees = {name: _degree(name, numbers[name], cutting) for name in parts}
        _refuse_parts(cutting, numbers, degrees)
        units = _units(extents, args)
        few: dict[tuple[str, int, int], list[str]] = {}
        for name, part in parts.items():
            own, degree = units[name], degrees[name]
            if degree == _axis(name, cutting).full:
                own = Units("ranks", degree)  # Megatron's own cut, which may share a query group among ranks
            if degree > own.count:
                few.setdefault((own.name, own.count, degree), []).append(name)
                continue
            self[name] = _Cut(dims[part.key], numbers[name], degree, cut(extents[name], own.count, degree))
        if few:
            raise UsageError(
                "; ".join(
                    f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {count} {what} cannot be dealt out"
                    f" to {degree} ranks (1 to {count} work)"
                    for (what, count, degree), names in few.items()
                )
            )


def _cut_dims(uncut: Structures, full: Structures, cutting: Cutting) -> dict[str, int]:
    """The dim of the rank's own tensor that the full layout cuts, by key."""
    before = {part.key: part.local.size for part in _all_parts(uncut)}
    out = {}
    for part in _all_parts(full):
        sizes = list(zip(before[part.key], part.local.size, strict=True))
        dims = [dim for dim, (whole, own) in enumerate(sizes) if whole != own]
        if not dims or part.key in out:
            continue
        whole, own = sizes[dims[0]]
        if len(dims) > 1 or whole != own * _axis(part.key, cutting).full:
            raise UnsupportedError(
                f"{part.key}: tensor parallel ranks hold {list(part.local.size)} of {list(before[part.key])}, which is no even"
                " cut of one dim, so it cannot be cut unevenly"
            )
        out[part.key] = dims[0]
    return out


def _units(extents: Mapping[str, int], args: Mapping[str, object]) -> dict[str, Units]:
    """What each tensor consists of that may not be cut; looked up block by block, since a block's tensors are cut alike."""
    blocks: dict[str, list[str]] = {}
    out: dict[str, Units] = {}
    unknown = []
    for name, extent in extents.items():
        if (match := _BLOCK.match(name)) is not None:
            blocks.setdefault(match["block"], []).append(name)
        elif _NO_BLOCK.fullmatch(name):
            out[name] = Units("rows", extent)
        else:
            unknown.append(name)
    for block, names in blocks.items():
        units = _units_of(block, names, extents, args)
        unknown += [name for name in names if units is None or extents[name] % units.count]
        if units is not None:
            out |= dict.fromkeys(names, units)
    if unknown:
        raise UnsupportedError(
            f"what must stay together is not known of {len(unknown)} tensors that TP cuts: {', '.join(unknown[:_SHOWN])}"
            f"{', ...' if len(unknown) > _SHOWN else ''}",
            next_step="They are cut evenly only: leave --replica-tp and --tp-for out.",
        )
    return out


def _units_of(block: str, names: Sequence[str], extents: Mapping[str, int], args: Mapping[str, object]) -> Units | None:
    own = {name.removeprefix(f"{block}.").partition(".")[0] for name in names}
    if block.endswith("self_attention"):
        if "in_proj" in own:  # linear attention: a key head with the value heads that belong to it
            return Units("key heads of linear attention", number(args, "linear_num_key_heads") or 1)
        dims = dimensions_of(args)
        return Units("query groups", dims.groups) if "linear_qkv" in own else Units("attention heads", dims.heads)
    if block.endswith("mixer"):
        return Units("Mamba groups", number(args, "mamba_num_groups", 8))
    widths = {extents[name] for name in names}  # gate, up and down have one width, and one unit is a column of each
    return Units("columns", widths.pop()) if len(widths) == 1 else None


def _refuse_parts(cutting: Cutting, numbers: Mapping[str, int | None], degrees: Mapping[str, int]) -> None:
    wrong = [
        f"--tp-for {pattern}={degree}: of the tensors that TP or ETP cuts, such as {next(iter(numbers), 'none')}, none is left"
        " for this pattern"
        for part, (pattern, degree) in enumerate(cutting.parts)
        if part not in numbers.values()
    ]
    large: dict[tuple[str, int, int], str] = {}
    blocks: dict[str, tuple[str, int]] = {}
    for name, degree in degrees.items():
        size = _axis(name, cutting).size
        if degree > size:
            large.setdefault((cutting.parts[numbers[name] or 0][0], degree, size), name)
        match = _BLOCK.match(name)
        other, same = blocks.setdefault(match["block"] if match else name, (name, degree))
        if same != degree:
            wrong.append(f"--tp-for gives {other} degree {same} and {name} {degree}, which one block computes together")
    wrong += [
        f"--tp-for {pattern}={degree}: {name} is held by the {size} ranks of a replica (1 to {size} work)"
        for (pattern, degree, size), name in large.items()
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UsageError("; ".join(wrong[:_SHOWN]) + more, next_step="Name whole blocks: 'decoder.layers.*.mlp.*=4'.")


class _Ranks:
    """Makes the ranks of a replica, one after the other."""

    def __init__(self, uncut: Structures, args: Mapping[str, object], cutting: Cutting, cuts: _Cuts) -> None:
        self._sources = {(rank.at["pp"], rank.at["ep"]): rank for rank in uncut.ranks}
        self._cutting, self._cuts = cutting, cuts
        pp, self._ep = number(args, "pipeline_model_parallel_size", 1), number(args, "expert_model_parallel_size", 1)
        tp, etp = cutting.dense.size, cutting.expert.size
        dp = smallest_dp(tp, 1, etp, self._ep)
        self._grid = Grid(tp, pp, 1, dp, etp, self._ep, bool(args.get("use_tp_pp_dp_mapping")))

    def __iter__(self) -> Iterator[RankStructure]:
        grid = self._grid
        for stage in range(grid.pp):
            for copy in range(grid.dp):
                for tp in range(grid.tp):
                    yield self._rank(stage, copy, tp)

    def _rank(self, stage: int, copy: int, tp: int) -> RankStructure:
        grid = self._grid
        expert_dp, inner = divmod(tp + grid.tp * copy, grid.etp * grid.ep)
        ep, etp = divmod(inner, grid.etp)
        at = {
            "tp": tp, "pp": stage, "ep": ep, "etp": etp, "dense_dp": copy, "expert_dp": expert_dp,
            "dense_group": tp + grid.tp * stage, "expert_group": inner + grid.etp * grid.ep * stage,
        }  # fmt: skip
        dense, expert = self._sources[stage, 0], self._sources[stage, ep]
        made: dict[int, LocalTensor] = {}
        chunks = []
        for dense_chunk, expert_chunk in zip(dense.chunks, expert.chunks, strict=True):
            for one, other in zip(dense_chunk, expert_chunk, strict=True):
                source, rank, again = (other, etp, expert_dp) if _is_expert(other.name) else (one, tp, copy)
                own = self._tensor(source, rank, saves=not again)
                if own is not None:
                    made[id(source)] = own
            chunks.append(tuple(made[key] for key in _ids(dense_chunk, expert_chunk) if key in made))
        return RankStructure(
            grid.dense(tp, stage, copy), at, tuple(chunks), expert.objects if not etp and not expert_dp else (),
            tuple(_buffer(buffer, made) for buffer in dense.dense), tuple(_buffer(buffer, made) for buffer in expert.expert),
            tuple(_present(group, made) for group in dense.groups), tuple(_present(g, made) for g in expert.expert_groups),
        )  # fmt: skip

    def _tensor(self, tensor: LocalTensor, rank: int, *, saves: bool) -> LocalTensor | None:
        """A rank's part of a tensor; None if it holds none.

        Args:
            tensor: Of the rank that is not cut.
            rank: Along the axis that cuts it.
            saves: Whether copies of the first of the ranks that hold the same are saved here.
        """
        cuts = {self._cuts.get(_name(part)) for part in tensor.parts}
        if None in cuts:
            if len(cuts) > 1:
                raise UnsupportedError(f"{tensor.name}: TP cuts some of its parts and not others")
            main = saves and rank == 0
            return replace(tensor, parts=tuple(replace(part, main=part.main and main) for part in tensor.parts))
        found = [self._cuts[_name(part)] for part in tensor.parts]
        at = place(rank, _axis(tensor.name, self._cutting).size, found[0].degree)
        if at is None:
            return None
        dim, kept = found[0].dim, {}
        for part, own in zip(tensor.parts, found, strict=True):
            kept[part.local.offset[dim]] = own.ranges[at[1]]
        begins, width = {}, 0
        for begin, (first, end) in sorted(kept.items()):
            begins[begin] = width
            width += end - first
        parts = [
            _cut_part(part, own, at[1], begins[part.local.offset[dim]], main=saves and not at[0])
            for part, own in zip(tensor.parts, found, strict=True)
        ]
        shape = (*tensor.shape[:dim], width, *tensor.shape[dim + 1 :])
        return replace(tensor, shape=shape, parts=tuple(parts))


def _cut_part(part: Part, own: _Cut, at: int, begin: int, *, main: bool) -> Part:
    """The part of a part at a place, which begins in the rank's own tensor at ``begin``."""
    first, end = own.ranges[at]
    more = len(part.box.size) - len(part.local.size)
    box = _with(part.box, more + own.dim, part.box.offset[more + own.dim] + first, end - first)
    return Part(part.key, part.shape, box, _with(part.local, own.dim, begin, end - first), part.main and main)


def _with(box: Box, dim: int, offset: int, size: int) -> Box:
    return Box(
        (*box.offset[:dim], offset, *box.offset[dim + 1 :]), (*box.size[:dim], size, *box.size[dim + 1 :])
    )  # fmt: skip


def _ids(dense: Sequence[LocalTensor], expert: Sequence[LocalTensor]) -> list[int]:
    return [id(other if _is_expert(other.name) else one) for one, other in zip(dense, expert, strict=True)]


def _present(tensors: Sequence[LocalTensor], made: Mapping[int, LocalTensor]) -> tuple[LocalTensor, ...]:
    return tuple(made[id(tensor)] for tensor in tensors if id(tensor) in made)


def _buffer(buffer: Buffer, made: Mapping[int, LocalTensor]) -> Buffer:
    """The same parameters in the same order, without padding: no bucket of an uneven replica is stored."""
    buckets = []
    for bucket in buffer.buckets:
        places, at = [], 0
        for tensor in _present([old.tensor for old in bucket.places], made):
            numel = Box((0,) * len(tensor.shape), tensor.shape).numel
            places.append(Place(tensor, at, at + numel))
            at += numel
        buckets.append(Bucket(at, at, tuple(places)))
    return Buffer(buffer.dtype, tuple(buckets))


def _held(
    structures: Structures, args: Mapping[str, object], cutting: Cutting, cuts: _Cuts, state_bytes: int
) -> tuple[Held, ...]:
    count, size = len(cutting.parts) + 1, len(structures.ranks)
    weights, states, crossing = ([[0] * size for _ in range(count)] for _ in range(3))
    for column, rank in enumerate(structures.ranks):
        for tensor in (tensor for chunk in rank.chunks for tensor in chunk):
            itemsize = BY_NAME[tensor.dtype].itemsize
            for part in tensor.parts:
                name = _name(part)
                own = cuts.get(name)
                which = cutting.part_of(name) if own is None else own.part
                which = count - 1 if which is None else which
                weights[which][column] += part.box.numel * itemsize
                states[which][column] += part.box.numel * state_bytes if tensor.trainable else 0
                if own is not None:
                    axis = _axis(name, cutting)
                    at = rank.at["etp" if axis is cutting.expert else "tp"]
                    crossing[which][column] += _crossing(part, own, at, axis) * itemsize
    rows = zip([*cutting.parts, (_REST, cutting.dense.size)], weights, states, crossing, strict=True)
    return tuple(Held(name, degree, tuple(w), tuple(s), tuple(c)) for (name, degree), w, s, c in rows)


def _crossing(part: Part, own: _Cut, rank: int, axis: Axis) -> int:
    """Elements of a rank's part that the rank at its place of a full replica does not hold."""
    extent = own.ranges[-1][1]
    first, end = own.ranges[rank % own.degree]
    there = extent // axis.full
    both = max(0, min(end, there * (rank + 1)) - max(first, there * rank))
    return part.box.numel // (end - first) * (end - first - both)


def _all_parts(structures: Structures) -> Iterator[Part]:
    return (part for rank in structures.ranks for chunk in rank.chunks for tensor in chunk for part in tensor.parts)


def _name(part: Part) -> str:
    """The global name with the number of the layer in it, which is the first index where layers are stored as one tensor."""
    match = _WITHOUT_NUMBER.fullmatch(part.key)
    if match is None or len(part.box.size) == len(part.local.size):
        return part.key
    return f"{match[1]}.{part.box.offset[0]}.{match[2]}"


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _axis(name: str, cutting: Cutting) -> Axis:
    return cutting.expert if _is_expert(name) else cutting.dense


def _degree(name: str, part: int | None, cutting: Cutting) -> int:
    return _axis(name, cutting).size if part is None else cutting.parts[part][1]
