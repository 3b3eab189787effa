"""Hundreds of faults while a view is prepared on two to four simulated nodes: nodes, links, disks, files, servers, clocks.

    python tools/stress/view_faults.py [--count N] [--seed N] [--only KIND ...] [--jobs N]

Every run must end in time, with one clear message, and leave on every node a whole view, that from before, or none; the next
prepare must succeed. Prints a line per fault and a table; rows are kept in .bench/view_faults.json as they come. Exits 1 on any
miss. Needs Linux and root, for namespaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ckptguard.testing.nodes import reason_against
from ckptguard.testing.view_faults import KINDS
from ckptguard.testing.view_runs import Truth
from ckptguard.testing.view_trials import Row, trials

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".bench" / "view_faults.json"
FIXTURES = ROOT / "fixtures" / "megatron-0.19"
STEPS = {
    "20": FIXTURES / "moe_pp2ep2_fully_reshardable" / "iter_0000004",
    "10": FIXTURES / "dense_tp2pp2_integrity" / "iter_0000002",
}
NODES = 4


def planned(count: int, only: Sequence[str] | None, rng: random.Random) -> list[str]:
    """The kinds of so many faults, each by its share, mixed."""
    shares = {name: kind.share for name, kind in KINDS.items() if not only or name in only}
    whole = sum(shares.values())
    exact = {name: count * share / whole for name, share in shares.items()}
    numbers = {name: int(value) for name, value in exact.items()}
    by_rest = sorted(exact, key=lambda name: numbers[name] - exact[name])
    for name in by_rest[: count - sum(numbers.values())]:
        numbers[name] += 1
    out = [name for name, number in numbers.items() for _ in range(number)]
    rng.shuffle(out)
    return out


def show(row: Row) -> None:
    """A line, and what is wrong below it."""
    codes = " ".join(str(code) for code in row.codes.values())
    where = f"node {row.victim}/{row.nodes} {row.when}"
    print(
        f"{row.number:4} {row.kind:14} {row.variant:28} {where:24} {row.seconds:5.1f} s  {row.came:8} [{codes}]",
        flush=True,
    )
    for text in row.wrong:
        print(f"     WRONG {text}", flush=True)


def table(rows: Sequence[Row]) -> None:
    """How each kind ended."""
    print(
        f"\n{'kind':16}{'runs':>5}{'failure':>9}{'success':>9}{'older':>7}{'parted':>8}{'left':>6}{'healed':>8}{'slowest':>9}{'wrong':>7}"
    )
    for kind in sorted({row.kind for row in rows}, key=list(KINDS).index):
        own = [row for row in rows if row.kind == kind]
        came = Counter(row.came for row in own)
        counts = f"{came['failure']:9}{came['success']:9}{came['older']:7}{came['parted']:8}"
        slowest = max(row.seconds for row in own)
        print(
            f"{kind:16}{len(own):5}{counts}{sum(row.left for row in own):6}{sum(row.healed for row in own):8}{slowest:8.1f}s"
            f"{sum(bool(row.wrong) for row in own):7}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    if against := reason_against():
        print(f"cannot be run here: {against}")
        return 1
    kinds = planned(chosen.count, chosen.only, random.Random(chosen.seed))
    began = time.monotonic()
    rows: list[Row] = []
    chosen.results.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptguard-faults-") as scratch:
        for row in trials(kinds, Truth.of(STEPS), Path(scratch), seed=chosen.seed, jobs=chosen.jobs, nodes=NODES):
            rows.append(row)
            show(row)
            chosen.results.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1) + "\n")
    table(rows)
    wrong = sum(bool(row.wrong) for row in rows)
    slowest = max(row.seconds for row in rows)
    print(
        f"{len(rows)} faults in {(time.monotonic() - began) / 60:.1f} min, the slowest run {slowest:.1f} s,"
        f" {sum(row.left for row in rows)} killed nodes left with an unconfirmed view, {wrong} wrong"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
