"""Ways to damage a checkpoint on disk, for tests: each changes the files of a copy and says what it did.

None of them uses ckptguard's own readers: the tables they change are read and written with torch and pickle.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Damage:
    """What was done.

    Attributes:
        what: In words.
        files: The files that are not what they were, relative to the directory.
        byte: First changed byte of the first file, where one can be named.
    """

    what: str
    files: tuple[str, ...]
    byte: int | None = None


def data_files(directory: Path) -> list[Path]:
    """The files that hold tensors, sorted."""
    found = [
        p for p in directory.rglob("*") if p.suffix in (".distcp", ".safetensors") or p.parent.name.startswith("mp_")
    ]
    return sorted(p for p in found if p.is_file())


def flip_bit(file: Path, byte: int, bit: int, root: Path) -> Damage:
    """Flips one bit."""
    with file.open("r+b") as handle:
        handle.seek(byte)
        old = handle.read(1)[0]
        handle.seek(byte)
        handle.write(bytes([old ^ (1 << bit)]))
    return Damage(f"bit {bit} of byte {byte} flipped", (str(file.relative_to(root)),), byte)


def zero_page(file: Path, root: Path, rng: random.Random) -> Damage:
    """Overwrites an aligned 4 KiB page that is not all zero with zeros."""
    data = file.read_bytes()
    pages = [at for at in range(0, len(data), 4096) if any(data[at : at + 4096])]
    at = rng.choice(pages)
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes(min(4096, len(data) - at)))
    return Damage(f"page at {at} zeroed", (str(file.relative_to(root)),), at)


def truncate(file: Path, root: Path, rng: random.Random) -> Damage:
    """Cuts a random number of bytes off the end."""
    size = file.stat().st_size
    keep = rng.randrange(size)
    os.truncate(file, keep)
    return Damage(f"cut from {size} to {keep} bytes", (str(file.relative_to(root)),), keep)


def lengthen(file: Path, root: Path, rng: random.Random) -> Damage:
    """Appends random bytes."""
    size = file.stat().st_size
    with file.open("ab") as handle:
        handle.write(rng.randbytes(rng.randint(1, 5000)))
    return Damage("bytes appended", (str(file.relative_to(root)),), size)


def swap(one: Path, other: Path, root: Path) -> Damage:
    """Exchanges two files."""
    spare = one.with_name(one.name + ".swap")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    return Damage("exchanged", tuple(str(p.relative_to(root)) for p in (one, other)))


def edit_metadata(directory: Path, change: Callable[[Any], None]) -> Damage:
    """Rewrites a DCP ``.metadata`` after changing it with torch's own classes."""
    path = directory / ".metadata"
    value = pickle.loads(path.read_bytes())
    change(value)
    path.write_bytes(pickle.dumps(value))
    return Damage("index rewritten", (".metadata",))


def swap_names(directory: Path) -> Damage:
    """Exchanges the stored places of two tensors of one dtype and shape, so that only digests can tell."""

    def change(metadata: Any) -> None:
        by_kind: dict[Any, list[str]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "size"):
                boxes = tuple((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
                by_kind.setdefault((tuple(entry.size), entry.properties.dtype, boxes), []).append(name)
        one, other = next(names for names in by_kind.values() if len(names) > 1)[:2]
        renamed = {}
        for index, info in metadata.storage_data.items():
            name = {one: other, other: one}.get(index.fqn, index.fqn)
            renamed[type(index)(name, index.offset, index.index)] = info
        metadata.storage_data = renamed

    return edit_metadata(directory, change)


def drop_chunk(directory: Path, *, declared: bool) -> Damage:
    """Removes one chunk of a tensor from the index: its place only, or its declaration too."""

    def change(metadata: Any) -> None:
        name, entry = next((n, e) for n, e in metadata.state_dict_metadata.items() if len(getattr(e, "chunks", ())) > 1)
        gone = entry.chunks[-1]
        if declared:
            entry.chunks.pop()
        metadata.storage_data = {
            i: s
            for i, s in metadata.storage_data.items()
            if not (i.fqn == name and tuple(i.offset) == tuple(gone.offsets))
        }

    return edit_metadata(directory, change)


def overlap_chunk(directory: Path) -> Damage:
    """Moves one chunk of a tensor onto its neighbour."""

    def change(metadata: Any) -> None:
        name, entry = next((n, e) for n, e in metadata.state_dict_metadata.items() if len(getattr(e, "chunks", ())) > 1)
        last, before = entry.chunks[-1], entry.chunks[-2]
        dim = next(d for d in range(len(last.offsets)) if last.offsets[d] != before.offsets[d])
        moved = list(last.offsets)
        moved[dim] -= 1 if last.sizes[dim] > 1 else last.offsets[dim] - before.offsets[dim]
        index = next(i for i in metadata.storage_data if i.fqn == name and tuple(i.offset) == tuple(last.offsets))
        info = metadata.storage_data.pop(index)
        last.offsets = type(last.offsets)(moved)
        if last.sizes[dim] == 1:  # a second chunk at the very same offset cannot be stored: make it wider instead
            last.offsets, last.sizes = before.offsets, type(last.sizes)(last.sizes)
        metadata.storage_data[type(index)(name, last.offsets, None)] = info

    return edit_metadata(directory, change)


def huge_sizes(directory: Path) -> Damage:
    """Makes the index declare a tensor of 2**60 elements."""

    def change(metadata: Any) -> None:
        entry = next(e for e in metadata.state_dict_metadata.values() if len(getattr(e, "chunks", ())) == 1)
        huge = type(entry.size)([1 << 60] + [1] * (len(entry.size) - 1))
        entry.size = entry.chunks[0].sizes = huge

    return edit_metadata(directory, change)


class Evil:
    """Unpickled by anything but a refusing unpickler, it makes a directory whose path is kept in ``CKPTGUARD_EVIL``."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["CKPTGUARD_EVIL"],)
