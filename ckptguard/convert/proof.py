"""The proof of an import: every tensor of the snapshot, put together again from the written files, has its fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptguard.convert.import_plan import ImportPlan
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.pieces import Assembly, invert, of_source
from ckptguard.core.plan import Made, Stored
from ckptguard.core.problems import Problem
from ckptguard.engine.filling import Filler
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.proving import different, fingerprints_of
from ckptguard.engine.workers import Following, Progress
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Reader
from ckptguard.formats.storage import Directory


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found equal.

    Attributes:
        tensors: Number of the snapshot's tensors.
        written: Fingerprints of the Megatron tensors as they were read back.
    """

    tensors: int
    written: Mapping[str, Fingerprint]


def prove(
    checkpoint: Checkpoint,
    plan: ImportPlan,
    folder: Path,
    written: Mapping[str, TensorEntry],
    known: Mapping[str, Fingerprint] | None,
    threads: int | None,
    progress: Progress,
) -> Proof:
    """Reads the written files back through the inverse mapping and compares with the snapshot.

    Args:
        checkpoint: The snapshot.
        plan: What was written.
        folder: Where it stands.
        written: The tensors as the index says that was written, not as the plan does.
        known: Their fingerprints, if they were added up while they were written.
        threads: Worker threads.
        progress: Hears of the bytes read.

    Raises:
        DamagedError: A tensor of the snapshot is not given back; names all.
    """
    sides = _Sides(plan, written)
    passes = 2 if known is not None else 3
    progress.start("proving", passes * sum(made.size_bytes for made in sides.expected))
    with Directory(folder) as files:
        index = Index("dcp", str(folder), written, {}, files.listing, {})
        target = Checkpoint(index, files, Reader(files))
        found = fingerprints_of(Filler(sides.found, sides.stored, target), threads=threads, progress=progress)
        prints = known or fingerprint_checkpoint(target, threads=threads, progress=Following(progress))
    expected = sides.expected_prints(checkpoint, threads, progress)
    wrong = different(expected, found)
    if wrong:
        problems = [Problem("changed", f"{name}: not given back by what was written", tensor=name) for name in wrong]
        raise DamagedError(
            f"{folder}: {len(wrong)} of {len(expected)} tensors of the snapshot are not what was written",
            problems=problems,
            next_step="What was written was removed. Check memory and disk, then run the command again.",
        )
    return Proof(len(expected), prints)


class _Sides:
    """The same tensors twice: from the snapshot, and from the written chunks."""

    def __init__(self, plan: ImportPlan, written: Mapping[str, TensorEntry]) -> None:
        by_box = {(name, chunk.box): (entry, chunk) for name, entry in written.items() for chunk in entry.chunks}
        self.stored = {}
        assemblies: dict[str, Assembly] = {}
        dtypes: dict[str, DType] = {}
        for chunk in plan.chunks:
            name = f"{chunk.name}{chunk.box}"
            self.stored[name] = Stored(*by_box[chunk.name, chunk.box])
            assemblies[name] = chunk.assembly
            dtypes |= dict.fromkeys(chunk.assembly.sources, chunk.dtype)
        shapes = {name: plan.sources[name].shape for name in dtypes}
        back = invert(assemblies, shapes)
        self.found = [
            Made(name, dtypes[name], shape, whole(shape), Assembly(shape, back[name])) for name, shape in shapes.items()
        ]
        self._sources = plan.sources
        self.expected = [
            Made(name, dtypes[name], shape, whole(shape), of_source(name, shape)) for name, shape in shapes.items()
        ]

    def expected_prints(
        self, checkpoint: Checkpoint, threads: int | None, progress: Progress
    ) -> dict[str, Fingerprint]:
        """Fingerprints of the snapshot's side: straight from the files where nothing is cast or computed."""
        plain = {
            made.name
            for made in self.expected
            if isinstance(source := self._sources[made.name], Stored) and source.dtype == made.dtype
        }
        rest = [made for made in self.expected if made.name not in plain]
        out = fingerprint_checkpoint(
            checkpoint, keep=lambda entry: entry.name in plain, threads=threads, progress=Following(progress)
        )
        if rest:
            out |= fingerprints_of(Filler(rest, self._sources, checkpoint), threads=threads, progress=progress)
        return out
