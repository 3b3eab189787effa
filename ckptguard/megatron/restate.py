"""The state beside the tensors of a checkpoint in another layout or form: the question, its answer, and who answers it.

Common state is read and written by Megatron's own rules (``torch.load(weights_only=True)`` with its safe globals) in a
process of its own, ``restate_worker``: the values are objects of Megatron's classes, which nothing else here imports.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptguard.megatron import process
from ckptguard.megatron.structure import Buffer

_MODULE = "ckptguard.megatron.restate_worker"
OptimizerFormat = Literal["dp_reshardable", "fully_reshardable", "plain"]


@dataclass(frozen=True, slots=True)
class Restate:
    """What is stored, and of what it is to be.

    Attributes:
        common: The bytes of ``common.pt`` or of the object ``common_state/shard_0_1``; of legacy files the path of rank 0's
            ``model_optim_rng.pt``, whose tensors are then not read; of torch DCP by modules its objects, by stored name
            (those of plain DCP are none: the args are then those of ``args_changes``).
        iteration: Of the target.
        layout_changed: Whether TP or PP is another one.
        world_changed: Whether TP, PP, DP or the world size is another one.
        has_rng: Whether the source holds RNG states that can go along.
        args_changes: New values of training arguments, plain; ``no_save_rng`` and ``no_save_optim`` follow from the rest.
        optimizer_format: Of the target; None if no optimizer state goes along, "plain" that of one that is not distributed.
        group_states: Bytes of the source's objects ``<prefix>.optimizer/shard_0_1`` and ``<prefix>.grad_scaler/shard_0_1``,
            where prefix is ``[chained_K.]optimizer.distributed.dp_group_idx_I``.
        groups: (prefix, whether of expert parameters) of the target's optimizers, of every rank that has state of its own;
            with either form, though the keys of ``fully_reshardable`` have no prefix. Empty for the source's own chain.
        buffers: By prefix, for ``dp_reshardable``: the buffers whose lengths are stored.
        run_config: Bridge's ``run_config.yaml``, if there is one.
        train_state: Bridge's ``train_state.pt``, if there is one.
        old_readers: Whether Megatron Core until 0.18 is to find ``common.pt``.
        decays: For ``fsdp_dtensor``, whose ``objects`` are then the entries of the common state: whether weight decay
            applies to each parameter of its optimizer, by the name that it has there.
        group_decays: For ``plain``, by prefix: whether weight decay applies to each of the groups that the optimizer has.
        legacy: Whether the target are legacy files: then ``common_state`` is what each ``model_optim_rng.pt`` holds beside
            its tensors, and nothing else is made.
    """

    common: bytes | Path | Mapping[str, bytes]
    iteration: int | Literal["release"]
    layout_changed: bool
    world_changed: bool
    has_rng: bool
    args_changes: Mapping[str, object]
    optimizer_format: OptimizerFormat | None = None
    group_states: Mapping[str, bytes] = field(default_factory=dict)
    groups: tuple[tuple[str, bool], ...] = ()
    buffers: Mapping[str, tuple[Buffer, ...]] = field(default_factory=dict)
    run_config: bytes | None = None
    train_state: bytes | None = None
    old_readers: bool = True
    decays: Mapping[str, bool] | None = None
    group_decays: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    legacy: bool = False


@dataclass(frozen=True, slots=True)
class Restated:
    """Bytes to be stored.

    Attributes:
        common_state: The object ``common_state/shard_0_1``.
        objects: The objects beside the optimizer's buckets, or of ``fsdp_dtensor`` those of the common state, by storage name.
        iteration_files: By name, in the directory of the iteration.
        root_files: By name, in the root: the trackers.
        keep_rng: Whether the objects ``rng_state/...`` go along as they are.
        keep_rerun: Whether the objects ``rerun_state_machine_state/...`` go along as they are.
        notes: What was kept, completed and left out, and what Megatron will do; sentences for the user.
    """

    common_state: bytes
    objects: Mapping[str, bytes]
    iteration_files: Mapping[str, bytes]
    root_files: Mapping[str, bytes]
    keep_rng: bool
    keep_rerun: bool
    notes: tuple[str, ...]


def restate(question: Restate, *, timeout_seconds: float = process.TIMEOUT_SECONDS) -> Restated:
    """Makes what is stored beside the tensors.

    Raises:
        DamagedError: Common state cannot be read, or the optimizers of two ranks contradict each other.
        UnsupportedError: It is of a Megatron too old to be understood.
        EnvironmentFailedError: The process ended without an answer, or ran too long.
    """
    answer = _answer(_as_json(question), timeout_seconds)
    common, common_file = b64decode(answer["common_state"]), b64decode(answer["common_file"])
    files = {"common.pt": common_file} if question.old_readers and not question.legacy else {}
    if question.run_config is not None:
        files["run_config.yaml"] = answer["run_config"].encode()
    root = {"latest_checkpointed_iteration.txt": str(question.iteration).encode()}
    if question.train_state is not None:
        files["train_state.pt"] = question.train_state
        if (
            question.iteration != "release"
        ):  # Bridge would look for an iteration; without it, it reads the other tracker
            root["latest_train_state.pt"] = question.train_state
    return Restated(
        common_state=common,
        objects={name: b64decode(data) for name, data in answer["objects"].items()},
        iteration_files=files,
        root_files=root,
        keep_rng=answer["keep_rng"],
        keep_rerun=answer["keep_rerun"],
        notes=tuple(answer["notes"]),
    )


def started_early() -> AbstractContextManager[None]:
    """Starts the process now, so that it imports while the caller asks other things."""
    return process.started_early(_MODULE)


def _as_json(question: Restate) -> dict[str, Any]:
    is_file = isinstance(question.common, Path)
    return {
        "common": _common(question.common),
        "is_file": is_file,
        "iteration": question.iteration,
        "layout_changed": question.layout_changed,
        "world_changed": question.world_changed,
        "has_rng": question.has_rng,
        "args_changes": dict(question.args_changes),
        "optimizer_format": question.optimizer_format,
        "group_states": {name: b64encode(data).decode() for name, data in question.group_states.items()},
        "groups": [list(group) for group in question.groups],
        "buffers": {prefix: [_buffer(b) for b in buffers] for prefix, buffers in question.buffers.items()},
        "legacy": question.legacy,
        "group_decays": {prefix: list(decays) for prefix, decays in question.group_decays.items()},
        "decays": dict(question.decays) if question.decays is not None else None,
        "run_config": question.run_config.decode() if question.run_config is not None else None,
    }


def _common(common: bytes | Path | Mapping[str, bytes]) -> str | dict[str, str]:
    if isinstance(common, Mapping):
        return {name: b64encode(data).decode() for name, data in common.items()}
    return str(common) if isinstance(common, Path) else b64encode(common).decode()


def _buffer(buffer: Buffer) -> dict[str, Any]:
    return {
        "dtype": buffer.dtype,
        "per_bucket_numel": [bucket.padded for bucket in buffer.buckets],
        "per_bucket_numel_unpadded": [bucket.numel for bucket in buffer.buckets],
    }


def _answer(question: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
    waiting = process.start(_MODULE)
    return process.answer_of(waiting, question, doing="read the common state", timeout_seconds=timeout_seconds)
