"""Where a plan is written: a directory that all ranks of a run share, or a URL. One interface for both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.writing import Fill, WritePlan
from ckptguard.engine.peers import Peers
from ckptguard.engine.remote_target import RemoteStaging, write_remote
from ckptguard.engine.shared_staging import Gathered, Shared
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.fingerprint.manifest import FileDigest
from ckptguard.formats.remote import RemotePath


class WriteTarget(Protocol):
    """A target that is being made. A context manager; the order of calls is write, gather, commit (the first rank), done.

    Attributes:
        path: Where its files stand until it is whole.
    """

    path: Path

    def __enter__(self) -> Self:
        """Begins."""

    def __exit__(self, *exc: object) -> None:
        """Keeps what is there for a later run."""

    def write(
        self, fill: Fill, *, memory_bytes: int = 2 << 30, threads: int | None = None, progress: Progress = SILENT
    ) -> Mapping[str, FileDigest]:
        """Writes this process's files."""

    def distrust(self) -> None:
        """Removes what was written, because it is not what it should be."""

    def gather(self, result: bytes) -> Gathered | None:
        """Waits for all processes; on the first one, what they wrote and found out."""

    def commit(self, last: Mapping[str, bytes]) -> None:
        """The first process: writes the small last files in their order and makes the target whole."""

    def done(self) -> None:
        """All processes, last."""


def open_target(dst: Path, plan: WritePlan, *, what: str, peers: Peers) -> WriteTarget:
    """Begins a target, or finds what an earlier run left of it.

    Args:
        dst: A path or a URL (``formats.remote.path_of``); nothing is there yet.
        plan: All files of the run, made by every process for itself.
        what: The run in the user's words, for messages of a later run.
        peers: The processes of the run.

    Raises:
        UsageError: Something is there already, or another run's leftovers are.
        UnsupportedError: Several processes and a URL.
        EnvironmentFailedError: The file system or the store refuses.
    """
    if not isinstance(dst, RemotePath):
        return Shared.open(dst, plan, what=what, peers=peers)
    if peers.world.size > 1:
        raise UnsupportedError(
            f"{dst}: {peers.world.size} processes cannot write one target at a URL",
            next_step="Start one process, which uploads several files at once, or give a target on a shared file system.",
        )
    return _AtUrl(dst, plan, what)


class _AtUrl:
    """A target at a URL."""

    def __init__(self, dst: RemotePath, plan: WritePlan, what: str) -> None:
        self._staging = RemoteStaging.open(dst, plan.identity, what=what)
        self._plan = plan
        self._digests: Mapping[str, FileDigest] = {}
        self.path: Path = self._staging.path

    def __enter__(self) -> Self:
        self._staging.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._staging.__exit__(*exc)

    def write(
        self, fill: Fill, *, memory_bytes: int = 2 << 30, threads: int | None = None, progress: Progress = SILENT
    ) -> Mapping[str, FileDigest]:
        """As ``WriteTarget.write``."""
        self._digests = write_remote(
            self._plan, self._staging, fill, memory_bytes=memory_bytes, threads=threads, progress=progress
        )
        return self._digests

    def distrust(self) -> None:
        """As ``WriteTarget.distrust``."""
        self._staging.distrust()

    def gather(self, result: bytes) -> Gathered | None:
        """As ``WriteTarget.gather``."""
        return Gathered(self._digests, (result,))

    def commit(self, last: Mapping[str, bytes]) -> None:
        """As ``WriteTarget.commit``."""
        self._staging.commit(last)

    def done(self) -> None:
        """Nobody else waits."""
