"""Benchmark of the shared view on simulated nodes: survey and agreement, staging beside ``curl`` and ``cp``, bytes moved.

    tools/bench view                        some minutes; needs root, and 4 GiB of memory
    tools/bench view --parts survey --files 1000
    tools/bench view --size 256MiB --rounds 3

Nodes are network namespaces of this machine joined by veth, so all of them share its cores, and a link is as fast as those
cores move bytes unless it is slowed down. Ours and the peers take turns; ratios are medians over the rounds, of the best peer's
time and ours in the same round. What staging checks on arrival is in its time, and in no peer's. Slowed links have a queue of
200 ms, in which the acknowledgements of a node that also serves wait behind its data: of a chain they show the worst.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import make_snapshots
from imports import Row, say, show
from run import ROOT

from ckptguard.testing import view_bars, view_transfers
from ckptguard.testing.nodes import Cluster, reason_against
from ckptguard.testing.view_calls import PRELOAD

_SURVEY_SECONDS = 5.0
_STAGED = 0.7  # of the rate of the best peer
_MORE_PERCENT = 1.0


def survey(work: Path, options: argparse.Namespace) -> list[Row]:
    """All nodes look at very many files and agree: each has a part of them, or each has all."""
    rows = []
    for everywhere, where in ((False, "spread"), (True, "all on every node")):
        with Cluster(options.nodes, workdir=work / where, preload=PRELOAD) as cluster:
            say(f"{options.files} files on {options.nodes} nodes, {where}")
            view_bars.many_files(cluster, "ckpt", options.files, everywhere=everywhere)
            what = f"{options.files} files on {options.nodes} nodes, {where}"
            for verb, name in (("status", "`status`"), ("prepare", "`prepare --dry-run`, which also brings the index")):
                asked = [view_bars.ask(cluster, "ckpt", verb) for _ in range(options.rounds)]
                assert all(one.files == options.files for one in asked)
                seconds = statistics.median(one.seconds for one in asked)
                cpu = statistics.median(one.cpu_seconds for one in asked)
                spread = f"{min(o.seconds for o in asked):.2f} to {max(o.seconds for o in asked):.2f}"
                detail = f"{spread}; imports excluded; CPU time of all nodes {cpu:.1f} s"
                rows.append(Row(f"{what}: {name}", seconds, "s", most=_SURVEY_SECONDS, detail=detail))
            imports = view_bars.import_by_command(cluster)
            detail = f"of which imports, alone: {imports:.1f} s, since {options.nodes} nodes share this machine's cores"
            rows.append(Row(f"{what}: whole commands", view_bars.ask_by_command(cluster, "ckpt"), "s", detail=detail))
    return rows


def links(work: Path, options: argparse.Namespace) -> list[Row]:
    """A file comes over a link, as fast as it goes and slowed down; and over a chain of two."""
    rows = []
    for rate_mbit in (0, options.rate):
        where = f"a link of {rate_mbit / 1000:g} Gbit/s" if rate_mbit else "an unlimited link"
        size = options.size if not rate_mbit else min(options.size, rate_mbit * 1_000_000 // 8 * 4)  # 4 s of it
        with (
            Cluster(3, workdir=work / where, kind="namespaces", preload=PRELOAD) as cluster,
            view_transfers.link(cluster, size) as link,
        ):
            for node in cluster.nodes if rate_mbit else ():
                cluster.slow(node, rate_mbit=rate_mbit)
            say(f"{size / 2**20:.0f} MiB over {where}")
            calls = {
                "ours": link.stage,
                "curl from our server": lambda link=link: link.curl(plain=False),
                "curl from python -m http.server": lambda link=link: link.curl(plain=True),
                "chain": lambda link=link: link.stage(2),
            }
            done = in_turns(calls, options.rounds)
        rows.append(beside(f"staging over {where}: rate / that of curl", done, size))
        ratio = statistics.median(one / two for one, two in zip(done["ours"], done["chain"], strict=True))
        rate = size / statistics.median(done["chain"]) / 1e9
        detail = f"{rate:.2f} GB/s to each; the second begins when the first has its first 64 MiB"
        rows.append(Row("the same, two nodes one behind the other: one's time / both's", ratio, detail=detail))
    return rows


def copies(work: Path, options: argparse.Namespace) -> list[Row]:
    """A file is copied to another file system of its node."""
    rows = []
    with Cluster(1, workdir=work / "copies", kind="namespaces", preload=PRELOAD) as cluster:
        node = cluster.nodes[0]
        for name in ("memory", "view"):
            node.disk(name, options.size + (64 << 20))
        for source, where in (("memory", "memory to memory"), ("disk", "a disk, in the page cache, to memory")):
            digest = view_transfers.random_file(node.path(source) / "file", options.size)
            (node.path(source) / "digest").write_text(json.dumps(digest))
            say(f"{options.size / 2**20:.0f} MiB from {where}")
            calls = {
                "ours": lambda s=source: view_transfers.copy_seconds(cluster, s, "view", with_cp=False),
                "cp": lambda s=source: view_transfers.copy_seconds(cluster, s, "view", with_cp=True),
            }
            done = in_turns(calls, options.rounds)
            rows.append(beside(f"staging by copy from {where}: rate / that of cp", done, options.size))
            (node.path(source) / "file").unlink()
    return rows


def moved(work: Path, options: argparse.Namespace) -> list[Row]:
    """Three nodes make a view of a checkpoint of which each has a third."""
    with Cluster(3, workdir=work / "moved", kind="namespaces", preload=PRELOAD) as cluster:
        say(f"a view of which {options.missing / 2**20:.0f} MiB are missing, on 3 nodes")
        missing = view_transfers.spread_checkpoint(cluster, options.missing // 2)
        one = view_transfers.make_view(cluster, missing)
    bodies = f"{one.body_bytes} bytes of files, {one.missing_bytes} missing; {one.seconds:.1f} s"
    wire = (
        f"{one.wire_bytes} bytes at the interfaces: headers, acknowledgements and all that nodes say to each other"
        " included; veth carries segments of up to 64 KiB, so there are fewer headers than on a wire"
    )
    percent = [(count / one.missing_bytes - 1) * 100 for count in (one.body_bytes, one.wire_bytes)]
    return [
        Row("bytes of files moved, more than are missing", percent[0], "%", most=_MORE_PERCENT, detail=bodies),
        Row("bytes at the interfaces, more than are missing", percent[1], "%", most=_MORE_PERCENT, detail=wire),
    ]


PARTS = {"survey": survey, "links": links, "copies": copies, "moved": moved}


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round, in an order that changes, after one round that does not count."""
    done: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = calls[name]()
            if number:
                done[name].append(seconds)
    return done


def beside(what: str, done: dict[str, list[float]], size_bytes: int) -> Row:
    """A row of our rate beside that of the peer that was best in the median."""
    middles = {name: statistics.median(seconds) for name, seconds in done.items()}
    peer = min((name for name in done if name not in ("ours", "chain")), key=middles.__getitem__)
    ratios = sorted(theirs / ours for ours, theirs in zip(done["ours"], done[peer], strict=True))
    rates = [f"{size_bytes / middles[name] / 1e9:.2f} GB/s" for name in ("ours", peer)]
    detail = f"{rates[0]}; {peer} {rates[1]}; in single rounds {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return Row(what, statistics.median(ratios), least=_STAGED, detail=detail)


def main() -> None:
    """Measures, prints a table and JSON, and fails when a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="tools/bench view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = make_snapshots.size_in_bytes
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; by default all: %(default)s")
    parser.add_argument("--nodes", type=int, default=16, help="that look and agree (16)")
    parser.add_argument("--files", type=int, default=10_000, help="that they look at (10000)")
    parser.add_argument("--size", type=size, default=size("1GiB"), help="of the file that is staged (1GiB)")
    parser.add_argument("--rate", type=int, default=1000, help="of the slower link, in Mbit/s (1000)")
    parser.add_argument("--missing", type=size, default=size("200MiB"), help="on three nodes (200MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    chosen = options.parts.split(",")
    if set(chosen) - set(PARTS):
        parser.error(f"--parts: of {', '.join(PARTS)}")
    if against := reason_against():
        sys.exit(f"no nodes can be simulated here: {against}")
    work = ROOT / ".bench" / "view"
    shutil.rmtree(work, ignore_errors=True)
    rows: list[Row] = []
    try:
        for part in chosen:
            (work / part).mkdir(parents=True)
            rows += PARTS[part](work / part, options)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        show(rows)
    if missed := [row.what for row in rows if row.missed]:
        sys.exit("bars missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
