"""Which format a path is of: each one looks, and an unknown path is told why it is none of them."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from ckptguard.core.errors import EnvironmentFailedError, NotFoundError, UnknownFormatError, UsageError
from ckptguard.formats.base import Checkpoint, Format, steps_below, trackers_of
from ckptguard.formats.chunks import Reader
from ckptguard.formats.remote import path_of, refuse_unfinished

# Module and class of each format, in the order they are tried; a module is imported when its turn comes.
FORMATS = (
    ("ckptguard.formats.torch_dist", "TorchDist"),
    ("ckptguard.formats.torch_dist", "Dcp"),
    ("ckptguard.formats.legacy", "LegacyTorch"),
    ("ckptguard.formats.hf", "HuggingFace"),
)


def open_checkpoint(path: str | os.PathLike[str], *, step: str | None = None) -> Checkpoint:
    """Opens a checkpoint of any known format.

    Args:
        path: An iteration directory, a root with a tracker or a Hugging Face snapshot, as a path or a URL; or a hub id
            ``org/name[@revision]``.
        step: Which iteration of a root ("123" or "release"); by default the tracker's.

    Returns:
        The index and the way to its bytes; close it, or use it as a context manager.

    Raises:
        NotFoundError: Nothing is there.
        UnknownFormatError: No format accepts it; says why for each.
        UsageError: A root with several steps and no tracker, or a step that it does not have.
        DamagedError: The format is clear, but its index cannot be read.
    """
    chosen = resolve(path, step=step)
    found = detect(chosen)
    files = found.open_files(chosen)
    return Checkpoint(found.read_index(files), files, Reader(files))


def detect(chosen: Path) -> Format:
    """The format of an iteration directory or snapshot.

    Raises:
        UnknownFormatError: None accepts it; says why for each.
    """
    reasons = {}
    try:
        for module, name in FORMATS:
            candidate: Format = getattr(import_module(module), name)()
            reason = candidate.why_not(chosen)
            if reason is None:
                return candidate
            reasons[candidate.name] = reason
    except PermissionError as error:
        raise EnvironmentFailedError(f"{error.filename}: permission denied") from error
    raise UnknownFormatError(
        f"{chosen}: not a checkpoint of a known format",
        reasons=reasons,
        next_step="Give the iteration directory, the root that holds it, or a Hugging Face snapshot.",
    )


def resolve(path: str | os.PathLike[str], *, step: str | None = None) -> Path:
    """The directory (or single file) that a path or URL, a root with a tracker or a hub id stands for.

    Raises:
        NotFoundError, UsageError: As ``open_checkpoint``.
        DamagedError: A target at a URL that is not whole yet.
        EnvironmentFailedError: A store cannot be reached.
    """
    where = path_of(path)
    if where.exists():
        refuse_unfinished(where)
        return choose_step(where, step)
    from ckptguard.formats import hub

    if isinstance(path, str) and hub.looks_like_id(path):
        return choose_step(hub.download(path), step)
    raise NotFoundError(
        f"{where}: no such file or directory", next_step="Check the path; a hub id has the form org/name."
    )


def choose_step(root: Path, step: str | None) -> Path:
    """The iteration directory that a path stands for; the path itself if it is no root.

    Raises:
        UsageError: The step is not there, or must be named because no tracker chooses.
        NotFoundError: The tracker names a step that is not there.
    """
    if not root.is_dir():
        return root
    trackers, steps = trackers_of(root), steps_below(root)
    if not trackers and not steps:
        if step is not None:
            raise UsageError(f"{root}: has no iter_* directories, so --step {step} chooses nothing")
        return root
    said = trackers.get("latest_checkpointed_iteration.txt")
    wanted = step if step is not None else said
    if wanted is None and len(steps) == 1:
        (wanted,) = steps
    if wanted is None:
        raise UsageError(
            f"{root}: holds steps {', '.join(steps) or 'none'} and no latest_checkpointed_iteration.txt",
            next_step="Choose one with --step, or give its directory.",
        )
    wanted = str(int(wanted)) if wanted.isdigit() else wanted
    if wanted not in steps:
        source = f"--step says {wanted}" if step is not None else f"latest_checkpointed_iteration.txt says {wanted!r}"
        error = UsageError if step is not None else NotFoundError
        raise error(f"{root}: {source}, but the steps there are {', '.join(steps) or 'none'}")
    return steps[wanted]
