"""What stands in the directories of a place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptguard.core.errors import NotFoundError
from ckptguard.formats.remote import RemotePath


@dataclass(frozen=True, slots=True)
class Child:
    """What stands in a directory: its name, whether it is a directory itself (or leads to one), whether it is a symlink."""

    name: str
    folder: bool
    link: bool = False


def children_of(folder: Path) -> dict[str, Child]:
    """What stands in a directory, by name.

    Raises:
        NotFoundError: It is not there.
        OSError, EnvironmentFailedError: It cannot be listed.
    """
    if isinstance(folder, RemotePath):
        return {path.name: Child(path.name, path.is_dir()) for path in folder.iterdir()}
    try:
        with os.scandir(folder) as entries:
            return {entry.name: Child(entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries}
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder}: not there") from error


def leaves(root: Path, path: str) -> bool:
    """Whether symlinks on the way to ``path``, which is relative to ``root``, lead out of it."""
    return not (root / path).resolve().is_relative_to(root.resolve())


def joined(below: str, name: str) -> str:
    """A path relative to a place; "" is the place itself."""
    return f"{below}/{name}" if below else name
