"""``ckptguard import``: from a snapshot to a Megatron checkpoint that was proved to hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blake3 import blake3

from ckptguard.convert.import_plan import ImportPlan, plan_import
from ckptguard.convert.iterations import folder_of, last_files, refuse_damage, stamps
from ckptguard.convert.placing import COMMON_STATE, placed, with_common_state
from ckptguard.convert.proof import prove
from ckptguard.convert.quantised import SCALES_FILE
from ckptguard.convert.shards import safetensors_file
from ckptguard.core.boxes import whole
from ckptguard.core.errors import DamagedError, UnsupportedError, UsageError
from ckptguard.core.pieces import of_source
from ckptguard.core.plan import Made
from ckptguard.core.problems import Problem
from ckptguard.core.writing import TargetFile, WritePlan
from ckptguard.engine.filling import Filler
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.proving import Summing
from ckptguard.engine.staging import Staging, distrusted_if_damaged
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.engine.write_digests import digest_of, manifest_of
from ckptguard.engine.writing import write
from ckptguard.fingerprint.manifest import FILE_NAME, FileDigest
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats import torch_dist_writer as writer
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.dcp import collector_paused, parse_table
from ckptguard.formats.zip_frames import empty_tensor_in_list
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.hf_structure import Structure, ask_structure

_NOT_CARRIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", "index.json", FILE_NAME)
_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a user may choose.

    Attributes:
        layout: Target layout.
        iteration: The step that the checkpoint is for; "release" starts a run at step 0.
        dtypes: (pattern of Megatron's names, dtype) pairs.
        drop: Patterns of the snapshot's names that may be left out.
        pad_vocabulary_to: The vocabulary's multiple per TP rank, instead of Bridge's.
        keep_scales: Keep the scales of fp8 weights beside the checkpoint, so that export can give the fp8 back.
        old_readers: Also write common.pt, which readers before Megatron Core 0.19 need.
        verify: Prove the result before it appears.
        memory_bytes: Most bytes of buffers.
        threads: Worker threads.
    """

    layout: Layout = field(default_factory=Layout)
    iteration: int | Literal["release"] = "release"
    dtypes: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    pad_vocabulary_to: int | None = None
    keep_scales: bool = False
    old_readers: bool = True
    verify: bool = True
    memory_bytes: int = 2 << 30
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """An import that has been planned and can be run.

    Attributes:
        structure: The model under the layout.
        plan: What is written.
        write_plan: The files, byte by byte.
        small: Files of the iteration directory that are written last, by name.
        root_files: Files of the root, by name.
        scales: Scales of quantised weights that are kept; after the plan's chunks in the order of elements.
        folder: Name of the iteration directory.
    """

    structure: Structure
    plan: ImportPlan
    write_plan: WritePlan
    small: Mapping[str, bytes]
    root_files: Mapping[str, bytes]
    scales: tuple[Made, ...]
    folder: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        small = sum(len(data) for data in {**self.small, **self.root_files}.values())
        return sum(file.size_bytes for file in self.write_plan.files) + small


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did.

    Attributes:
        path: The new root.
        seal: Of its manifest.
        proved: How many tensors of the snapshot were proved to be in it; None if that was left out.
        written_bytes: Bytes of all files.
    """

    path: Path
    seal: str
    proved: int | None
    written_bytes: int


def prepare(checkpoint: Checkpoint, model_id: str, options: ImportOptions, *, progress: Progress = SILENT) -> Prepared:
    """Plans an import; nothing is written.

    Args:
        checkpoint: An open snapshot.
        model_id: As the user named it; stored as ``hf_model_id``.
        options: The user's choices.
        progress: Hears of what is checked on the way.

    Raises:
        DamagedError: The snapshot is damaged or incomplete.
        UnsupportedError: Architecture, layout or a tensor; all of a kind at once.
    """
    _refuse_damage(checkpoint)
    tensors = checkpoint.index.tensors
    config = json.loads(checkpoint.files.read("config.json"))
    folder = folder_of(options.iteration)
    structure = ask_structure(
        checkpoint.files.root, config, {name: (e.dtype.name, e.shape) for name, e in tensors.items()}, options.layout,
        dtype=model_dtype(checkpoint), pad_vocabulary_to=options.pad_vocabulary_to,
        store_as={"hf_model_id": model_id, "iteration": options.iteration},
    )  # fmt: skip
    with collector_paused():  # a large model has a million values that live as long as the plan
        plan = plan_import(structure, tensors, dtypes=options.dtypes, drop=options.drop)
    _refuse_other_copies(checkpoint, plan, progress)
    common = structure.files["common_state"]
    files_placed = placed(
        with_common_state(plan.files), lambda name: common if name == COMMON_STATE else empty_tensor_in_list()
    )
    small = _carried(checkpoint)
    small |= {n.partition("/")[2]: data for n, data in structure.files.items() if n.startswith("iteration/")}
    small |= {
        ".metadata": writer.metadata_bytes([file for file, _ in files_placed]),
        "metadata.json": writer.config_bytes(),
    }
    if not options.old_readers:
        small.pop("common.pt", None)
    root = {n.partition("/")[2]: data for n, data in structure.files.items() if n.startswith("root/")}
    files = [TargetFile(f"{folder}/{file.name}", parts) for file, parts in files_placed]
    scales = _scales(plan, structure) if options.keep_scales else ()
    if scales:
        files.append(safetensors_file(f"{folder}/{SCALES_FILE}", scales, first_key=len(plan.chunks)))
    identity = _identity(checkpoint, plan, small, root, options)
    return Prepared(structure, plan, WritePlan(tuple(files), identity), small, root, scales, folder)


def run_import(
    checkpoint: Checkpoint,
    prepared: Prepared,
    dst: Path,
    options: ImportOptions,
    *,
    what: str,
    progress: Progress = SILENT,
) -> Imported:
    """Runs a planned import: writes, proves, seals, and only then gives the target its name.

    Args:
        checkpoint: The open snapshot.
        prepared: From ``prepare``.
        dst: The new root; absent or empty.
        options: As given to ``prepare``.
        what: The command in the user's words.
        progress: Hears of the bytes done.

    Raises:
        UsageError: The target is there already.
        DamagedError: What was written is not what the snapshot holds; the target does not appear.
        EnvironmentFailedError: No room, or an error of the file system.
    """
    plan, folder = prepared.plan, prepared.folder
    filler = Filler((*plan.chunks, *prepared.scales), plan.sources, checkpoint)
    with Staging.open(dst, prepared.write_plan.identity, what=what) as staging:
        summing = Summing(filler) if options.verify else None
        digests: dict[str, FileDigest] = write(
            prepared.write_plan, staging, summing or filler, memory_bytes=options.memory_bytes,
            threads=options.threads, progress=progress,
        )  # fmt: skip
        proved = None
        prints: Mapping[str, Fingerprint] = {}
        if summing is not None:
            table = parse_table(prepared.small[".metadata"], str(dst / folder / ".metadata"))
            known = summing.fingerprints() if summing.complete else None
            with distrusted_if_damaged(staging):
                proof = prove(checkpoint, plan, staging.path / folder, table.tensors, known, options.threads, progress)
            proved, prints = proof.tensors, proof.written
        digests |= {f"{folder}/{name}": digest_of(data) for name, data in prepared.small.items()}
        manifest = manifest_of(digests, prints, below=folder)
        staging.commit({**last_files(folder, prepared.small, manifest.to_bytes()), **prepared.root_files})
    written = sum(d.size_bytes for d in digests.values())
    return Imported(dst, manifest.seal, proved, written)


def model_dtype(checkpoint: Checkpoint) -> str:
    """The floating dtype that most of a snapshot's bytes have; bfloat16 for quantised ones."""
    totals: dict[str, int] = {}
    for entry in checkpoint.index.tensors.values():
        name = entry.dtype.name if entry.dtype.name in _FLOATS else "bfloat16"
        totals[name] = totals.get(name, 0) + entry.size_bytes
    return max(totals, key=lambda name: totals[name]) if totals else "bfloat16"


def _refuse_damage(checkpoint: Checkpoint) -> None:
    if checkpoint.index.format != "huggingface":
        raise UsageError(
            f"{checkpoint.index.location}: a {checkpoint.index.format} checkpoint, not a Hugging Face snapshot",
            next_step="Megatron checkpoints are exported with `ckptguard export`.",
        )
    refuse_damage(
        checkpoint, doing="imported", next_step="Run `ckptguard verify` for the list; download again what it names."
    )
    if "config.json" not in checkpoint.files.listing:
        raise DamagedError(
            f"{checkpoint.files.root}: no config.json, so the model is not known",
            problems=[Problem("missing-file", "no config.json", file="config.json")],
            next_step="Get it from where the tensors came from.",
        )


def _refuse_other_copies(checkpoint: Checkpoint, plan: ImportPlan, progress: Progress) -> None:
    """Tensors that Megatron keeps once must be equal wherever the snapshot repeats them."""
    wanted = {*plan.copies, *plan.copies.values()}
    prints = fingerprint_checkpoint(checkpoint, keep=lambda e: e.name in wanted, progress=progress) if wanted else {}
    wrong = [(copy, original) for copy, original in plan.copies.items() if prints[copy].sums != prints[original].sums]
    if wrong:
        raise UnsupportedError(
            "; ".join(f"{copy} differs from {original}, but the model's config ties them" for copy, original in wrong),
            next_step="Nothing was written. Correct config.json, or leave the tensor out knowingly with --drop.",
        )


def _scales(plan: ImportPlan, structure: Structure) -> tuple[Made, ...]:
    """The scales that fp8 weights were multiplied with, as tensors of their own.

    Raises:
        UnsupportedError: Weights of another fp8 than e4m3fn.
    """
    quantised = [item for item in structure.derived.values() if item.kind.startswith("fp8")]
    other = sorted({n for item in quantised for n in item.of[:1] if plan.sources[n].dtype.name != "float8_e4m3fn"})
    if other:
        raise UnsupportedError(
            f"--fp8 keep: {other[0]} is {plan.sources[other[0]].dtype}; only float8_e4m3fn can be kept"
        )
    names = {name for item in quantised for name in item.of[1:]}
    out = []
    for name in sorted(names):
        source = plan.sources[name]
        out.append(Made(name, source.dtype, source.shape, whole(source.shape), of_source(name, source.shape)))
    return tuple(out)


def _carried(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Config, tokenizer and generation files, as they are, in the folder where Megatron-Bridge keeps them."""
    names = [
        n for n in checkpoint.files.listing if "/" not in n and not n.endswith(_NOT_CARRIED) and not n.startswith(".")
    ]
    return {f"tokenizer/{name}": checkpoint.files.read(name) for name in names}


def _identity(
    checkpoint: Checkpoint,
    plan: ImportPlan,
    small: Mapping[str, bytes],
    root: Mapping[str, bytes],
    options: ImportOptions,
) -> str:
    """Of everything that the bytes depend on; a source file is told by its name, size and time of last change."""
    body = {
        "rules": 1,
        "sources": stamps(checkpoint, (n for n in checkpoint.files.listing if n.endswith(".safetensors"))),
        "files": {n: blake3(data).hexdigest() for n, data in sorted({**small, **root}.items())},
        "chunks": blake3(repr([(f.rank, f.objects, f.chunks) for f in plan.files]).encode()).hexdigest(),
        "verify": options.verify,
        "scales": options.keep_scales,
    }
    return blake3(json.dumps(body, sort_keys=True).encode()).hexdigest()


def dtype_rules(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(pattern, dtype) pairs from ``PATTERN=DTYPE`` or ``DTYPE``.

    Raises:
        UsageError: A dtype that weights cannot have.
    """
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    out = []
    for text in texts:
        pattern, _, name = text.rpartition("=")
        name = short.get(name, name)
        if name not in _FLOATS:
            raise UsageError(f"--dtype {text}: {name!r} is no dtype for weights; {', '.join(_FLOATS)} are")
        out.append((pattern or "*", name))
    return tuple(out)
