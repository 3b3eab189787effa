"""Made-up models under any layout: what Megatron would say of them, without Megatron, for tests of pure plans.

A stand-in for ``megatron.structure``: tensors are cut along one dim by TP or ETP, layers are dealt out to stages, SwiGLU's
gate and up stand one after the other in a rank's own tensor, norms are copies on every TP rank, and the distributed optimizer
places parameters in buckets, in reverse order, at multiples of 64 elements, padded at the end for its data parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptguard.convert.canonical import State
from ckptguard.convert.reshard_plan import ReshardPlan
from ckptguard.convert.sources import state_name, state_of
from ckptguard.convert.target import OptimizerForm, Target
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.index import Chunk, Index, Span, TensorEntry
from ckptguard.core.pieces import boxes_of_run
from ckptguard.core.plan import Made
from ckptguard.layout.ranks import Grid
from ckptguard.megatron.structure import Bucket, Buffer, LocalTensor, Part, Place, RankStructure, Structures

Array = npt.NDArray[Any]
STATES = ("param", "exp_avg", "exp_avg_sq")
_ALIGNMENT = 64  # pad_param_start of megatron/core/optimizer/param_layout.py
_DTYPES = "(torch.bfloat16, torch.float32)"


@dataclass(frozen=True, slots=True)
class Kind:
    """A parameter of every layer, or of one end of the model.

    Attributes:
        name: Its name below the layer.
        shape: Of one whole parameter.
        dim: Along which TP (of experts: ETP) cuts it; None if every rank has a copy.
        fused: Parameters that a rank's own tensor holds one after the other along that dim: 2 for gate and up.
        expert: Whether every expert has one.
        where: ``layer``, ``first`` (the first stage) or ``last``.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    fused: int = 1
    expert: bool = False
    where: str = "layer"


@dataclass(frozen=True, slots=True)
class Model:
    """A made-up model: kinds of parameters, layers and experts."""

    kinds: tuple[Kind, ...]
    layers: int
    experts: int = 1


def structures(model: Model, grid: Grid, stages: tuple[tuple[int, ...], ...]) -> Structures:
    """What Megatron would say.

    Args:
        model: The model.
        grid: Its ranks.
        stages: Layers of each model chunk, stage by stage; with virtual stages chunk 0 of all stages comes first.
    """
    small = lcm(grid.tp, grid.etp * grid.ep)
    ranks = [_rank(model, grid, stages, pp, at, pp * small + at) for pp in range(grid.pp) for at in range(small)]
    return Structures(tuple(ranks), "made up", None)


def _rank(
    model: Model, grid: Grid, stages: tuple[tuple[int, ...], ...], pp: int, at: int, number: int
) -> RankStructure:
    tp, etp, ep = at % grid.tp, at % grid.etp, at // grid.etp % grid.ep
    where = {
        "tp": tp, "pp": pp, "ep": ep, "etp": etp, "dense_dp": at // grid.tp, "expert_dp": at // (grid.etp * grid.ep),
        "dense_group": tp + grid.tp * pp, "expert_group": etp + grid.etp * (ep + grid.ep * pp),
    }  # fmt: skip
    chunks = tuple(
        tuple(_tensors(model, grid, where, stages, chunk)) for chunk in range(pp, len(stages), grid.pp)
    )  # fmt: skip
    dense = [tensor for chunk in chunks for tensor in chunk if ".experts." not in tensor.name]
    expert = [tensor for chunk in chunks for tensor in chunk if ".experts." in tensor.name]
    return RankStructure(
        number, where, chunks, (), _buffers(dense, grid.dp * grid.cp), _buffers(expert, grid.expert_dp)
    )  # fmt: skip


def _tensors(
    model: Model, grid: Grid, at: Mapping[str, int], stages: tuple[tuple[int, ...], ...], chunk: int
) -> Iterator[LocalTensor]:
    for kind in model.kinds:
        if kind.where == "first" and chunk == 0:
            yield _tensor(kind, grid, at, kind.name, (), ())
        if kind.where == "layer":
            for local, layer in enumerate(stages[chunk]):
                yield from _of_layer(model, kind, grid, at, local, layer)
        if kind.where == "last" and chunk == len(stages) - 1:
            yield _tensor(kind, grid, at, kind.name, (), ())


def _of_layer(
    model: Model, kind: Kind, grid: Grid, at: Mapping[str, int], local: int, layer: int
) -> Iterator[LocalTensor]:
    if not kind.expert:
        yield _tensor(kind, grid, at, f"layers.{local}.{kind.name}", (model.layers,), (layer,))
        return
    count = model.experts // grid.ep
    for number in range(count):
        name = f"layers.{local}.experts.{number}.{kind.name}"
        yield _tensor(kind, grid, at, name, (model.layers, model.experts), (layer, at["ep"] * count + number))


def _tensor(
    kind: Kind, grid: Grid, at: Mapping[str, int], name: str, more: tuple[int, ...], index: tuple[int, ...]
) -> LocalTensor:
    size, number = (grid.etp, at["etp"]) if kind.expert else (grid.tp, at["tp"])
    copy = at["expert_dp"] if kind.expert else at["dense_dp"]
    shape = list(kind.shape)
    parts = []
    for part in range(kind.fused):
        offset, extent, local = [0] * len(shape), list(shape), [0] * len(shape)
        if kind.dim is not None:
            extent[kind.dim] = shape[kind.dim] // kind.fused // size
            offset[kind.dim] = shape[kind.dim] // kind.fused * part + number * extent[kind.dim]
            local[kind.dim] = part * extent[kind.dim]
        box = Box((*index, *offset), (*(1 for _ in index), *extent))
        main = not copy and (kind.dim is not None or number == 0)
        key = f"model.{'experts.' if kind.expert else ''}{kind.name}"
        parts.append(Part(key, (*more, *shape), box, Box(tuple(local), tuple(extent)), main))
    if kind.dim is not None:
        shape[kind.dim] //= size
    return LocalTensor(name, "bfloat16", tuple(shape), True, tuple(parts))


def _buffers(tensors: list[LocalTensor], dp: int) -> tuple[Buffer, ...]:
    """One buffer of buckets of up to three parameters."""
    buckets = []
    backwards = tensors[::-1]
    for first in range(0, len(backwards), 3):
        places, at = [], 0
        for tensor in backwards[first : first + 3]:
            at = -(-at // _ALIGNMENT) * _ALIGNMENT
            places.append(Place(tensor, at, at + prod(tensor.shape)))
            at += prod(tensor.shape)
        step = lcm(dp, 128)
        buckets.append(Bucket(at, -(-at // step) * step, tuple(places)))
    return (Buffer(_DTYPES, tuple(buckets)),) if buckets else ()


def values(model: Model) -> dict[str, Array]:
    """Every global tensor and optimizer state with values that no other element has."""
    out: dict[str, Array] = {}
    at = 1
    for kind in model.kinds:
        more = (model.layers, model.experts) if kind.expert else (model.layers,) if kind.where == "layer" else ()
        key = f"model.{'experts.' if kind.expert else ''}{kind.name}"
        shape = (*more, *kind.shape)
        for name in (key, *(state_name(state, key) for state in STATES)):
            count = prod(shape)
            out[name] = np.arange(at, at + count, dtype=np.uint32).reshape(shape)
            at += count
    return out


class Stored:
    """A made-up checkpoint: an index whose chunks are arrays in memory."""

    def __init__(self, chunks: Mapping[tuple[str, Box], Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.chunks = chunks
        tensors: dict[str, list[Chunk]] = {}
        for number, (name, box) in enumerate(chunks):
            tensors.setdefault(name, []).append(Chunk(box, Span("file", number, 1)))
        entries = {
            name: TensorEntry(name, BY_NAME["uint32"], shapes[name], tuple(found)) for name, found in tensors.items()
        }
        self.index = Index("torch_dist", "made up", entries, {}, {}, {})

    def state(self, structures: Structures) -> State:
        """Its global tensors."""
        return state_of(self.index, structures)

    def written(self, state: State, plan: ReshardPlan) -> Stored:
        """What a plan makes of it."""
        chunks = {(made.name, made.box): self._fill(made, state) for made in plan.chunks}
        return Stored(chunks, {made.name: made.shape for made in plan.chunks})

    def _fill(self, made: Made, state: State) -> Array:
        shape = made.assembly.shape
        target = np.full(shape, 0xFFFFFFFF, np.uint32)
        for piece in made.assembly.pieces:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
            assert (target[place] == 0xFFFFFFFF).all(), "an element is in two pieces"
            if not piece.source:
                target[place] = 0
                continue
            source: Any = state.sources[piece.source]
            flat = self.chunks[source.entry.name, source.chunk.box].reshape(-1)[piece.first :]
            strides = [s * flat.itemsize for s in piece.strides]
            target[place] = np.lib.stride_tricks.as_strided(flat, piece.size, strides)
        if made.run is None:
            return target
        length = made.box.numel
        out = np.empty(length, np.uint32)
        for offset, size, before in boxes_of_run(shape, made.run, length):
            window = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            out[before : before + prod(size)] = target[window].reshape(-1)
        return out


def whole_checkpoint(model: Model) -> Stored:
    """All tensors in one chunk each, optimizer state in model space."""
    arrays = values(model)
    return Stored({(n, whole(a.shape)): a for n, a in arrays.items()}, {n: a.shape for n, a in arrays.items()})


def target(model: Model, grid: Grid, stages: tuple[tuple[int, ...], ...], form: OptimizerForm) -> Target:
    """The target of a layout."""
    return Target(structures(model, grid, stages), grid, form)
