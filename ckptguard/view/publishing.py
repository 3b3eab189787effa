"""How a view appears on a node: absent or whole, at every instant.

A view ``V`` is a symbolic link to a version in ``V.d`` beside it::

    view -> view.d/0000020-1f3a5c        the current version
    view.d/.lock                         held by the prepare that is at work; dies with its process
    view.d/.staging/                     what is to become a version; there is one, so that the next attempt finds its files
    view.d/.probe-<run>-<node>           seen by other nodes where they share this directory
    view.d/0000020-1f3a5c/               a version: read-only, with its record, ``ckptguard-view.json``
    view.d/0000020-1f3a5c.json           when it was published and confirmed, and what was current before

::

    site = Site(view)
    with site.hold():
        told = site.recover()
        ...  # files come into site.staging
        version = site.finish(agreement, node)
        version.publish()                # the link is swapped by one rename
        version.confirm()                # once every node has published; otherwise version.withdraw()

A version that was published and not confirmed is not known to be current on the other nodes: the next prepare takes it back.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.engine.write_calls import sync_directory, writing
from ckptguard.formats.remote import RemotePath, path_of
from ckptguard.formats.trackers import TRAIN_STATE, tracker_files
from ckptguard.view import records
from ckptguard.view.directories import REMOVING, free_bytes, make_writable, remove_all_but, remove_tree, seal
from ckptguard.view.locks import locked
from ckptguard.view.records import Publication
from ckptguard.view.values import Agreement, Step

_VERSION = re.compile(r"(?:\d{7,}|release)-[0-9a-f]{4,}")
_PROBE = ".probe-"


class Site:
    """Where a view stands on a node, or is to stand.

    Attributes:
        view: The link, absolute; only the directories above it are resolved.
        versions: The directory beside it that holds all versions.
        staging: What is to become a version.

    Args:
        view: As the user gave it.

    Raises:
        UsageError: Something stands there that ckptguard did not make.
    """

    def __init__(self, view: Path) -> None:
        if isinstance(view, RemotePath):
            raise UsageError(f"{view}: a view is a path, not a URL", next_step="Give a path on a disk of each node.")
        path = Path(os.path.abspath(view))
        self.view = Path(os.path.realpath(path.parent), path.name)
        if not path.name:
            raise UsageError(f"{view}: no name for a view", next_step="Give a path that can become a symbolic link.")
        self.versions = self.view.with_name(f"{self.view.name}.d")
        self.staging = self.versions / ".staging"
        if self.versions.exists() and not self.versions.is_dir():
            raise UsageError(
                f"{self.versions}: is a file; the versions of the view {self.view} are kept in a directory of that name",
                next_step="Give another path with --view, or move this file away.",
            )
        self.current()

    def current(self) -> Version | None:
        """The version that the link names, whether it is there or not; None without a link.

        Raises:
            UsageError: What stands there is not a link that ckptguard made.
        """
        try:
            target = os.readlink(self.view)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise EnvironmentFailedError(f"{self.view}: cannot be read: {error.strerror}") from error
            what = "a directory" if self.view.is_dir() else "a file"
            raise self._foreign(f"is {what}; a view is a symbolic link that ckptguard makes") from None
        folder, _, name = target.rpartition("/")
        if folder != self.versions.name or not _VERSION.fullmatch(name):
            raise self._foreign(f"is a symbolic link to {target}, which ckptguard did not make")
        return Version(self, name)

    def _foreign(self, what: str) -> UsageError:
        return UsageError(f"{self.view}: {what}", next_step="Give another path with --view, or move this one away.")

    def refuse_places(self, places: Sequence[str]) -> None:
        """Raises UsageError if the view would stand inside a place where checkpoints are looked for, or one inside it."""
        for place in places:
            path = path_of(place)
            if isinstance(path, RemotePath):
                continue
            path = Path(os.path.realpath(path))
            if self.view.is_relative_to(path):
                raise UsageError(
                    f"{self.view}: the view would stand inside {place}, where checkpoints are looked for",
                    next_step="Give a path beside it with --view.",
                )
            if path.is_relative_to(os.path.realpath(self.versions)):
                raise UsageError(
                    f"{place}: stands inside {self.versions}, which ckptguard fills itself",
                    next_step="Give the directory that training saves to.",
                )

    def free_bytes(self) -> int:
        """Bytes that an unprivileged user may still write where the versions are or will be."""
        return free_bytes(self.versions)

    def put_probe(self, run_id: str, node: int) -> None:
        """Leaves a sign by which other nodes of the run find out that they see this very directory."""
        self._make_directory()
        with writing(self.versions):
            (self.versions / f"{_PROBE}{run_id}-{node}").touch()

    def probes(self, run_id: str) -> tuple[int, ...]:
        """The nodes of the run whose probes stand here, ascending."""
        own = self.versions / f"{_PROBE}{secrets.token_hex(8)}"
        with writing(self.versions):
            # NFS shows a remembered listing for up to a minute (acdirmax). A change of our own shows it that others changed the
            # directory too: the answer carries the directory's state before the change (RFC 1813 section 2.6, wcc_data).
            own.touch()
            own.unlink()
            found = os.listdir(self.versions)
        mark = f"{_PROBE}{run_id}-"
        nodes = [name.removeprefix(mark) for name in found if name.startswith(mark)]
        return tuple(sorted(int(node) for node in nodes if node.isdigit()))

    def remove_probe(self, run_id: str, node: int) -> None:
        """Takes the sign away. May be called again."""
        with writing(self.versions):
            (self.versions / f"{_PROBE}{run_id}-{node}").unlink(missing_ok=True)

    def _make_directory(self) -> None:
        with writing(self.versions):
            self.versions.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other prepares, and ``prune``, away for as long as the block runs; ends with the process.

        Raises:
            EnvironmentFailedError: Another process is at work there; names it. Or the file system has no locks.
        """
        self._make_directory()
        with locked(self.versions / ".lock", f"is preparing or pruning {self.view}"):
            yield

    def names(self) -> tuple[str, ...]:
        """Names of the versions that are there, sorted."""
        try:
            found = os.listdir(self.versions)
        except FileNotFoundError:
            return ()
        return tuple(sorted(name for name in found if _VERSION.fullmatch(name) and (self.versions / name).is_dir()))

    def recover(self) -> tuple[str, ...]:
        """Takes back what an earlier prepare did not confirm, and makes the staging directory ready. Needs ``hold``.

        Returns:
            Sentences about what was taken back.
        """
        current = self.current()
        first, told = current.name if current else "", []
        # The current one first: the staging directory takes the files of one, and they are those of the latest attempt.
        for name in sorted(self.names(), key=lambda name: name != first):
            version = Version(self, name)
            if not version.publication().confirmed:
                version.withdraw()
                told.append(f"{version.path}: an earlier prepare ended before all nodes had it; it was taken back")
        self._remove_litter()
        with writing(self.staging):
            self.staging.mkdir(exist_ok=True)
            make_writable(self.staging)
        return tuple(told)

    def _remove_litter(self) -> None:
        """Removes what a killed process left of a removal, and what was written down about versions that are gone."""
        there = self.names()
        with writing(self.versions):
            for name in sorted(os.listdir(self.versions)):
                if name.startswith(REMOVING):
                    remove_tree(self.versions / name)
                elif name.endswith((".json", ".json.tmp")):
                    version = name.partition(".json")[0]
                    if _VERSION.fullmatch(version) and (name.endswith(".tmp") or version not in there):
                        (self.versions / name).unlink()

    def remove_probes(self) -> None:
        """Removes the probes of all runs."""
        with writing(self.versions):
            for path in self.versions.glob(f"{_PROBE}*"):
                path.unlink(missing_ok=True)

    def finish(self, agreement: Agreement, node: int) -> Version:
        """Makes the staging directory a version: only what the agreement names for the node, trackers, the record, read-only.

        Files are not touched, only directories: a file may be a hard link of the user's own.

        Raises:
            EnvironmentFailedError: A file that was staged is gone or has another size, or the file system refuses.
        """
        version = Version(self, version_name(agreement.step, agreement.id))
        names = frozenset(agreement.origins.get(node, {}))
        with writing(self.staging):
            remove_all_but(self.staging, names)
            self._require({name: agreement.files[name].size_bytes for name in sorted(names)})
            for name, data in _trackers(self.staging, agreement.step).items():
                records.put_file(self.staging / name, data)
            records.write_record(self.staging, agreement, node)
            # nvidia-resiliency-ext's manager saves into the directory that it loads from.
            seal(self.staging, writable=agreement.step.kind == "local")
            os.rename(self.staging, version.path)
            sync_directory(self.versions)
        return version

    def _require(self, sizes_bytes: Mapping[str, int]) -> None:
        for name, expected in sizes_bytes.items():
            path = self.staging / name
            found = f"has {path.lstat().st_size} bytes" if path.is_file() and not path.is_symlink() else "is gone"
            if found != f"has {expected} bytes":
                raise EnvironmentFailedError(
                    f"{path}: was staged with {expected} bytes and {found}: something else changes this directory",
                    next_step="Find what does, then run the same command again.",
                )

    def point(self, name: str) -> None:
        """Makes a version current by one rename; none if the name is "".

        Raises:
            UsageError: Something else has been put where the link stands.
            EnvironmentFailedError: The file system refuses.
        """
        current = self.current()
        temporary = self.view.with_name(f".{self.view.name}.next")
        with writing(self.view):
            temporary.unlink(missing_ok=True)
            if name:
                os.symlink(f"{self.versions.name}/{name}", temporary)
                os.replace(temporary, self.view)
            elif current:
                self.view.unlink()
            sync_directory(self.view.parent)


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a view, by its name in ``V.d``. All else about it is on the disk, where a later process finds it."""

    site: Site
    name: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.site.versions / self.name

    @property
    def _notes(self) -> Path:
        return self.site.versions / f"{self.name}.json"

    def publication(self) -> Publication:
        """What happened to it so far."""
        return records.read_publication(self._notes)

    def publish(self) -> None:
        """Makes it current. What was current is written down first, so that ``withdraw`` finds it after a crash too."""
        current = self.site.current()
        previous = current.name if current else ""
        records.write_publication(self._notes, Publication(previous, records.moment()))
        self.site.point(self.name)

    def confirm(self) -> None:
        """Writes down that every node has it: from now on it stays."""
        records.write_publication(self._notes, replace(self.publication(), confirmed=records.moment()))

    def withdraw(self) -> None:
        """Takes it back, however far it came; may be called again.

        The link names the version before it again if that was confirmed and is there, else it goes away. The files become the
        staging directory again, so that the next attempt keeps them.
        """
        if (current := self.site.current()) and current.name == self.name:
            self.site.point(self.fallback())
        with writing(self.path):
            if self.path.is_dir():
                make_writable(self.path)
                if self.site.staging.exists():
                    remove_tree(self.path)
                else:
                    os.rename(self.path, self.site.staging)
            self._notes.unlink(missing_ok=True)
            sync_directory(self.site.versions)

    def fallback(self) -> str:
        """Name of the version that becomes current if this one is taken back; "" for none."""
        previous = Version(self.site, self.publication().previous)
        return previous.name if previous.name in self.site.names() and previous.publication().confirmed else ""

    def remove(self) -> None:
        """Removes it for good. Not for the current one."""
        remove_tree(self.path)
        with writing(self._notes):
            self._notes.unlink(missing_ok=True)


def version_name(step: Step, agreed: str) -> str:
    """The name of a version: the step's number and the agreement's id."""
    name = f"{step.number.zfill(7) if step.number.isdigit() else step.number}-{agreed}"
    if not _VERSION.fullmatch(name):
        raise ValueError(f"{name!r}: not the name of a version")
    return name


def _trackers(root: Path, step: Step) -> dict[str, bytes]:
    """Tracker files for a step; none for a local one, whose files name their iteration."""
    if step.kind == "local":
        return {}
    state = root / step.folder / TRAIN_STATE
    return tracker_files(step.number, state.read_bytes() if state.is_file() else None)
