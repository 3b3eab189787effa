"""Local checkpoints of nvidia-resiliency-ext below a place: files by step, that is by iteration and session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptguard.core.errors import CkptguardError
from ckptguard.formats import nvrx_local
from ckptguard.formats.nvrx_local import LocalFile
from ckptguard.formats.remote import directory
from ckptguard.view.listing import Child, children_of, joined, leaves
from ckptguard.view.step_survey import said
from ckptguard.view.values import Copy, FoundStep, Step

_NO_SESSION = frozenset({"lost+found", "release"})


class Sessions:
    """Collects the local files of one place.

    Args:
        node: Number of this node.
        place: Number of the place.
        root: The place: a local path or a URL.
        wanted: The only iteration to look for, or None.

    Attributes:
        iterations: All that are there, wanted or not.
        notes: What could not be looked at.
    """

    def __init__(self, node: int, place: int, root: Path, wanted: str | None) -> None:
        self.iterations: set[str] = set()
        self.notes: list[str] = []
        self._node, self._place, self._root, self._wanted = node, place, root, wanted
        self._copies: dict[tuple[int, str], list[Copy]] = {}
        self._problems: dict[tuple[int, str], list[str]] = {}

    def look(self, children: Mapping[str, Child]) -> None:
        """Looks for rank folders, here (those of the session without a name) and one level below.

        Args:
            children: What stands in the place.
        """
        self._ranks("", children, outside=False)
        for child in children.values():
            other = (
                child.name.startswith((".", "iter_"))
                or child.name in _NO_SESSION
                or nvrx_local.is_rank_folder(child.name)
            )
            if not child.folder or other or (child.link and not leaves(self._root, child.name)):
                continue
            try:
                self._ranks(child.name, children_of(self._root / child.name), outside=child.link)
            except (OSError, CkptguardError) as error:
                self.notes.append(f"{self._root / child.name}: {said(error)}")

    def _ranks(self, session: str, children: Mapping[str, Child], *, outside: bool) -> None:
        for child in children.values():
            path = joined(session, child.name)
            if not child.folder or not nvrx_local.is_rank_folder(child.name):
                continue
            if outside or (child.link and leaves(self._root, path)):
                self.notes.append(
                    f"{self._root / path}: leads out of {self._root}: give the directory itself with --source"
                )
                continue
            try:
                self._add(session, path)
            except (OSError, CkptguardError) as error:
                self.notes.append(f"{self._root / path}: {said(error)}")

    def _add(self, session: str, path: str) -> None:
        """Takes in the files of a rank's folder."""
        with directory(self._root / path) as files:
            for name, entry in files.listing.items():
                local = nvrx_local.parse(name)
                if local is None:
                    continue
                self.iterations.add(str(local.iteration))
                if self._wanted not in (None, str(local.iteration)):
                    continue
                key = local.iteration, session
                copies = self._copies.setdefault(key, [])
                why = _unusable(local, entry.size_bytes, entry.inside)
                if why:
                    self._problems.setdefault(key, []).append(f"{files.root / name}: {why}")
                else:
                    at = local.place(session)
                    copies.append(Copy(self._node, self._place, f"{path}/{name}", at, entry.size_bytes))

    def steps(self) -> list[FoundStep]:
        """What was found of each."""
        return [
            FoundStep(
                Step("local", str(iteration), session), self._node, self._place, tuple(copies),
                problems=tuple(self._problems.get((iteration, session), ())),
            )
            for (iteration, session), copies in self._copies.items()
        ]  # fmt: skip


def _unusable(local: LocalFile, size_bytes: int, inside: bool) -> str:
    if not local.finished:
        return "half-written: its writer has not renamed it yet, or died"
    if not inside:
        return "a symlink that leaves its directory"
    if size_bytes <= 0:
        return (
            "0 bytes: its writer died, or the disk was full" if size_bytes == 0 else "a symlink that leads to no file"
        )
    return ""
