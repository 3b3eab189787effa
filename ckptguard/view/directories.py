"""Directories of versions: read-only once whole, removed without ever looking whole in part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Set
from pathlib import Path

from ckptguard.engine import workers
from ckptguard.engine.write_calls import sync_directory, writing

REMOVING = ".removing-"
_OWNER_WRITES = 0o200
_ALL_WRITE = 0o222


def remove_all_but(root: Path, names: Set[str]) -> None:
    """Removes files and empty directories: what other attempts left must not stand in the view."""
    for folder, _, files in root.walk(top_down=False):
        for name in files:
            path = folder / name
            if path.relative_to(root).as_posix() not in names:
                path.unlink()
        if folder != root and not os.listdir(folder):
            folder.rmdir()


def seal(root: Path, *, writable: bool = False) -> None:
    """Waits until all is on the disk, then makes the directories read-only, unless they are to stay writable."""
    folders = [Path(folder) for folder, _, _ in os.walk(root, topdown=False)]
    files = (path for folder in folders for path in folder.iterdir() if path.is_file())
    for _ in workers.run(files, _sync_file):
        pass
    for folder in folders:
        if not writable:
            os.chmod(folder, folder.stat().st_mode & 0o777 & ~_ALL_WRITE)
        sync_directory(folder)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged user may still write where a path is, or will be."""
    there = next(one for one in (path, *path.parents) if one.is_dir())
    with writing(there):
        found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def make_writable(path: Path) -> None:
    """Lets the owner write to a directory and those below it again."""
    for folder, _, _ in os.walk(path):
        mode = os.stat(folder).st_mode & 0o777
        if not mode & _OWNER_WRITES:
            os.chmod(folder, mode | _OWNER_WRITES)


def remove_tree(path: Path) -> None:
    """Removes a directory that may be read-only. It first takes a name under which nobody takes what is left for whole."""
    aside = path if path.name.startswith(REMOVING) else path.with_name(REMOVING + path.name)
    with writing(path):
        if aside != path:
            if aside.exists():
                remove_tree(aside)
            os.rename(path, aside)
        make_writable(aside)
        shutil.rmtree(aside)
