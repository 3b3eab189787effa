"""Looking into the copies of files that one node has: which are sound, and what their bytes are.

What a copy is compared with, the first of these that there is:

* the manifest of the step (``ckptguard.json.zst``), if it is whole and made for the very ``.metadata`` that was agreed on:
  size and BLAKE3 (blocks say where the damage is), and a file it does not list is a problem. A manifest that is damaged or of
  another save is a problem of that file, if a copy of it is among the copies; the others are checked as if there were none;
* the index: size, the header of each item (dtype, shape; objects' pickles by the allow-list), and the CRC-32 of each record
  of each item's zip; SHA-256 too where Megatron's integrity.json, of the same save, has one;
* for local files, which have no index, the CRC-32 of every record of the zip. Their pickle is not looked into.

What no check covers without a manifest: in the zips, what no loader looks at (``formats.zip_checks``); bytes between and behind
the items; items that carry no CRC-32 (safetensors, raw pickles, compressed objects, ``torch.save`` told to leave it out); and a
sound file that is not the right one: that of another save of the same layout, or of another rank whose file holds items of the
same shapes at the same places. Such files differ in their fast digest only.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.core.index import FileEntry
from ckptguard.core.problems import Problem
from ckptguard.engine.digests import changed_blocks
from ckptguard.engine.placement import Placer
from ckptguard.engine.workers import SILENT, Progress, run
from ckptguard.fingerprint.manifest import FILE_NAME, FileDigest, block_bytes_for
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Reader
from ckptguard.formats.remote import RemoteDirectory, RemotePath, path_of
from ckptguard.formats.storage import Directory
from ckptguard.view import expected
from ckptguard.view.expected import Expected
from ckptguard.view.one_pass import END_BYTES, OnePass, Sums, fast_digest
from ckptguard.view.saved import Saved
from ckptguard.view.values import Checked, Copy, Digest, Step

_MOST_SENTENCES = 8


def check(
    copies: Sequence[Copy],
    places: Sequence[str],
    *,
    step: Step,
    staged: Path,
    digests: bool,
    progress: Progress = SILENT,
    threads: int | None = None,
) -> list[Checked]:
    """Looks into copies, many at once. Whatever keeps a copy from being read is a problem of that copy, never an exception.

    Args:
        copies: Of one step, all of this node.
        places: Where this node looks: paths and URLs.
        step: What they are copies of.
        staged: Directory that holds the index files of the step as agreed on: ``iter_0000020/.metadata``.
        digests: Look at every byte; else only the fast digests are made.
        progress: Hears of the bytes done.
        threads: Worker threads; as many as cores by default.

    Returns:
        One value per copy, in their order.
    """
    saved = Saved(staged / step.folder) if digests and step.kind == "global" else None
    look = _Look(places, step, saved, digests)
    sizes = [copy.size_bytes if digests else min(copy.size_bytes, 2 * END_BYTES) for copy in copies]
    progress.start("checking copies" if digests else "comparing copies", sum(sizes))

    def work(number: int) -> tuple[int, Checked]:
        share = _Share(progress, sizes[number])
        checked = look.at(copies[number], share)
        share.end()
        return number, checked

    largest_first = sorted(range(len(copies)), key=lambda number: -sizes[number])
    done = dict(run(largest_first, work, threads=threads))
    return [done[number] for number in range(len(copies))]


class _Share:
    """The bytes of one copy in the whole: as many as were announced, however far its check came."""

    def __init__(self, whole: Progress, size_bytes: int) -> None:
        self._whole, self._left = whole, size_bytes

    def start(self, label: str, total_bytes: int) -> None:
        """Does nothing: the phase has begun."""

    def advance(self, count_bytes: int) -> None:
        """So many more bytes of the copy are done."""
        count = min(count_bytes, self._left)
        self._left -= count
        self._whole.advance(count)

    def end(self) -> None:
        """Nothing more comes."""
        self.advance(self._left)


class _Alone(Directory):
    """A directory of which one file is looked at: the others are not listed, and need not be readable."""

    def __init__(self, root: Path, file: FileEntry) -> None:
        super().__init__(root)
        self._only = file

    @cached_property
    def listing(self) -> dict[str, FileEntry]:
        """The one file."""
        return {self._only.path: self._only}


class _Look:
    """Looks at one copy; one for all threads."""

    def __init__(self, places: Sequence[str], step: Step, saved: Saved | None, digests: bool) -> None:
        self._places, self._saved, self._digests = places, saved, digests
        self._folder = f"{step.folder}/"
        self._pass = OnePass()

    def at(self, copy: Copy, progress: Progress) -> Checked:
        """Everything that is found out about a copy."""
        where, name = copy.name, self._name_of(copy)
        try:
            root = path_of(self._places[copy.place]) / copy.path.removesuffix(name)
            where = str(root / name)
            before = _identity(root / name)
            with _alone(root, name, before[0]) as files:
                fast = fast_digest(files, name)
                digest, problems = self._whole(copy, files, name, progress) if self._digests else (None, ())
            if _identity(root / name) != before:
                problems = (Problem("changed", f"{name}: changed while it was read", file=name),)
        except CkptguardError as error:
            return Checked(copy, problems=_sentences(where, name, expected.problems_of(error)))
        except OSError as error:
            return Checked(copy, problems=(f"{where}: cannot be read: {error.strerror or error}",))
        if before[0] != copy.size_bytes:
            text = f"{name}: has {before[0]} bytes, had {copy.size_bytes} when it was listed"
            problems = (Problem("size", text, file=name), *problems)
        return Checked(copy, fast, None if problems else digest, _sentences(where, name, problems))

    def _name_of(self, copy: Copy) -> str:
        """Its name as the index has it. A replica of a local file may stand in any folder."""
        name = copy.name.removeprefix(self._folder)
        return name if f"/{copy.path}".endswith(f"/{name}") else copy.path.rpartition("/")[2]

    def _whole(
        self, copy: Copy, files: Directory, name: str, progress: Progress
    ) -> tuple[Digest | None, tuple[Problem, ...]]:
        """Looks at the headers, then, if they are sound, at every byte."""
        try:
            what = self._expected(copy, files, name)
            if what.problems:
                return None, what.problems
            size = files.size(name)
            block = what.sealed.block_bytes if what.sealed else 0 if copy.blake3 else block_bytes_for(size)
            records = [mark.record for mark in what.marks]
            sums = self._pass.read(files, name, records, progress, block_bytes=block, sha256=bool(what.sha256))
            problems = tuple(self._differences(copy, files, name, what, sums))
        except CkptguardError as error:
            return None, tuple(expected.problems_of(error))
        if copy.blake3:  # small: whoever gets it reads it at once
            return Digest(size, sums.blake3), problems
        return Digest(size, sums.blake3, block, sums.blocks.hex()), problems

    def _expected(self, copy: Copy, files: Directory, name: str) -> Expected:
        if self._saved is None:
            return expected.of_local(files, name)
        if not copy.name.startswith(self._folder):  # a tracker, beside the step
            return expected.of_small(files, name)
        if name == FILE_NAME:
            return expected.of_manifest(self._saved, files, name)
        if self._saved.manifest is not None:
            return expected.by_manifest(self._saved, files, name)
        if copy.blake3 or not (name.endswith(".distcp") or self._saved.items(name)):
            return expected.of_small(files, name)
        return expected.by_index(self._saved, files, name)

    def _differences(self, copy: Copy, files: Directory, name: str, what: Expected, sums: Sums) -> Iterator[Problem]:
        """What the sums over all bytes show."""
        for owner in dict.fromkeys(what.marks[number].owner for number in sums.wrong):
            yield Problem("crc", f"{name}: {owner}: its bytes do not match the CRC-32 stored beside them", file=name)
        if what.sealed and what.sealed.blake3 != sums.blake3:
            yield from self._changed(files, name, what.sealed, sums)
        if what.sha256 and what.sha256 != sums.sha256:
            text = f"its SHA-256 is {sums.sha256}, integrity.json says {what.sha256}; is it of another save?"
            yield Problem("changed", f"{name}: {text}", file=name)
        if copy.blake3 and copy.blake3 != sums.blake3:
            yield Problem(
                "changed", f"{name}: its BLAKE3 is {sums.blake3}, it was listed with {copy.blake3}", file=name
            )

    def _changed(self, files: Directory, name: str, sealed: FileDigest, sums: Sums) -> Iterator[Problem]:
        """Places what was changed since the step was sealed to blocks, and from there to tensors."""
        assert self._saved is not None
        placer = None
        if self._saved.items(name):
            placer = Placer(Checkpoint(self._saved.index_of(name, files.size(name)), files, Reader(files)))
        runs = changed_blocks(sealed, sums.blocks)
        for first, last in runs[:_MOST_SENTENCES]:
            begin, end = first * sealed.block_bytes, min(last * sealed.block_bytes, sealed.size_bytes)
            if placer:
                yield from placer.place(name, first, begin, end)
            else:
                yield Problem("changed", f"{name}: bytes {begin} to {end} are not what was sealed", file=name)
        if not runs:
            yield Problem("changed", f"{name}: its bytes are not the ones that were sealed", file=name)


def _alone(root: Path, name: str, size_bytes: int) -> Directory:
    """The one file, at a path or a URL."""
    if isinstance(root, RemotePath):
        return RemoteDirectory(root, only=name)
    return _Alone(root, FileEntry(name, size_bytes))


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Size, time of the last change, inode and device. The last two are 0 at a URL.

    Raises:
        DamagedError: It is not there, or is no plain file: reading from a pipe would wait for ever.
        EnvironmentFailedError: The store cannot be asked.
        OSError: The disk cannot be asked.
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name}: missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"{path.name}: not a plain file")
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


def _sentences(where: str, name: str, problems: Sequence[Problem]) -> tuple[str, ...]:
    """The first problems in words, each with the path of the copy."""
    out = []
    for problem in problems[:_MOST_SENTENCES]:
        text = problem.message
        for begin in (where, name):
            text = text.removeprefix(begin).lstrip(":, ") if text.startswith(begin) else text
        out.append(f"{where}: {text}")
    if len(problems) > _MOST_SENTENCES:
        out.append(f"{where}: and {len(problems) - _MOST_SENTENCES} problems more")
    return tuple(out)
