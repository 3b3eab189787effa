"""A small plan with every sort of part, the bytes that it must give, and a process that dies while it writes them."""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib
from pathlib import Path

from ckptguard.core.writing import Closing, Elements, Literal, Part, TargetFile, WritePlan
from ckptguard.engine import writing
from ckptguard.engine.staging import Staging

LAST = {"iter_0000000/metadata.json": b"{}", "latest_checkpointed_iteration.txt": b"release"}
MEMORY_BYTES = 2 * 3 * 4096  # two threads with windows of 8 KiB


def content(key: int, length_bytes: int) -> bytes:
    """What the elements of a key are."""
    return random.Random(key).randbytes(length_bytes)


def tail(crc: int) -> bytes:
    """A closing part of 12 bytes that shows its CRC."""
    return b"crc:%08x" % crc


def plan(files: int = 3, *, seed: int = 0) -> WritePlan:
    """Files of framed elements from none to 50 kB, some in rows, one file empty."""
    rng = random.Random(seed)
    targets = [TargetFile("iter_0000000/empty", ())]
    for number in range(files):
        parts: list[Part] = [Literal(b"head of the file")]
        for tensor in range(rng.randrange(4, 9)):
            length, step = rng.choice([0, 1, 100, 4096, 5000, 50_000]), rng.choice([1, 2, 1000, 3000])
            parts += [Literal(rng.randbytes(rng.choice([0, 7, 900])))]
            parts += [Elements(100 * number + tensor, length, step), Closing(12, tail)]
            parts += [Elements(100 * number + 50 + tensor, rng.randrange(2000), 8)]
        targets.append(TargetFile(f"iter_0000000/__{number}_0.distcp", tuple(parts)))
    return WritePlan(tuple(targets), f"identity {files} {seed}")


def lengths(of: WritePlan) -> dict[int, int]:
    """Length of the elements, by key."""
    return {part.key: part.length_bytes for file in of.files for part in file.parts if isinstance(part, Elements)}


class Source:
    """Fills elements with ``content`` and counts the calls."""

    def __init__(self, of: WritePlan) -> None:
        self.data = {key: content(key, length) for key, length in lengths(of).items()}
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, key: int, begin_bytes: int, out: memoryview) -> None:
        self.calls.append((key, begin_bytes, len(out)))
        out[:] = self.data[key][begin_bytes : begin_bytes + len(out)]


def expected(of: WritePlan) -> dict[str, bytes]:
    """Content of every file of a plan, put together the plain way."""
    out = {}
    for file in of.files:
        data, elements = bytearray(), b""
        for part in file.parts:
            if isinstance(part, Literal):
                data += part.data
            elif isinstance(part, Elements):
                elements = content(part.key, part.length_bytes)
                data += elements
            else:
                data += part.make(zlib.crc32(elements))
        out[file.path] = bytes(data)
    return out


def tree(root: Path) -> dict[str, bytes]:
    """Content of every file below a directory."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def run(dst: Path, of: WritePlan, fill: Source) -> None:
    """Writes a plan to its end."""
    with Staging.open(dst, of.identity, what="a test") as staging:
        writing.write(of, staging, fill, memory_bytes=MEMORY_BYTES, threads=2)
        staging.commit(LAST)


def die_at(call: str, count: int) -> None:
    """Has this process killed at the count-th call of a function of ``os``, before it does anything."""
    real, seen = getattr(os, call), 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, call, counted)


if __name__ == "__main__":
    die_at(sys.argv[2], int(sys.argv[3]))
    run(Path(sys.argv[1]), plan(), Source(plan()))
