"""The proofs of an export: before it, that nothing is lost; after it, that the files give every stored chunk back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckptguard.convert.export_plan import ExportPlan, Held, seen
from ckptguard.convert.quantised import dequantised
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.plan import Made, Source, Stored
from ckptguard.core.problems import Problem
from ckptguard.engine import computing
from ckptguard.engine.filling import Array, Filler
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.padding import is_vocab
from ckptguard.engine.proving import different, fingerprints_of
from ckptguard.engine.workers import SILENT, Following, Progress
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Reader
from ckptguard.formats.hf import HuggingFace

_SHOWN = 6
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found equal.

    Attributes:
        tensors: Number of the snapshot's tensors.
        written: Their fingerprints as they were read back.
    """

    tensors: int
    written: Mapping[str, Fingerprint]


def refuse_other_constants(
    checkpoint: Checkpoint, plan: ExportPlan, *, drop: Iterable[str], threads: int | None, progress: Progress
) -> list[str]:
    """Looks at what the snapshot has no place for: it must hold nothing.

    Args:
        checkpoint: The Megatron checkpoint.
        plan: The export.
        drop: Names of the model's tensors that may hold anything.
        threads: Worker threads.
        progress: Hears of the bytes read.

    Returns:
        A sentence for each tensor with vocabulary padding that is not zero: training fills it, and nothing reads it.

    Raises:
        UnsupportedError: A tensor holds values of its own where an import puts a constant; names all.
    """
    names = {"": None, **plan.constants}
    chosen = [held for held in plan.held if any(piece.source in names for piece in held.assembly.pieces)]
    expected = [_made(held, held.source.dtype, names, own=False) for held in chosen]
    found = [_made(held, held.source.dtype, names, own=True) for held in chosen]
    sources: dict[str, Source] = {**plan.sources, **plan.constants}
    progress.start("checking padding", 2 * sum(made.size_bytes for made in found))
    sums = [
        fingerprints_of(Filler(side, sources, checkpoint), threads=threads, progress=progress)
        for side in (expected, found)
    ]
    wrong = set(different(*sums))
    keys = dict.fromkeys(held.key for held in chosen if held.name in wrong)
    padded = [key for key in keys if is_vocab(key)]
    lost = [key for key in keys if not is_vocab(key) and key not in drop]
    if lost:
        raise UnsupportedError(
            f"{len(lost)} tensors hold values that the Hugging Face model has no place for: {', '.join(lost[:_SHOWN])}",
            next_step="Nothing was written. Leave them out knowingly with --drop PATTERN.",
        )
    return [f"{key}: the rows that pad the vocabulary are not zero; they are left out" for key in padded]


def refuse_losses(checkpoint: Checkpoint, plan: ExportPlan, *, threads: int | None, progress: Progress) -> None:
    """Reads the tensors that get a narrower dtype: their values must all fit into it.

    Raises:
        UnsupportedError: Some would lose bits; names all.
    """
    by_name = {made.name: made for made in plan.tensors}
    narrow = {name: by_name[name] for name in plan.narrowed}
    wide = [replace(made, dtype=_widest(made, plan.sources)) for made in narrow.values()]
    if not wide:
        return
    progress.start("checking dtypes", sum(made.size_bytes for made in wide))
    checking = _Checking(wide, plan, checkpoint, {name: made.dtype for name, made in narrow.items()})
    fingerprints_of(checking, threads=threads, progress=progress)
    if checking.lossy:
        first, *_ = names = sorted(checking.lossy)
        stored = next(made.dtype for made in wide if made.name == first)
        raise UnsupportedError(
            f"{len(names)} tensors would lose bits, such as {first}: stored as {stored}, {narrow[first].dtype} in the snapshot",
            next_step="Nothing was written. Round them knowingly with --dtype, such as --dtype "
            f"{narrow[first].dtype}, or keep them with --dtype {stored}.",
        )


def _widest(made: Made, sources: Mapping[str, Source]) -> DType:
    """In which the values of all its pieces fit."""
    stored = {sources[piece.source].dtype for piece in made.assembly.pieces}
    return stored.pop() if len(stored) == 1 else BY_NAME["float32"]


class _Checking(Filler):
    """Fills as ever, and notes whose values do not survive a cast there and back."""

    def __init__(
        self, chunks: list[Made], plan: ExportPlan, checkpoint: Checkpoint, narrow: Mapping[str, DType]
    ) -> None:
        super().__init__(chunks, plan.sources, checkpoint)
        self.lossy: set[str] = set()
        self._narrow = narrow
        self._lock = threading.Lock()

    def __call__(self, key: int, begin_bytes: int, out: memoryview, /) -> None:
        super().__call__(key, begin_bytes, out)
        made = self.chunks[key]
        values: Array = np.frombuffer(out, _WORDS[made.dtype.itemsize])
        small = computing.cast(values, made.dtype, self._narrow[made.name])
        if not np.array_equal(computing.cast(small, self._narrow[made.name], made.dtype), values):
            with self._lock:
                self.lossy.add(made.name)


def prove(
    checkpoint: Checkpoint, plan: ExportPlan, folder: Path, threads: int | None, progress: Progress = SILENT
) -> Proof:
    """Reads the written files back, puts every stored chunk together from them, and compares.

    Args:
        checkpoint: The Megatron checkpoint.
        plan: What was written.
        folder: Where it stands.
        threads: Worker threads.
        progress: Hears of the bytes read.

    Raises:
        DamagedError: A stored chunk is not given back; names all.
    """
    names = {made.name: None for made in plan.tensors}
    with HuggingFace().open_files(folder) as files:
        written = Checkpoint(HuggingFace().read_index(files), files, Reader(files))
        tensors = written.index.tensors
        told = {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
        if told != {made.name: (made.dtype, made.shape) for made in plan.tensors}:
            raise _not_equal(folder, sorted(told.keys() ^ names.keys()) or sorted(names))
        chosen = [held for held in plan.held if any(name in names for name in held.assembly.sources)]
        found = [_made(held, held.dtype, names, own=False) for held in chosen]
        progress.start("proving", 2 * sum(made.size_bytes for made in found) + plan.total_bytes)
        sources = dequantised(plan.tensors, {name: Stored(entry, *entry.chunks) for name, entry in tensors.items()})
        back = fingerprints_of(Filler(found, sources, written), threads=threads, progress=progress)
        prints = fingerprint_checkpoint(written, threads=threads, progress=Following(progress))
    expected = [_made(held, held.dtype, names, own=True) for held in chosen]
    held = fingerprints_of(Filler(expected, plan.sources, checkpoint), threads=threads, progress=progress)
    wrong = different(held, back)
    wrong += [copy for copy, original in plan.copies.items() if prints[copy] != prints[original]]
    if wrong:
        raise _not_equal(folder, wrong)
    return Proof(len(prints), prints)


def _made(held: Held, dtype: DType, names: Mapping[str, object], *, own: bool) -> Made:
    shape = held.assembly.shape
    return Made(held.name, dtype, shape, whole(shape), seen(held, names, own=own))


def _not_equal(folder: Path, wrong: list[str]) -> DamagedError:
    return DamagedError(
        f"{folder}: {len(wrong)} stored chunks are not given back by what was written",
        problems=[Problem("changed", f"{name}: not given back by what was written", tensor=name) for name in wrong],
        next_step="What was written was removed. Check memory and disk, then run the command again.",
    )
