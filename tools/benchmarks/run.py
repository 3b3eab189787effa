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
_BARE = (
    "import numpy, numba, blake3, xxhash, zstandard, click, rich; import ckptguard.engine.verify, ckptguard.cli.main"
)


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


def main() -> None:
    """Makes the checkpoint, measures, writes the page, and fails when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-slow", action="store_true", help="leave out the peers that take minutes")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint in .bench for the next run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    work = ROOT / ".bench"
    ckpt = make_checkpoints.large(work / f"torch_dist-{options.gib:g}GiB", int(options.gib * (1 << 30)))
    index = make_checkpoints.many_chunks(work / "chunks-100000", 100_000)
    subprocess.run(
        [PYTHON, "-m", "ckptguard", "seal", str(ckpt), "--replace", "--no-crc"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    files = [str(p) for p in sorted(ckpt.glob("*.distcp"))]
    total = sum(os.path.getsize(f) for f in files)
    warm(files)
    rows, failed, facts = [], [], {}

    def row(name: str, ours: list[str], peer_name: str, peer: list[str], bar: float | None, rounds: int) -> None:
        mine, theirs, ratio = turns(ours, peer, rounds)
        speed = [total / statistics.median(t.seconds for t in side) / 1e9 for side in (mine, theirs)]
        verdict = "" if bar is None else ("met" if ratio >= bar else "**missed**")
        rows.append(
            (
                name,
                peer_name,
                f"{ratio:.2f}",
                f"{speed[0]:.2f}",
                f"{speed[1]:.2f}",
                "" if bar is None else f">= {bar}",
                verdict,
            )
        )
        print(rows[-1], flush=True)
        facts[name] = max(t.anonymous_bytes for t in mine)
        if bar is not None and ratio < bar:
            failed.append(f"{name} against {peer_name}: {ratio:.2f}, wanted {bar}")

    tool = [str(Path(PYTHON).parent / "ckptguard")]
    verify, prints = [*tool, "verify", str(ckpt)], [*tool, "fingerprint", str(ckpt)]
    if shutil.which("b3sum"):
        row("verify", verify, "b3sum (all cores)", ["b3sum", *files], 0.95, options.rounds)
    row("verify --quick", [*tool, "verify", "--quick", str(ckpt)], "cat", ["cat", *files], None, options.rounds)
    row("fingerprint", prints, "cat", ["cat", *files], 0.7, options.rounds)
    if not options.skip_slow:
        row("verify", verify, "Megatron Core verify_integrity", [PYTHON, "-c", _MCORE, str(ckpt)], None, 1)
        row("verify", verify, "sha256sum", ["sha256sum", *files], None, 1)
        row("fingerprint", prints, "torch DCP reader (load all)", [PYTHON, "-c", _DCP, str(ckpt)], None, 1)
    bare = timed([PYTHON, "-c", _BARE]).anonymous_bytes
    memory = {name: (peak - bare) / (1 << 20) for name, peak in facts.items()}
    failed += [f"{name}: {mib:.0f} MiB of anonymous memory" for name, mib in memory.items() if mib >= 512]
    helps = statistics.median(timed([*tool, "--help"]).seconds for _ in range(9))
    inspect = statistics.median(timed([*tool, "inspect", str(index)]).seconds for _ in range(5))
    failed += [f"--help took {helps:.2f} s"] if helps >= 0.3 else []
    failed += [f"inspect of 100,000 chunks took {inspect:.2f} s"] if inspect >= 3 else []
    write_page(options.output, options.gib, len(files), rows, memory, helps, inspect)
    if not options.keep:
        shutil.rmtree(work)
    print(json.dumps({"memory_mib": memory, "help_s": helps, "inspect_100k_s": inspect}))
    if failed:
        sys.exit("bars missed: " + "; ".join(failed))


def write_page(path: Path, gib: float, count: int, rows: list, memory: dict, helps: float, inspect: float) -> None:
    """The page for people."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    lines = [
        "# Benchmarks",
        "",
        f"Made by `tools/bench` on {platform.system()} with {os.cpu_count()} cores ({cpu}): a torch_dist checkpoint of",
        f"{gib:g} GiB in {count} files, written by torch DCP, in the page cache. Whole processes, start-up included; ours and",
        "the peer's take turns. **Ratio** is the peer's time divided by ours (above 1: we are faster), the median of the",
        "rounds; the speeds are of the same rounds and say little on another machine.",
        "",
        "| command | peer | ratio | GB/s | peer GB/s | bar | |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
        "| what | seen | bar |",
        "|---|---|---|",
        *(
            f"| anonymous memory of `{name}` above the bare import | {mib:.0f} MiB | < 512 MiB |"
            for name, mib in memory.items()
        ),
        f"| `ckptguard --help` | {helps:.2f} s | < 0.3 s |",
        f"| `ckptguard inspect` of an index with 100,000 chunks | {inspect:.2f} s | < 3 s |",
        "",
    ]
    path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
