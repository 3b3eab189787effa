"""How fast files come to a staging directory, beside ``curl`` and ``cp``, and how many bytes move until there is a view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from ckptguard.testing.nodes import Cluster, Node
from ckptguard.testing.view_bars import STEP, finish
from ckptguard.testing.view_calls import (
    POLL_SECONDS,
    SECONDS,
    all_at_once,
    answer_of,
    await_file,
    fresh,
    options_of,
    refuse_failed,
    say,
    tell,
    told_in,
)
from ckptguard.view.preparing import prepare
from ckptguard.view.server import FILES, Server
from ckptguard.view.staging import deliver
from ckptguard.view.values import Copy, Delivered, Delivery, Digest

_ME = "ckptguard.testing.view_transfers"
_CKPT = "saved"
_TOKEN = "of-a-benchmark"
_BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
_NAME = f"{STEP}/__0_0.distcp"


@dataclass(frozen=True, slots=True)
class Link:
    """A file on node 0, served, and peers that get it too.

    Attributes:
        cluster: The nodes.
        size_bytes: Of the file.
        url: Of node 0's server.
        plain_url: Of the same file at Python's own ``http.server``.
        digest: Of the file, as JSON.
    """

    cluster: Cluster
    size_bytes: int
    url: str
    plain_url: str
    digest: Mapping[str, Any]

    def stage(self, last: int = 1) -> float:
        """Seconds until nodes ``1 ... last`` all have the file staged, each from the one before it."""
        cluster, url, told, calls = self.cluster, self.url, [], []
        go, over = (fresh(cluster, name) for name in ("go", "over"))
        for node in cluster.nodes[1 : last + 1]:
            told.append([fresh(cluster, f"{what}{node.number}") for what in ("url", "ended")])
            files = [str(path) for path in (node.place("disk"), *told[-1], go, over)]
            args = [self.digest, url, node.number, node.address, *files]
            calls.append(cluster.call(node, f"{_ME}:on_node_stage", args))
            url = told_in(told[-1][0], calls[-1])
        went = time.monotonic()
        go.touch()
        seconds = max(float(told_in(end, call)) for (_, end), call in zip(told, calls, strict=True)) - went
        over.touch()
        for call in calls:
            refuse_failed(call.wait(SECONDS))
        return seconds

    def curl(self, *, plain: bool) -> float:
        """Seconds of ``curl`` on node 1, from our server or from Python's."""
        node = self.cluster.nodes[1]
        url = self.plain_url if plain else f"{self.url}{FILES}{_NAME}"
        target = node.place("disk") / "curl"
        token = f"Authorization: Bearer {_TOKEN}"
        ended = node.run(
            ["curl", "-sSf", "--noproxy", "*", "-H", token, "-o", str(target), url], timeout_seconds=SECONDS
        )
        size = node.path("disk/curl").stat().st_size if not ended.code else -1
        if size != self.size_bytes:
            raise RuntimeError(f"curl: exit code {ended.code}, {size} bytes: {ended.err}")
        node.path("disk/curl").unlink()
        return ended.seconds


@contextmanager
def link(cluster: Cluster, size_bytes: int) -> Iterator[Link]:
    """A file in the memory of node 0, served there. Each node has a file system in memory of its own, ``disk``."""
    for node in cluster.nodes:
        node.disk("disk", size_bytes + (64 << 20))
    digest = random_file(cluster.nodes[0].path("disk/file"), size_bytes)
    cluster.warm()
    first, told = cluster.nodes[0], fresh(cluster, "served")
    path, plain = first.place("disk") / "file", f"http://{first.address}:8123/file"
    serving = cluster.call(first, f"{_ME}:on_node_serve", [digest, str(path), first.address, str(told)])
    command = [sys.executable, "-m", "http.server", "8123", "--bind", first.address, "--directory", str(path.parent)]
    python = first.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = told_in(told, serving)
        _await_server(first, plain)
        yield Link(cluster, size_bytes, url, plain, digest)
    finally:
        python.kill()
        python.wait()
        serving.kill()


def _await_server(node: Node, url: str) -> None:
    until = time.monotonic() + SECONDS
    while node.run(["curl", "-sSfI", "--noproxy", "*", "-o", os.devnull, url]).code:
        if time.monotonic() > until:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(POLL_SECONDS)


def random_file(path: Path, size_bytes: int) -> dict[str, Any]:
    """Writes a file of random bits; returns its digest."""
    whole, blocks, left = blake3(), bytearray(), size_bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while left:
            piece = os.urandom(min(left, _PIECE_BYTES))
            file.write(piece)
            whole.update(piece)
            for at in range(0, len(piece), _BLOCK_BYTES):
                blocks += xxh3_64_intdigest(piece[at : at + _BLOCK_BYTES]).to_bytes(8, "little")
            left -= len(piece)
    return {
        "size_bytes": size_bytes, "blake3": whole.hexdigest(), "block_bytes": _BLOCK_BYTES, "blocks": blocks.hex()
    }  # fmt: skip


def on_node_serve(digest: Mapping[str, Any], path: str, address: str, told: str) -> None:
    """Serves a file until the process is killed."""
    with Server(address, _TOKEN) as server:
        server.offer(_NAME, Path(path), Digest(**digest))
        tell(Path(told), server.url)
        while True:
            time.sleep(SECONDS)


def on_node_stage(
    digest: Mapping[str, Any], url: str, number: int, address: str, disk: str, own: str, end: str, go: str, over: str
) -> None:
    """Gets the file from another node into a staging directory, and gives it on while it comes."""
    staging, size = Path(disk) / "staging", digest["size_bytes"]
    delivery = Delivery(_NAME, number, Digest(**digest), Copy(0, 0, _NAME, _NAME, size), via=number - 1)
    with Server(address, _TOKEN) as server:
        tell(Path(own), server.url)
        await_file(Path(go))
        urls = {number - 1: url}
        came = deliver([delivery], node=number, places=[disk], staging=staging, server=server, urls=urls, token=_TOKEN)
        tell(Path(end), str(time.monotonic()))
        await_file(Path(over))
    _refuse_other(came, "fetched")
    (staging / _NAME).unlink()


def copy_seconds(cluster: Cluster, source: str, target: str, *, with_cp: bool) -> float:
    """Seconds to copy ``file`` from one file system of node 0 to another one, by staging or by ``cp``.

    The digest of the file stands beside it, in ``digest``.
    """
    node = cluster.nodes[0]
    end = node.path(target) / _NAME
    end.parent.mkdir(parents=True, exist_ok=True)
    size = (node.path(source) / "file").stat().st_size
    if with_cp:
        ended = node.run(["cp", str(node.place(source) / "file"), str(node.place(target) / _NAME)])
        refuse_failed(ended)
        seconds = ended.seconds
    else:
        digest = json.loads((node.path(source) / "digest").read_text())
        args = [digest, str(node.place(source)), str(node.place(target))]
        seconds = float(answer_of(cluster.call(node, f"{_ME}:on_node_copy", args).wait(SECONDS))["seconds"])
    assert end.stat().st_size == size
    end.unlink()
    return seconds


def on_node_copy(digest: Mapping[str, Any], source: str, target: str) -> None:
    """Stages a file of the node's own that cannot be linked."""
    delivery = Delivery(_NAME, 0, Digest(**digest), Copy(0, 0, "file", _NAME, digest["size_bytes"]))
    with Server("127.0.0.1", _TOKEN) as server:
        began = time.monotonic()
        came = deliver([delivery], node=0, places=[source], staging=Path(target), server=server, urls={}, token=_TOKEN)
        seconds = time.monotonic() - began
    _refuse_other(came, "copied")
    say(seconds=seconds)


def _refuse_other(came: Sequence[Delivered], how: str) -> None:
    if [one.how for one in came] != [how]:
        raise RuntimeError("; ".join(one.problem or one.how for one in came))


@dataclass(frozen=True, slots=True)
class Moved:
    """What went over the network while nodes made a view.

    Attributes:
        missing_bytes: Of the files that nodes lacked, once for each node that lacked it.
        body_bytes: Of files, as the nodes' HTTP clients counted them.
        wire_bytes: As the nodes' interfaces counted them: Ethernet, IP, TCP and HTTP headers, acknowledgements and all that
            the nodes say to each other included.
        seconds: Until the last node had the view.
    """

    missing_bytes: int
    body_bytes: int
    wire_bytes: int
    seconds: float


def spread_checkpoint(cluster: Cluster, size_bytes: int) -> int:
    """A checkpoint of torch's own writer, each data file on one node only, the index on node 0.

    Returns:
        Bytes that the nodes lack, all together.
    """
    first, count = cluster.nodes[0], len(cluster.nodes)
    folder = first.path(_CKPT) / STEP
    refuse_failed(
        cluster.call(first, f"{_ME}:on_node_save", [str(first.place(_CKPT) / STEP), size_bytes]).wait(SECONDS)
    )
    finish(first.path(_CKPT), (folder / ".metadata").read_bytes())
    sizes = [path.stat().st_size for path in folder.iterdir()]
    for number, path in enumerate(sorted(folder.glob("*.distcp"))):
        owner = cluster.nodes[number % count]
        target = owner.path(_CKPT) / STEP / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return sum(sizes) * (count - 1)


def on_node_save(folder: str, size_bytes: int) -> None:
    """Saves random tensors, in six files."""
    import warnings

    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    each = size_bytes // 24 // 4096
    state = {
        f"decoder.layers.{number}.mlp.linear_fc1.weight": torch.randint(-(2**62), 2**62, (each, 512))
        for number in range(24)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder, thread_count=6), no_dist=True)


def make_view(cluster: Cluster, missing_bytes: int) -> Moved:
    """Has all nodes make a view of what ``spread_checkpoint`` made."""
    before = _received(cluster)
    answers = all_at_once(cluster, f"{_ME}:on_node_prepare", [], _CKPT)
    after = _received(cluster)
    body = sum(answer["body_bytes"] for answer in answers)
    return Moved(missing_bytes, body, after - before, max(answer["seconds"] for answer in answers))


def on_node_prepare(node: Mapping[str, Any], go: str) -> None:
    """Waits for the word, and makes the view."""
    options = options_of(node, dry_run=False)
    await_file(Path(go))
    began = time.monotonic()
    result = prepare(options)
    seconds = time.monotonic() - began
    body = sum(one.moved_bytes for one in result.delivered if one.how == "fetched")
    say(seconds=seconds, body_bytes=body)


def _received(cluster: Cluster) -> int:
    """Bytes that the interfaces of all nodes have received: every byte that moved, counted once."""
    total = 0
    for node in cluster.nodes:
        line = next(line for line in node.run(["cat", "/proc/net/dev"]).out.splitlines() if "eth0:" in line)
        total += int(line.partition(":")[2].split()[0])
    return total
