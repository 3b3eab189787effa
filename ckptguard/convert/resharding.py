"""``ckptguard reshard``: from one layout or form to another, proved to hold the same state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptguard.convert.iterations import last_files
from ckptguard.convert.masters_sample import masters_note
from ckptguard.convert.output import Output
from ckptguard.convert.reshard_proof import Proof, merged, prove
from ckptguard.convert.reshard_source import (
    ReshardSource,
)
from ckptguard.convert.target import Target
from ckptguard.convert.uneven_target import (
    Uneven,
)
from ckptguard.core.plan import Made
from ckptguard.core.writing import WritePlan
from ckptguard.engine.filling import Filler
from ckptguard.engine.peers import Alone, Peers, barrier
from ckptguard.engine.proving import Summing
from ckptguard.engine.shared_staging import Gathered
from ckptguard.engine.staging import distrusted_if_damaged
from ckptguard.engine.targets import open_target
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.engine.write_digests import digest_of, manifest_of
from ckptguard.formats.remote import directory
from ckptguard.layout.layouts import Layout

TargetFormat = Literal["torch_dist", "torch", "dcp", "fsdp_dtensor"]
OptimizerChoice = Literal["keep", "dp_reshardable", "fully_reshardable", "none"]


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """What a user may choose.

    Attributes:
        layout: Target layout.
        optimizer: Form of the optimizer's state; "keep" is the source's where it still exists, else ``fully_reshardable``.
        args: Training args that the checkpoint does not store, or stores otherwise; the target stores them.
        to: Form of the target.
        files: How many files the tensors of ``dcp`` and ``fsdp_dtensor`` are cut into; None is one per rank.
        replica_tp: (data parallel replica, its TP) of those that lost ranks; each gets a checkpoint of its own.
        tp_for: (pattern of global names, degree) of parts with a TP or ETP of their own, in these replicas or, without
            any, in the whole target.
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
    replica_tp: tuple[tuple[int, int], ...] = ()
    tp_for: tuple[tuple[str, int], ...] = ()
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
        uneven: How its ranks came about, if they are not cut evenly.
        replicas: (data parallel replica, its checkpoint) of those whose TP is not the run's. Their files are in
            ``write_plan`` too, with their elements behind those of this one.
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
    uneven: Uneven | None = None
    replicas: tuple[tuple[int, ReshardPrepared], ...] = ()

    @property
    def checkpoints(self) -> tuple[ReshardPrepared, ...]:
        """All that are written: this one, and those of replicas."""
        return (self, *(one for _, one in self.replicas))

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        last = [{**one.output.small, **one.root_files} for one in self.checkpoints]
        small = sum(len(data) for files in last for data in files.values())
        return sum(file.size_bytes for file in self.write_plan.files) + small


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a resharding did.

    Attributes:
        path: The new root.
        seal: Of its manifest.
        proved: How many global tensors were proved to be in it; None if that was left out.
        written_bytes: Bytes of all files.
        notes: What was seen in the source on the way; sentences for the user.
    """

    path: Path
    seal: str
    proved: int | None
    written_bytes: int
    notes: tuple[str, ...] = ()


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
    source, peers, every = prepared.source, peers or Alone(), prepared.checkpoints
    chunks = [made for one in every for made in (*one.output.chunks, *one.side_files)]
    filler = Filler(chunks, source.state.sources, source.checkpoint)
    with open_target(dst, prepared.write_plan, what=what, peers=peers) as shared:
        # It adds up by name, and replicas have the same names.
        summing = Summing(filler) if options.verify and peers.world.size == 1 and len(every) == 1 else None
        with distrusted_if_damaged(shared):
            shared.write(
                summing or filler, memory_bytes=options.memory_bytes, threads=options.threads, progress=progress
            )
        proofs = [Proof({}, {}) for _ in every]
        if options.verify:
            barrier(peers, "written")
            for number, one in enumerate(every):
                files = directory(shared.path / one.folder)
                with distrusted_if_damaged(shared), files, peers.moving(progress) as moving:
                    proofs[number] = prove(
                        source, one.output, files, keeps_optimizer=one.target.optimizer is not None, summing=summing,
                        world=peers.world, threads=peers.world.threads(options.threads), progress=moving,
                    )  # fmt: skip
        gathered = shared.gather(json.dumps([proof.to_bytes().decode() for proof in proofs]).encode())
        done = None
        if gathered is not None:
            done, last = _sealed(prepared, gathered, dst, verified=options.verify)
            done = replace(done, notes=masters_note(source.state, source.checkpoint))
            shared.commit(last)
        shared.done()
    return done


def _sealed(
    prepared: ReshardPrepared, gathered: Gathered, dst: Path, *, verified: bool
) -> tuple[Resharded, dict[str, bytes]]:
    """What was done, and the last files of all checkpoints, with a manifest each; this one's come last."""
    results = [[Proof.from_bytes(text.encode()) for text in json.loads(result)] for result in gathered.results]
    last: dict[str, bytes] = {}
    digests = dict(gathered.digests)
    for number, one in reversed(list(enumerate(prepared.checkpoints))):
        digests |= {f"{one.folder}/{name}": digest_of(data) for name, data in one.output.small.items()}
        proof = merged([proofs[number] for proofs in results])
        manifest = manifest_of(digests, proof.stored, below=one.folder)
        last |= {**last_files(one.folder, one.output.small, manifest.to_bytes()), **one.root_files}
    written = sum(digest.size_bytes for digest in digests.values())
    return Resharded(dst, manifest.seal, len(proof.equal) if verified else None, written), last
