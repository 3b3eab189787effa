"""Benchmarks beside peers on the same files, in the same cache state, in one run. Writes docs/benchmarks.md.

Every command is timed as a whole process, start-up included. Fast ones run several times, taking turns with their peer, and
the median of the ratios counts: on a shared machine absolute times mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import make_checkpoints

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
TOOL = [str(Path(PYTHON).parent / "ckptguard")]
_MCORE = (
    "from megatron.core.dist_checkpointing.validation import _verify_integrity_manifest_impl as check;"
    "import sys; check(sys.argv[1])"
)
_DCP = """
import sys, torch
from torch.distributed.checkpoint import FileSystemReader, load
reader = FileSystemReader(sys.argv[1])
state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in reader.read_metadata().state_dict_metadata.items()
         if hasattr(m, "size")}
load(state, storage_reader=reader, no_dist=True)
"""
_BARE = {
    "verify": "import ckptguard.cli.main, ckptguard.engine.verify, blake3, xxhash, zstandard, json",
    "fingerprint": "import ckptguard.cli.main, ckptguard.engine.fingerprints, blake3, json",
}


@dataclass
class Timing:
    """What one command took."""

    seconds: float
    anonymous_bytes: int


def timed(words: list[str], *, expect: int = 0) -> Timing:
    """Runs a command; watches its anonymous memory every 5 ms."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            with contextlib.suppress(OSError, IndexError, ValueError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(peak, int(status.split("RssAnon:")[1].split()[0]) << 10)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    stderr = process.communicate()[1]
    seconds = time.perf_counter() - start
    watcher.join()
    if process.returncode != expect:
        sys.exit(f"{words}: exit code {process.returncode}\n{stderr.decode()}")
    return Timing(seconds, peak)


def warm(files: list[str]) -> None:
    """Brings the files into the page cache."""
    for _ in range(2):
        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)


def turns(ours: list[str], peer: list[str], rounds: int) -> tuple[list[Timing], list[Timing], float]:
    """Ours and the peer's timings, and the median of peer / ours (above 1: we are faster)."""
    pairs = []
    for number in range(rounds):
        order = [ours, peer] if number % 2 else [peer, ours]
        done = {id(words): timed(words) for words in order}
        pairs.append((done[id(ours)], done[id(peer)]))
    ratio = statistics.median(p.seconds / o.seconds for o, p in pairs)
    return [o for o, _ in pairs], [p for _, p in pairs], ratio


class Rows:
    """Measures pairs of commands on one checkpoint and keeps what was seen."""

    def __init__(self, ckpt: Path) -> None:
        self.ckpt = ckpt
        self.files = [str(p) for p in sorted(ckpt.glob("*.distcp"))]
        self.total = sum(os.path.getsize(f) for f in self.files)
        self.rows: list[list[str]] = []
        self.missed: list[str] = []
        self.memory: dict[str, int] = {}

    def add(self, command: str, peer_name: str, peer: list[str], rounds: int, bar: float | None = None) -> None:
        """One row: ``ckptguard command`` beside a peer."""
        ours = [*TOOL, *command.split(), str(self.ckpt)]
        mine, theirs, ratio = turns(ours, peer, rounds)
        speeds = [self.total / statistics.median(t.seconds for t in side) / 1e9 for side in (mine, theirs)]
        verdict = "" if bar is None else f">= {bar}: " + ("met" if ratio >= bar else "**missed**")
        self.rows.append([command, peer_name, f"{ratio:.2f}", f"{speeds[0]:.2f}", f"{speeds[1]:.2f}", verdict])
        print(f"{self.total / 2**30:.0f} GiB", *self.rows[-1], sep=" | ", flush=True)
        self.memory[command] = max(t.anonymous_bytes for t in mine)
        if bar is not None and ratio < bar:
            self.missed.append(f"{command} against {peer_name}: {ratio:.2f}, wanted {bar}")


def main() -> None:
    """Makes the checkpoints, measures, writes the page, and fails when a bar is missed."""
    if sys.argv[1:2] == ["reshard"]:  # another page of benchmarks, with options of its own
        import reshards

        del sys.argv[1]
        reshards.main()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16.0, help="size of the checkpoint that the bars are held to")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-slow", action="store_true", help="leave out the peers that take minutes")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints in .bench for the next run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    work = ROOT / ".bench"
    tables = [
        measure(work, options.gib / 2, options, with_bars=False),
        measure(work, options.gib, options, with_bars=True),
    ]
    index = make_checkpoints.many_chunks(work / "chunks-100000", 100_000)
    bare = {name: timed([PYTHON, "-c", f"{code}; import time; time.sleep(0.2)"]) for name, code in _BARE.items()}
    memory = {
        name: (peak - bare[name.split()[0]].anonymous_bytes) / (1 << 20) for name, peak in tables[-1].memory.items()
    }
    missed = [text for table in tables for text in table.missed]
    missed += [f"{name}: {mib:.0f} MiB of anonymous memory" for name, mib in memory.items() if mib >= 512]
    helps = statistics.median(timed([*TOOL, "--help"]).seconds for _ in range(9))
    inspect = statistics.median(timed([*TOOL, "inspect", str(index)]).seconds for _ in range(5))
    missed += [f"--help took {helps:.2f} s"] if helps >= 0.3 else []
    missed += [f"inspect of 100,000 chunks took {inspect:.2f} s"] if inspect >= 3 else []
    write_page(options.output, tables, memory, helps, inspect)
    if not options.keep:
        shutil.rmtree(work)
    print(json.dumps({"memory_mib": memory, "help_s": helps, "inspect_100k_s": inspect}))
    if missed:
        sys.exit("bars missed: " + "; ".join(missed))


def measure(work: Path, gib: float, options: argparse.Namespace, *, with_bars: bool) -> Rows:
    """All rows for one size. What torch's reader loads must fit into memory beside the cache, so it has the smaller one."""
    ckpt = make_checkpoints.large(work / f"torch_dist-{gib:g}GiB", int(gib * (1 << 30)))
    seal = [*TOOL, "seal", str(ckpt), "--replace", "--no-crc"]
    subprocess.run(seal, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = Rows(ckpt)
    warm(rows.files)
    if shutil.which("b3sum"):
        rows.add("verify", "b3sum, all cores", ["b3sum", *rows.files], options.rounds, 0.95 if with_bars else None)
    rows.add("verify --quick", "cat", ["cat", *rows.files], options.rounds)
    rows.add("fingerprint", "cat", ["cat", *rows.files], options.rounds, 0.7 if with_bars else None)
    if not options.skip_slow and not with_bars:
        rows.add("verify", "Megatron Core verify_integrity", [PYTHON, "-c", _MCORE, str(ckpt)], 1)
        rows.add("verify", "sha256sum", ["sha256sum", *rows.files], 1)
        rows.add("fingerprint", "torch DCP reader, loading all", [PYTHON, "-c", _DCP, str(ckpt)], 1)
    if not with_bars and not options.keep:
        shutil.rmtree(ckpt)  # the larger one needs its place in the page cache
    return rows


def write_page(path: Path, tables: list[Rows], memory: dict[str, float], helps: float, inspect: float) -> None:
    """The page for people."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    lines = [
        "# Benchmarks",
        "",
        f"Made by `tools/bench` on {platform.system()} with {os.cpu_count()} cores ({cpu}): torch_dist checkpoints written by",
        "torch DCP, in the page cache. Whole processes, start-up included; ours and the peer's take turns. **Ratio** is the",
        "peer's time divided by ours (above 1: we are faster), the median of the rounds. The speeds are of the same rounds and",
        "say little on another machine.",
        "",
        "| size | command | peer | ratio | GB/s | peer GB/s | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for table in tables:
        lines += [f"| {table.total / 2**30:.1f} GiB | " + " | ".join(row) + " |" for row in table.rows]
    size = f"{tables[-1].total / 2**30:.0f} GiB"
    lines += ["", "| what | seen | bar |", "|---|---|---|"]
    lines += [
        f"| anonymous memory of `{name}` on {size}, above the bare import | {mib:.0f} MiB | < 512 MiB |"
        for name, mib in memory.items()
    ]
    lines += [
        f"| `ckptguard --help` | {helps:.2f} s | < 0.3 s |",
        f"| `ckptguard inspect` of an index with 100,000 chunks | {inspect:.2f} s | < 3 s |",
        "",
        "Start-up is the same for any size (0.15 s for `verify`, 0.25 s for `fingerprint`), so it shows in the smaller one.",
        "",
    ]
    path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
