"""The manifest: size and digests of every file of a checkpoint, as a value and as bytes. Pure; ``engine.seal`` makes it.

On disk it is ``ckptguard.json.zst``: JSON compressed with zstandard. docs/manifest.md describes every field.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.problems import Problem
from ckptguard.fingerprint.values import Fingerprint

FILE_NAME = "ckptguard.json.zst"
FORMAT = "ckptguard-manifest/1"
BLOCK_DIGEST = "xxh3-64"
FILE_DIGEST = "blake3"
_MAX_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 1 << 12
_BLOCKS_WANTED = 1024
_MAX_JSON_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file was when it was sealed.

    Attributes:
        size_bytes: Its size.
        blake3: BLAKE3 of all its bytes, hexadecimal; what ``b3sum`` prints.
        block_bytes: Size of a block; the last one may be shorter.
        blocks: XXH3-64 of every block as 8 little-endian bytes each, one after the other.
    """

    size_bytes: int
    blake3: str
    block_bytes: int
    blocks: bytes

    def block(self, number: int) -> int:
        """Digest of one block."""
        return int.from_bytes(self.blocks[8 * number : 8 * number + 8], "little")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Digests of the bytes on disk, and the fingerprints of the tensors in them.

    Attributes:
        created: When, ISO 8601 in UTC.
        files: Every file of the checkpoint but the manifest itself, by relative path.
        fingerprints: By tensor name; empty if they were left out.
        algorithm: Name of the fingerprint algorithm.
        root: Root over the fingerprints, or "".
    """

    created: str
    files: Mapping[str, FileDigest]
    fingerprints: Mapping[str, Fingerprint]
    algorithm: str = ""
    root: str = ""

    @property
    def seal(self) -> str:
        """BLAKE3 over the manifest's canonical JSON, hexadecimal: one value that stands for all of it."""
        from blake3 import blake3

        return blake3(_canonical(self._body())).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "created": self.created,
            "digests": {"file": FILE_DIGEST, "block": BLOCK_DIGEST},
            "count": len(self.files),
            "total_bytes": sum(f.size_bytes for f in self.files.values()),
            "files": {
                name: {
                    "bytes": f.size_bytes,
                    "blake3": f.blake3,
                    "block_bytes": f.block_bytes,
                    "blocks": base64.b64encode(f.blocks).decode(),
                }
                for name, f in sorted(self.files.items())
            },
            "fingerprints": {
                "algorithm": self.algorithm,
                "root": self.root,
                "tensors": {n: [f.dtype, list(f.shape), f.hex] for n, f in sorted(self.fingerprints.items())},
            },
        }

    def to_bytes(self) -> bytes:
        """The file's content."""
        import zstandard

        body = self._body()
        body["seal"] = self.seal
        return zstandard.ZstdCompressor(level=6, write_checksum=True).compress(_canonical(body))


def parse(data: bytes, where: str) -> Manifest:
    """Reads a manifest and checks it against the digest and the counts that it carries.

    Args:
        data: The file's content.
        where: Its path, for messages.

    Raises:
        DamagedError: Not a whole manifest, or not the one that its digest stands for.
        UnsupportedError: Written by a newer ckptguard.
    """
    try:
        body = json.loads(_decompress(data))
        found = body.pop("seal")
        if body["format"] != FORMAT and re.fullmatch(r"ckptguard-manifest/\d+", str(body["format"])):
            raise UnsupportedError(f"{where}: format {body['format']!r}; this ckptguard reads {FORMAT}")
        manifest = _from_body(body)
        counts = len(manifest.files), sum(f.size_bytes for f in manifest.files.values())
        if counts != (body["count"], body["total_bytes"]):
            raise ValueError(
                f"lists {counts[0]} files of {counts[1]} bytes, says {body['count']} of {body['total_bytes']}"
            )
        if manifest.seal != found:
            raise ValueError(f"its content has the seal {manifest.seal[:16]}..., it says {found[:16]}...")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        message = f"{where}: not a whole manifest ({error})"
        raise DamagedError(
            message,
            problems=[Problem("manifest", message, file=FILE_NAME)],
            next_step="The manifest itself is damaged: get it again from where the checkpoint was sealed.",
        ) from error
    return manifest


def _decompress(data: bytes) -> bytes:
    """Undoes zstandard, up to a limit that no real checkpoint reaches."""
    import zstandard

    if not data:
        raise ValueError("it is empty")
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > _MAX_JSON_BYTES:  # an unknown size is the largest 64-bit number
            raise ValueError(f"it does not say a size below {_MAX_JSON_BYTES} bytes")
        stream = zstandard.ZstdDecompressor().decompressobj()
        out = stream.decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be unpacked: {error}") from error
    if not stream.eof or stream.unused_data or len(out) != size:
        raise ValueError(f"it unpacks to {len(out)} of {size} bytes, with {len(stream.unused_data)} bytes left over")
    return out


def _from_body(body: dict[str, Any]) -> Manifest:
    files = {}
    for name, item in body["files"].items():
        blocks = base64.b64decode(item["blocks"], validate=True)
        size, block = int(item["bytes"]), int(item["block_bytes"])
        if block < 1 or len(blocks) != 8 * -(-size // block):
            raise ValueError(f"{name}: {len(blocks)} bytes of block digests for {size} bytes in blocks of {block}")
        files[name] = FileDigest(size, str(item["blake3"]), block, blocks)
    prints = body["fingerprints"]
    tensors = {
        name: Fingerprint(dtype, tuple(shape), (int(text[:16], 16), int(text[16:], 16)))
        for name, (dtype, shape, text) in prints["tensors"].items()
    }
    return Manifest(body["created"], files, tensors, prints["algorithm"], prints["root"])


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def block_bytes_for(size_bytes: int) -> int:
    """Block size for a file: a power of two from 4 KiB to 1 MiB, about a thousand blocks for files below 1 GiB."""
    wanted = max(1, size_bytes // _BLOCKS_WANTED)
    return min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, 1 << (wanted - 1).bit_length()))
