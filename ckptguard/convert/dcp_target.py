"""Targets that torch's own Distributed Checkpoint reads: Megatron-FSDP's ``fsdp_dtensor``, and plain ``dcp``. Pure.

Every tensor is cut into as many equal rows as there are files. ``fsdp_dtensor`` has the names of modules (``dcp_names``) and
each entry of the common state as an object of its own; plain DCP has Megatron's global names and the common state of
``torch_dist``, without ``metadata.json``. Sources: as of ``dcp_names``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptguard.convert import dcp_names
from ckptguard.convert.canonical import State
from ckptguard.convert.output import Output
from ckptguard.convert.placing import COMMON_STATE, placed
from ckptguard.convert.plain_optimizer import decays
from ckptguard.convert.rank_files import RankFile
from ckptguard.convert.reshard_plan import cut_rows, refuse_unfitting, target_shapes
from ckptguard.convert.reshard_source import ReshardSource
from ckptguard.convert.sources import into_local, state_name, state_of, states_in
from ckptguard.convert.target import Target
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index
from ckptguard.core.pieces import Assembly
from ckptguard.core.plan import Made
from ckptguard.core.writing import TargetFile
from ckptguard.formats import torch_dist_writer as writer
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Reader
from ckptguard.formats.dcp import parse_table
from ckptguard.formats.storage import Directory
from ckptguard.megatron.restate import Restated
from ckptguard.megatron.structure import LocalTensor, Structures

DcpFormat = Literal["dcp", "fsdp_dtensor"]
FSDP_STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A stored tensor.

    Attributes:
        name: Its name.
        dtype: Element type.
        shape: Its shape.
        parts: (global tensor, box of it, where that stands in the stored one) of each part.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Box, Box], ...]


def dcp_output(
    source: ReshardSource, target: Target, state: Restated, folder: str, *, to: DcpFormat, files: int | None = None
) -> Output:
    """A checkpoint of torch DCP.

    Args:
        source: What it is made of.
        target: Its model; of ``fsdp_dtensor`` on one rank (``dcp_names.whole_model_args``), with the run's grid.
        state: What stands beside its tensors, restated for this form.
        folder: Of the iteration.
        to: Which form.
        files: How many files; by default as many as the target has ranks.

    Raises:
        UnsupportedError: A tensor of the model is not stored, or an optimizer state that the form has no place for.
    """
    shapes = target_shapes(source.state, target)
    refuse_unfitting(source.state, shapes, keeps_optimizer=target.optimizer is not None)
    wanted = [*(_by_module(source.state, target) if to == "fsdp_dtensor" else _by_key(source.state, shapes))]
    chunks = _in_rows(source.state, wanted, files or target.grid.world)
    blobs = dict(state.objects) if to == "fsdp_dtensor" else {COMMON_STATE: state.common_state}
    first = RankFile(0, tuple(blobs), chunks[0])
    ranks = [first, *(RankFile(n, (), made) for n, made in enumerate(chunks[1:], 1) if made)]
    on_disk = placed(ranks, blobs.__getitem__)
    metadata = writer.metadata_bytes([file for file, _ in on_disk])
    small = {name: data for name, data in state.iteration_files.items() if name != "common.pt"} | {
        ".metadata": metadata
    }

    def read_back(written: Directory) -> tuple[State, Checkpoint]:
        table = parse_table(metadata, str(written.root / ".metadata"))
        index = Index(to, str(written.root), table.tensors, {}, written.listing, {})
        by_module = to == "fsdp_dtensor"
        found = dcp_names.state_of(index, target.structures) if by_module else state_of(index)
        return found, Checkpoint(index, written, Reader(written))

    targets = tuple(TargetFile(f"{folder}/{file.name}", parts) for file, parts in on_disk)
    made = tuple(chunk for file in ranks for chunk in file.chunks)
    return Output(made, targets, small, cut_rows(source.state, shapes), (), read_back)


def parameters(structures: Structures, args: Mapping[str, object]) -> dict[str, bool]:
    """Whether weight decay applies to each parameter of Megatron-FSDP's optimizer, by the name that it has there."""
    tensors = (tensor for chunk in structures.ranks[0].chunks for tensor in chunk if tensor.trainable)
    return {f"module.module.module.{tensor.name}": decays(tensor, args) for tensor in tensors}


def _is_split(tensor: LocalTensor) -> bool:
    """``handle_swiglu_in_state_dict`` takes the gate and the other half of these apart."""
    return len(tensor.parts) == 2 and ".linear_fc1." in tensor.name


def _by_key(state: State, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Wanted]:
    for name, shape in shapes.items():
        yield _Wanted(name, state.tensors[name].dtype, shape, ((name, whole(shape), whole(shape)),))


def _by_module(state: State, target: Target) -> Iterator[_Wanted]:
    kinds = states_in(state) if target.optimizer is not None else ()
    if strange := [kind for kind in kinds if kind not in FSDP_STATES]:
        raise UnsupportedError(
            f"fsdp_dtensor has no place for the optimizer state {', '.join(strange)}",
            next_step="Convert the weights alone with --optimizer none.",
        )
    for named in dcp_names.model_names(target.structures, dcp_names.FSDP_MODEL, _is_split):
        trained = named.tensor.trainable and bool(kinds)
        yield _module_tensor(state, named, named.name, "param" if trained else "")
        for kind in kinds if trained else ():
            if kind != "param":
                name = f"{dcp_names.FSDP_STATE}{named.name.removeprefix(dcp_names.FSDP_MODEL)}.{kind}"
                yield _module_tensor(state, named, name, kind)


def _module_tensor(state: State, named: dcp_names.Named, name: str, kind: str) -> _Wanted:
    parts = []
    for part in named.tensor.parts:
        common = part.local.intersect(named.local)
        if common is not None:
            key = state_name(kind, part.key) if kind else part.key
            parts.append((key, dcp_names.global_box(part, common), common.relative_to(named.local)))
    dtypes = {state.tensors[key].dtype for key, _, _ in parts}
    if len(dtypes) != 1:
        raise UnsupportedError(f"{name}: its parts are {' and '.join(sorted(map(str, dtypes)))}, and it is one tensor")
    return _Wanted(name, next(iter(dtypes)), named.local.size, tuple(parts))


def _in_rows(state: State, wanted: Sequence[_Wanted], files: int) -> list[tuple[Made, ...]]:
    """Every tensor cut into rows, as equal as can be; per file what it holds."""
    out: list[list[Made]] = [[] for _ in range(files)]
    for item in wanted:
        pieces = [into_local(piece, at) for key, box, at in item.parts for piece in state.assembly(key, box).pieces]
        rows = item.shape[0] if item.shape else 1
        step = -(-rows // files)
        for number in range(-(-rows // step) if rows else 0):
            box = whole(item.shape)
            if item.shape:
                begin = number * step
                size = (min(step, rows - begin), *item.shape[1:])
                box = Box((begin, *(0 for _ in size[1:])), size)
            inside = [p for piece in pieces if (p := piece.within(box)) is not None]
            shifted = tuple(replace(p, offset=_minus(p.offset, box.offset)) for p in inside)
            out[number].append(Made(item.name, item.dtype, item.shape, box, Assembly(box.size, shifted)))
    return [tuple(made) for made in out]


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
