"""Writing the manifest for a checkpoint that somebody else wrote."""

from __future__ import annotations

import datetime
from pathlib import Path

from ckptguard.core.errors import DamagedError, UsageError
from ckptguard.core.problems import Problem
from ckptguard.engine import contents, structure
from ckptguard.engine.digests import file_digests
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.fingerprint.manifest import FILE_NAME, Manifest
from ckptguard.fingerprint.roots import root
from ckptguard.fingerprint.values import ALGORITHM
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.storage import write_atomically


def seal(
    checkpoint: Checkpoint,
    *,
    fingerprints: bool = True,
    crc: bool = True,
    replace: bool = False,
    copy_to: Path | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Checks a checkpoint as far as it can be checked without a manifest, then writes one.

    Args:
        checkpoint: An open checkpoint.
        fingerprints: Also record the fingerprint of every tensor.
        crc: Also check the CRC-32 stored beside each tensor, so that damage of the past is not sealed.
        replace: Write even if there is a manifest already.
        copy_to: Also write the manifest there, first.
        progress: Hears of the bytes done.

    Raises:
        UsageError: It is sealed already.
        DamagedError: It is damaged; a seal would only hide that. Lists all problems.
        EnvironmentFailedError: The manifest cannot be written.
    """
    target = checkpoint.files.root / FILE_NAME
    others = [entry.name for entry in target.parent.iterdir() if entry.name not in checkpoint.files.listing]
    if any(name.endswith(".safetensors") for name in others):
        raise UsageError(
            f"{target.parent}: holds {', '.join(sorted(others)[:4])} too; a seal is for a whole directory",
            next_step="Give the directory instead of one of its files.",
        )
    if target.exists() and not replace:
        raise UsageError(
            f"{target}: already sealed",
            next_step="Check it with `ckptguard verify`; write a new seal over the old one with --replace.",
        )
    refuse_damage(checkpoint, crc=crc, progress=progress)
    names = [name for name in checkpoint.files.listing if name != FILE_NAME]
    progress.start("digesting files", sum(checkpoint.files.size(name) for name in names))
    digests = file_digests(checkpoint.files, names, progress)
    prints = fingerprint_checkpoint(checkpoint, progress=progress) if fingerprints else {}
    manifest = Manifest(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        files=digests,
        fingerprints=prints,
        algorithm=ALGORITHM if prints else "",
        root=root(prints) if prints else "",
    )
    data = manifest.to_bytes()
    if copy_to is not None:
        write_atomically(copy_to, data)
    write_atomically(target, data)
    return manifest


def refuse_damage(checkpoint: Checkpoint, *, crc: bool, progress: Progress) -> None:
    """Raises DamagedError with every problem that can be found without a manifest."""
    problems: list[Problem] = [p for p in structure.check(checkpoint.index) if p.is_damage]
    more, found = contents.check_headers(checkpoint)
    problems += more
    if crc:
        problems += contents.check_crcs(checkpoint, found, progress)[0]
    if problems:
        raise DamagedError(
            f"{checkpoint.index.location}: {len(problems)} problems; a damaged checkpoint is not sealed",
            problems=problems,
            next_step="Run `ckptguard verify` for the list; repair or replace what it names, then seal.",
        )
