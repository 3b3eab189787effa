"""Planning a resharding: Megatron is asked, source and target are put together; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from ckptguard.convert import dcp_names, plain_optimizer
from ckptguard.convert.dcp_target import dcp_output, parameters
from ckptguard.convert.gathered_state import is_gathered
from ckptguard.convert.iterations import folder_of, stamps
from ckptguard.convert.output import legacy_output, torch_dist_output
from ckptguard.convert.reshard_plan import plan_torch_dist
from ckptguard.convert.reshard_source import (
    ReshardSource,
    asks_for_source,
    layout_of,
    open_source,
    refuse_unfit,
)
from ckptguard.convert.resharding import OptimizerChoice, ReshardOptions, ReshardPrepared, TargetFormat
from ckptguard.convert.sources import split_state
from ckptguard.convert.target import OptimizerForm, Target
from ckptguard.convert.uneven_target import (
    Uneven,
    cutting_of,
    refuse_uneven,
    replica_args,
    state_bytes_of,
    uncut_args,
    uneven,
)
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.core.index import Index
from ckptguard.core.writing import Elements, TargetFile, WritePlan
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.dcp import collector_paused
from ckptguard.layout.layouts import Layout
from ckptguard.layout.ranks import Grid
from ckptguard.megatron.model_numbers import number
from ckptguard.megatron.reshard_args import target_args
from ckptguard.megatron.restate import Restate, Restated, restate, started_early
from ckptguard.megatron.structure import Structures, structures_for

_SHARDED = ("dp_reshardable", "fully_reshardable")
_DCP = ("dcp", "fsdp_dtensor")


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
    refuse_uneven(wanted.args, options.replica_tp, options.tp_for, optimizer=form, to=options.to)
    own, structures, uncut = _ask(
        checkpoint.index, wanted.args, options.to, also_uncut=bool(options.replica_tp or options.tp_for)
    )
    target = Target(
        structures, _grid(wanted.args), form, number(wanted.args, "num_distributed_optimizer_instances") or 1
    )
    if form == "dp_reshardable" and structures.no_buckets:
        raise UnsupportedError(
            f"the target's optimizer buckets cannot be derived from the stored args: {structures.no_buckets}",
            next_step="Choose --optimizer fully_reshardable, or convert the weights alone with --optimizer none.",
        )
    with collector_paused():  # a large model has a million values that live as long as the plan
        source = open_source(checkpoint, own, keeps_optimizer=form is not None)
        if form in _SHARDED:
            source = replace(source, state=plain_optimizer.with_masters(source.state))
        cut = None
        if uncut is not None and not options.replica_tp:
            cutting = cutting_of(wanted.args, wanted.args, options.tp_for)
            cut = uneven(uncut, structures, wanted.args, cutting, state_bytes_of(source.state))
            target = replace(target, structures=cut.structures)
    changes = {**options.args, **switched, **wanted.changes}
    notes = (*dcp_names.switch_notes(facts.args, wanted.args), *wanted.notes)
    prepared = _planned(source, target, wanted.args, changes, options, notes=notes, cut=cut)
    if uncut is None or not options.replica_tp:
        return prepared
    return _with_replicas(prepared, uncut, structures, wanted.args, changes, options)


def _with_replicas(
    prepared: ReshardPrepared,
    uncut: Structures,
    full: Structures,
    args: Mapping[str, object],
    changes: Mapping[str, object],
    options: ReshardOptions,
) -> ReshardPrepared:
    """The plan with the checkpoints of the replicas whose TP is not the run's, all of them in one plan of files."""
    source, state_bytes = prepared.source, state_bytes_of(prepared.source.state)
    made: list[tuple[int, ReshardPrepared]] = []
    files, count = [*prepared.write_plan.files], len(prepared.output.chunks) + len(prepared.side_files)
    for replica, tp in options.replica_tp:
        own = replica_args(args, tp)
        both = {**args, **own}
        cut = uneven(uncut, full, both, cutting_of(args, both, options.tp_for), state_bytes)
        target = Target(cut.structures, _grid(both), prepared.target.optimizer)
        one = _planned(source, target, both, {**changes, **own}, options, cut=cut, below=f"replica_{replica}/")
        files += [_renumbered(file, count) for file in one.write_plan.files]
        count += len(one.output.chunks) + len(one.side_files)
        made.append((replica, one))
    identities = [prepared.write_plan.identity, *(one.write_plan.identity for _, one in made)]
    plan = WritePlan(tuple(files), blake3("".join(identities).encode()).hexdigest())
    return replace(prepared, write_plan=plan, replicas=tuple(made))


def _renumbered(file: TargetFile, count: int) -> TargetFile:
    """A file whose elements stand behind so many others."""
    parts = [replace(part, key=part.key + count) if isinstance(part, Elements) else part for part in file.parts]
    return TargetFile(file.path, tuple(parts))


def _planned(
    source: ReshardSource,
    target: Target,
    args: Mapping[str, object],
    changes: Mapping[str, object],
    options: ReshardOptions,
    *,
    notes: tuple[str, ...] = (),
    cut: Uneven | None = None,
    below: str = "",
) -> ReshardPrepared:
    """The plan of one checkpoint of the target.

    Args:
        source: The open source.
        target: The checkpoint's ranks.
        args: Of the target.
        changes: Those that are not as the source stores them.
        options: The user's choices.
        notes: Sentences for the user.
        cut: How the ranks came about, if they are not cut evenly.
        below: Where in the target's root it stands, with a slash at the end.
    """
    with collector_paused():
        plan = plan_torch_dist(source.state, target) if options.to == "torch_dist" else None
        if plan is not None and target.optimizer == "plain":
            plan = plain_optimizer.with_stored_names(plan)
    layout = layout_of(args)
    folder = below + folder_of(source.iteration)
    state = _restated(source, target, layout, changes, options)
    if plan is not None:
        output = torch_dist_output(source, target, state, plan, folder)
    elif options.to == "dcp" or options.to == "fsdp_dtensor":
        output = dcp_output(source, target, state, folder, to=options.to, files=options.files)
    else:
        output = legacy_output(source, target, state, folder)
    side = source.side_files()
    files = [file for file in output.files if file.parts]  # a rank may hold nothing
    for key, made in enumerate(side, len(output.chunks)):
        files.append(TargetFile(f"{folder}/{made.name}", (Elements(key, made.size_bytes),)))
    root = {below + name: data for name, data in state.root_files.items()}
    identity = _identity(source, output.small, root, layout, options)
    notes = (*notes, *state.notes, *output.notes)
    return ReshardPrepared(
        source, target, layout, output, side, WritePlan(tuple(files), identity), root, folder, notes, cut
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


def _ask(
    index: Index, args: Mapping[str, object], to: TargetFormat, *, also_uncut: bool
) -> tuple[Structures | None, Structures, Structures | None]:
    """What Megatron says of the source's own layout and of the target's with TP 1, where needed, and of the target's."""
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
    if also_uncut:
        questions.append((uncut_args(args), content, None))
    answers = structures_for(questions)
    before = answers.pop(0) if asks_for_source(index) else None
    return before, answers[0], answers[1] if also_uncut else None


def _grid(args: Mapping[str, object]) -> Grid:
    def size(name: str) -> int:
        return number(args, name) or 1

    return Grid(
        tp=size("tensor_model_parallel_size"), pp=size("pipeline_model_parallel_size"), cp=size("context_parallel_size"),
        dp=size("data_parallel_size"), etp=size("expert_tensor_parallel_size"), ep=size("expert_model_parallel_size"),
        stages_first=bool(args.get("use_tp_pp_dp_mapping")),
    )  # fmt: skip


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
        "sources": stamps(source.checkpoint, source.index.files),
        "files": {name: blake3(data).hexdigest() for name, data in sorted({**small, **root}.items())},
        "layout": layout.as_dict(),
        "optimizer": options.optimizer,
        "to": options.to,
        "uneven": [options.replica_tp, options.tp_for],
        "cut_into": options.files,
        "args": {name: str(value) for name, value in sorted(options.args.items())},
        "verify": options.verify,
    }
    return blake3(json.dumps(body, sort_keys=True).encode()).hexdigest()
