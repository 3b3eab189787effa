"""What a resharding writes: its files, byte by byte, and how they are read back. One maker for each form of target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptguard.convert.canonical import State
from ckptguard.convert.legacy_target import MODEL_FILE, plan_legacy, target_files
from ckptguard.convert.placing import COMMON_STATE, placed, with_common_state
from ckptguard.convert.rank_files import RankFile
from ckptguard.convert.reshard_plan import ReshardPlan, cut_rows, refuse_unfitting, target_shapes
from ckptguard.convert.reshard_source import ReshardSource
from ckptguard.convert.sources import state_of, states_in
from ckptguard.convert.target import Target
from ckptguard.core.index import Index
from ckptguard.core.plan import Made
from ckptguard.core.writing import TargetFile
from ckptguard.formats import torch_dist_writer as writer
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Reader
from ckptguard.formats.dcp import parse_table
from ckptguard.formats.legacy import LegacyTorch
from ckptguard.formats.storage import Directory
from ckptguard.formats.zip_frames import empty_tensor_in_list
from ckptguard.megatron.legacy_names import to_global_view
from ckptguard.megatron.legacy_parts import folder_of
from ckptguard.megatron.legacy_pickles import ExtraState, rank_pickles
from ckptguard.megatron.restate import Restated

ReadBack = Callable[[Directory], tuple[State, Checkpoint]]


@dataclass(frozen=True, slots=True)
class Output:
    """All that is written of one iteration.

    Attributes:
        chunks: By the number under which elements of the files are asked for.
        files: Relative to the target's root.
        small: Files that are written last, by name.
        rows: Rows of vocabulary padding that are left out, or (negative) added, by tensor.
        notes: Sentences for the user.
        read_back: Opens the written files: their global tensors, and the way to their bytes.
    """

    chunks: tuple[Made, ...]
    files: tuple[TargetFile, ...]
    small: Mapping[str, bytes]
    rows: Mapping[str, int]
    notes: tuple[str, ...]
    read_back: ReadBack


def torch_dist_output(source: ReshardSource, target: Target, state: Restated, plan: ReshardPlan, folder: str) -> Output:
    """A ``torch_dist`` checkpoint.

    Args:
        source: What it is made of.
        target: Its ranks.
        state: What stands beside its tensors.
        plan: From ``plan_torch_dist``.
        folder: Of the iteration.
    """
    objects, notes = _with_objects(source, target, plan, state)
    chunks = {file.rank: file.chunks for file in plan.files}
    files = with_common_state([RankFile(rank, names, chunks.get(rank, ())) for rank, names in sorted(objects.items())])

    def blob_of(name: str) -> bytes:
        if name == COMMON_STATE:
            return state.common_state
        if name in state.objects:
            return state.objects[name]
        return source.blob(name) if name in source.index.objects else empty_tensor_in_list()

    on_disk = placed(files, blob_of, source.check_of)
    metadata = writer.metadata_bytes([file for file, _ in on_disk])
    small = {**state.iteration_files, ".metadata": metadata, "metadata.json": writer.config_bytes()}

    def read_back(written: Directory) -> tuple[State, Checkpoint]:
        table = parse_table(metadata, str(written.root / ".metadata"))
        index = Index("dcp", str(written.root), table.tensors, {}, written.listing, {})
        return state_of(index, target.structures), Checkpoint(index, written, Reader(written))

    targets = tuple(TargetFile(f"{folder}/{file.name}", parts) for file, parts in on_disk)
    return Output(plan.chunks, targets, small, plan.rows, tuple(notes), read_back)


def _with_objects(
    source: ReshardSource, target: Target, plan: ReshardPlan, state: Restated
) -> tuple[dict[int, tuple[str, ...]], list[str]]:
    """Names of the objects that each rank's file holds, in Megatron's order, and what is to be said of them."""
    by_rank: dict[int, list[str]] = {file.rank: list(file.objects) for file in plan.files}
    for rank in target.structures.ranks:
        for prefix, _, ranks in target.optimizer_groups(rank):
            names = [name for name in state.objects if name.startswith(f"{prefix}.")]
            by_rank.setdefault(ranks[0], []).extend(names)
    first = min(by_rank)
    for keep, kind in ((state.keep_rerun, "rerun_state_machine_state/"), (state.keep_rng, "rng_state/")):
        for name in source.objects_named(kind) if keep else ():
            by_rank.setdefault(_rank_of_object(name, target), []).append(name)
    wanted = {name for file in plan.files for name in file.objects}
    left = [name for name in source.own_objects() if name not in wanted]
    by_rank[first] += left
    notes = []
    if left:
        notes.append(f"{len(left)} objects that the model does not ask for go along as they are, such as {left[0]}")
    empty = sorted(name for name in wanted if name not in source.index.objects)
    if empty:
        notes.append(
            f"{len(empty)} objects that are not stored are written empty, as of modules without fp8, such as {empty[0]}"
        )
    return {rank: tuple(names) for rank, names in by_rank.items()}, notes


def _rank_of_object(name: str, target: Target) -> int:
    """The rank that saves an object of its own: ``rng_state/shard_PP.TP_...``, ``rerun_state_machine_state/shard_RANK_...``."""
    at = [int(part) for part in name.partition("/shard_")[2].partition("_")[0].split(".")]
    return target.grid.dense(at[1], at[0]) if name.startswith("rng_state/") else at[0]


def legacy_output(source: ReshardSource, target: Target, state: Restated, folder: str) -> Output:
    """Legacy files, ``--ckpt-format torch``.

    Args:
        source: What they are made of.
        target: Its ranks.
        state: What stands beside their tensors, restated for this form.
        folder: Of the iteration.
    """
    shapes = target_shapes(source.state, target)
    refuse_unfitting(source.state, shapes, keeps_optimizer=target.optimizer is not None)
    states = states_in(source.state) if target.optimizer is not None else ()
    extra = {
        rank.rank: [[ExtraState(name, is_tensor) for name, is_tensor in chunk] for chunk in rank.extra]
        for rank in target.structures.ranks
    }
    plan = plan_legacy(source.state, target.structures, folder=folder, states=states, extra_states=extra)
    rng = _rng_states(source, target, folder) if state.keep_rng else {}
    rng = {path: data for path, data in rng.items() if any(file.path == path for file in plan.descriptions)}
    pickles = rank_pickles(plan.descriptions, state.common_state, rng_states=rng)

    def read_back(written: Directory) -> tuple[State, Checkpoint]:
        index = LegacyTorch().read_index(written)
        index = to_global_view(index, structures=target.structures).index
        return state_of(index, target.structures), Checkpoint(index, written, Reader(written))

    files = target_files(plan, pickles)
    return Output(plan.chunks, files, {}, cut_rows(source.state, shapes), (), read_back)


def _rng_states(source: ReshardSource, target: Target, folder: str) -> dict[str, bytes]:
    """The RNG state that each rank's file is to hold, by the file's path."""
    out = {}
    for rank in target.structures.ranks:
        name = f"rng_state/shard_{rank.at['pp']}.{rank.at['tp']}_{target.grid.pp}.{target.grid.tp}"
        if name in source.index.objects:
            out[f"{folder}/{folder_of(rank, target.structures)}/{MODEL_FILE}"] = source.blob(name)
    return out
