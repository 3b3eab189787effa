"""Files with their digests, and nodes that serve and get them, all on the loopback address."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from ckptguard.view.server import Server
from ckptguard.view.staging import deliver
from ckptguard.view.values import Copy, Delivered, Delivery, Digest

TOKEN = "a-token-of-one-run"
HOST = "127.0.0.1"
BLOCK = 1 << 16
NAME = "iter_0000020/__0_0.distcp"


def data_of(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere."""
    return blake3(seed.to_bytes(8, "little")).digest(length=size_bytes)


def digest_of(data: bytes, block_bytes: int = BLOCK) -> Digest:
    parts = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)] if block_bytes else []
    blocks = b"".join(xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)
    return Digest(len(data), blake3(data).hexdigest(), block_bytes, blocks.hex())


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def spoil(path: Path, at: int) -> None:
    """Turns one byte over, and leaves the time of change as it was."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@dataclass
class Node:
    """A node: its place, its staging directory, its server."""

    number: int
    place: Path
    staging: Path
    server: Server
    urls: dict[int, str] = field(default_factory=dict)

    def offer(self, name: str, data: bytes, block_bytes: int = BLOCK) -> Digest:
        """Has a file at its place, and offers it as one does that has just been checked."""
        digest = digest_of(data, block_bytes)
        self.server.offer(name, put(self.place / name, data), digest)
        return digest

    def deliver(self, deliveries: Sequence[Delivery], **options: Any) -> list[Delivered]:
        options = {"timeout_seconds": 5.0, "urls": self.urls, "places": [str(self.place)], **options}
        return deliver(deliveries, node=self.number, staging=self.staging, server=self.server, token=TOKEN, **options)

    def partial(self, name: str) -> Path:
        return self.staging / f"{name}.partial"


@contextmanager
def nodes_at(folder: Path, count: int) -> Iterator[list[Node]]:
    """Nodes whose servers run until the block is left; each knows where the others are."""
    with ExitStack() as stack:
        nodes = []
        for number in range(count):
            server = stack.enter_context(Server(HOST, TOKEN))
            place = folder / f"n{number}" / "ckpt"
            place.mkdir(parents=True)
            nodes.append(Node(number, place, folder / f"n{number}" / "staging", server))
        for node in nodes:
            node.urls = {other.number: other.server.url for other in nodes}
        yield nodes


def fetch(name: str, to: int, digest: Digest, *, origin: int = 0, via: int | None = 0) -> Delivery:
    return Delivery(name, to, digest, Copy(origin, 0, name, name, digest.size_bytes), via)


def local(name: str, node: int, digest: Digest, path: str | None = None) -> Delivery:
    return Delivery(name, node, digest, Copy(node, 0, path or name, name, digest.size_bytes))


def names_below(folder: Path) -> Mapping[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
