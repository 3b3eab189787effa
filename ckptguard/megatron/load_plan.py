"""Which files of a ``torch_dist`` checkpoint a rank reads when Megatron loads it. Pure, but for asking Megatron.

A rank reads every stored chunk that shares an element with a tensor of its own, and the objects of its own names
(megatron/core/dist_checkpointing/strategies/torch.py ``TorchDistLoadShardedStrategy``, megatron-core 0.19.2). What is said here
holds for any rank of a model-parallel place: with ``--ckpt-fully-parallel-load`` data parallel ranks share the reading out
among them and each reads less (strategies/fully_parallel.py ``FullyParallelLoadStrategyWrapper``), never more.

What is not understood is read by every rank: a plan may name a file too many, and none too few.

Sources of names (0.19.2): megatron/core/optimizer/distrib_optimizer.py ``sharded_state_dict``; megatron/core/
rerun_state_machine.py ``state_dict``; megatron/training/checkpointing.py ``get_rng_state``, and that of megatron-bridge 0.6.2,
whose RNG state may have a third dim for data parallel ranks; megatron/core/dist_checkpointing/mapping.py
``ShardedObject.unique_key``: a rank asks for ``<key>/shard_<offset>_<shape>`` of its own world, and for no other shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ckptguard.core.boxes import Box, Meetings
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.layout.fits import dense_ranks, expert_ranks
from ckptguard.layout.layouts import Layout
from ckptguard.layout.ranks import Grid
from ckptguard.megatron.model_numbers import number
from ckptguard.megatron.refusals import refuse
from ckptguard.megatron.reshard_args import target_args
from ckptguard.megatron.structure import Part, RankStructure, Structures, structures_for

Files = frozenset[str]

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.\w+?\.(.+)")
_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\..+")
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_LAYER = re.compile(r"(.*?\blayers)\.(?:(\d+)\.)?.+")
_RNG, _RERUN, _EXTRA = "rng_state", "rerun_state_machine_state", "._extra_state"


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is to load a checkpoint.

    Attributes:
        args: Its training args, as far as they say what a rank owns.
        grid: Its ranks.
        title: Its layout, for people.
    """

    args: Mapping[str, object]
    grid: Grid
    title: str


def run_of(stored: Mapping[str, object], layout: Layout | None, world: int) -> Run:
    """The run of so many ranks.

    Args:
        stored: Training args of the checkpoint, as plain values.
        layout: The layout that it loads under; None is the one that it was saved with, whatever its data parallel size was.
        world: Number of ranks.

    Raises:
        UsageError: The layout is not possible for the model, or not with so many ranks.
        UnsupportedError: The args lead to no model; or, without a layout, the stored one is not possible with so many ranks.
    """
    refuse(stored)
    own = layout if layout is not None else _stored_layout(stored)
    dense, expert = dense_ranks(own), expert_ranks(own)
    if world % dense or world % expert or own.dp not in (None, world // dense):
        message = f"{world} ranks cannot load it as {own}: that takes {_worlds(own)}"
        raise UnsupportedError(message) if layout is None else UsageError(message)
    own = replace(own, dp=world // dense)
    args = dict(stored)
    if layout is not None:
        args = dict(target_args(stored, own, optimizer=None, vocabulary_rows=None).args)
    # Which parameter stands in which bucket or group is not asked: a rank reads all of its own.
    args |= {"use_distributed_optimizer": False, "no_save_optim": True}
    grid = Grid(
        tp=own.tp, pp=own.pp, cp=own.cp, dp=world // dense, etp=own.etp or own.tp, ep=own.ep,
        stages_first=bool(args.get("use_tp_pp_dp_mapping")),
    )  # fmt: skip
    return Run(args, grid, str(own))


def _worlds(layout: Layout) -> str:
    if layout.dp is not None:
        return f"TP x PP x CP x DP, {dense_ranks(layout) * layout.dp}"
    return f"a multiple of TP x PP x CP, {dense_ranks(layout)}, and of ETP x EP x PP, {expert_ranks(layout)}"


def _stored_layout(args: Mapping[str, object]) -> Layout:
    """Sizes of the axes that a checkpoint was saved with; how its layers are cut stays with its args."""

    def size(name: str) -> int:
        return number(args, name) or 1

    tp, etp = size("tensor_model_parallel_size"), number(args, "expert_tensor_parallel_size")
    return Layout(
        tp=tp, pp=size("pipeline_model_parallel_size"), cp=size("context_parallel_size"),
        ep=size("expert_model_parallel_size"), etp=etp if etp and etp != tp else None,
        vpp=size("virtual_pipeline_model_parallel_size"),
    )  # fmt: skip


def load_plan(index: Index, run: Run) -> LoadPlan:
    """Asks Megatron what each rank of a run owns, and finds where it is stored.

    Raises:
        UnsupportedError: Megatron cannot be asked about its model, or describes another one than is stored; says why.
        EnvironmentFailedError: The process that asks failed, or ran too long.
    """
    question = (run.args, index.facts.content_metadata, None)
    return LoadPlan(index, structures_for([question])[0], run.grid, experts=bool(number(run.args, "num_experts")))


class LoadPlan:
    """The files that each rank of a run reads.

    Args:
        index: Of the checkpoint.
        structures: What Megatron says of the run's layout.
        grid: The run's ranks.
        experts: Whether the model has experts.

    Raises:
        UnsupportedError: Megatron describes another model than the one that is stored.
    """

    def __init__(self, index: Index, structures: Structures, grid: Grid, *, experts: bool) -> None:
        self.megatron = structures.megatron
        self._index, self._grid = index, grid
        _refuse_other_model(index, structures)
        self._owners = {_place_of(rank): rank for rank in structures.ranks}
        self._sorted = _Sorted(index, structures, grid, experts=experts)
        self._known: dict[int, Files] = {}

    def files_of(self, ranks: Iterable[int]) -> Files:
        """The files that these global ranks read, relative to the checkpoint directory.

        Raises:
            UnsupportedError: Megatron's groups of this run do not fit together.
        """
        out = set(self._sorted.everyone)
        for rank in ranks:
            owner = self._owners.get(self._places[rank])
            if owner is None:
                raise UnsupportedError(f"Megatron does not say what a rank at {self._places[rank]} owns")
            if owner.rank not in self._known:
                self._known[owner.rank] = self._sorted.files_of(owner)
            out |= self._known[owner.rank]
            out |= self._sorted.of_rank.get(rank, set())
        return frozenset(out)

    @cached_property
    def _places(self) -> list[_Place]:
        """Of each global rank."""
        grid = self._grid
        dense = {
            grid.dense(tp, pp, replica): (tp, pp)
            for tp in range(grid.tp)
            for pp in range(grid.pp)
            for replica in range(grid.dp * grid.cp)
        }
        expert = {
            grid.expert(etp, ep, pp, replica): (etp, ep, pp)
            for etp in range(grid.etp)
            for ep in range(grid.ep)
            for pp in range(grid.pp)
            for replica in range(grid.expert_dp)
        }
        if any(dense[rank][1] != expert[rank][2] for rank in dense):  # Megatron refuses to make such groups
            raise UnsupportedError("the stages of dense and of expert parameters are not the same ranks")
        return [_Place(*dense[rank], *expert[rank][:2]) for rank in range(grid.world)]


@dataclass(frozen=True, slots=True)
class _Place:
    """What decides about the parameters of a rank."""

    tp: int
    pp: int
    etp: int
    ep: int

    def __str__(self) -> str:
        return f"TP {self.tp}, PP {self.pp}, ETP {self.etp}, EP {self.ep}"


def _place_of(rank: RankStructure) -> _Place:
    return _Place(*(rank.at[axis] for axis in ("tp", "pp", "etp", "ep")))


def _refuse_other_model(index: Index, structures: Structures) -> None:
    """Raises unless every tensor of the model is stored, in its shape but for the rows of a padded vocabulary."""
    for key, shape in structures.global_shapes.items():
        stored = index.tensors.get(key)
        if stored is None:
            raise UnsupportedError(f"the model that Megatron makes of the args has {key}, which is not stored")
        if len(stored.shape) != len(shape) or stored.shape[1:] != shape[1:]:
            raise UnsupportedError(
                f"the model that Megatron makes of the args has {key} with shape {list(shape)}; it is stored as"
                f" {list(stored.shape)}"
            )


class _Sorted:
    """What is stored, by who reads it.

    Attributes:
        everyone: Files that all ranks read: those with common state, or with what is not understood.
        of_rank: Files with an object of one global rank.
    """

    def __init__(self, index: Index, structures: Structures, grid: Grid, *, experts: bool) -> None:
        self.everyone: set[str] = set()
        self.of_rank: dict[int, set[str]] = {}
        self._places: dict[tuple[int, int], set[str]] = {}  # (pp, tp)
        self._groups: dict[tuple[str, int], set[str]] = {}
        self._layers: dict[tuple[str, int], set[str]] = {}
        self._objects = {name: entry.span.file for name, entry in index.objects.items()}
        self._grid = grid
        saved = index.facts.layout
        self._same_stages = (saved.get("tp", 1), saved.get("pp", 1)) == (grid.tp, grid.pp)
        self._kinds = _group_kinds([*index.tensors, *index.objects], experts=experts)
        shapes = structures.global_shapes
        entries: dict[str, list[TensorEntry]] = {key: [index.tensors[key]] for key in shapes}
        for name, entry in index.tensors.items():
            if name not in shapes:
                self._sort(entry, entries)
        self._tensors = {key: _Stored(found) for key, found in entries.items()}
        self._known_layers = {layer for rank in structures.ranks for layer in _layers_of(rank)}
        held = {name for rank in structures.ranks for name in rank.held}
        for name, file in self._objects.items():
            if name not in held and file != name:  # a side file, such as common.pt, is no data file
                self._sort_object(name, file)

    def _sort(self, entry: TensorEntry, entries: Mapping[str, list[TensorEntry]]) -> None:
        """Optimizer state goes with its model tensor, or with the ranks of its group."""
        files = {chunk.span.file for chunk in entry.chunks}
        state = _STATE.fullmatch(entry.name)
        if state and state[1] in entries and entries[state[1]][0].shape == entry.shape:
            entries[state[1]].append(entry)
        elif not self._sort_group(entry.name, files):
            self.everyone |= files

    def _sort_group(self, name: str, files: set[str]) -> bool:
        group = _GROUP.fullmatch(name)
        if group is None:
            return False
        for kind in self._kinds.get(group[1], ("dense_group", "expert_group")):
            self._groups.setdefault((kind, int(group[2])), set()).update(files)
        return True

    def _sort_object(self, name: str, file: str) -> None:
        if self._sort_group(name, {file}):
            return
        shard = _SHARD.fullmatch(name)
        key, offset, shape = (shard[1], _numbers(shard[2]), _numbers(shard[3])) if shard else (name, (), ())
        if key == _RERUN and len(offset) == len(shape) == 1:
            if self._same_stages and shape[0] == self._grid.world:
                self.of_rank.setdefault(offset[0], set()).add(file)
        elif key == _RNG and len(offset) == len(shape) and len(shape) in (2, 3):
            if shape[:2] == (self._grid.pp, self._grid.tp):
                self._places.setdefault((offset[0], offset[1]), set()).add(file)
        elif key.endswith(_EXTRA) and (layer := _layer_of(key, offset)) in self._known_layers:
            self._layers.setdefault(layer, set()).add(file)  # a module that the asked Megatron has no such object for
        else:
            self.everyone.add(file)

    def files_of(self, owner: RankStructure) -> Files:
        """Those that a rank at the place of this one reads, beside those of everyone."""
        out = {self._objects[name] for name in owner.held if name in self._objects}
        out |= self._places.get((owner.at["pp"], owner.at["tp"]), set())
        for kind in ("dense_group", "expert_group"):
            out |= self._groups.get((kind, owner.at[kind]), set())
        for layer in _layers_of(owner) if self._layers else ():
            out |= self._layers.get(layer, set())
        for part in _parts_of(owner):
            out |= self._tensors[part.key].files_of(part.box)
        return frozenset(out)


class _Stored:
    """Tensors of one shape whose parts the same ranks own, such as a weight and its optimizer state."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._entries = [(entry.chunks, Meetings([chunk.box for chunk in entry.chunks])) for entry in entries]
        self._known: dict[Box, Files] = {}

    def files_of(self, box: Box) -> Files:
        if box not in self._known:
            met = (chunks[n].span.file for chunks, meetings in self._entries for n, _ in meetings.of(box))
            self._known[box] = frozenset(met)
        return self._known[box]


def _parts_of(owner: RankStructure) -> Iterator[Part]:
    return (part for chunk in owner.chunks for tensor in chunk for part in tensor.parts)


def _layers_of(owner: RankStructure) -> set[tuple[str, int]]:
    """Layers of which a rank has tensors."""
    out = set()
    for part in _parts_of(owner):
        prepended = part.box.offset[: len(part.box.size) - len(part.local.size)]
        if layer := _layer_of(part.key, prepended):
            out.add(layer)
    return out


def _layer_of(key: str, prepended: Sequence[int]) -> tuple[str, int] | None:
    """The stack and number of the layer that something is of: in its name, or its place in the first prepended dim."""
    found = _LAYER.fullmatch(key)
    if found is None or not (found[2] or prepended):
        return None
    return found[1], int(found[2]) if found[2] else prepended[0]


def _group_kinds(names: Iterable[str], *, experts: bool) -> dict[str | None, tuple[str, ...]]:
    """Whose group a ``dp_group_idx`` counts, by the number of the chained optimizer, where that is sure.

    Megatron makes the optimizer of expert parameters last (megatron/core/optimizer/__init__.py ``get_megatron_optimizer``,
    0.19.2); with more than two, chunks of the model have some of their own.
    """
    chained = {found[1] for name in names if (found := _GROUP.fullmatch(name))}
    if chained == {None}:
        return {None: ("dense_group",)}
    return {"0": ("dense_group",), "1": ("expert_group",)} if experts and chained == {"0", "1"} else {}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".") if number)
