"""The plan of a ``torch_dist`` target: what every rank's file holds and what it is made of. Pure.

Chunks, files and their order are those that Megatron Core 0.19.2 writes itself in that layout without
``--ckpt-fully-parallel-save``: every chunk is saved by the rank that is the main replica of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptguard.convert.bucket_plan import names_in_buckets, of_buckets
from ckptguard.convert.canonical import State
from ckptguard.convert.rank_files import RankFile, grouped, refuse_holes
from ckptguard.convert.sources import split_state, state_name, states_in
from ckptguard.convert.target import Target, Wanted
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.plan import Made
from ckptguard.megatron.structure import LocalTensor, RankStructure

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """A planned target.

    Attributes:
        files: By rank; ranks that own nothing of their own have none.
        rows: Rows of vocabulary padding that are left out, or (negative) added, by tensor.
    """

    files: tuple[RankFile, ...]
    rows: Mapping[str, int]

    @property
    def chunks(self) -> tuple[Made, ...]:
        """All chunks, file by file."""
        return tuple(chunk for file in self.files for chunk in file.chunks)


def plan_torch_dist(state: State, target: Target) -> ReshardPlan:
    """Plans all files of a target.

    Raises:
        UnsupportedError: A tensor of the target has no source, has another shape, or one of the source has no place; all
            at once.
    """
    shapes = target_shapes(state, target)
    refuse_unfitting(state, shapes, keeps_optimizer=target.optimizer is not None)
    wanted = [*_weights(target), *_optimizer(state, target)]
    _refuse_holes(wanted)
    dtype_of = _DTypes(state)
    files: dict[int, list[Made]] = {}
    for item in wanted:
        assembly = item.made if item.made is not None else state.assembly(item.name, item.box)
        made = Made(item.name, dtype_of(item.name), item.shape, item.box, assembly, run=item.run)
        files.setdefault(item.rank, []).append(made)
    objects: dict[int, list[str]] = {}
    for rank in target.structures.ranks:
        objects.setdefault(target.rank_of(rank), []).extend(rank.objects)
    ranks = sorted({*files, *(rank for rank, names in objects.items() if names)})
    out = [RankFile(rank, tuple(objects.get(rank, ())), grouped(files.get(rank, ()))) for rank in ranks]
    return ReshardPlan(tuple(out), cut_rows(state, shapes))


def target_shapes(state: State, target: Target) -> dict[str, tuple[int, ...]]:
    """Shapes of all global tensors, optimizer states included, that the target's model has."""
    shapes = dict(target.structures.global_shapes)
    if target.optimizer is not None:
        for name in _states(state, target):
            split = split_state(name)
            assert split is not None
            shapes[name] = shapes[split[1]]
    return shapes


def _states(state: State, target: Target) -> set[str]:
    if target.optimizer == "dp_reshardable":
        return names_in_buckets(state, target)
    keys = {part.key for rank in target.structures.ranks for tensor in _trainable(rank) for part in tensor.parts}
    return {state_name(kind, key) for key in keys for kind in states_in(state)}


def cut_rows(state: State, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Rows of vocabulary padding that are left out, or (negative) added."""
    return {n: state.tensors[n].shape[0] - s[0] for n, s in shapes.items() if s and state.tensors[n].shape != s}


def refuse_unfitting(state: State, shapes: Mapping[str, tuple[int, ...]], *, keeps_optimizer: bool) -> None:
    """Raises UnsupportedError unless the target's model is the one that is stored: nothing missing, nothing left over."""
    missing = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in state.tensors]
    left = [n for n in state.tensors if n not in shapes and (keeps_optimizer or split_state(n) is None)]
    wrong = []
    for name, shape in shapes.items():
        stored = state.tensors.get(name)
        if stored is not None and stored.shape != shape:
            padded = name.endswith(VOCABULARY) and stored.shape[1:] == shape[1:]
            wrong += [] if padded else [f"{name} is {list(stored.shape)}, the model has {list(shape)}"]
    said = [
        f"{len(names)} {what}: {'; '.join(names[:_SHOWN])}{'; ...' if len(names) > _SHOWN else ''}"
        for what, names in (("not stored", missing), ("of another shape", wrong), ("stored without a place", left))
        if names
    ]
    if said:
        raise UnsupportedError(
            f"the model that Megatron builds from the stored args is not the one that is stored. Tensors {'. '.join(said)}",
            next_step="Nothing was written. The args in the checkpoint must be those of the run that wrote it, and the"
            " installed megatron-core must know the model.",
        )


def _weights(target: Target) -> Iterator[Wanted]:
    for rank in target.structures.ranks:
        number = target.rank_of(rank)
        for chunk in rank.chunks:
            for tensor in chunk:
                for part in tensor.parts:
                    if part.main:
                        yield Wanted(number, part.key, part.shape, part.box)


def _optimizer(state: State, target: Target) -> Iterator[Wanted]:
    if target.optimizer is None:
        return
    kinds = states_in(state)
    for rank in target.structures.ranks:
        if target.optimizer == "dp_reshardable":
            yield from of_buckets(state, target, rank)
            continue
        number = target.rank_of(rank)
        buffers = target.optimizer == "fully_reshardable" and not target.structures.no_buckets
        for tensor in _in_buffers(rank) if buffers else _trainable(rank):
            for kind in kinds:
                for part in tensor.parts:
                    if part.main:
                        yield Wanted(number, state_name(kind, part.key), part.shape, part.box)


def _trainable(rank: RankStructure) -> list[LocalTensor]:
    return [tensor for chunk in rank.chunks for tensor in chunk if tensor.trainable]


def _in_buffers(rank: RankStructure) -> list[LocalTensor]:
    """In the order of the optimizer's buffers, in which ``sharded_param_state_fully_reshardable`` goes through them."""
    return [place.tensor for buffer in (*rank.dense, *rank.expert) for b in buffer.buckets for place in b.places]


class _DTypes:
    """Element types: a global tensor's own; of a bucket, that of the state in all tensors."""

    def __init__(self, state: State) -> None:
        self._tensors = state.tensors
        self._of_state: dict[str, set[DType]] = {}
        for name, tensor in state.tensors.items():
            if (split := split_state(name)) is not None:
                self._of_state.setdefault(split[0], set()).add(tensor.dtype)

    def __call__(self, name: str) -> DType:
        if name in self._tensors:
            return self._tensors[name].dtype
        kind = name.rpartition(".")[2]
        found = self._of_state[kind]
        if len(found) != 1:
            raise UnsupportedError(
                f"optimizer state {kind} is {' and '.join(sorted(map(str, found)))} in different tensors; a bucket of"
                " dp_reshardable has one type",
                next_step="Choose --optimizer fully_reshardable.",
            )
        return next(iter(found))


def _refuse_holes(wanted: Sequence[Wanted]) -> None:
    """The chunks must be the whole of every tensor, once."""
    by_name: dict[str, list[Wanted]] = {}
    for item in wanted:
        by_name.setdefault(item.name, []).append(item)
    for name, items in by_name.items():
        refuse_holes(name, items[0].shape, [item.box for item in items])
