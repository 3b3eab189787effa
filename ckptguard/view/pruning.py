"""Which versions of a view a node has, and removing those that are not needed any more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptguard.core.errors import DamagedError, UsageError
from ckptguard.engine.write_calls import writing
from ckptguard.view.directories import remove_tree
from ckptguard.view.publishing import Site, Version
from ckptguard.view.records import NAME, Publication, read_record
from ckptguard.view.values import Step


@dataclass(frozen=True, slots=True)
class View:
    """A version of a view on this node, or the staging directory that an earlier prepare left.

    Attributes:
        path: Its directory.
        current: Whether the view's link names it.
        publication: When it was published and confirmed.
        size_bytes: Size of its files, each counted once.
        own_bytes: Of those, bytes of files that have no hard link elsewhere: what removing it gives back, unless the file
            system shares blocks between files.
        step: What it holds; None of the staging directory, or if its record cannot be read.
        made: When the nodes agreed on it, ISO 8601 in UTC, by the clock of node 0.
        saved_later: Files that are not of its record: local checkpoints that a run saved there. It stays, then.
        problem: What is wrong with its record, in a sentence; "" if nothing is.
    """

    path: Path
    current: bool
    publication: Publication
    size_bytes: int
    own_bytes: int
    step: Step | None = None
    made: str = ""
    saved_later: int = 0
    problem: str = ""

    @property
    def confirmed(self) -> bool:
        """Whether every node was known to have it."""
        return bool(self.publication.confirmed)


def views(view: Path) -> tuple[View, ...]:
    """The versions that are there, the newest first. Changes nothing.

    Raises:
        UsageError: Something stands at the path that ckptguard did not make.
    """
    site = Site(view)
    current = site.current()
    found = [_look(Version(site, name), current is not None and name == current.name) for name in site.names()]
    return tuple(sorted(found, key=_moment, reverse=True))


def prune(view: Path, keep: int = 1, *, dry_run: bool = False) -> tuple[View, ...]:
    """Removes old versions and what prepares that ended early left.

    Args:
        view: The link.
        keep: How many confirmed versions stay: the current one, and the newest of the others.
        dry_run: Only says what would be removed.

    Returns:
        What was removed, or would be: versions, and the staging directory if there was anything in it.

    Raises:
        UsageError: ``keep`` is below 1, or something stands at the path that ckptguard did not make.
        EnvironmentFailedError: A prepare is at work there, or the file system refuses.
    """
    if keep < 1:
        raise UsageError(f"keep {keep}: the current view is never removed", next_step="Keep 1 or more.")
    site = Site(view)
    if not site.versions.is_dir():
        return ()
    with site.hold():
        gone = _unneeded(views(view), _current_once_recovered(site), keep)
        left = _size(site.staging) if site.staging.is_dir() else (0, 0)
        if not dry_run:
            site.recover()
            for name in {view.path.name for view in gone}.intersection(site.names()):
                Version(site, name).remove()
            remove_tree(site.staging)
            site.remove_probes()
    staging = View(site.staging, False, Publication(), *left)
    return (*gone, staging) if left[0] else gone


def _current_once_recovered(site: Site) -> str:
    """Name of the version that is current when unconfirmed ones have been taken back; "" for none."""
    current = site.current()
    if current is None:
        return ""
    return current.name if current.publication().confirmed else current.fallback()


def _unneeded(there: Sequence[View], current: str, keep: int) -> tuple[View, ...]:
    """All but the current version and the newest others of those that are confirmed. Takes them the newest first."""
    others = [view for view in there if view.confirmed and view.path.name != current]
    kept = {current, *(view.path.name for view in others[: keep - 1 if current else keep])}
    kept |= {view.path.name for view in there if view.saved_later}
    return tuple(view for view in there if view.path.name not in kept)


def _moment(view: View) -> str:
    return view.publication.confirmed or view.publication.published or view.made


def _look(version: Version, current: bool) -> View:
    sizes = _size(version.path)
    try:
        record = read_record(version.path)
    except DamagedError as error:
        return View(version.path, current, version.publication(), *sizes, problem=error.message)
    agreement = record.agreement
    later = 0
    if agreement.step.kind == "local":
        ours = {NAME, *agreement.origins.get(record.node, {})}
        later = sum(path.relative_to(version.path).as_posix() not in ours for path in version.path.rglob("*_local.pt"))
    return View(version.path, current, version.publication(), *sizes, agreement.step, agreement.made, later)


def _size(root: Path) -> tuple[int, int]:
    """(bytes of all files below, of those that have no hard link elsewhere). A file with two names there counts once."""
    links: dict[tuple[int, int], tuple[os.stat_result, int]] = {}
    with writing(root):
        for folder, _, names in root.walk():
            for name in names:
                found = (folder / name).lstat()
                at = (found.st_dev, found.st_ino)
                links[at] = found, links.get(at, (found, 0))[1] + 1
    size_bytes = sum(found.st_size for found, _ in links.values())
    return size_bytes, sum(found.st_size for found, count in links.values() if found.st_nlink == count)
