"""Digests of files while they are written: what the manifest records, from memory, without reading back."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_intdigest

from ckptguard.fingerprint.manifest import FileDigest, Manifest, block_bytes_for
from ckptguard.fingerprint.roots import root
from ckptguard.fingerprint.values import ALGORITHM, Fingerprint


class FileHasher:
    """Digests one file whose bytes come in order, in views of any length. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._block_bytes = block_bytes_for(size_bytes)
        self._whole = blake3()
        self._blocks = bytearray()
        self._begun = xxh3_64()
        self._begun_bytes = 0

    def update(self, view: memoryview) -> None:
        """Adds the next bytes of the file."""
        self._whole.update(view)
        at = 0
        while at < len(view):
            part = view[at : at + self._block_bytes - self._begun_bytes]
            at += len(part)
            if len(part) == self._block_bytes:
                self._blocks += xxh3_64_intdigest(part).to_bytes(8, "little")
            else:
                self._begun.update(part)
                self._begun_bytes += len(part)
                if self._begun_bytes == self._block_bytes:
                    self._end_block()

    def _end_block(self) -> None:
        self._blocks += self._begun.intdigest().to_bytes(8, "little")
        self._begun.reset()
        self._begun_bytes = 0

    def finish(self) -> FileDigest:
        """The digest, once all bytes were added."""
        if self._begun_bytes:
            self._end_block()
        return FileDigest(self._size_bytes, self._whole.hexdigest(), self._block_bytes, bytes(self._blocks))


def digest_of(data: bytes) -> FileDigest:
    """The digest of a (small) file that is in memory."""
    hasher = FileHasher(len(data))
    hasher.update(memoryview(data))
    return hasher.finish()


def manifest_of(digests: Mapping[str, FileDigest], fingerprints: Mapping[str, Fingerprint], *, below: str) -> Manifest:
    """The manifest of one directory of what was written.

    Args:
        digests: By path relative to the root that was written.
        fingerprints: By tensor name; empty to leave them out.
        below: The directory's path relative to that root, "" for the root itself. Files outside are left out.
    """
    prefix = f"{below}/" if below else ""
    return Manifest(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        files={name.removeprefix(prefix): digest for name, digest in digests.items() if name.startswith(prefix)},
        fingerprints=fingerprints,
        algorithm=ALGORITHM if fingerprints else "",
        root=root(fingerprints) if fingerprints else "",
    )
