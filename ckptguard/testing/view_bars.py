"""How long nodes take to look at a checkpoint of very many files, and to agree on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME
from ckptguard.formats.torch_dist_writer import ChunkToWrite, config_bytes, file_name, metadata_bytes, place
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.view_calls import PORT, SECONDS, all_at_once, await_file, options_of, say
from ckptguard.view.preparing import prepare, status

STEP = "iter_0000020"
_DISK_BYTES = 256 << 20
_ME = "ckptguard.testing.view_bars"


@dataclass(frozen=True, slots=True)
class Asked:
    """How long all nodes took to answer.

    Attributes:
        seconds: From the moment when all of them run to the last verdict.
        node_seconds: The same, node by node.
        cpu_seconds: Of all their processes, without imports.
        files: How many data files node 0 knew of in the end, by name.
    """

    seconds: float
    node_seconds: tuple[float, ...]
    cpu_seconds: float
    files: int


def many_files(cluster: Cluster, ckpt: str, count: int, *, everywhere: bool, chunks_each: int = 2) -> None:
    """A made-up checkpoint of very many data files (zeros, sparse), spread over the nodes or whole on each of them.

    Args:
        cluster: Whose nodes get it.
        ckpt: Name of its directory.
        count: How many data files there are.
        everywhere: Each node has all of it; else an equal part each, and node 0 the index.
        chunks_each: How many chunks each file has.
    """
    shape, names = (count, 64, 64), [file_name(number) for number in range(count)]
    placed = []
    for number, name in enumerate(names):
        box = Box((number, 0, 0), (1, 64, 64))
        tensors = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(chunks_each)]
        placed.append(place(name, [ChunkToWrite(tensor, BY_NAME["bfloat16"], shape, box) for tensor in tensors]))
    index = metadata_bytes(placed)
    for node in cluster.nodes:
        if cluster.kind == "namespaces":
            node.disk(ckpt, _DISK_BYTES)  # in memory: gone at once in the end
        folder = node.path(ckpt) / STEP
        folder.mkdir(parents=True)
        own = placed if everywhere else placed[node.number :: len(cluster.nodes)]
        for file in own:
            _sparse(folder / file.name, file.size_bytes)
        if everywhere or node.number == 0:
            finish(node.path(ckpt), index)


def _sparse(path: Path, size_bytes: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(handle, size_bytes)
    os.close(handle)


def finish(root: Path, index: bytes) -> None:
    """What makes a step whole: index, marker, tracker."""
    (root / STEP / ".metadata").write_bytes(index)
    (root / STEP / "metadata.json").write_bytes(config_bytes())
    (root / "latest_checkpointed_iteration.txt").write_text(str(int(STEP.removeprefix("iter_"))))


def ask(cluster: Cluster, ckpt: str, verb: str) -> Asked:
    """Has every node ask at once: ``status``, or ``prepare`` until the data would be moved (a dry run)."""
    answers = all_at_once(cluster, f"{_ME}:on_node_ask", [verb], ckpt)
    ended = [answer["seconds"] for answer in answers]
    files = answers[0]["files"]
    return Asked(max(ended), tuple(ended), sum(answer["cpu_seconds"] for answer in answers), files)


def ask_by_command(cluster: Cluster, ckpt: str) -> float:
    """Seconds of ``ckptguard view status`` started on every node at once, until the last has ended; imports included."""
    nodes, count = cluster.nodes, str(len(cluster.nodes))
    where = ["--rdzv", f"{nodes[0].address}:{PORT}", "--nodes", count]
    began, running = time.monotonic(), []
    for node in nodes:
        own = ["--node-rank", str(node.number), "--address", node.address]
        words = ["view", "status", str(node.place(ckpt)), *where, *own]
        command = [sys.executable, "-m", "ckptguard", *words]
        running.append(node.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in running:
        said = process.communicate(timeout=SECONDS)[1]
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {said}")
    return time.monotonic() - began


def import_by_command(cluster: Cluster) -> float:
    """Seconds of the imports of that command alone, on every node at once."""
    command = [sys.executable, "-c", "from ckptguard.testing.view_calls import imported; imported()"]
    began = time.monotonic()
    for process in [node.popen(command) for node in cluster.nodes]:
        process.wait(SECONDS)
    return time.monotonic() - began


def on_node_ask(verb: str, node: Mapping[str, Any], go: str) -> None:
    """Waits for the word, and asks."""
    options = options_of(node, dry_run=True)
    await_file(Path(go))
    began, used = time.monotonic(), time.process_time()
    result = status(options) if verb == "status" else prepare(options)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - used
    files = len({name for candidate in result.candidates for name in candidate.data})
    say(seconds=seconds, cpu_seconds=cpu_seconds, files=files)
