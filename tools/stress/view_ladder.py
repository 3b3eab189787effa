"""The ladder of node-local checkpoints with everything real: plain Megatron, nvidia-resiliency-ext's manager, Megatron-LM runs.

The tests climb the same ladder without the manager, which is no dependency: here its release is installed into a directory that
is removed afterwards. Prints one line per rank and row. Exits 1 where a row does not end as it says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ckptguard.testing import node_training, view_ladder
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.recipes import Recipe

MANAGER = "nvidia-resiliency-ext==0.4.1"
RECIPE = Recipe(name="two_nodes", dp=2, num_layers=2)
_SHOWN_CHARACTERS = 160


def manager(folder: Path) -> Path | None:
    """Where the manager is, freshly installed; None, and the reason on stderr, if it cannot be."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), MANAGER]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"without {MANAGER}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    print(f"local files with the manager of {MANAGER}")
    return folder


def plain(scratch: Path, arguments: argparse.Namespace) -> list[str]:
    """Every row without a view; returns what is not as the row says."""
    out = []
    package = manager(scratch / "package")
    with Cluster(2, workdir=scratch / "ladder", kind=arguments.kind, preload=view_ladder.PRELOAD) as cluster:
        saved = scratch / "saved"
        view_ladder.save(cluster, saved)
        for row in view_ladder.ROWS:
            view_ladder.lay_out(row, saved, cluster, row.letter)
            places = [node.place(row.letter) for node in cluster.nodes]
            ends = view_ladder.load(row, cluster, places, clock_seconds=arguments.clock, package=package)
            print(f"{row.letter}: node 1 has {row.has}")
            for end in ends:
                how = _last_line(end.error)[-_SHOWN_CHARACTERS:] if end.error else f"loads {end.values}"
                print(f"   rank {end.rank}, {end.seconds:5.1f} s: {how}")
            out += [f"{row.letter}: {miss}" for miss in view_ladder.misses(row, ends, arguments.clock)]
    return out


def plain_training(scratch: Path, arguments: argparse.Namespace) -> list[str]:
    """Megatron-LM's own run, saved to node-local disks and resumed from there: it waits for its whole clock, a minute."""
    with Cluster(2, workdir=scratch / "training", kind=arguments.kind, preload=node_training.PRELOAD) as cluster:
        places = [node.place("run") for node in cluster.nodes]
        saved = node_training.train(cluster, RECIPE, save=places)
        began = time.monotonic()
        ends = node_training.train(cluster, RECIPE, save=None, load=places, clock_minutes=1)
        seconds = time.monotonic() - began
    print(f"Megatron-LM resumes from node-local disks: {seconds:.1f} s")
    for rank, end in enumerate(ends):
        print(f"   rank {rank}: {_last_line(end.err)[-_SHOWN_CHARACTERS:]}")
    right = not any(end.code for end in saved) and all(end.code for end in ends) and seconds > 60
    return [] if right else ["the run of Megatron-LM did not wait for its clock"]


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clock", type=float, default=15.0, help="time-out of the process groups, in seconds")
    parser.add_argument("--kind", choices=("namespaces", "loopback"), help="of the nodes; default: what is allowed")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ckptguard-ladder-") as scratch:
        misses = plain(Path(scratch), arguments) + plain_training(Path(scratch), arguments)
    print("\n".join(misses) or "every row ended as it says")
    return bool(misses)


if __name__ == "__main__":
    sys.exit(main())
