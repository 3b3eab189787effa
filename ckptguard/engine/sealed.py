"""Comparing a directory with its manifest: missing, extra, resized and changed files, each placed as closely as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from ckptguard.core.problems import Problem
from ckptguard.engine.digests import Outcome, changed_blocks, digest_files, size_problem
from ckptguard.engine.placement import Placer
from ckptguard.engine.structure import rank_of
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.fingerprint.manifest import FILE_NAME, FileDigest, Manifest
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.storage import Directory

Mode = Literal["full", "quick"]


class Comparison:
    """Digests the files in the background from the moment it is made; ``report`` waits for that and compares.

    Args:
        files: The directory.
        manifest: What it must be.
        mode: "full" for BLAKE3 of every byte, "quick" for the digests of the blocks.
        progress: Hears of the bytes done.
    """

    def __init__(self, files: Directory, manifest: Manifest, mode: Mode, progress: Progress) -> None:
        self.files, self.manifest, self.mode = files, manifest, mode
        listing = files.listing
        self._present = [n for n in manifest.files if n in listing and listing[n].size_bytes >= 0]
        self.bytes_checked = sum(files.size(name) for name in self._present)
        progress.start("comparing blocks" if mode == "quick" else "comparing bytes", self.bytes_checked)
        self._background = ThreadPoolExecutor(1)
        self._digests = self._background.submit(self._digest, progress)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        self._background.shutdown()

    def _digest(self, progress: Progress) -> list[Outcome]:
        wanted = [(name, self.manifest.files[name].block_bytes) for name in self._present]
        quick = self.mode == "quick"
        return list(digest_files(self.files, wanted, progress, whole=not quick, blocks=quick))

    def report(self, checkpoint: Checkpoint | None, proved: list[str]) -> list[Problem]:
        """Waits for the digests and returns everything that is not as it was sealed.

        Args:
            checkpoint: Says which tensors stand in changed bytes; None if its index cannot be read.
            proved: Is added to.
        """
        found = self._files()
        resized = {p.file for p in found if p.kind == "size"}
        changed = []
        for outcome in self._digests.result():
            if outcome.error:
                found += outcome.error.problems
            elif self._differs(outcome):
                changed.append(outcome.name)
        placer = Placer(checkpoint) if checkpoint else None
        for name in sorted(changed):
            found += self._place(name, placer, sized=name not in resized)
        what = "BLAKE3 of every byte" if self.mode == "full" else "XXH3 of every block"
        whole = f" of {len(self.manifest.files)} sealed files compared: all as sealed, none missing or extra"
        proved.append(what + (" compared" if found else whole))
        return found

    def _differs(self, outcome: Outcome) -> bool:
        sealed = self.manifest.files[outcome.name]
        return outcome.blake3 != sealed.blake3 if self.mode == "full" else outcome.blocks != sealed.blocks

    def _files(self) -> list[Problem]:
        sealed, there = self.manifest.files, self.files.listing.keys()
        out = [
            _problem("missing-file", name, f"missing; it was sealed with {sealed[name].size_bytes} bytes")
            for name in sorted(sealed.keys() - set(self._present))
        ]
        extra = sorted(there - sealed.keys() - {FILE_NAME})
        out += [_problem("extra-file", name, "was not there when the checkpoint was sealed") for name in extra]
        sizes = (size_problem(name, sealed[name], self.files.size(name)) for name in self._present)
        return out + [problem for problem in sizes if problem]

    def _place(self, name: str, placer: Placer | None, *, sized: bool) -> list[Problem]:
        """Reads a changed file once more for its block digests, and says what stands in the changed blocks."""
        sealed, size = self.manifest.files[name], self.files.size(name)
        (outcome,) = digest_files(self.files, [(name, sealed.block_bytes)], SILENT, whole=False, threads=1)
        runs = changed_blocks(sealed, outcome.blocks)
        out: list[Problem] = []
        for first, last in runs:
            begin, end = first * sealed.block_bytes, min(last * sealed.block_bytes, max(size, sealed.size_bytes))
            out += placer.place(name, first, begin, end) if placer else _block(name, sealed, first, begin, end)
        if not runs and sized:
            out.append(_problem("changed", name, "its bytes are not the ones that were sealed"))
        return out


def _block(name: str, sealed: FileDigest, block: int, begin: int, end: int) -> Sequence[Problem]:
    text = f"{name}: block {block} of {sealed.block_bytes} bytes (bytes {begin} to {end}) is not what was sealed"
    return [Problem("changed", text, file=name, block=block, bytes_range=(begin, end), rank=rank_of(name))]


def _problem(kind: Literal["missing-file", "extra-file", "changed"], name: str, text: str) -> Problem:
    return Problem(kind, f"{name}: {text}", file=name, rank=rank_of(name))
