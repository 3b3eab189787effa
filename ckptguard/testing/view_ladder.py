"""The ladder: what happens when each of two nodes has only some files of a checkpoint, from the least to almost all of them.

Every row says what node 1 has, how plain Megatron (megatron-core 0.19.2, Bridge 0.6.2) or nvidia-resiliency-ext's local manager
(0.4.1) loads that on two ranks over gloo, and how it ends. Node 0 always has what rank 0 wrote there. Node-local saves are real
(:func:`save`); a rank that dies resets its connections, so most rows end at once; row H is the one in which nobody dies and
everybody waits for the whole clock.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptguard.testing.nodes import Call, Cluster, Ended, Node

PRELOAD = ("ckptguard.testing.ladder_rank:prepare", "ckptguard.view.preparing", "ckptguard.cli.main")
"""For the :class:`Cluster` in which the ladder is climbed."""
OLDER, NEWEST = 10, 20
TRACKERS = ("latest_checkpointed_iteration.txt", "latest_train_state.pt")

_RANK = "ckptguard.testing.ladder_rank"
_PORT = 29500
_SAVE_SECONDS = 100.0
PREPARE_SECONDS = 90.0
_CUT_BYTES = 100
_DEAD_PEER = r"Connection (closed|reset) by peer|Broken pipe"
TIMED_OUT = r"(?i)timed out"
_EITHER = f"{TIMED_OUT}|{_DEAD_PEER}"  # whose clock runs out first ends, and the other sees that

Loader = Literal["core", "verified", "bridge", "local"]
"""``dist_checkpointing.load``; the same with ``verify_integrity``; after Bridge's search for the step; local files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        letter: Its name.
        has: What node 1 has of it, in words.
        files: Patterns of the files of rank 0 (in ``iter_*/``) that node 1 has beside its own.
        damage: What is done to rank 1's own file of the newest step.
        loader: How it is loaded.
        errors: By rank, a pattern of its error; a rank that is not here loads without one.
        wrong: By rank, what it holds instead of what was saved, though nothing said so.
        waits: Whether the whole clock runs out for at least one rank.
        lost: Whether no node has a good copy of rank 1's file: a view is then made of the older step, or of the newest if a
            source has a copy of that file.
    """

    letter: str
    has: str
    files: tuple[str, ...] = ()
    damage: Callable[[Path], None] | None = None
    loader: Loader = "core"
    errors: Mapping[int, str] = field(default_factory=dict)
    wrong: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    waits: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """How loading ended for one rank.

    Attributes:
        rank: Its number.
        error: Type and text; "" if it loaded.
        step: Iteration that it chose; -1 if it found none; None if it did not come so far.
        values: The different values that its part of ``w`` holds.
        seconds: Until its process ended.
        log: All that it printed.
    """

    rank: int
    error: str
    step: int | None
    values: tuple[float, ...]
    seconds: float
    log: str


def remove(path: Path) -> None:
    """As if it had never been written."""
    path.unlink()


def cut(path: Path) -> None:
    """Its end is missing."""
    path.write_bytes(path.read_bytes()[:-_CUT_BYTES])


def empty(path: Path) -> None:
    """Its directory entry was written, its data was not."""
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """One bit of one element is another one: 2.0 becomes 0.0."""
    data = bytearray(path.read_bytes())
    right = struct.pack("<f", 2.0)
    start = data.index(right * 16)
    data[start + 3] ^= 0x40
    path.write_bytes(data)


_D = ("metadata.json", ".metadata", "__0_*.distcp")

ROWS: tuple[Row, ...] = (
    Row(letter="A", has="its own shard only", errors={0: _DEAD_PEER, 1: r"is not a distributed checkpoint"}),
    Row(letter="B", has="A and metadata.json", files=_D[:1], errors={0: _DEAD_PEER, 1: r"metadata is None|\.metadata"}),
    Row(letter="C", has="B and .metadata", files=_D[:2], errors={0: _DEAD_PEER, 1: r"__0_0\.distcp"}),
    Row(letter="D", has="C and the shard with common state", files=_D),
    Row(
        letter="E", has="D without its own shard", files=_D, damage=remove, errors={0: _DEAD_PEER, 1: r"__1_0\.distcp"},
        lost=True,
    ),
    Row(
        letter="F", has="D, its own shard cut short", files=_D, damage=cut, lost=True,
        errors={0: _DEAD_PEER, 1: "failed finding central directory"},
    ),
    Row(
        letter="G", has="D, one bit of its own shard flipped, integrity verified", files=_D, damage=flip, loader="verified",
        wrong={1: (0.0, 2.0)}, lost=True,
    ),
    Row(
        letter="H", has="D, loaded by Bridge, whose tracker node 0 alone has", files=_D, loader="bridge",
        errors={0: _EITHER, 1: _EITHER}, waits=True,
    ),
    Row(
        letter="I", has="local files, its newest one empty", damage=empty, loader="local",
        errors={0: _DEAD_PEER, 1: "EOFError"}, lost=True,
    ),
    Row(
        letter="J", has="local files, one bit of its newest one flipped", damage=flip, loader="local", wrong={1: (0.0, 2.0)},
        lost=True,
    ),
)  # fmt: skip


def save(cluster: Cluster, out: Path) -> None:
    """Have two ranks on two nodes save to node-local disks, Megatron's own way and as local files.

    Args:
        cluster: Two nodes.
        out: Gets ``node0/`` and ``node1/`` with what each has afterwards: ``ckpt/`` and ``local/``.
    """
    for node in cluster.nodes:
        node.path("saved/ckpt").mkdir(parents=True)
    where = [str(node.place("saved/ckpt")) for node in cluster.nodes]
    for loaded in _ranks(cluster, "save", [[place, [OLDER, NEWEST]] for place in where], _SAVE_SECONDS):
        assert not loaded.error, loaded.log
    from ckptguard.testing import ladder_rank

    for node in cluster.nodes:
        for step in (OLDER, NEWEST):
            ladder_rank.save_local(node.path("saved/local") / local_name(node.number, step), node.number, step)
        shutil.copytree(node.path("saved"), out / node.host)
        shutil.rmtree(node.path("saved"))


def local_name(rank: int, step: int) -> str:
    """Path of a local file below the manager's root, with the session ""."""
    return f"{rank}/iter_{step:07d}_{rank}_local.pt"


def lay_out(row: Row, saved: Path, cluster: Cluster, name: str) -> None:
    """Give the two nodes what a row says.

    Args:
        row: Which.
        saved: What :func:`save` made.
        cluster: Two nodes.
        name: Directory of the nodes' own that gets it.
    """
    kind = "local" if row.loader == "local" else "ckpt"
    for node in cluster.nodes:
        shutil.copytree(saved / node.host / kind, node.path(name))
    one = cluster.nodes[1].path(name)
    for pattern in row.files:
        for file in (saved / cluster.nodes[0].host / kind).glob(f"iter_*/{pattern}"):
            shutil.copy2(file, one / file.parent.name / file.name)
    if row.damage:
        row.damage(own_file(row, one))


def lay_out_source(row: Row, saved: Path, out: Path) -> None:
    """Make a directory that holds good copies of what rank 1 wrote, and nothing of rank 0's."""
    shutil.copytree(saved / "node1" / ("local" if row.loader == "local" else "ckpt"), out)


def own_file(row: Row, root: Path) -> Path:
    """The file that rank 1 wrote of the newest step."""
    return root / (local_name(1, NEWEST) if row.loader == "local" else f"iter_{NEWEST:07d}/__1_0.distcp")


def load(
    row: Row,
    cluster: Cluster,
    places: Sequence[Path],
    *,
    clock_seconds: float,
    step: int | None = NEWEST,
    package: Path | None = None,
) -> list[Loaded]:
    """Load as the row says, with nothing of ckptguard.

    Args:
        row: Which.
        cluster: Two nodes.
        places: The checkpoint's root, as each node sees it.
        clock_seconds: Time-out of the process group: 600 in a real run.
        step: Which step the loaders ``core`` and ``verified`` take; None is that of Megatron-LM's tracker.
        package: Where nvidia-resiliency-ext is, for the loader ``local``; None is without it.

    Returns:
        How it ended for rank 0 and rank 1.
    """
    arguments: dict[Loader, tuple[str, list[Any]]] = {
        "core": ("load", [step, False]),
        "verified": ("load", [step, True]),
        "bridge": ("load_as_bridge", []),
        "local": ("load_local", [str(package) if package else None]),
    }
    function, more = arguments[row.loader]
    return _ranks(cluster, function, [[str(place), *more] for place in places], clock_seconds)


def misses(row: Row, ends: Sequence[Loaded], clock_seconds: float) -> list[str]:
    """In what a plain load did not end as the row says, in sentences."""
    out = []
    for end in ends:
        pattern = row.errors.get(end.rank)
        if pattern is None and end.error:
            out.append(f"rank {end.rank} should load: {end.log}")
        elif pattern is not None and not re.search(pattern, end.error):
            out.append(f"rank {end.rank} should fail with {pattern}: {end.log}")
        elif pattern is None and end.values != row.wrong.get(end.rank, right(end.rank, NEWEST)):
            out.append(f"rank {end.rank} holds {end.values}")
    slowest_seconds = max(end.seconds for end in ends)
    timed_out = any(re.search(TIMED_OUT, end.error) for end in ends)
    if row.waits != timed_out or row.waits != (slowest_seconds >= clock_seconds):
        out.append(f"ended after {slowest_seconds:.1f} s of {clock_seconds:g} s")
    return out


def misses_in_view(ends: Sequence[Loaded], step: int) -> list[str]:
    """What is not as from a truly shared directory after a load from a view, in sentences."""
    return [
        f"rank {end.rank} chose step {end.step} and holds {end.values}: {end.log}"
        for end in ends
        if end.error or end.step != step or end.values != right(end.rank, step)
    ]


def right(rank: int, step: int) -> tuple[float, ...]:
    """The different values that a rank's part of ``w`` had when it was saved."""
    from ckptguard.testing import ladder_rank

    return (ladder_rank.value(rank, step),)


def prepare(
    cluster: Cluster, name: str, view: str, *, sources: Sequence[Path] = (), options: Sequence[str] = ()
) -> list[Ended]:
    """Run ``ckptguard view prepare`` on every node at once; returns how it ended on each.

    Args:
        cluster: The nodes.
        name: The checkpoint's root, of the nodes' own.
        view: The view, likewise.
        sources: More places, as the nodes see them.
        options: More of the command line.
    """
    calls = [start_prepare(cluster, node, name, view, sources=sources, options=options) for node in cluster.nodes]
    return [call.wait(PREPARE_SECONDS) for call in calls]


def start_prepare(
    cluster: Cluster, node: Node, name: str, view: str, *, sources: Sequence[Path] = (), options: Sequence[str] = ()
) -> Call:
    """Start ``ckptguard view prepare`` on one node; see :func:`prepare`."""
    line = ["view", "prepare", str(node.place(name)), "--view", str(node.place(view)), *options]
    for source in sources:
        line += ["--source", str(source)]
    line += ["--nodes", str(len(cluster.nodes)), "--node-rank", str(node.number)]
    line += ["--rdzv", f"{cluster.nodes[0].address}:{_PORT}", "--address", node.address]
    return cluster.call(node, "ckptguard.cli.main:run", [line])


def _ranks(cluster: Cluster, function: str, arguments: Sequence[list[Any]], clock_seconds: float) -> list[Loaded]:
    """One rank on every node; waits until all have ended."""
    store, world = f"tcp://{cluster.nodes[0].address}:{_PORT}", len(cluster.nodes)
    cluster.warm()
    calls = []
    for node, more in zip(cluster.nodes, arguments, strict=True):
        group = {"rank": node.number, "world": world, "store": store, "clock_seconds": clock_seconds}
        calls.append(cluster.call(node, f"{_RANK}:{function}", [group, *more]))
    return [_loaded(call.wait(3 * clock_seconds)) for call in calls]


def _loaded(ended: Ended) -> Loaded:
    line = next((line for line in reversed(ended.out.splitlines()) if line.startswith("{")), "")
    if not line:
        raise RuntimeError(f"a rank ended with code {ended.code} and said nothing:\n{ended.out}{ended.err}")
    told = json.loads(line)
    return Loaded(
        told["rank"], told.get("error", ""), told.get("resolved"), tuple(told.get("value", ())), ended.seconds,
        ended.out + ended.err,
    )  # fmt: skip
