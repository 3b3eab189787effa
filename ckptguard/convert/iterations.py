"""The iteration directory of a checkpoint: its name, what tells a source's files apart, and what is written last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ckptguard.core.errors import DamagedError
from ckptguard.engine import structure as checks
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.base import Checkpoint

# In the order in which they make a checkpoint readable: the index, then Megatron's marker that it is whole.
_MARKERS = (".metadata", "metadata.json")


def folder_of(iteration: int | Literal["release"]) -> str:
    """Name of the directory of an iteration."""
    return "release" if iteration == "release" else f"iter_{iteration:07d}"


def last_files(folder: str, small: Mapping[str, bytes], manifest: bytes) -> dict[str, bytes]:
    """The small files of an iteration directory in an order in which nothing looks whole before it is.

    The index comes after the manifest that it must fit, Megatron's marker after the index.
    """
    files = {name: data for name, data in small.items() if name not in _MARKERS}
    files |= {FILE_NAME: manifest, **{name: small[name] for name in _MARKERS if name in small}}
    return {f"{folder}/{name}": data for name, data in files.items()}


def stamps(checkpoint: Checkpoint, names: Iterable[str]) -> list[tuple[str, int, int]]:
    """(name, size in bytes, time of last change in ns) of files: by this a changed source is known."""
    out = []
    for name in names:
        stat = checkpoint.files.checked_path(name).stat()
        out.append((name, stat.st_size, stat.st_mtime_ns))
    return out


def refuse_damage(checkpoint: Checkpoint, *, doing: str, next_step: str) -> None:
    """Raises DamagedError with all damage that the index tells of; ``doing`` completes "so it is not ..."."""
    problems = [problem for problem in checks.check(checkpoint.index) if problem.is_damage]
    if problems:
        raise DamagedError(
            f"{checkpoint.index.location}: damaged, so it is not {doing}: {checks.said(problems)}",
            problems=problems,
            next_step=next_step,
        )
