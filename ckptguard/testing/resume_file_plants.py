"""Faults and harmless changes in a checkpoint's files, between the save and the resume. Each is given the root of a copy.

A root has the iterations of a run, the last of which is resumed from.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.buckets import unused_ranges
from ckptguard.testing.damage import edit_metadata

Edit = Callable[[Path], None]


def _iterations(root: Path) -> list[Path]:
    return sorted(root.glob("iter_*"))


def stale(files: str = ".") -> Edit:
    """An edit that puts the bytes of the iteration before into all tensors that stand in files with this pattern."""

    def edit(root: Path) -> None:
        before, last = _iterations(root)[-2:]
        with open_checkpoint(before) as older, open_checkpoint(last) as newer:
            changed = 0
            for name, entry in newer.index.tensors.items():
                there = {chunk.box: chunk for chunk in older.index.tensors[name].chunks}
                for chunk in entry.chunks:
                    if re.search(files, chunk.span.file):
                        new = _elements(older, before, older.index.tensors[name], there[chunk.box])
                        changed += _put(newer, last, entry, chunk, new)
        if not changed:
            raise LookupError(f"{last}: nothing is older than it was")

    return edit


def random_padding(root: Path) -> None:
    """Puts random bytes where the optimizer's buckets belong to no parameter."""
    rng, last = random.Random(0), _iterations(root)[-1]
    with open_checkpoint(last) as checkpoint:
        changed = 0
        for name, ranges in unused_ranges(checkpoint.index).items():
            entry = checkpoint.index.tensors[name]
            for chunk in entry.chunks:
                data = bytearray(_elements(checkpoint, last, entry, chunk))
                first, size = chunk.box.offset[0], entry.dtype.itemsize
                for begin, end in ranges:
                    low, high = max(begin - first, 0) * size, min(end - first, chunk.box.size[0]) * size
                    if low < high:
                        data[low:high] = rng.randbytes(high - low)
                changed += _put(checkpoint, last, entry, chunk, bytes(data))
    if not changed:
        raise LookupError(f"{last}: it has no padding")


def other_files(root: Path) -> None:
    """Gives data files other names and the other order, in the tables and on disk."""
    last = _iterations(root)[-1]
    files = sorted(last.glob("*.distcp"))
    names = {path.name: f"__{len(files) - 1 - at}_{7 + at}.distcp" for at, path in enumerate(files)}

    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = names[info.relative_path]

    edit_metadata(last, change)
    for path in files:
        path.rename(path.with_name(f"moved_{names[path.name]}"))
    for path in last.glob("moved_*"):
        path.rename(path.with_name(path.name.removeprefix("moved_")))


def _elements(checkpoint: Checkpoint, folder: Path, entry: TensorEntry, chunk: Chunk) -> bytes:
    span = checkpoint.reader.locate(entry, chunk).span
    with (folder / span.file).open("rb") as file:
        file.seek(span.offset_bytes)
        return file.read(span.length_bytes)


def _put(checkpoint: Checkpoint, folder: Path, entry: TensorEntry, chunk: Chunk, data: bytes) -> bool:
    """Writes a chunk's elements; whether they were others."""
    if _elements(checkpoint, folder, entry, chunk) == data:
        return False
    span = checkpoint.reader.locate(entry, chunk).span
    with (folder / span.file).open("r+b") as file:
        file.seek(span.offset_bytes)
        file.write(data)
    return True
