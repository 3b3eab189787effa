"""The directory in which a target is made, and its becoming the target: absent or whole, whatever happens in between.

``DST.partial-<id>/`` stands beside ``DST`` and holds all of it as it will be. Large files come first, each noted in the journal
once it is on the disk; small files without which the whole is not readable (index, tracker, manifest) come last; then one
rename. ``<id>`` follows from the run's identity, so that the same command finds what it left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

from blake3 import blake3

from ckptguard.core.errors import DamagedError, EnvironmentFailedError, UsageError
from ckptguard.core.writing import check_relative
from ckptguard.engine.digests import digest_files
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.engine.write_calls import create, store, sync_directory, writing
from ckptguard.engine.write_journal import NAME, OF_RANKS, Journal, header
from ckptguard.fingerprint.manifest import FileDigest
from ckptguard.formats.storage import Directory

_MARK = ".partial-"


class Staging:
    """A locked staging directory. Use as a context manager; leaving it keeps the directory for a later run.

    Attributes:
        path: The directory.
        target: What it will become.
        identity: Of the run that it belongs to.
    """

    def __init__(self, path: Path, target: Path, identity: str, journal: Journal) -> None:
        self.path = path
        self.target = target
        self.identity = identity
        self._journal = journal
        self._noted: dict[str, FileDigest] = {}

    @classmethod
    def open(cls, dst: Path, identity: str, *, what: str) -> Self:
        """Makes or finds the staging directory of a target.

        Args:
            dst: The target; absent or an empty directory.
            identity: Digest of everything that the result depends on.
            what: The run in the user's words (``import of /models/m``), for messages of a later run.

        Raises:
            UsageError: The target is there already, another run's leftovers are, or another process is at work.
            EnvironmentFailedError: The file system refuses.
        """
        target = Path(os.path.realpath(dst))
        refuse_present(target)
        path = staging_path(target, identity)
        _refuse_others(target, path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        staging = cls(path, target, identity, Journal.open(path / NAME))
        try:
            staging._noted = staging._journal.begin(identity, what)
            staging.take_over()
        except BaseException:
            staging.close()
            raise
        return staging

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the lock back."""
        self._journal.close()

    def resume(
        self, sizes_bytes: Mapping[str, int], *, progress: Progress = SILENT, threads: int | None = None
    ) -> dict[str, FileDigest]:
        """Finished files of an earlier run, read again and found to be what the journal says. Removes all others.

        Args:
            sizes_bytes: Size of every planned file, by path.
            progress: Hears of the bytes read.
            threads: Worker threads.
        """
        noted = self._noted_as_planned(sizes_bytes)
        self._remove_all_but(noted)
        whole = self._whole(noted, progress, threads)
        self._remove_all_but(whole)
        return whole

    def _noted_as_planned(self, sizes_bytes: Mapping[str, int]) -> dict[str, FileDigest]:
        return {name: digest for name, digest in self._noted.items() if sizes_bytes.get(name) == digest.size_bytes}

    def _whole(self, noted: Mapping[str, FileDigest], progress: Progress, threads: int | None) -> dict[str, FileDigest]:
        """Those files that are there and, read again, have the noted digests."""
        with Directory(self.path) as files:
            there = {name: noted[name] for name in noted if name in files.listing}
            there = {name: digest for name, digest in there.items() if files.size(name) == digest.size_bytes}
            if there:
                progress.start("checking what was written before", sum(d.size_bytes for d in there.values()))
            wanted = [(name, digest.block_bytes) for name, digest in there.items()]
            outcomes = list(digest_files(files, wanted, progress, blocks=False, threads=threads))
        return {o.name: there[o.name] for o in outcomes if o.error is None and o.blake3 == there[o.name].blake3}

    def take_over(self) -> None:
        """Notes here what the journals of single ranks note (``engine/shared_staging.py``), and removes those.

        Raises:
            UsageError: A rank is still at work.
        """
        for path in sorted(self.path.glob(OF_RANKS)):
            journal = Journal.open(path)
            try:
                noted = journal.begin(self.identity, "")
            finally:
                journal.close()  # before it is removed: NFS keeps open files under another name
            for name, digest in noted.items():
                if self._noted.get(name) != digest:
                    self._journal.add(name, digest)
            self._noted |= noted
            self._journal.sync()
            with writing(path):
                path.unlink()

    def require_space(self, needed_bytes: int) -> None:
        """Raises EnvironmentFailedError if the file system has less room than that."""
        with writing(self.path, needed_bytes):
            found = os.statvfs(self.path)
        free_bytes = found.f_bavail * found.f_frsize
        if needed_bytes > free_bytes:
            raise EnvironmentFailedError(
                f"{self.path.parent}: {needed_bytes} bytes are needed, {free_bytes} are free",
                next_step="Free space there, then run the same command again; or give another target.",
            )

    def note(self, name: str, digest: FileDigest) -> None:
        """Records a finished file, once it is on the disk. Thread-safe."""
        self._journal.add(name, digest)

    def distrust(self) -> None:
        """Removes everything: what was written is not what it should be, and no later run may go on from it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def commit(self, last: Mapping[str, bytes]) -> None:
        """Writes the small last files in the order given, then makes the directory the target by one rename.

        Args:
            last: Content by path relative to the root; what makes the whole readable comes last.

        Raises:
            UsageError: The target was made by somebody else in the meantime.
            EnvironmentFailedError: The file system refuses. In both cases the staging directory stays as it is.
        """
        refuse_present(self.target)
        for name, data in last.items():
            check_relative(name)
            path = self.path / name
            with writing(path, len(data)):
                handle = create(path, len(data))
                try:
                    store(handle, memoryview(data), 0)
                    os.fsync(handle)
                finally:
                    os.close(handle)
                sync_directory(path.parent)
        with writing(self.target):
            for folder, _, _ in os.walk(self.path, topdown=False):
                sync_directory(Path(folder))
            (self.path / NAME).unlink()
            sync_directory(self.path)
            os.rename(self.path, self.target)
            sync_directory(self.target.parent)

    def _remove_all_but(self, kept: Mapping[str, FileDigest]) -> None:
        """Removes files, so that what a broken-off run left neither takes space nor stays in the result."""
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                path = Path(folder, name)
                if path.relative_to(self.path).as_posix() not in kept and path != self.path / NAME:
                    with writing(path):
                        path.unlink()
            if not os.listdir(folder):
                Path(folder).rmdir()


def staging_path(target: Path, identity: str) -> Path:
    """Where a target is made: beside it, under a name that follows from the run's identity."""
    return target.with_name(f"{target.name}{_MARK}{blake3(identity.encode()).hexdigest()[:12]}")


class Distrusting(Protocol):
    """What is being written, and can be given up."""

    def distrust(self) -> None:
        """Removes everything that was written."""


@contextmanager
def distrusted_if_damaged(target: Distrusting) -> Iterator[None]:
    """What was written is removed if the block finds that it is not what it should be: a rerun must not go on from it."""
    try:
        yield
    except DamagedError:
        target.distrust()
        raise


def refuse_present(target: Path) -> None:
    """Raises UsageError if something stands where a target is to be made."""
    if target.is_mount():
        raise UsageError(
            f"{target}: is a mount point", next_step="Give a directory inside it, which must not exist yet."
        )
    try:
        present = next(target.iterdir(), None) is not None
    except FileNotFoundError:
        return
    except NotADirectoryError:
        present = True
    if present:
        raise UsageError(
            f"{target}: is there already; only an absent or empty directory can become the target",
            next_step="Give another target, or move this one away.",
        )


def _refuse_others(target: Path, own: Path) -> None:
    """Raises UsageError if a run with other arguments left its staging directory beside the target."""
    for other in sorted(target.parent.glob("*")) if target.parent.is_dir() else ():
        if other.name.startswith(target.name + _MARK) and other != own:
            what = header(other / NAME).get("what", "another run")
            raise UsageError(
                f"{other}: left by {what}, which was started with other arguments and has not ended",
                next_step="Run that one again with its arguments, or remove that directory.",
            )
