"""The ladder of node-local checkpoints with everything real: plain Megatron, nvidia-resiliency-ext's manager, Megatron-LM runs.

The tests climb the same ladder without the manager, which is no dependency: here its release is installed into a directory that
is removed afterwards. Every row is loaded plainly and from a view; runs of Megatron-LM on 2, 3 and 4 nodes go on from views, in
the same and another layout, also with a node replaced by an empty one, and are compared bit by bit with runs that go on from a
truly shared directory. Exits 1 on any difference from what is said.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptguard.engine.diff import diff_checkpoints
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing import node_training, view_ladder
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.recipes import Recipe
from ckptguard.testing.view_ladder import NEWEST, OLDER, Row

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
        for row in view_ladder.ROWS:
            out += from_view(row, saved, cluster, package, arguments.clock)
    return out


def from_view(row: Row, saved: Path, cluster: Cluster, package: Path | None, clock_seconds: float) -> list[str]:
    """One row after ``ckptguard view prepare``; returns what is not as from a shared directory."""
    name, view, step = f"{row.letter}-for-view", f"{row.letter}-view", OLDER if row.lost else NEWEST
    view_ladder.lay_out(row, saved, cluster, name)
    prepared = view_ladder.prepare(cluster, name, view, options=["--ranks", "0/1"])
    if any(ended.code for ended in prepared):
        return [f"{row.letter}: view prepare: {ended.err}" for ended in prepared]
    places = [node.place(view) for node in cluster.nodes]
    ends = view_ladder.load(row, cluster, places, clock_seconds=clock_seconds, step=None, package=package)
    print(f"{row.letter}: from a view, {prepared[0].seconds:.1f} s: both ranks load step {ends[0].step}")
    return [f"{row.letter}: {miss}" for miss in view_ladder.misses_in_view(ends, step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A training saved on some nodes and resumed from a view on as many.

    Attributes:
        nodes: How many.
        saved: What was trained.
        resumed: The layout in which it goes on.
        options: Of ``view prepare``, for that layout.
        replaced: A node whose disk is empty when the view is prepared, its files being elsewhere; None for none.
    """

    nodes: int
    saved: Recipe
    resumed: Recipe
    options: tuple[str, ...] = ()
    replaced: int | None = None

    @property
    def title(self) -> str:
        """For people."""
        empty = f", node {self.replaced} replaced by an empty one" if self.replaced is not None else ""
        return f"{self.nodes} nodes, {self.saved.name} -> {self.resumed.name}{empty}"


_SIX = ("--global-batch-size", "6")
_FOUR_LAYERS = Recipe(name="TP2 PP2", tp=2, pp=2, optimizer_format="fully_reshardable")
_PP4 = replace(_FOUR_LAYERS, name="TP1 PP4", tp=1, pp=4)
_TO_PP4 = ("--tp", "1", "--pp", "4")
_DP3 = replace(RECIPE, name="DP3", dp=3, extra_flags=_SIX)
MOVES = (
    Move(nodes=2, saved=_FOUR_LAYERS, resumed=_FOUR_LAYERS),
    Move(nodes=2, saved=_FOUR_LAYERS, resumed=_PP4, options=_TO_PP4),
    Move(nodes=2, saved=_FOUR_LAYERS, resumed=_PP4, options=_TO_PP4, replaced=0),
    Move(nodes=3, saved=_DP3, resumed=_DP3, replaced=1),
    Move(nodes=4, saved=_FOUR_LAYERS, resumed=_PP4, options=_TO_PP4, replaced=3),
)


def trainings(scratch: Path, arguments: argparse.Namespace) -> list[str]:
    """Every move, compared with a resume from a truly shared directory; returns what differs."""
    out = []
    for number, move in enumerate(MOVES):
        preload = (*node_training.PRELOAD, "ckptguard.view.preparing", "ckptguard.cli.main")
        with Cluster(move.nodes, workdir=scratch / f"move{number}", kind=arguments.kind, preload=preload) as cluster:
            misses = _moved(move, cluster, scratch / f"out{number}")
        print(f"{move.title}: {'different' if misses else 'the same, bit for bit'}")
        out += [f"{move.title}: {miss}" for miss in misses]
    return out


def _moved(move: Move, cluster: Cluster, out: Path) -> list[str]:
    train, nodes = node_training.train, cluster.nodes
    saved = train(cluster, move.saved, save=[node.place("run") for node in nodes])
    if any(end.code for end in saved):
        return [f"did not train: {end.err[-1000:]}" for end in saved]
    shared = node_training.gather(cluster, "run", out / "shared")
    sources = []
    if move.replaced is not None:
        shutil.move(nodes[move.replaced].path("run"), out / "elsewhere")
        sources = ["--source", str(out / "elsewhere")]
    each = str(move.saved.world_size // move.nodes)
    prepared = view_ladder.prepare(cluster, "run", "view", options=["--ranks-per-node", each, *sources, *move.options])
    if any(end.code for end in prepared):
        return [f"view prepare: {end.err}" for end in prepared]
    longer = replace(move.resumed, steps=move.saved.steps + 2)
    one = train(cluster, longer, load=[shared] * move.nodes, save=[out / "one"] * move.nodes)
    two = train(cluster, longer, load=[node.place("view") for node in nodes], save=[out / "two"] * move.nodes)
    failed = [f"did not go on: {end.err[-1000:]}" for end in (*one, *two) if end.code]
    if failed:
        return failed
    if node_training.losses(one) != node_training.losses(two):
        return [f"losses {node_training.losses(one)} and {node_training.losses(two)}"]
    same = diff_checkpoints(open_checkpoint(out / "one"), open_checkpoint(out / "two"))
    return [f"{diff.name} differs" for diff in same if diff.differs]


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
        parts = (plain, plain_training, trainings)
        misses = [miss for part in parts for miss in part(Path(scratch), arguments)]
    print("\n".join(misses) or "every row ended as it says")
    return bool(misses)


if __name__ == "__main__":
    sys.exit(main())
