"""``ckptguard export``: from a Megatron checkpoint to a snapshot that was proved to hold its model."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from ckptguard.convert import shards
from ckptguard.convert.export_plan import ExportPlan, plan_export, use_of
from ckptguard.convert.export_proof import prove, refuse_losses, refuse_other_constants
from ckptguard.convert.iterations import stamps
from ckptguard.convert.quantised import refuse_other_values, with_fp8
from ckptguard.convert.reference import BRIDGE_FOLDER, CONFIG, Reference, own_reference, read_reference
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import DamagedError, UsageError
from ckptguard.core.writing import WritePlan
from ckptguard.engine import structure as checks
from ckptguard.engine.filling import Filler
from ckptguard.engine.padding import is_vocab
from ckptguard.engine.staging import Staging, distrusted_if_damaged
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.engine.write_digests import digest_of, manifest_of
from ckptguard.engine.writing import write
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.base import Checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.hf_structure import Structure, ask_structure
from ckptguard.megatron.legacy_names import to_global

MAX_SHARD_BYTES = 5 * 10**9  # huggingface_hub's and transformers' 5GB


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a user may choose.

    Attributes:
        max_shard_bytes: Most bytes of tensors in a file; a larger tensor has one of its own.
        dtypes: (pattern of the snapshot's names, dtype) pairs.
        drop: Patterns of names, of either side, that may be left out.
        restore_fp8: Give fp8 weights back by the scales that import kept.
        verify: Prove the result before it appears.
        memory_bytes: Most bytes of buffers.
        threads: Worker threads.
    """

    max_shard_bytes: int = MAX_SHARD_BYTES
    dtypes: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    restore_fp8: bool = False
    verify: bool = True
    memory_bytes: int = 2 << 30
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedExport:
    """An export that has been planned and can be run.

    Attributes:
        structure: The model under the layout of a single rank.
        reference: What the snapshot is written like.
        plan: What is written.
        write_plan: The files, byte by byte.
        small: Files that are written last, by path.
        notes: Sentences for the user.
    """

    structure: Structure
    reference: Reference
    plan: ExportPlan
    write_plan: WritePlan
    small: Mapping[str, bytes]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did.

    Attributes:
        path: The new snapshot.
        seal: Of its manifest.
        proved: How many of its tensors were proved to be the stored ones; None if that was left out.
        written_bytes: Bytes of all files.
    """

    path: Path
    seal: str
    proved: int | None
    written_bytes: int


def prepare_export(
    checkpoint: Checkpoint, reference: str | None, options: ExportOptions, *, progress: Progress = SILENT
) -> PreparedExport:
    """Plans an export; nothing is written.

    Args:
        checkpoint: An open Megatron checkpoint.
        reference: A snapshot, or a directory with its small files; None for what the checkpoint holds itself.
        options: The user's choices.
        progress: Hears of what is checked on the way.

    Raises:
        DamagedError: The model's part of the checkpoint is damaged or incomplete.
        UnsupportedError: Architecture or a tensor; all of a kind at once.
        UsageError: No config is to be had, or the checkpoint is no Megatron checkpoint.
    """
    if checkpoint.index.format == "huggingface":
        raise UsageError(
            f"{checkpoint.index.location}: a Hugging Face snapshot already",
            next_step="Snapshots become Megatron checkpoints with `ckptguard import`.",
        )
    like = own_reference(checkpoint) if reference is None else read_reference(reference)
    if checkpoint.index.format == "torch":
        checkpoint = replace(checkpoint, index=to_global(checkpoint.index))
    _refuse_damage(checkpoint)
    structure = ask_structure(
        like.folder, like.config,
        None if like.tensors is None else {name: (dtype.name, shape) for name, (dtype, shape) in like.tensors.items()},
        Layout(), dtype=_model_dtype(checkpoint), pad_vocabulary_to=_vocabulary_rows(checkpoint),
    )  # fmt: skip
    table = like.tensors
    if table is None:
        table = {name: (BY_NAME[dtype], shape) for name, (dtype, shape) in structure.exported.items()}
    plan = plan_export(
        structure, checkpoint.index, table, keep_dtypes=like.tensors is not None, dtypes=options.dtypes, drop=options.drop
    )  # fmt: skip
    dropped = {held.key for held in plan.held if any(fnmatch.fnmatchcase(held.key, p) for p in options.drop)}
    notes = refuse_other_constants(checkpoint, plan, drop=dropped, threads=options.threads, progress=progress)
    refuse_losses(checkpoint, plan, threads=options.threads, progress=progress)
    if options.restore_fp8:
        plan = with_fp8(checkpoint, plan)
        refuse_other_values(checkpoint, plan, threads=options.threads, progress=progress)
    cut = shards.split(plan.tensors, options.max_shard_bytes)
    small, more = _small_files(like, plan, restored=options.restore_fp8)
    if options.restore_fp8 and f"{BRIDGE_FOLDER}/{CONFIG}" in checkpoint.files.listing:
        small[CONFIG] = checkpoint.files.read(f"{BRIDGE_FOLDER}/{CONFIG}")  # it names the quantisation
    if len(cut.names) > 1:
        small[shards.INDEX_NAME] = shards.index_bytes(cut)
    files = shards.target_files(cut, plan.tensors)
    identity = _identity(checkpoint, plan, small, cut, options)
    return PreparedExport(structure, like, plan, WritePlan(files, identity), small, (*notes, *more))


def run_export(
    checkpoint: Checkpoint,
    prepared: PreparedExport,
    dst: Path,
    options: ExportOptions,
    *,
    what: str,
    progress: Progress = SILENT,
) -> Exported:
    """Runs a planned export: writes, proves, seals, and only then gives the target its name.

    Args:
        checkpoint: The open Megatron checkpoint.
        prepared: From ``prepare_export``.
        dst: The new snapshot; absent or empty.
        options: As given to ``prepare_export``.
        what: The command in the user's words.
        progress: Hears of the bytes done.

    Raises:
        UsageError: The target is there already.
        DamagedError: What was written is not what the checkpoint holds; the target does not appear.
        EnvironmentFailedError: No room, or an error of the file system.
    """
    plan = prepared.plan
    filler = Filler(plan.tensors, plan.sources, checkpoint)
    with Staging.open(dst, prepared.write_plan.identity, what=what) as staging:
        digests = write(
            prepared.write_plan, staging, filler, memory_bytes=options.memory_bytes, threads=options.threads,
            progress=progress,
        )  # fmt: skip
        proved = None
        prints: Mapping[str, Fingerprint] = {}
        if options.verify:
            with distrusted_if_damaged(staging):
                proof = prove(checkpoint, plan, staging.path, options.threads, progress)
            proved, prints = proof.tensors, proof.written
        digests |= {name: digest_of(data) for name, data in prepared.small.items()}
        manifest = manifest_of(digests, prints, below="")
        staging.commit({**prepared.small, FILE_NAME: manifest.to_bytes()})
    written = sum(digest.size_bytes for digest in digests.values())
    return Exported(dst, manifest.seal, proved, written)


def _refuse_damage(checkpoint: Checkpoint) -> None:
    """The model must be whole; what is wrong with optimizer state does not matter here."""
    used = {name: entry for name, entry in checkpoint.index.tensors.items() if use_of(name) == "weights"}
    files = {chunk.span.file for entry in used.values() for chunk in entry.chunks}
    problems = [
        problem
        for problem in checks.check(checkpoint.index)
        if problem.is_damage and (problem.tensor in used if problem.tensor else problem.file in files)
    ]
    if problems:
        raise DamagedError(
            f"{checkpoint.index.location}: its model is damaged, so it is not exported: {checks.said(problems)}",
            problems=problems,
            next_step="Run `ckptguard verify` for the list; copy again what it names.",
        )


def _model_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most bytes of the stored model have."""
    totals: dict[str, int] = {"bfloat16": 0, "float16": 0, "float32": 0}
    for name, entry in checkpoint.index.tensors.items():
        if use_of(name) == "weights" and entry.dtype.name in totals:
            totals[entry.dtype.name] += entry.size_bytes
    return max(totals, key=lambda name: totals[name])


def _vocabulary_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the stored embedding, padding included."""
    for name, entry in checkpoint.index.tensors.items():
        if use_of(name) == "weights" and is_vocab(name) and entry.shape:
            return entry.shape[0]
    return None


def _small_files(like: Reference, plan: ExportPlan, *, restored: bool) -> tuple[dict[str, bytes], list[str]]:
    """Config, tokenizer and generation files; and a sentence for each thing that is not as in the reference."""
    small, notes = dict(like.files), []
    if like.quantised and not restored:
        notes.append(f"{like.quantised} tensors are quantised in {like.location}; they are written as bfloat16")
    totals: dict[str, int] = {}
    for made in plan.tensors:
        if made.dtype.kind == "float":
            totals[made.dtype.name] = totals.get(made.dtype.name, 0) + made.size_bytes
    main = max(totals, key=lambda name: totals[name])
    config = dict(like.config)
    for field in ("dtype", "torch_dtype"):
        if isinstance(config.get(field), str) and config[field] != main and (plan.rounded or like.tensors is None):
            notes.append(f"{CONFIG}: {field} is {main}, as the tensors are; it was {config[field]}")
            config[field] = main
            small[CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return small, notes


def _identity(
    checkpoint: Checkpoint, plan: ExportPlan, small: Mapping[str, bytes], cut: shards.Shards, options: ExportOptions
) -> str:
    """Of everything that the bytes depend on; a source file is told by its name, size and time of last change."""
    body = {
        "rules": 1,
        "sources": stamps(checkpoint, sorted({held.source.chunk.span.file for held in plan.held})),
        "files": {name: blake3(data).hexdigest() for name, data in sorted(small.items())},
        "shards": {file: list(names) for file, names in cut.names.items()},
        "tensors": blake3(repr(plan.tensors).encode()).hexdigest(),
        "verify": options.verify,
    }
    return blake3(json.dumps(body, sort_keys=True).encode()).hexdigest()
