"""``ckptguard reshard``: from one layout or form to another, proved to hold the same state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from ckptguard.convert import dcp_names, plain_optimizer
from ckptguard.convert.dcp_target import dcp_output, parameters
from ckptguard.convert.output import Output, legacy_output, torch_dist_output
from ckptguard.convert.reshard_plan import plan_torch_dist
from ckptguard.convert.reshard_proof import Proof, merged, prove
from ckptguard.convert.reshard_source import (
    ReshardSource,
    asks_for_source,
    layout_of,
    open_source,
    refuse_unfit,
)
from ckptguard.convert.sources import split_state
from ckptguard.convert.target import OptimizerForm, Target
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.core.index import Index
from ckptguard.core.plan import Made
from ckptguard.core.writing import Elements, TargetFile, WritePlan
from ckptguard.engine.filling import Filler
from ckptguard.engine.peers import Alone, Peers, barrier
from ckptguard.engine.proving import Summing
from ckptguard.engine.targets import open_target
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.engine.write_digests import digest_of, manifest_of
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.dcp import collector_paused
from ckptguard.formats.remote import directory
from ckptguard.layout.layouts import Layout
from ckptguard.layout.ranks import Grid
from ckptguard.megatron.gathered_state import is_gathered
from ckptguard.megatron.reshard_args import target_args
from ckptguard.megatron.restate import Restate, Restated, restate, started_early
from ckptguard.megatron.structure import Structures, structures_for

TargetFormat = Literal["torch_dist", "torch", "dcp", "fsdp_dtensor"]
OptimizerChoice = Literal["keep", "dp_reshardable", "fully_reshardable", "none"]
_DCP = ("dcp", "fsdp_dtensor")
_SHARDED = ("dp_reshardable", "fully_reshardable")


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """What a user may choose.

    Attributes:
        layout: Target layout.
        optimizer: Form of the optimizer's state; "keep" is the source's where it still exists, else ``fully_reshardable``.
        args: Training args that the checkpoint does not store, or stores otherwise; the target stores them.
        to: Form of the target.
        files: How many files the tensors of ``dcp`` and ``fsdp_dtensor`` are cut into; None is one per rank.
        old_readers: Also write common.pt, which readers before Megatron Core 0.19 need.
        verify: Prove the result before it appears.
        memory_bytes: Most bytes of buffers.
        threads: Worker threads.
    """

    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerChoice = "keep"
    args: Mapping[str, object] = field(default_factory=dict)
    to: TargetFormat = "torch_dist"
    files: int | None = None
    old_readers: bool = False
    verify: bool = True
    memory_bytes: int = 2 << 30
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ReshardPrepared:
    """A resharding that has been planned and can be run.

    Attributes:
        source: The open source.
        target: The ranks of the target, and its optimizer's form.
        layout: Of the target, with everything that was left open filled in.
        output: What is written.
        side_files: Files that go along as they are; after the output's chunks in the order of elements.
        write_plan: The files, byte by byte.
        root_files: Files of the root, by name.
        folder: Name of the iteration directory.
        notes: What changes beside the layout; sentences for the user.
    """

    source: ReshardSource
    target: Target
    layout: Layout
    output: Output
    side_files: tuple[Made, ...]
    write_plan: WritePlan
    root_files: Mapping[str, bytes]
    folder: str
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        small = sum(len(data) for data in {**self.output.small, **self.root_files}.values())
        return sum(file.size_bytes for file in self.write_plan.files) + small


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a resharding did.

    Attributes:
        path: The new root.
        seal: Of its manifest.
        proved: How many global tensors were proved to be in it; None if that was left out.
        written_bytes: Bytes of all files.
    """

    path: Path
    seal: str
    proved: int | None
    written_bytes: int


def prepare_reshard(checkpoint: Checkpoint, options: ReshardOptions) -> ReshardPrepared:
    """Plans a resharding; nothing is written.

    Args:
        checkpoint: An open Megatron checkpoint.
        options: The user's choices.

    Raises:
        UsageError: The layout is not possible for this model; names what does not divide.
        DamagedError: The source is damaged or incomplete.
        UnsupportedError: Its model, form of state, or a tensor; all of a kind at once.
    """
    with started_early():
        return _prepare(checkpoint, options)


def _prepare(checkpoint: Checkpoint, options: ReshardOptions) -> ReshardPrepared:
    facts = replace(checkpoint.index.facts, args={**checkpoint.index.facts.args, **options.args})
    checkpoint = replace(checkpoint, index=replace(checkpoint.index, facts=facts))
    refuse_unfit(checkpoint)
    if options.files is not None and options.to not in _DCP:
        raise UsageError(f"--files: {options.to} has one file per rank", next_step="Leave --files out.")
    form = _form(checkpoint.index, options.optimizer, options.to)
    switched = dcp_names.switched_off(facts.args)
    wanted = target_args(
        {**facts.args, **switched}, options.layout, optimizer=form,
        vocabulary_rows=dcp_names.vocabulary_rows(checkpoint.index), keep_rng=True,
    )  # fmt: skip
    own, structures = _ask(checkpoint.index, wanted.args, options.to)
    target = Target(structures, _grid(wanted.args), form, _instances(wanted.args))
    if form == "dp_reshardable" and structures.no_buckets:
        raise UnsupportedError(
            f"the target's optimizer buckets cannot be derived from the stored args: {structures.no_buckets}",
            next_step="Choose --optimizer fully_reshardable, or convert the weights alone with --optimizer none.",
        )
    with collector_paused():  # a large model has a million values that live as long as the plan
        source = open_source(checkpoint, own, keeps_optimizer=form is not None)
        if form in _SHARDED:
            source = replace(source, state=plain_optimizer.with_masters(source.state))
        plan = plan_torch_dist(source.state, target) if options.to == "torch_dist" else None
        if plan is not None and form == "plain":
            plan = plain_optimizer.with_stored_names(plan)
    layout = layout_of(wanted.args)
    folder = "release" if source.iteration == "release" else f"iter_{source.iteration:07d}"
    state = _restated(source, target, layout, {**options.args, **switched, **wanted.changes}, options)
    if plan is not None:
        output = torch_dist_output(source, target, state, plan, folder)
    elif options.to == "dcp" or options.to == "fsdp_dtensor":
        output = dcp_output(source, target, state, folder, to=options.to, files=options.files)
    else:
        output = legacy_output(source, target, state, folder)
    side = source.side_files()
    files = [*output.files]
    for key, made in enumerate(side, len(output.chunks)):
        files.append(TargetFile(f"{folder}/{made.name}", (Elements(key, made.size_bytes),)))
    identity = _identity(source, output.small, state.root_files, layout, options)
    notes = (*dcp_names.switch_notes(facts.args, wanted.args), *wanted.notes, *state.notes, *output.notes)
    return ReshardPrepared(
        source, target, layout, output, side, WritePlan(tuple(files), identity), state.root_files, folder, notes
    )


def _restated_form(target: Target, options: ReshardOptions) -> OptimizerForm | None:
    """Where the param groups of the optimizer go: legacy files hold them as ``fully_reshardable`` does, in one place."""
    return "fully_reshardable" if target.optimizer in _SHARDED and options.to == "torch" else target.optimizer


def _form(index: Index, choice: OptimizerChoice, to: TargetFormat) -> OptimizerForm | None:
    """The form of the target's optimizer state."""
    stored = index.facts.optimizer_format
    has_state = any(
        split_state(name) or "dp_group_idx_" in name or "distrib_optim.pt" in name or plain_optimizer.is_of_legacy(name)
        for name in index.tensors
    )
    has_state = has_state or dcp_names.has_optimizer_state(index) or any(map(is_gathered, index.objects))
    if choice == "none" or not has_state:
        if choice in _SHARDED:
            raise UsageError(f"--optimizer {choice}: {index.location} holds no optimizer state")
        return None
    if to in _DCP:
        if choice == "dp_reshardable":
            raise UsageError(
                f"--optimizer dp_reshardable: {to} has no buckets", next_step="Choose --optimizer fully_reshardable."
            )
        return "fully_reshardable"
    distributed = bool(index.facts.args.get("use_distributed_optimizer"))
    if not distributed and choice == "keep":
        return "plain"
    if choice == "keep":
        return "dp_reshardable" if stored == "dp_reshardable" else "fully_reshardable"
    return choice


def _ask(index: Index, args: Mapping[str, object], to: TargetFormat) -> tuple[Structures | None, Structures]:
    """What Megatron says of the source's own layout, where that is needed, and of the target's."""
    content = index.facts.content_metadata
    if to == "fsdp_dtensor":
        rows = args.get("padded_vocab_size")
        args = dcp_names.whole_model_args(args, rows if isinstance(rows, int) else None)
    questions = [(args, content, None)]
    if asks_for_source(index):
        own = index.facts.args
        if dcp_names.is_by_module(index):
            own = dcp_names.whole_model_args(own, dcp_names.vocabulary_rows(index))
        questions.insert(0, (own, content, None))
    answers = structures_for(questions)
    return (answers[0] if len(answers) > 1 else None), answers[-1]


def _grid(args: Mapping[str, object]) -> Grid:
    def size(name: str) -> int:
        value = args.get(name)
        return value if isinstance(value, int) and value > 0 else 1

    return Grid(
        tp=size("tensor_model_parallel_size"), pp=size("pipeline_model_parallel_size"), cp=size("context_parallel_size"),
        dp=size("data_parallel_size"), etp=size("expert_tensor_parallel_size"), ep=size("expert_model_parallel_size"),
        stages_first=bool(args.get("use_tp_pp_dp_mapping")),
    )  # fmt: skip


def _instances(args: Mapping[str, object]) -> int:
    value = args.get("num_distributed_optimizer_instances")
    return value if isinstance(value, int) and value > 0 else 1


def _restated(
    source: ReshardSource, target: Target, layout: Layout, changes: Mapping[str, object], options: ReshardOptions
) -> Restated:
    before, buffers = source.layout, {}
    groups: list[tuple[str, bool]] = []
    if target.optimizer == "plain" or options.to == "fsdp_dtensor":
        groups += plain_optimizer.chain(target.structures)
    for rank in target.structures.ranks if target.optimizer in _SHARDED and not groups else ():
        for prefix, own, _ in target.optimizer_groups(rank):
            groups.append((prefix, prefix.startswith("chained_1.")))
            buffers[prefix] = own
    question = Restate(
        common=source.common(),
        iteration=source.iteration,
        layout_changed=(before.tp, before.pp) != (layout.tp, layout.pp),
        world_changed=(before.tp, before.pp, before.dp, before.cp) != (layout.tp, layout.pp, layout.dp, layout.cp)
        or options.to in _DCP,
        has_rng=bool(source.objects_named("rng_state/")) and options.to not in _DCP,
        args_changes=changes,
        optimizer_format=_restated_form(target, options),
        group_states=source.group_states(),
        groups=tuple(groups),
        buffers=buffers if target.optimizer == "dp_reshardable" else {},
        run_config=source.file("run_config.yaml"),
        train_state=source.file("train_state.pt"),
        old_readers=options.old_readers,
        group_decays=plain_optimizer.group_decays(target.structures, source.index.facts.args)
        if target.optimizer == "plain"
        else {},
        decays=parameters(target.structures, source.index.facts.args) if options.to == "fsdp_dtensor" else None,
        legacy=options.to == "torch",
    )
    return restate(question)


def _identity(
    source: ReshardSource,
    small: Mapping[str, bytes],
    root: Mapping[str, bytes],
    layout: Layout,
    options: ReshardOptions,
) -> str:
    """Of everything that the bytes depend on; a source file is told by its name, size and time of last change."""
    body: dict[str, Any] = {
        "rules": 1,
        "sources": source.stamps(),
        "files": {name: blake3(data).hexdigest() for name, data in sorted({**small, **root}.items())},
        "layout": layout.as_dict(),
        "optimizer": options.optimizer,
        "to": options.to,
        "cut_into": options.files,
        "args": {name: str(value) for name, value in sorted(options.args.items())},
        "verify": options.verify,
    }
    return blake3(json.dumps(body, sort_keys=True).encode()).hexdigest()


def run_reshard(
    prepared: ReshardPrepared,
    dst: Path,
    options: ReshardOptions,
    *,
    what: str,
    progress: Progress = SILENT,
    peers: Peers | None = None,
) -> Resharded | None:
    """Runs a planned resharding: writes, proves, seals, and only then gives the target its name.

    Args:
        prepared: From ``prepare_reshard``.
        dst: The new root; absent or empty.
        options: As given to ``prepare_reshard``.
        what: The command in the user's words.
        progress: Hears of the bytes done.
        peers: The processes that share the work, each of which has prepared the same plan; None is this one alone.

    Returns:
        What was done; None on all ranks but the first.

    Raises:
        UsageError: The target is there already.
        DamagedError: The source is not what its index says, or the target is not what the source holds; it does not appear.
        EnvironmentFailedError: No room, or an error of the file system, or of another process.
    """
    source, folder, peers = prepared.source, prepared.folder, peers or Alone()
    filler = Filler((*prepared.output.chunks, *prepared.side_files), source.state.sources, source.checkpoint)
    with open_target(dst, prepared.write_plan, what=what, peers=peers) as shared:
        summing = Summing(filler) if options.verify and peers.world.size == 1 else None
        shared.write(
            summing or filler, memory_bytes=options.memory_bytes, threads=options.threads, progress=progress
        )  # fmt: skip
        proof = Proof({}, {})
        if options.verify:
            barrier(peers, "written")
            with directory(shared.path / folder) as files, peers.moving(progress) as moving:
                proof = prove(
                    prepared.source, prepared.output, files, keeps_optimizer=prepared.target.optimizer is not None,
                    summing=summing, world=peers.world, threads=peers.world.threads(options.threads), progress=moving,
                )  # fmt: skip
        gathered = shared.gather(proof.to_bytes())
        done = None
        if gathered is not None:
            whole = merged([Proof.from_bytes(result) for result in gathered.results])
            digests = {f"{folder}/{name}": digest_of(data) for name, data in prepared.output.small.items()}
            digests = {**gathered.digests, **digests}
            manifest = manifest_of(digests, whole.stored, below=folder)
            shared.commit(_last(prepared, manifest.to_bytes()))
            written = sum(digest.size_bytes for digest in digests.values())
            done = Resharded(dst, manifest.seal, len(whole.equal) if options.verify else None, written)
        shared.done()
    return done


def _last(prepared: ReshardPrepared, manifest: bytes) -> dict[str, bytes]:
    """The small files in an order in which nothing looks whole before it is: the index after the manifest that it must fit."""
    names = list(prepared.output.small)
    first = len(names) - prepared.output.markers
    files = {name: prepared.output.small[name] for name in names[:first]}
    files[FILE_NAME] = manifest
    files |= {name: prepared.output.small[name] for name in names[first:]}
    return {**{f"{prepared.folder}/{name}": data for name, data in files.items()}, **prepared.root_files}
