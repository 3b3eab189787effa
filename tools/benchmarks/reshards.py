"""Benchmarks of ``ckptguard reshard`` beside peers, in one run: ``cp``, Megatron's own way, torch's Distributed Checkpoint.

    tools/bench reshard                     all parts at full size: needs 30 GiB of disk
    tools/bench reshard --size 256MiB --peer-size 256MiB

Whole processes, taking turns with their peer, sources in the page cache as far as it holds them, outputs deleted in between;
medians count. What is made is removed at the end, whatever the end is. The parts:

    kept    every chunk stays whole: another PP, beside ``cp -r`` and ``sync`` of the files
    cut     every tensor is cut anew: TP2 to TP4 and to TP1, and buckets to tensors, beside the same
    megatron, dcp   beside processes that hold the checkpoint
    ranks   two processes of torchrun beside one
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import make_megatron
from imports import Bench, Row, Timing, middle, say, show, timed
from make_snapshots import size_in_bytes
from run import PYTHON, ROOT, warm

from ckptguard.layout.layouts import Layout

PARTS = ("kept", "cut", "megatron", "dcp", "ranks")
_HERE = ROOT / "tools" / "benchmarks"
_COPY = 'cp -r "$1" "$2" && find "$2" -exec sync {} +'
_CONSTANT_BYTES = 1 << 30  # Python, and for some seconds the process that asks Megatron
_TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Commands = dict[str, Sequence[str]]


class Reshards(Bench):
    """Runs commands in turns in a directory of its own.

    Attributes:
        memory_bytes: What our commands may use for buffers.
    """

    memory_bytes: int

    def source(self, size_bytes: int, optimizer: str = "fully_reshardable", dp: int = 1) -> Path:
        """A checkpoint in TP2 PP2, made if it is not there."""
        path = self.work / f"{size_bytes >> 20}-{optimizer}"
        say(f"making {path}")
        self.work.mkdir(parents=True, exist_ok=True)
        return make_megatron.make(path, size_bytes, layout=Layout(tp=2, pp=2, dp=dp), optimizer=optimizer)

    def ours(self, source: Path, *options: str, start: Sequence[str] = (PYTHON,)) -> list[str]:
        """A resharding of a source to OUT."""
        script = [*start, str(_HERE / "timed_reshard.py"), str(self.work / "times"), str(source), "OUT"]
        return [*script, f"--memory={self.memory_bytes >> 20}MiB", *options]

    def turns(self, commands: Commands, source: Path, rounds: int) -> dict[str, list[Timing]]:
        """Runs each command in every round, in an order that changes; each writes OUT, which is removed after it."""
        done: dict[str, list[Timing]] = {name: [] for name in commands}
        out, names = self.work / "out", list(commands)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                warm([str(file) for file in sorted(source.rglob("*.distcp"))])
                try:
                    done[name].append(self._timed([str(out) if word == "OUT" else word for word in commands[name]]))
                finally:
                    for path in self.work.glob("out*"):
                        shutil.rmtree(path)
                parts = "".join(f", {what} {s:.1f} s" for what, s in self._parts.items() if what != "told")
                say(f"  round {number + 1} of {rounds}: {name} {done[name][-1].seconds:.1f} s{parts}")
        return done

    def _timed(self, words: Sequence[str]) -> Timing:
        """As ``timed``; of ours also how long it took once it was planned."""
        times = self.work / "times"
        times.unlink(missing_ok=True)
        timing = timed(words)
        self._parts: dict[str, float] = json.loads(times.read_text()) if times.exists() else {}
        return replace(timing, told_seconds=self._parts.get("told", timing.seconds))

    def against_copy(self, what: str, source: Path, options: Sequence[str], bar: float) -> None:
        """Rows of a resharding beside ``cp`` of the same bytes, with the proof and without."""
        copy = ["sh", "-c", _COPY, "cp", str(source), "OUT"]
        commands = {"cp": copy, "--no-verify": self.ours(source, *options, "--no-verify")}
        commands["verify"] = self.ours(source, *options)
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        done = self.turns(commands, source, self.rounds)
        for name in ("--no-verify", "verify"):
            pairs = list(zip(done[name], done["cp"], strict=True))
            rates = [size / 1e9 / middle(t.told_seconds for t in done[side]) for side in (name, "cp")]
            detail = f"{rates[0]:.2f} GB/s; cp {rates[1]:.2f} GB/s"
            label = f"{what}, {size / 2**30:.1f} GiB, {name}: rate / cp's"
            net = middle(cp.seconds / t.told_seconds for t, cp in pairs)
            self.add(Row(f"{label}, once planned", net, "", least=bar, detail=detail))
            self.add(Row(f"{label}, whole command", middle(cp.seconds / t.seconds for t, cp in pairs), "", least=bar))
        self.memory_of(what, [t for name, side in done.items() if name != "cp" for t in side])

    def against_peer(
        self, what: str, source: Path, ours: Sequence[str], peer: Sequence[str], rounds: int, bar: float | None = None
    ) -> None:
        """Rows of a resharding with its proof beside a peer that holds the checkpoint."""
        done = self.turns({"ckptguard": ours, "peer": peer}, source, rounds)
        own, theirs = done["ckptguard"], done["peer"]
        self.time_beside(what, own, theirs, least=bar)
        net = middle(p.seconds / o.told_seconds for o, p in zip(own, theirs, strict=True))
        self.add(Row(f"{what}: peer's time / ours once planned", net))
        self.memory_beside(what, "resident", own, theirs)

    def memory_of(self, what: str, own: Sequence[Timing]) -> None:
        """A row: the most memory of all processes at once, at most what was allowed and a constant."""
        peak, allowed = max(t.resident_bytes for t in own), self.memory_bytes + _CONSTANT_BYTES
        detail = f"{max(t.anonymous_bytes for t in own) / 2**20:.0f} MiB anonymous"
        self.add(Row(f"{what}: resident memory", peak / 2**20, "MiB", most=allowed / 2**20, detail=detail))


def kept(bench: Reshards, options: argparse.Namespace) -> None:
    """Every chunk stays whole."""
    source = bench.source(options.size)
    bench.against_copy("TP2 PP2 to TP2 PP1", source, ["--pp=1"], 0.8)


def cut(bench: Reshards, options: argparse.Namespace) -> None:
    """Every tensor is cut anew."""
    source = bench.source(options.size)
    bench.against_copy("TP2 to TP4", source, ["--tp=4", "--pp=1"], 0.5)
    bench.against_copy("TP2 to TP1", source, ["--tp=1"], 0.5)
    if not options.keep:
        shutil.rmtree(source)  # the next one needs its place in the page cache
    source = bench.source(options.size, "dp_reshardable", dp=2)
    bench.against_copy("buckets of DP2 to tensors", source, ["--optimizer=fully_reshardable"], 0.5)
    if not options.keep:
        shutil.rmtree(source)


def megatron(bench: Reshards, options: argparse.Namespace) -> None:
    """Two processes of Megatron load in the new layout and save."""
    source = bench.source(options.peer_size)
    peer = [PYTHON, str(_HERE / "megatron_reshard.py"), str(source), "OUT", f"--size={options.peer_size}", "--pp=2"]
    what = f"Megatron, {options.peer_size / 2**30:.1f} GiB to TP1 PP2"
    bench.against_peer(what, source, bench.ours(source, "--tp=1", "--pp=2"), peer, options.peer_rounds, 5.0)


def dcp(bench: Reshards, options: argparse.Namespace) -> None:
    """One process loads all tensors and saves them in another grid."""
    source = bench.source(options.peer_size)
    (folder,) = source.glob("iter_*")
    peer = [PYTHON, str(_HERE / "dcp_reshard.py"), str(folder), "OUT", "--cut=4"]
    what = f"torch DCP, {options.peer_size / 2**30:.1f} GiB to four parts a tensor"
    bench.against_peer(what, source, bench.ours(source, "--tp=4", "--pp=1"), peer, options.peer_rounds)


def ranks(bench: Reshards, options: argparse.Namespace) -> None:
    """Two processes beside one: with one thread each, and as it comes, where both use all cores."""
    source = bench.source(options.size)
    one, two = (PYTHON,), tuple(_TORCHRUN)
    for verify in ([], ["--no-verify"]):
        name = " ".join(["TP2 PP2 to TP2 PP1", *verify])
        runs = {
            "one, a thread": bench.ours(source, "--pp=1", "--threads=1", *verify, start=one),
            "two, a thread each": bench.ours(source, "--pp=1", "--threads=1", *verify, start=two),
            "one": bench.ours(source, "--pp=1", *verify, start=one),
            "two": bench.ours(source, "--pp=1", *verify, start=two),
        }
        done = bench.turns(runs, source, bench.rounds)
        for a, b, bar in (("one, a thread", "two, a thread each", 1.6), ("one", "two", None)):
            pairs = list(zip(done[a], done[b], strict=True))
            label = f"{name}: time of '{a}' / of '{b}'"
            net = middle(x.told_seconds / y.told_seconds for x, y in pairs)
            bench.add(Row(f"{label}, once planned", net, "", least=bar))
            bench.add(Row(f"{label}, whole command", middle(x.seconds / y.seconds for x, y in pairs)))


_MEASURES: dict[str, Callable[[Reshards, argparse.Namespace], None]] = {
    "kept": kept,
    "cut": cut,
    "megatron": megatron,
    "dcp": dcp,
    "ranks": ranks,
}


def main() -> None:
    """Measures, prints a table and JSON, and fails when a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="tools/bench reshard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; by default all: %(default)s")
    parser.add_argument("--size", type=size_in_bytes, default=8 << 30, help="beside cp, and of the ranks (8GiB)")
    parser.add_argument("--peer-size", type=size_in_bytes, default=2 << 30, help="beside Megatron and torch (2GiB)")
    parser.add_argument("--memory", type=size_in_bytes, default=2 << 30, help="of our commands' buffers (2GiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=3, help="beside Megatron and torch (3)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints in .bench for the next run")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts: of {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up
    bench = Reshards(ROOT / ".bench" / "reshards", options.rounds)
    bench.memory_bytes = options.memory
    try:
        for part in parts:
            _MEASURES[part](bench, options)
    finally:
        if not options.keep:
            shutil.rmtree(bench.work, ignore_errors=True)
        show(bench.rows)
    missed = [row.what for row in bench.rows if row.missed]
    if missed:
        sys.exit("bars missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
