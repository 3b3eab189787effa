"""Runs ``view.prepare`` on simulated nodes, and holds what is left on every node against the truth.

A checkpoint of several steps is laid out over the nodes as node-local saves leave it: every node has the shards of its own
ranks, and one of them the index. Whatever happens in a run, a view that appears on a node has to be a whole one, byte by byte.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.nodes import Call, Cluster, Ended, Node
from ckptguard.testing.view_node import TARGET, Asked, Plants
from ckptguard.view import records

TRACKER = "latest_checkpointed_iteration.txt"
HANG_SECONDS = 90.0
CHECKPOINT, VIEW, VIEWS = "ckpt", "views/view", "views"
_POLL_SECONDS = 0.01
_LARGE_BYTES = 8192
_COUNTER = itertools.count()
_FIRST_PORT, _PORTS = 20000, 8000
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Truth:
    """The steps of a checkpoint.

    Attributes:
        steps: Per number, the bytes of every file by its name in the view.
        tensors: Per file, byte ranges ``[begin, end)`` that hold elements of tensors.
    """

    steps: Mapping[str, Mapping[str, bytes]]
    tensors: Mapping[str, Sequence[tuple[int, int]]]

    @classmethod
    def of(cls, folders: Mapping[str, Path]) -> Truth:
        """Step directories by the number they are to have."""
        steps: dict[str, dict[str, bytes]] = {}
        tensors: dict[str, list[tuple[int, int]]] = {}
        for number, folder in folders.items():
            view = f"iter_{int(number):07d}"
            steps[number] = {f"{view}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
            with open_checkpoint(folder) as checkpoint:
                spans = [chunk.span for entry in checkpoint.index.tensors.values() for chunk in entry.chunks]
            for span in spans:
                if span.length_bytes > _LARGE_BYTES:  # the middle of its zip is elements
                    middle = span.offset_bytes + span.length_bytes // 2
                    tensors.setdefault(f"{view}/{span.file}", []).append((middle - 1024, middle + 1024))
        return cls(steps, tensors)

    def inside(self, name: str, rng: random.Random) -> int:
        """A byte of a data file that is part of a tensor's element."""
        begin, end = rng.choice(self.tensors[name])
        return rng.randrange(begin, end)

    @property
    def newest(self) -> str:
        """Number of the newest step."""
        return max(self.steps, key=int)

    @property
    def oldest(self) -> str:
        """Number of the oldest step."""
        return min(self.steps, key=int)

    def shards(self, number: str) -> list[str]:
        """Names of the data files of a step."""
        return [name for name in self.steps[number] if _SHARD.fullmatch(name.rpartition("/")[2])]


@dataclass(frozen=True, slots=True)
class Seen:
    """The view of a node.

    Attributes:
        step: Number of the step; "" where there is no view.
        id: Of the agreement.
        confirmed: Whether it is known to be on every node.
        wrong: What is wrong with it; empty if it is whole or absent.
    """

    step: str = ""
    id: str = ""
    confirmed: bool = False
    wrong: tuple[str, ...] = ()


@dataclass(slots=True)
class Running:
    """The nodes of one run.

    Attributes:
        calls: By node.
        killed: Nodes whose process somebody killed or froze.
    """

    calls: dict[int, Call]
    ends: dict[int, Ended] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    hung: set[int] = field(default_factory=set)

    def said(self, node: int) -> str:
        """All that a node has printed so far."""
        return self.calls[node]._out.read_text()

    def doing(self, node: int) -> str:
        """The order that a node has begun last."""
        orders = re.findall(r"^order (\w+)$", self.said(node), re.MULTILINE)
        return orders[-1] if orders else "meeting"

    def told(self, node: int) -> dict[str, Any]:
        """What a node that ended well prints."""
        told: dict[str, Any] = json.loads(self.ends[node].out.splitlines()[-1])
        return told

    def codes(self) -> dict[int, int]:
        """Exit codes by node."""
        return {node: end.code for node, end in sorted(self.ends.items())}


class Bench:
    """Nodes with a checkpoint.

    Args:
        cluster: The nodes; a run takes the first of them.
        truth: The checkpoint.
        name: Folder of the run on every node.
        count: How many nodes take part.
        timeout_seconds: As of ``Options``.
    """

    def __init__(self, cluster: Cluster, truth: Truth, name: str, count: int, *, timeout_seconds: float = 12.0) -> None:
        self.cluster, self.truth, self.name, self.count = cluster, truth, name, count
        self.timeout_seconds = timeout_seconds
        self.nodes = cluster.nodes[:count]
        self.torn: list[str] = []
        self._disks: list[tuple[Node, str]] = []

    def path(self, node: int, name: str) -> Path:
        """Where this process sees a file of a node's."""
        return self.nodes[node].path(f"{self.name}/{name}")

    def place(self, node: int, name: str) -> Path:
        """Where the node's own processes see it."""
        return self.nodes[node].place(f"{self.name}/{name}")

    # --- the checkpoint

    def lay_out(self, *, index: Sequence[int] = (0,), copies: int = 1, trackers: Sequence[int] | None = None) -> None:
        """As a run saves it to node-local disks.

        Args:
            index: Nodes that have the small files.
            copies: Nodes that have each shard.
            trackers: Nodes that have a tracker; by default all.
        """
        for node in range(self.count):
            root = self.path(node, CHECKPOINT)
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            self.path(node, VIEWS).mkdir(exist_ok=True)
            if trackers is None or node in trackers:
                (root / TRACKER).write_text(self.truth.newest)
        for files in self.truth.steps.values():
            for name, data in files.items():
                for node in self.owners(name, copies) or index:
                    self.put(node, name, data)

    def owners(self, name: str, copies: int = 1) -> list[int]:
        """Nodes that have a shard; empty for a small file."""
        match = _SHARD.fullmatch(name.rpartition("/")[2])
        first = int(match[1]) % self.count if match else 0
        return [(first + more) % self.count for more in range(min(copies, self.count))] if match else []

    def put(self, node: int, name: str, data: bytes) -> Path:
        """Gives a node a file of the checkpoint."""
        path = self.path(node, f"{CHECKPOINT}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def disk(self, node: int, size_bytes: int) -> None:
        """Gives a node's views a small disk of their own."""
        name = f"{self.name}/{VIEWS}"
        self.nodes[node].disk(name, size_bytes)
        self._disks.append((self.nodes[node], name))

    def remove_disks(self) -> None:
        """Takes the small disks away, with all that is on them."""
        for node, name in self._disks:
            node.remove_disk(name)
        self._disks.clear()

    # --- running

    def start(
        self,
        plants: Mapping[int, Plants] | None = None,
        *,
        nodes: Sequence[int] | None = None,
        asked: Mapping[int, Mapping[str, Any]] | None = None,
        **everywhere: Any,
    ) -> Running:
        """Starts ``prepare`` on the nodes.

        Args:
            plants: Faults by node.
            nodes: Those that are started; by default all.
            asked: By node, fields of ``Asked`` that differ.
            everywhere: Fields of ``Asked`` that differ on all nodes.
        """
        meets = f"tcp://{self.nodes[0].address}:{_port(self.cluster, self.nodes[0])}"
        calls = {}
        for node in range(self.count) if nodes is None else nodes:
            at = self.nodes[node]
            fields: dict[str, Any] = {
                "places": [str(self.place(node, CHECKPOINT))],
                "view": str(self.place(node, VIEW)),
                "number": node,
                "count": self.count,
                "rendezvous": meets,
                "address": at.address,
                "host": at.host,
                "timeout_seconds": self.timeout_seconds,
                "plants": asdict((plants or {}).get(node, Plants())),
            }
            fields |= everywhere | dict((asked or {}).get(node, {}))
            what = asdict(Asked(**fields))
            calls[node] = self.cluster.call(self.nodes[node], TARGET, [what])
        return Running(calls)

    def wait(self, running: Running, *, until_seconds: float = HANG_SECONDS) -> None:
        """Until all have ended but those that were killed; looks meanwhile whether any view is ever half there."""
        until = time.monotonic() + until_seconds
        while left := [n for n in running.calls if n not in running.ends and n not in running.killed]:
            for node in left:
                if not running.calls[node].running():
                    running.ends[node] = running.calls[node].wait(1)
            self.look_for_torn()
            if time.monotonic() > until:
                running.hung |= {node for node in left if node not in running.ends}
                break
            time.sleep(_POLL_SECONDS)
        for node in running.killed | running.hung:
            running.calls[node].kill()
            running.ends[node] = running.calls[node].wait(10)

    def wait_for(self, running: Running, node: int, order: str, then_seconds: float = 0.0, *, times: int = 1) -> bool:
        """Waits until a node has begun an order so many times, then so much longer. False if it ends before."""
        mark = f"order {order}\n"
        while order != "start" and running.said(node).count(mark) < times:
            if not running.calls[node].running():
                return False
            time.sleep(0.002)
        time.sleep(then_seconds)
        return running.calls[node].running()

    def prepare(self, **everywhere: Any) -> Running:
        """A run that nothing happens to."""
        running = self.start(**everywhere)
        self.wait(running)
        return running

    # --- the truth

    def look_for_torn(self) -> None:
        """Notes a view that is there and not whole at this instant, by names and sizes."""
        for node in range(self.count):
            view = self.path(node, VIEW)
            root = _version_of(view)
            if root is None or not root.is_dir():
                continue
            found = {path.relative_to(root).as_posix(): size for path, size in _files(root)}
            whole = any(
                all(found.get(name) == len(data) for name, data in files.items()) and records.NAME in found
                for files in self.truth.steps.values()
            )
            if not whole and _version_of(view) == root and root.is_dir():
                self.torn.append(f"node {node}: {root.name} was not whole while it was the view: {sorted(found)}")

    def seen(self, node: int) -> Seen:
        """The view of a node as it is now, every byte of it compared."""
        view = self.path(node, VIEW)
        root = _version_of(view)
        if root is None:
            return Seen(id="of somebody" if os.path.lexists(view) else "")
        if root.parent.name != f"{view.name}.d":
            return Seen(id="of somebody")
        if not root.is_dir():
            return Seen(id="leads nowhere")
        try:
            agreement = records.read_record(root).agreement
        except ValueError as error:
            return Seen(wrong=(f"node {node}: {error}",))
        number = agreement.step.number
        published = records.read_publication(root.with_name(f"{root.name}.json"))
        names = {*self.truth.steps.get(number, {}), TRACKER, "latest_train_state.pt", records.NAME}
        found = {path.relative_to(root).as_posix(): path for path, _ in _files(root)}
        wrong = [f"{name} is no file of the step" for name in found.keys() - names]
        wrong += [
            f"{name} is not as it was saved"
            for name, data in self.truth.steps.get(number, {}).items()
            if name not in found or found[name].read_bytes() != data
        ]
        if TRACKER not in found or found[TRACKER].read_text() != number:
            wrong.append("its tracker does not name its step")
        wrong += [f"{folder} can be written to" for folder in (root, *root.rglob("*")) if _open_to_writes(folder)]
        return Seen(number, agreement.id, bool(published.confirmed), tuple(f"node {node}: {one}" for one in wrong))

    def missing_bytes(self, node: int, number: str, block_bytes: int = 4096) -> int:
        """Bytes of a step that a node has neither in its checkpoint nor from an earlier attempt, block by block."""
        count = 0
        for name, data in self.truth.steps[number].items():
            if self._has(self.path(node, f"{CHECKPOINT}/{name}"), data):
                continue
            kept = [*self.path(node, f"{VIEW}.d").glob("*/"), *self.path(node, f"{VIEW}.d").glob(".staging")]
            found = [_bytes_of(folder / f"{name}{end}") for folder in kept for end in ("", ".partial")]
            there = max(found, key=len, default=b"")
            blocks = range(0, len(data), block_bytes)
            gone = [
                data[at : at + block_bytes]
                for at in blocks
                if there[at : at + block_bytes] != data[at : at + block_bytes]
            ]
            count += sum(map(len, gone))
        return count

    def _has(self, path: Path, data: bytes) -> bool:
        return _bytes_of(path) == data

    def clean(self) -> None:
        """Ends what runs on the nodes and removes the run's files."""
        for node in self.nodes:
            self.cluster.kill(node)
        self.remove_disks()
        for node in self.nodes:
            shutil.rmtree(node.files / self.name, ignore_errors=True)


def _version_of(view: Path) -> Path | None:
    try:
        return view.parent / os.readlink(view)
    except OSError:
        return None


def _files(root: Path) -> Iterator[tuple[Path, int]]:
    """All files below, with their sizes; some may vanish meanwhile."""
    for folder, _, names in root.walk():
        for name in names:
            with suppress(FileNotFoundError):
                yield folder / name, (folder / name).lstat().st_size


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError:
        return b""


def _open_to_writes(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and bool(folder.stat().st_mode & 0o222)


def _port(cluster: Cluster, node: Node) -> int:
    """One that is free at a node: in a namespace they only follow each other, as nobody else is there."""
    if cluster.kind == "namespaces":
        return _FIRST_PORT + next(_COUNTER) % _PORTS
    with socket.socket() as free:
        free.bind((node.address, 0))
        port: int = free.getsockname()[1]
        return port
