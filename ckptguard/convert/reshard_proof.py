"""The proof of a resharding: every global tensor, put together again from the written files, has its fingerprint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptguard.convert.canonical import State
from ckptguard.convert.output import Output
from ckptguard.convert.reshard_source import GET_AGAIN, ReshardSource
from ckptguard.convert.sources import split_state
from ckptguard.core.boxes import Box
from ckptguard.core.errors import DamagedError
from ckptguard.core.plan import Stored
from ckptguard.core.problems import Problem
from ckptguard.engine.contents import Place, check_crcs
from ckptguard.engine.filling import Filler
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.proving import Summing, different, fingerprints_of
from ckptguard.engine.ranks import World, dealt_out
from ckptguard.engine.structure import said
from ckptguard.engine.workers import Following, Progress
from ckptguard.fingerprint.manifest import FILE_NAME, parse
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.storage import Directory

Prints = Mapping[str, Fingerprint]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Proof:
    """What one process found out.

    Attributes:
        equal: Fingerprints of the global tensors that are equal in source and target.
        stored: Fingerprints of stored tensors, for the manifest.
    """

    equal: Prints
    stored: Prints

    def to_bytes(self) -> bytes:
        """For another process."""
        parts = [{n: [f.dtype, f.shape, f.sums] for n, f in side.items()} for side in (self.equal, self.stored)]
        return json.dumps(parts).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Proof:
        """The other way."""
        sides = [
            {n: Fingerprint(dtype, tuple(shape), (sums[0], sums[1])) for n, (dtype, shape, sums) in side.items()}
            for side in json.loads(data)
        ]
        return cls(*sides)


def merged(proofs: Sequence[Proof]) -> Proof:
    """What all processes found out together; each looked at other tensors."""
    return Proof(
        {name: value for proof in proofs for name, value in proof.equal.items()},
        {name: value for proof in proofs for name, value in proof.stored.items()},
    )


def prove(
    source: ReshardSource,
    output: Output,
    files: Directory,
    *,
    keeps_optimizer: bool,
    summing: Summing | None,
    world: World,
    threads: int | None,
    progress: Progress,
) -> Proof:
    """Compares source and written files, this process's share of the tensors.

    Args:
        source: What was to be written.
        output: As it was planned.
        files: The written files; they are read by what they say of themselves, not by the plan.
        keeps_optimizer: Whether the optimizer's state went along.
        summing: Fingerprints that were added up while all chunks were written, if this process wrote them all.
        world: The processes that share the work.
        threads: Worker threads.
        progress: Hears of the bytes read.

    Raises:
        DamagedError: A tensor is not what the source holds, or the source is not what it was when it was saved; names all.
    """
    state, written = output.read_back(files)
    shapes = _shapes(source.state, state, keeps_optimizer=keeps_optimizer)
    sizes = {name: source.state.tensors[name].numel for name in shapes}
    own = {name: shapes[name] for name in dealt_out(sizes, world.size)[world.rank]}
    known = sealed_prints(source.checkpoint)
    total_bytes = sum(chunk.size_bytes for chunk in output.chunks) // world.size
    kept = _kept(source.state, output, summing)
    unsealed = {
        name: shape
        for name, shape in own.items()
        if name not in kept and not _is_known(source.state, name, shape, known)
    }
    _refuse_damaged(source, unsealed, threads, progress)
    progress.start("proving", total_bytes if known else 2 * total_bytes)
    found = prints_of(state, written, own, threads=threads, progress=progress)
    rest = {name: shape for name, shape in own.items() if name not in kept}
    expected = prints_of(source.state, source.checkpoint, rest, known=known, threads=threads, progress=progress)
    expected |= {name: kept[name] for name in own if name in kept}
    wrong = different(expected, found)
    if wrong:
        raise DamagedError(
            f"{files.root}: {len(wrong)} tensors are not what {source.index.location} holds: {'; '.join(wrong[:3])}",
            problems=[Problem("changed", f"{name}: not what the source holds", tensor=name) for name in wrong],
            next_step="What was written was removed. Run `ckptguard verify` on the source, check memory and disk, then run"
            " the command again.",
        )
    stored = {n: f for n, f in found.items() if n in written.index.tensors and state.tensors[n].shape == f.shape}
    others = {n: entry.numel for n, entry in written.index.tensors.items() if not _is_straight(state, shapes, n)}
    left = set(dealt_out(others, world.size)[world.rank])
    return Proof(found, {**stored, **_added_up(left, summing, written, threads, progress)})


def _kept(state: State, output: Output, summing: Summing | None) -> Prints:
    """Fingerprints of tensors all of whose chunks went along uncut: added up as they were read, from the very same places.

    Their CRC-32 were compared then too (``ReshardSource.check_of``), so the source need not be read again for them.
    """
    if summing is None or not summing.complete:
        return {}
    cut = {made.name for made in output.chunks if state.uncut(made) is None}
    return {name: value for name, value in summing.fingerprints().items() if name not in cut and name in state.tensors}


def _is_known(state: State, name: str, shape: tuple[int, ...], known: Prints | None) -> bool:
    """Whether a tensor's fingerprint is one that the checkpoint was sealed with."""
    entry = state.tensors[name].entry
    return known is not None and entry is not None and entry.shape == shape and entry.name in known


def _refuse_damaged(source: ReshardSource, shapes: Shapes, threads: int | None, progress: Progress) -> None:
    """Raises DamagedError if the source's own CRC-32 say that its bytes changed: nobody else knows what they were."""
    checkpoint = source.checkpoint
    cells = (cell for name in shapes for cell in source.state.tensors[name].cells)
    used: dict[tuple[str, Box], Place] = {}
    for cell in cells:
        if isinstance(cell.of, Stored):
            used[cell.of.entry.name, cell.of.chunk.box] = (cell.of.entry, cell.of.chunk)
        else:
            for name in cell.of.sources:
                stored = source.state.sources[name]
                assert isinstance(stored, Stored)
                used[stored.entry.name, stored.chunk.box] = (stored.entry, stored.chunk)
    found = [(place, checkpoint.reader.locate(*place)) for place in used.values()]
    problems, _ = check_crcs(checkpoint, found, progress, threads=threads)
    if problems:
        raise DamagedError(
            f"{source.index.location}: damaged: {said(problems)}",
            problems=problems,
            next_step=f"What was written was removed. {GET_AGAIN}",
        )


def _is_straight(state: State, shapes: Shapes, name: str) -> bool:
    """Whether a stored tensor is a global one, compared in its whole shape."""
    return name in shapes and state.tensors[name].entry is not None and state.tensors[name].shape == shapes[name]


def _added_up(
    names: set[str], summing: Summing | None, written: Checkpoint, threads: int | None, progress: Progress
) -> Prints:
    """Fingerprints of stored tensors that are no global ones: buckets, and vocabularies with padding."""
    if not names:
        return {}
    if summing is not None and summing.complete:
        added = summing.fingerprints()
        if names <= added.keys():
            return {name: added[name] for name in names}
    return fingerprint_checkpoint(
        written, keep=lambda entry: entry.name in names, threads=threads, progress=Following(progress)
    )


def _shapes(source: State, target: State, *, keeps_optimizer: bool) -> dict[str, tuple[int, ...]]:
    """What both sides must have alike: every tensor, of a vocabulary the rows that both have."""
    out = {}
    for name, tensor in source.tensors.items():
        if keeps_optimizer or split_state(name) is None:
            out[name] = tuple(min(a, b) for a, b in zip(tensor.shape, target.tensors[name].shape, strict=True))
    return out


def prints_of(
    state: State,
    checkpoint: Checkpoint,
    shapes: Shapes,
    *,
    known: Prints | None = None,
    threads: int | None = None,
    progress: Progress,
) -> dict[str, Fingerprint]:
    """Fingerprints of global tensors, read from the files that they stand in.

    Tensors whose chunks are boxes of them are read as they are stored; those that are cut in another way, such as state in
    buckets, are put together first.

    Args:
        state: The checkpoint's tensors.
        checkpoint: The files.
        shapes: Which tensors, and how much of each.
        known: Fingerprints that the checkpoint was sealed with, by stored name; their tensors are not read again.
        threads: Worker threads.
        progress: Hears of the bytes read.
    """
    out: dict[str, Fingerprint] = {}
    straight: dict[str, str] = {}
    rest: list[str] = []
    for name, shape in shapes.items():
        entry = state.tensors[name].entry
        if entry is None or entry.shape != shape:
            rest.append(name)
        elif known is not None and _is_known(state, name, shape, known):
            out[name] = known[entry.name]
        else:
            straight[entry.name] = name
    found = fingerprint_checkpoint(
        checkpoint, keep=lambda entry: entry.name in straight, threads=threads, progress=Following(progress)
    )
    out |= {straight[stored]: value for stored, value in found.items()}
    if rest:
        made = [state.made(name, shapes[name]) for name in rest]
        out |= fingerprints_of(Filler(made, state.sources, checkpoint), threads=threads, progress=progress)
    return out


def sealed_prints(checkpoint: Checkpoint) -> Prints | None:
    """The fingerprints that a checkpoint was sealed with, by stored name; None if it was not."""
    if checkpoint.index.format == "torch" or FILE_NAME not in checkpoint.files.listing:
        return None
    return parse(checkpoint.files.read(FILE_NAME), str(checkpoint.files.root / FILE_NAME)).fingerprints or None
