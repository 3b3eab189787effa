"""Planned rank files, byte by byte: the one way in which objects and chunks become parts of files to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptguard.convert.rank_files import RankFile
from ckptguard.core.plan import Made
from ckptguard.core.writing import Closing, Elements, Literal, Part
from ckptguard.engine.proving import step_bytes
from ckptguard.formats import torch_dist_writer as writer
from ckptguard.formats.zip_frames import frame

COMMON_STATE = "common_state/shard_0_1"
Placed = tuple[writer.PlacedFile, tuple[Part, ...]]


def with_common_state(files: Sequence[RankFile]) -> tuple[RankFile, ...]:
    """The files with the common state as the last object of the first one, where Megatron Core 0.19 puts it."""
    first, *rest = files
    return (replace(first, objects=(*first.objects, COMMON_STATE)), *rest)


def placed(
    files: Sequence[RankFile],
    blob_of: Callable[[str], bytes],
    check_of: Callable[[Made], Callable[[int], None] | None] = lambda _: None,
) -> list[Placed]:
    """Every rank's file, and its bytes as parts of a write plan.

    Args:
        files: What each rank's file holds. Elements are numbered in the order of all files' chunks.
        blob_of: The bytes of an object.
        check_of: What is to hear of the CRC-32 of a chunk's elements once they are written; raises if it is wrong.
    """
    out: list[Placed] = []
    key = 0
    for file in files:
        blobs = [writer.BlobToWrite(name, blob_of(name)) for name in file.objects]
        chunks = [writer.ChunkToWrite(c.name, c.dtype, c.shape, c.box) for c in file.chunks]
        parts: list[Part] = [Literal(blob.data) for blob in blobs]
        for chunk in file.chunks:
            parts += _parts(chunk, key, check_of(chunk))
            key += 1
        out.append((writer.place(writer.file_name(file.rank), writer.ordered([*blobs, *chunks])), tuple(parts)))
    return out


def _parts(chunk: Made, key: int, check: Callable[[int], None] | None) -> list[Part]:
    zipped = frame(chunk.dtype, chunk.box.size)
    step = step_bytes(chunk) if chunk.size_bytes else 1

    def checked_tail(crc32: int) -> bytes:
        if check is not None:
            check(crc32)
        return zipped.tail(crc32)

    tail = zipped.tail if check is None else checked_tail
    return [Literal(zipped.head), Elements(key, zipped.data_bytes, step), Closing(zipped.tail_bytes, tail)]
