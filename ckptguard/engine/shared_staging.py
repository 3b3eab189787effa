"""One staging directory that all ranks of a run write into, each its own files, and that rank 0 commits.

::

    with joined(world()) as peers:  # around all work of the command
        ...  # every rank plans by itself
        with Shared.open(dst, plan, what="reshard of /ckpt/run", peers=peers) as shared:
            shared.write(fill)
            gathered = shared.gather(result)  # the barrier
            if gathered is not None:
                shared.commit(last_files)
            shared.done()

With one process it is a plain ``Staging``. With several, rank 0 holds the lock that guards the run: locks of other machines may
not be seen. Each other rank notes its files in a journal of its own, which rank 0 takes over when the rank is done, or when a
later run finds it. So a run that was broken off goes on with any number of ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.core.writing import Fill, WritePlan
from ckptguard.engine.peers import Peers
from ckptguard.engine.ranks import World, share
from ckptguard.engine.staging import Staging, staging_path
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.engine.write_calls import writing
from ckptguard.engine.write_journal import NAME, Journal, conclusion, entries, finished, is_marked, of_rank
from ckptguard.engine.writing import write
from ckptguard.fingerprint.manifest import FileDigest

VISIBLE_SECONDS = 60.0  # NFS shows what another machine made after at most 60 s (acdirmax)
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Gathered:
    """What rank 0 knows once all files are written.

    Attributes:
        digests: Of all files, in the plan's order.
        results: What each rank gave to ``Shared.gather``, by rank.
    """

    digests: Mapping[str, FileDigest]
    results: tuple[bytes, ...]


class RankStaging(Staging):
    """A staging directory in which this process writes some of the files and other processes the others."""

    def prepare(self, sizes_bytes: Mapping[str, int]) -> str:
        """Rank 0: removes what no journal notes and makes the directory known.

        Args:
            sizes_bytes: Size of every planned file, of all ranks.

        Returns:
            A token for ``join``: who finds it sees this very directory.

        Raises:
            EnvironmentFailedError: Too little room on the disk for all that is left to write.
        """
        self._noted = self._noted_as_planned(sizes_bytes)
        self._remove_all_but(self._noted)
        self.require_space(sum(sizes_bytes.values()) - sum(digest.size_bytes for digest in self._noted.values()))
        token = secrets.token_hex(8)
        self._journal.mark(token)
        return token

    @classmethod
    def join(cls, dst: Path, identity: str, *, what: str, world: World, token: str) -> Self:
        """Any other rank: finds the directory that rank 0 prepared.

        Raises:
            EnvironmentFailedError: It is not to be seen from here.
            UsageError: A process of an earlier run is still at work.
        """
        target = Path(os.path.realpath(dst))
        path = staging_path(target, identity)
        lines = _once_seen(
            lambda: lines if is_marked(lines := entries(path / NAME), token) else None,
            f"{path}: made by rank 0, and not to be seen from rank {world.rank} ({socket.gethostname()})",
        )
        staging = cls(path, target, identity, Journal.open(path / of_rank(world.rank)))
        try:
            staging._journal.begin(identity, what)
            staging._noted = finished(lines)
        except BaseException:
            staging.close()
            raise
        return staging

    def resume(
        self, sizes_bytes: Mapping[str, int], *, progress: Progress = SILENT, threads: int | None = None
    ) -> dict[str, FileDigest]:
        """Finished files of an earlier run among those given, as in ``Staging``. Files of other ranks are left alone."""
        whole = self._whole(self._noted_as_planned(sizes_bytes), progress, threads)
        for name in sizes_bytes.keys() - whole.keys():
            with writing(self.path / name):
                (self.path / name).unlink(missing_ok=True)
        return whole

    def conclude(self, result: bytes) -> None:
        """Any rank but 0: the last line of its journal, which rank 0 may have from now on."""
        self._journal.conclude(result)
        self._journal.close()

    def collect(self, sizes_bytes: Mapping[str, int], own: Mapping[str, FileDigest], ranks: range) -> Gathered:
        """Rank 0: what the journals of the other ranks hold, taken over into its own. ``Gathered`` lacks rank 0's result."""
        results = []
        for rank in ranks:
            path = self.path / of_rank(rank)
            look = partial(_concluded, path)
            results.append(_once_seen(look, f"{path}: finished by rank {rank}, and not to be seen from rank 0"))
        self.take_over()
        known = {**self._noted_as_planned(sizes_bytes), **own}
        for name, size_bytes in sizes_bytes.items():
            if name not in known:
                raise EnvironmentFailedError(f"{self.path / name}: noted by no rank as written")
            path = self.path / name
            _once_seen(
                partial(_present, path, size_bytes),
                f"{path}: noted as written with {size_bytes} bytes, and not to be seen so from rank 0",
            )
        return Gathered({name: known[name] for name in sizes_bytes}, tuple(results))


class Shared:
    """A staging directory of all ranks of a run, seen from one of them. Leaving it keeps the directory for a later run.

    Attributes:
        path: The staging directory.
        own: The plan of the files that this rank writes.
        first: Whether this is the rank that commits.
    """

    def __init__(self, staging: Staging, plan: WritePlan, peers: Peers) -> None:
        self.path = staging.path
        self.own = share(plan, peers.world.size)[peers.world.rank]
        self.first = peers.world.first
        self._staging = staging
        self._plan = plan
        self._peers = peers
        self._digests: dict[str, FileDigest] = {}

    @classmethod
    def open(cls, dst: Path, plan: WritePlan, *, what: str, peers: Peers) -> Self:
        """Makes or finds the staging directory, once all ranks are seen to have made the same plan.

        Args:
            dst: The target; absent or an empty directory.
            plan: All files of the run, made by every rank for itself.
            what: The run in the user's words, for messages of a later run.
            peers: From ``peers.joined``.

        Raises:
            UsageError: As ``Staging.open``; or this rank's plan is not rank 0's.
            EnvironmentFailedError: The file system refuses, has too little room, or is not one for all ranks.
        """
        world = peers.world
        if world.size == 1:
            return cls(Staging.open(dst, plan.identity, what=what), plan, peers)
        _agree(plan, peers)
        if world.first:
            staging = RankStaging.open(dst, plan.identity, what=what)
            try:
                peers.tell("staging", staging.prepare(_sizes(plan)))
            except BaseException:
                staging.close()
                raise
        else:
            staging = RankStaging.join(dst, plan.identity, what=what, world=world, token=peers.hear("staging"))
        return cls(staging, plan, peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._staging.close()

    def write(
        self, fill: Fill, *, memory_bytes: int = 2 << 30, threads: int | None = None, progress: Progress = SILENT
    ) -> dict[str, FileDigest]:
        """Writes this rank's files, as ``engine.writing.write`` does.

        Args:
            fill: Provides the elements.
            memory_bytes: Most bytes of buffers of this rank.
            threads: Worker threads of this rank; a fair part of the machine's cores by default.
            progress: Hears of this rank's bytes.

        Returns:
            Digests of this rank's files, in the plan's order.

        Raises:
            UsageError: The memory does not hold one step of the elements.
            EnvironmentFailedError: Too little room, or an error of the file system.
        """
        threads = self._peers.world.threads(threads)
        with self._peers.moving(progress) as moving:
            self._digests = write(
                self.own, self._staging, fill, memory_bytes=memory_bytes, threads=threads, progress=moving
            )
        return self._digests

    def distrust(self) -> None:
        """As ``Staging.distrust``; other ranks end when this one does."""
        self._staging.distrust()

    def gather(self, result: bytes) -> Gathered | None:
        """Waits until every rank has written its files and come here.

        Args:
            result: What this rank found out, for rank 0: a few megabytes at most, since rank 0 holds those of all ranks.

        Returns:
            On rank 0 the digests of all files and all ranks' results; None on the others.
        """
        staging, world = self._staging, self._peers.world
        if not isinstance(staging, RankStaging):
            return Gathered(self._digests, (result,))
        if not world.first:
            staging.conclude(result)
            self._peers.arrive("gathered")
            return None
        self._peers.await_all("gathered")
        gathered = staging.collect(_sizes(self._plan), self._digests, range(1, world.size))
        return Gathered(gathered.digests, (result, *gathered.results))

    def commit(self, last: Mapping[str, bytes]) -> None:
        """Rank 0, after ``gather``: ``Staging.commit``. Not broken off by the end of other ranks, who have done their part."""
        assert self.first
        self._peers.undisturbed()
        self._staging.commit(last)

    def done(self) -> None:
        """All ranks, last: returns once rank 0 has committed."""
        if self.first:
            self._peers.tell("done")
        else:
            self._peers.hear("done")


def _agree(plan: WritePlan, peers: Peers) -> None:
    """Raises UsageError on a rank whose plan is not rank 0's; rank 0 goes on when all agree."""
    own = plan.identity
    if peers.world.first:
        peers.tell("identity", own)
        peers.await_all("agreed")
        return
    first = peers.hear("identity")
    if first != own:
        raise UsageError(
            f"rank {peers.world.rank} ({socket.gethostname()}) plans {own}, and rank 0 plans {first}: the ranks were started"
            " with different arguments or versions, or see different sources",
            next_step="Start the same command with the same version of ckptguard on all ranks, once the source is complete.",
        )
    peers.arrive("agreed")


def _sizes(plan: WritePlan) -> dict[str, int]:
    return {file.path: file.size_bytes for file in plan.files}


def _concluded(path: Path) -> bytes | None:
    return conclusion(entries(path))


def _present(path: Path, size_bytes: int) -> bool | None:
    """True if a file is there with that size, else None."""
    try:
        return path.stat().st_size == size_bytes or None
    except FileNotFoundError:
        return None


def _once_seen[Seen](look: Callable[[], Seen | None], message: str) -> Seen:
    """What ``look`` sees, as soon as it sees something: shared file systems show other machines' files late."""
    until = time.monotonic() + VISIBLE_SECONDS
    while (seen := look()) is None:
        if time.monotonic() > until:
            raise EnvironmentFailedError(
                message, next_step="Give a target on a file system that all ranks share, under the same path."
            )
        time.sleep(_POLL_SECONDS)
    return seen
