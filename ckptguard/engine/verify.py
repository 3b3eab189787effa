"""Is the checkpoint whole, and are its bytes the ones that were written? Collects every problem, then says what was proved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ckptguard.core.errors import CkptguardError, DamagedError, UnknownFormatError, UnsupportedError
from ckptguard.core.problems import Problem
from ckptguard.engine import contents, structure, unsealed
from ckptguard.engine.sealed import Comparison, Mode
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.fingerprint.manifest import FILE_NAME, Manifest, parse
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats import registry
from ckptguard.formats.base import Checkpoint, Format
from ckptguard.formats.chunks import Reader
from ckptguard.formats.remote import directory
from ckptguard.formats.storage import Directory

_INDEX_FILE = re.compile(r"\.metadata|metadata\.json|.*\.index\.json")
_OF_THE_FILES = ("escape", "unsafe-pickle", "manifest")  # true whatever an index says


@dataclass(frozen=True, slots=True)
class Authority:
    """What ``--against`` says the checkpoint must be.

    Attributes:
        seal: The seal that was printed when it was sealed.
        manifest: A manifest kept elsewhere.
        fingerprints: Tensor fingerprints kept elsewhere, by name.
    """

    seal: str | None = None
    manifest: Manifest | None = None
    fingerprints: dict[str, Fingerprint] | None = None


@dataclass(slots=True)
class Report:
    """What verifying found.

    Attributes:
        location: The directory that was checked.
        format: Name of the format, or None if no index could be read.
        seal: The manifest's seal; None if the checkpoint is not sealed.
        proved: What was checked, in words.
        problems: Everything that is wrong, and notes.
        files: How many files were looked at.
        bytes_checked: How many bytes were read for it.
    """

    location: str
    format: str | None = None
    seal: str | None = None
    proved: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes_checked: int = 0

    @property
    def damaged(self) -> bool:
        """Whether any problem is more than a note."""
        return any(p.is_damage for p in self.problems)


def verify(
    path: str | Path,
    *,
    step: str | None = None,
    mode: Mode = "full",
    against: Authority | None = None,
    masters: bool = False,
    progress: Progress = SILENT,
) -> Report:
    """Checks structure, then bytes.

    Args:
        path: A checkpoint, sealed or not.
        step: Which iteration of a root.
        mode: "full" compares every byte with its BLAKE3 (unsealed: the CRC-32 beside each tensor); "quick" the block digests
            (unsealed: structure and sizes only).
        against: What was kept elsewhere when it was sealed.
        masters: Also check that every weight is its fp32 master rounded, where both are stored in one shape.
        progress: Hears of the bytes done.

    Raises:
        NotFoundError, UnknownFormatError, UsageError: There is nothing to check.
    """
    against = against or Authority()
    where = registry.resolve(path, step=step)
    found, files = _detect(where)
    report = Report(str(files.root))
    with files:
        report.files = len(files.listing)
        manifest = _manifest(files, against, report)
        if manifest is None:
            checkpoint, chunks = _structure(found, files, frozenset(), report)
            if checkpoint is not None and mode == "full":
                problems, proved, checked = unsealed.check(checkpoint, chunks, progress)
                report.problems += problems
                report.proved += proved
                report.bytes_checked += checked
        else:
            # The bytes are digested while the index is read and checked: one core would only wait for the other.
            with Comparison(files, manifest, mode, progress) as comparison:
                checkpoint, _ = _structure(found, files, frozenset(manifest.files) | {FILE_NAME}, report)
                changes = comparison.report(checkpoint, report.proved)
            report.problems = [*_without_consequences(report.problems, changes), *changes]
            report.bytes_checked += comparison.bytes_checked
        if against.fingerprints is not None:
            _against_fingerprints(checkpoint, against.fingerprints, report, progress)
        if masters:
            _masters(checkpoint, report, progress)
    report.problems = _unique(report.problems)
    return report


def _detect(where: Path) -> tuple[Format | None, Directory]:
    """The format and its files; a sealed checkpoint is checked even when nothing of its format is left to recognise."""
    try:
        found = registry.detect(where)
    except UnknownFormatError:
        if not (where / FILE_NAME).is_file():
            raise
        return None, directory(where)
    return found, found.open_files(where)


def _manifest(files: Directory, against: Authority, report: Report) -> Manifest | None:
    """The manifest to check against: the one kept elsewhere if it is given, else the checkpoint's own."""
    own = None
    if FILE_NAME in files.listing:
        try:
            own = parse(files.read(FILE_NAME), str(files.root / FILE_NAME))
        except DamagedError as error:
            report.problems += error.problems
    chosen = against.manifest or own
    expected = against.manifest.seal if against.manifest else against.seal
    if expected is not None:
        found = own.seal if own else "none that can be read"
        if found != expected:
            message = (
                f"{FILE_NAME}: the seal is {found}, expected {expected}: the manifest is not the one that was kept"
            )
            report.problems.append(Problem("manifest", message, file=FILE_NAME))
        else:
            report.proved.append("the manifest is the one that was kept")
    report.seal = chosen.seal if chosen else None
    return chosen


def _structure(
    found: Format | None, files: Directory, sealed: frozenset[str], report: Report
) -> tuple[Checkpoint | None, contents.Found]:
    """Index and headers; returns the checkpoint, if its index can be read, and where the sound chunks stand."""
    if found is None:
        text = f"{files.root}: sealed, but no longer a checkpoint of a known format"
        report.problems += [Problem("unreadable", text), *structure.links(files.listing)]
        return None, []
    try:
        checkpoint = Checkpoint(found.read_index(files), files, Reader(files))
    except (DamagedError, UnsupportedError) as error:
        if isinstance(error, UnsupportedError) and not sealed:
            raise
        told = error.problems if isinstance(error, DamagedError) else ()
        report.problems += told or [Problem("unreadable", error.message)]
        report.problems += structure.links(files.listing)
        return None, []
    report.format = checkpoint.index.format
    report.problems += structure.check(checkpoint.index, sealed=sealed)
    problems, chunks = contents.check_headers(checkpoint)
    report.problems += problems
    if not any(p.is_damage for p in report.problems):
        report.proved.append(
            "every element of every tensor is stored once, in files of the right size; no pickle runs code"
        )
    return checkpoint, chunks


def _against_fingerprints(
    checkpoint: Checkpoint | None, expected: dict[str, Fingerprint], report: Report, progress: Progress
) -> None:
    from ckptguard.engine.fingerprints import fingerprint_checkpoint  # numpy: others need not wait for it

    if checkpoint is None:  # its damage is among the problems already
        report.problems.append(Problem("note", "fingerprints were not compared: the index cannot be read"))
        return
    try:
        found = fingerprint_checkpoint(checkpoint, progress=progress)
    except CkptguardError as error:
        report.problems += getattr(error, "problems", ()) or [Problem("unreadable", error.message)]
        return
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            report.problems.append(
                Problem("missing-tensor", f"{name}: not in the checkpoint, expected {expected[name]}", tensor=name)
            )
        elif name not in expected:
            report.problems.append(Problem("manifest", f"{name}: not among the kept fingerprints", tensor=name))
        elif found[name] != expected[name]:
            text = f"{name}: its fingerprint is {found[name]}, expected {expected[name]}"
            report.problems.append(Problem("changed", text, tensor=name))
    report.proved.append(f"fingerprints of {len(found)} tensors compared with the kept ones")


def _without_consequences(structural: list[Problem], changes: list[Problem]) -> list[Problem]:
    """Leaves out what a changed index makes of the other files: it says nothing about them."""
    changed = {p.file for p in changes if p.file and _INDEX_FILE.fullmatch(p.file)}
    if not changed:
        return structural

    def stands(p: Problem) -> bool:
        by_itself = p.kind in _OF_THE_FILES or (p.kind == "unreadable" and p.file is None)
        return not p.is_damage or p.file in changed or by_itself

    kept = [p for p in structural if stands(p)]
    if gone := len(structural) - len(kept):
        text = f"{', '.join(sorted(changed))}: changed, so {gone} contradictions between it and the other files are not listed"
        kept.append(Problem("note", text))
    return kept


def _masters(checkpoint: Checkpoint | None, report: Report, progress: Progress) -> None:
    from ckptguard.engine.masters import check_masters

    if checkpoint is None or any(p.is_damage for p in report.problems):
        report.problems.append(Problem("note", "masters were not compared with weights: the checkpoint is damaged"))
        return
    problems, count = check_masters(checkpoint, progress)
    report.problems += problems
    if count:
        report.proved.append(f"{count} weights compared with their fp32 masters")
    else:
        text = "masters were not compared with weights: no weight has its master stored in its own shape"
        report.problems.append(Problem("note", f"{text} (only fully_reshardable does)"))


def _unique(problems: list[Problem]) -> list[Problem]:
    """Drops repetitions: one missing or extra file is found by the index and by the manifest."""
    out: dict[object, Problem] = {}
    sealed_files = {(p.kind, p.file) for p in problems if p.kind in ("missing-file", "extra-file")}
    for problem in problems:
        if problem.kind == "note" and problem.file and ("extra-file", problem.file) in sealed_files:
            continue
        by_file = problem.kind in ("missing-file", "extra-file", "escape")
        out.setdefault((problem.kind, problem.file) if by_file else problem, problem)
    return list(out.values())
