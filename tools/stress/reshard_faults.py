"""Reshardings that something happens to: a full disk, a source that is cut or damaged under way, a rank that is killed.

* ``full``: as in ``import_disk_full``, a small tmpfs for the target. One clear error, and with room the same ends well.
* ``cut``: a file of the source is cut short before a random read of the run. It is named, with exit code 4, unless all that was
  cut off had been read already.
* ``flip``, ``sealed flip``: a bit of a tensor in the source is flipped before a random read, of a source without a manifest and
  of one with. It is noticed, with exit code 4, or the target holds what was there before.
* ``rank``: one of two processes, started as torchrun does, is killed at a random instant. The other one ends with exit code 6
  within a minute.
* ``torchrun``: the same under torchrun itself, which ends the other one.

After each the source is put right, and the same resharding, run again, gives the bytes of an undisturbed one. Exits 1 on any
miss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import import_disk_full
import psutil
import reshard_kills
from import_kills import TOOL, after_rerun, false_claims
from make_snapshots import size_in_bytes
from reshard_kills import ReshardCase

from ckptguard.core.errors import ExitCode
from ckptguard.core.index import Chunk
from ckptguard.engine import filling

KINDS = ("full", "cut", "flip", "sealed flip", "rank", "torchrun")
_LATEST_SECONDS = 60.0
_WAIT_SECONDS = 300.0
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Found = tuple[str, list[str]]


def on_reads(act: Callable[[], None]) -> None:
    """Has something done before every read of the process, be it into a buffer or by mapping the file. For a child."""
    read, mapped = os.preadv, filling._mapped

    def before_read(*args: Any) -> int:
        act()
        return read(*args)

    def before_mapping(*args: Any) -> filling._mapped:
        act()
        return mapped(*args)

    os.preadv, filling._mapped = before_read, before_mapping


def before_read(number: int, act: Callable[[], None]) -> None:
    """Has something done before the ``number``-th read of the process, counted from 0. For a child."""
    lock, count = threading.Lock(), 0

    def counted() -> None:
        nonlocal count
        with lock:
            if count == number:
                act()
            count += 1

    on_reads(counted)


def reads_of(case: ReshardCase, folder: Path) -> int:
    """How many reads an undisturbed run makes."""
    log = folder / "reads"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    write = os.write
    code = case.run(lambda: on_reads(lambda: write(handle, b".") and None))
    os.close(handle)
    if code:
        sys.exit(f"the undisturbed resharding failed: {case.message.read_text()}")
    case.clear()
    return log.stat().st_size


class Faults:
    """Trials on one planned resharding.

    Args:
        case: It.
        folder: For what trials leave.
        rng: Chooses.
    """

    def __init__(self, case: ReshardCase, folder: Path, rng: random.Random) -> None:
        self.case, self._rng = case, rng
        self._pristine = Path(shutil.copytree(case.source, folder / "pristine"))
        self._reads = reads_of(case, folder)

    def trial(self, kind: str) -> Found:
        """One trial: what came of it, and everything that was wrong."""
        if kind == "rank":
            return self._killed_rank()
        if kind == "torchrun":
            return self._killed_worker()
        return self._changed(kind)

    def _changed(self, kind: str) -> Found:
        """A source that changes under way."""
        case, number = self.case, self._rng.randrange(self._reads)
        chunk = self._some_chunk()
        file = Path(case.checkpoint.index.location, chunk.span.file)
        at = chunk.span.end_bytes - 2000 - self._rng.randrange(max(1, chunk.span.length_bytes - 4000))
        act = (lambda: os.truncate(file, at)) if kind == "cut" else (lambda: flip(file, at))
        code = case.run(lambda: before_read(number, act))
        wrong = [f"exit code {code}: {self._message()}"] * (code not in (ExitCode.OK, ExitCode.DAMAGED))
        if code == ExitCode.OK:
            came = "was read before"
            self._put_right()
            wrong += [f"not noticed ({text})" for text in after_rerun(case, code)]
        else:
            came = "noticed"
            message = self._message()
            wrong += [f"does not name the file {file.name}: {message}"] * (kind == "cut" and file.name not in message)
            wrong += [f"a traceback or no next step: {message}"] * (len(message.splitlines()) != 2)
            wrong += ["the target is there"] * case.dst.exists() + false_claims(case)[1]
            self._put_right()
            wrong += after_rerun(case, case.run())
        return came, [f"read {number} of {self._reads}, byte {at} of {file.name}: {text}" for text in wrong]

    def _message(self) -> str:
        return self.case.message.read_text() if self.case.message.exists() else ""

    def _some_chunk(self) -> Chunk:
        """A chunk, the larger the likelier."""
        chunks = [c for entry in self.case.checkpoint.index.tensors.values() for c in entry.chunks]
        chunks = [c for c in chunks if c.span.length_bytes > 8000]
        return self._rng.choices(chunks, [c.span.length_bytes for c in chunks])[0]

    def _put_right(self) -> None:
        """The source as it was, in the same files: they are open."""
        for file in sorted(path for path in self._pristine.rglob("*") if path.is_file()):
            there = self.case.source / file.relative_to(self._pristine)
            there.write_bytes(file.read_bytes())
            shutil.copystat(file, there)

    def _killed_rank(self) -> Found:
        """Two ranks, one of which is killed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        logs = [self.case.message.with_name(f"rank{rank}") for rank in range(2)]
        processes = []
        for rank, log in enumerate(logs):
            said = {**address, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            with log.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        self.case.command,
                        env=os.environ | said,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                        start_new_session=True,
                    )
                )
        try:
            self._wait(processes[0])
            victim = self._rng.randrange(2)
            processes[victim].kill()
            since = time.monotonic()
            code = processes[1 - victim].wait(_WAIT_SECONDS)
            seconds = time.monotonic() - since
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        message = logs[1 - victim].read_text()
        if code == ExitCode.OK:
            return self._after(f"rank {victim}", "had ended", [])
        wrong = [f"the other rank ended with {code}: {message}"] * (code != ExitCode.ENVIRONMENT)
        wrong += ["a traceback"] * ("Traceback" in message)
        wrong += [f"the other rank ended after {seconds:.0f} s"] * (seconds > _LATEST_SECONDS)
        return self._after(f"rank {victim}", "ended the other", wrong)

    def _killed_worker(self) -> Found:
        """The same under torchrun."""
        log = self.case.message.with_name("torchrun")
        with log.open("w") as stderr:
            command = [*_TORCHRUN, "-m", "ckptguard", *self.case.command[len(TOOL) :]]
            launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            self._wait(launcher)
            workers = [p for p in psutil.Process(launcher.pid).children() if "ckptguard" in p.cmdline()]
            victim = self._rng.choice(workers) if workers else None
            if victim is not None:
                victim.kill()
            since = time.monotonic()
            code = launcher.wait(_WAIT_SECONDS)
            seconds = time.monotonic() - since
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        if code == 0:
            return self._after("a worker", "had ended", [])
        wrong = [f"torchrun ended after {seconds:.0f} s"] * (seconds > _LATEST_SECONDS)
        told = "ended by SIGTERM" in log.read_text() or "no sign of life" in log.read_text()
        wrong += [] if told else [f"the other worker did not say why it ended: {log.read_text()[-2000:]}"]
        return self._after("a worker", "ended the other", wrong)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until a random instant after the staging directory is there, or the process has ended."""
        while not self.case.partials and process.poll() is None:
            time.sleep(0.002)
        time.sleep(self._rng.uniform(0, self.case.seconds))

    def _after(self, victim: str, came: str, wrong: list[str]) -> Found:
        """What a killed rank left, and the run after it, of one process or of two."""
        if self.case.dst.exists():
            return "had committed", [*wrong, *after_rerun(self.case, 0)]
        wrong = wrong + false_claims(self.case)[1]
        words = self.case.command
        if self._rng.random() < 0.5:
            words = [*_TORCHRUN, "-m", "ckptguard", *words[len(TOOL) :]]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_WAIT_SECONDS)
        self.case.message.write_text(done.stderr)
        wrong += after_rerun(self.case, done.returncode)
        return came, [f"{victim} killed: {text}" for text in wrong]


def flip(file: Path, at: int) -> None:
    """Flips a bit of a file, in place."""
    with file.open("r+b") as handle:
        handle.seek(at)
        (byte,) = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte ^ 1]))


def disk_trials(case: ReshardCase, folder: Path, count: int, rng: random.Random, misses: list[str]) -> Counter[str]:
    """Full disks, on a tmpfs of their own."""
    try:
        disk = import_disk_full.Tmpfs(folder / "disk", 2 * case.prepared.total_bytes + (64 << 20))
    except subprocess.CalledProcessError as error:
        print(f"full disks left out: a tmpfs cannot be mounted here ({error.stderr.decode().strip()})")
        return Counter()
    with disk:
        return import_disk_full.trials(replace(case, dst=disk.path / "dst"), disk, count, rng, misses)


def trials(faults: Faults, kinds: list[str], count: int, misses: list[str]) -> Counter[str]:
    """So many trials of each kind."""
    counts: Counter[str] = Counter()
    for kind in kinds:
        for number in range(count):
            came, wrong = faults.trial(kind)
            counts[f"{kind}: {came}"] += 1
            misses += [f"{kind}: {text}" for text in wrong]
            faults.case.clear()
            print(f"\r{kind}: {number + 1} of {count}, {len(misses)} misses ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    return counts


def main() -> None:
    """Runs the trials and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated; by default all: %(default)s")
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--size", type=size_in_bytes, default=64 << 20, help="of the checkpoint (64MiB)")
    parser.add_argument("--source", type=Path, help="another checkpoint, which TP4 PP1 fits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if set(kinds) - set(KINDS):
        parser.error(f"--kinds: of {', '.join(KINDS)}")
    rng, misses, start = random.Random(options.seed), [], time.perf_counter()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = reshard_kills.source_in(folder, options)
        for sealed in (False, True):
            chosen = [kind for kind in kinds if (kind == "sealed flip") == sealed]
            if not chosen:
                continue
            if sealed:
                subprocess.run([*TOOL, "seal", str(source)], check=True, capture_output=True)
            with reshard_kills.planned(source, folder / "dst") as case:
                if "full" in chosen:
                    counts += disk_trials(case, folder, options.trials, rng, misses)
                    chosen.remove("full")
                part = folder / str(sealed)
                part.mkdir()
                counts += trials(Faults(case, part, rng), chosen, options.trials, misses)
    print(f"{sum(counts.values())} faults in {time.perf_counter() - start:.0f} s:", json.dumps(counts))
    print(f"{len(misses)} misses", *misses[:20], sep="\n  ")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
