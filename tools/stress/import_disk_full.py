"""Imports whose disk fills up at a random point: one clear error, nothing that looks whole, and a rerun with room ends well.

The target stands on a small tmpfs (so this needs root). Three kinds: too small from the start, which is said before the
first byte; filled by others after the room was checked, so that reserving a file, the journal or a small file fails; and a
file system that cannot reserve, so that a write in the middle of a file fails. After each the tmpfs is enlarged and
the same import run again. Exits 1 on any miss, and says so if the machine does not let it mount.
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import import_kills
import make_snapshots
from import_kills import Case

from ckptguard.core.errors import ExitCode
from ckptguard.engine import write_calls
from ckptguard.engine.staging import Staging

KINDS = ("early", "reserve", "write")
_PAGE_BYTES = 4096
_LAST_BYTES = 1 << 20  # more than the journal and the small last files take


class Tmpfs:
    """A mounted tmpfs; unmounted at the end of the block."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True, capture_output=True
        )

    def __enter__(self) -> Tmpfs:
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=True)

    def resize(self, size_bytes: int) -> None:
        """Gives it another size."""
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", self.path], check=True, capture_output=True)


def fill_up(kind: str) -> None:
    """Has the import find room when it asks, and not when it writes. For a child."""
    if kind == "early":
        return
    Staging.require_space = lambda _self, _needed_bytes: None  # type: ignore[method-assign]
    if kind == "write":
        import ctypes

        def cannot(*_: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

        real = write_calls._libc()
        write_calls._libc = lambda: SimpleNamespace(fallocate=cannot, sync_file_range=real.sync_file_range)


def room(kind: str, needed_bytes: int, rng: random.Random) -> int:
    """Size of a tmpfs that is too small, in bytes; one time in three only just, so that the last small files meet it."""
    if kind != "early" and rng.random() < 1 / 3:
        return needed_bytes // _PAGE_BYTES * _PAGE_BYTES + rng.randrange(6, 24) * _PAGE_BYTES
    return rng.randrange(4, needed_bytes // _PAGE_BYTES) * _PAGE_BYTES


def unclear(message: str, case: Case, kind: str) -> list[str]:
    """What is wrong with the message of an import that met a full disk."""
    lines = message.splitlines()
    if len(lines) != 2 or str(case.dst.parent) not in lines[0]:
        return [f"not one message and one next step: {message!r}"]
    said = r"\d+ bytes are needed, \d+ are free" if kind == "early" else "cannot be written.*No space left on device"
    return [] if re.search(said, lines[0]) else [f"does not say that the disk is full: {message!r}"]


def trial(case: Case, disk: Tmpfs, kind: str, size_bytes: int, large_bytes: int) -> tuple[str, list[str]]:
    """Runs one import into too little room, then again with enough.

    Returns:
        How far the first came; everything that was wrong.
    """
    disk.resize(size_bytes)
    code = case.run(lambda: fill_up(kind))
    if code == ExitCode.OK:
        return "had room", import_kills.after_rerun(case, code)
    message = case.message.read_text()
    stage, wrong = import_kills.false_claims(case)
    wrong += unclear(message, case, kind)
    wrong += [f"exit code {code}"] * (code != ExitCode.ENVIRONMENT)
    wrong += ["the target is there"] * case.dst.exists()
    if kind == "early":
        wrong += [f"written before the room was checked: {p}" for p in case.dst.parent.rglob("*.distcp")]
    disk.resize(large_bytes)
    return stage, wrong + import_kills.after_rerun(case, case.run())


def trials(case: Case, disk: Tmpfs, count: int, rng: random.Random, misses: list[str]) -> Counter[str]:
    """Runs the trials."""
    counts: Counter[str] = Counter()
    needed = sum(file.size_bytes for file in case.prepared.write_plan.files)
    for number in range(count):
        kind = KINDS[(number + 1) % len(KINDS)]
        stage, wrong = trial(case, disk, kind, room(kind, needed, rng), needed + _LAST_BYTES)
        counts[f"{kind}: {stage}"] += 1
        misses += [f"{kind}, {stage}: {text}" for text in wrong]
        case.clear()
        print(f"\r{number + 1} of {count} full disks, {len(misses)} misses", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return counts


def command_trial(case: Case, disk: Tmpfs, size_bytes: int) -> list[str]:
    """The whole command: its exit code, and that standard error is the message."""
    disk.resize(size_bytes)
    done = subprocess.run(import_kills.command(case), check=False, capture_output=True, text=True)
    wrong = [f"the command ended with {done.returncode}"] * (done.returncode != ExitCode.ENVIRONMENT)
    wrong += [f"a traceback: {done.stderr}"] * ("Traceback" in done.stderr)
    wrong += [f"no message: {done.stderr!r}"] * (not re.search(r"bytes are needed, \d+ are free", done.stderr))
    case.clear()
    return wrong


def main() -> None:
    """Runs the trials and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--no-command", action="store_true", help="leave out the trial with the whole command")
    parser.add_argument("--size", type=make_snapshots.size_in_bytes, default=64 << 20, help="of the snapshot (64MiB)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, misses, start = random.Random(options.seed), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            disk = Tmpfs(Path(scratch) / "disk", 2 * options.size + (64 << 20))
        except subprocess.CalledProcessError as error:
            print(f"left out: a tmpfs cannot be mounted here ({error.stderr.decode().strip()})")
            return
        with disk, import_kills.planned(Path(scratch), options.size, disk.path / "dst") as case:
            counts = trials(case, disk, options.trials, rng, misses)
            if not options.no_command:
                misses += command_trial(case, disk, 1 << 20)
    print(f"{options.trials} full disks in {time.perf_counter() - start:.0f} s:", json.dumps(counts))
    print(f"{len(misses)} misses", *misses[:20], sep="\n  ")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
