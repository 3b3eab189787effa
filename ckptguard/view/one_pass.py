"""All sums over a file in one reading: BLAKE3, block digests, SHA-256 where one is known, CRC-32 of the records in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from xxhash import xxh3_64_intdigest, xxh3_128

from ckptguard.engine.checksums import crc32
from ckptguard.engine.contents import Record
from ckptguard.engine.workers import Buffers, Progress
from ckptguard.formats.storage import Directory

END_BYTES = 64 << 10
REMOTE_BUFFER_BYTES = 16 << 20  # a store gives long reads as several ranges side by side


@dataclass(frozen=True, slots=True)
class Sums:
    """What was found.

    Attributes:
        blake3: Of all bytes, hexadecimal.
        blocks: XXH3-64 of every block, 8 little-endian bytes each; empty if no block size was given.
        sha256: Of all bytes, hexadecimal, or "" if it was not asked for.
        wrong: Numbers of the records whose bytes do not have their CRC-32.
    """

    blake3: str
    blocks: bytes
    sha256: str
    wrong: tuple[int, ...]


def fast_digest(files: Directory, name: str) -> str:
    """XXH3-128 of a file's size (8 bytes, little-endian), its first and its last 64 KiB, hexadecimal."""
    size = files.size(name)
    hasher = xxh3_128(size.to_bytes(8, "little"))
    part = memoryview(bytearray(min(END_BYTES, size)))
    for at in (0, size - len(part)):
        files.read_into(name, at, part)
        hasher.update(part)
    return hasher.hexdigest()


class OnePass:
    """Reads files from end to end, with a buffer per thread."""

    def __init__(self) -> None:
        self._near, self._far = Buffers(), Buffers(REMOTE_BUFFER_BYTES)

    def read(
        self,
        files: Directory,
        name: str,
        records: Sequence[Record],
        progress: Progress,
        *,
        block_bytes: int = 0,
        sha256: bool = False,
    ) -> Sums:
        """Reads one file.

        Args:
            files: The directory.
            name: Relative path.
            records: With a CRC-32 each, of the file itself, in the order in which they stand; they do not overlap.
            progress: Hears of the bytes done.
            block_bytes: Size of a block, a power of two up to that of the read buffer; 0 for no block digests.
            sha256: Compute that too.

        Raises:
            DamagedError: The file ends too early.
            EnvironmentFailedError: It cannot be read.
        """
        buffer = (self._near if files.local else self._far).view
        whole, other, blocks = blake3(), hashlib.sha256() if sha256 else None, bytearray()
        crcs, done, size = _Crcs(records), 0, files.size(name)
        while done < size:
            part = buffer[: min(len(buffer), size - done)]
            files.read_into(name, done, part)
            crcs.update(part, done)
            whole.update(part)
            if other:
                other.update(part)
            if block_bytes:  # a block never crosses a read: see the limits of its size
                for at in range(0, len(part), block_bytes):
                    blocks += xxh3_64_intdigest(part[at : at + block_bytes]).to_bytes(8, "little")
            done += len(part)
            progress.advance(len(part))
        return Sums(whole.hexdigest(), bytes(blocks), other.hexdigest() if other else "", crcs.wrong())


class _Crcs:
    """CRC-32 of records that pass by one behind the other, in parts that begin and end anywhere."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._first = 0  # the first record that has not ended
        self._found = [0] * len(records)

    def update(self, part: memoryview, offset_bytes: int) -> None:
        """Takes the next bytes of the file."""
        end = offset_bytes + len(part)
        while self._first < len(self._records):
            span = self._records[self._first].span
            if span.offset_bytes >= end:
                return
            inside = part[max(0, span.offset_bytes - offset_bytes) : span.end_bytes - offset_bytes]
            self._found[self._first] = crc32(inside, self._found[self._first])
            if span.end_bytes > end:
                return
            self._first += 1

    def wrong(self) -> tuple[int, ...]:
        """After the last bytes: which records do not match."""
        return tuple(n for n, (r, found) in enumerate(zip(self._records, self._found, strict=True)) if r.crc32 != found)
