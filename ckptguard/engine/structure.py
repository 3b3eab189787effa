"""Whether an index hangs together: every element stored once, every span inside its file, no file missing or left over.

Pure: works on the index alone, which knows the files' sizes. ``contents`` looks into the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from ckptguard.core.boxes import missing_part, overlaps
from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Encoding, FileEntry, Index, Span, TensorEntry
from ckptguard.core.problems import Problem

_DATA_FILE = re.compile(r".*\.distcp|.*\.safetensors|mp_rank_[\d_]+/.*\.pt")
_RANK = re.compile(r"(?:^|/)(?:[A-Za-z].*?)?__(\d+)_\d+\.distcp$|(?:^|/)(mp_rank_[\d_]+)/|(?:^|/)shard-(\d+)-")
_MAX_PAIRS = 10


def rank_of(file: str) -> str | None:
    """The rank that wrote a file, as its name says: ``3`` of ``__3_0.distcp``, ``mp_rank_00_001`` of a legacy file."""
    match = _RANK.search(file)
    return next((group for group in match.groups() if group), None) if match else None


def check(index: Index, *, sealed: frozenset[str] = frozenset()) -> list[Problem]:
    """All structural problems of an index, its own included; notes too.

    Args:
        index: The index.
        sealed: Files that a manifest lists; they are no left-overs.
    """
    found = list(index.problems)
    for entry in index.tensors.values():
        found += _coverage(entry)
    found += _spans(index)
    found += _files(index, sealed)
    return found


def refuse_gaps(index: Index, chosen: Mapping[str, TensorEntry]) -> None:
    """Raises if a chosen tensor is not stored exactly once: half a tensor has no fingerprint worth comparing."""
    gone = {"missing-chunk", "missing-tensor", "missing-file", "overlap", "out-of-bounds", "size"}
    lost = [p for p in check(index) if p.kind in gone and (p.tensor in chosen or p.kind == "missing-file")]
    if lost:
        raise DamagedError(
            f"{index.location}: {len(lost)} problems keep its tensors from being read whole; the first: {lost[0].message}",
            problems=lost,
            next_step="Run `ckptguard verify` for the whole list.",
        )


def _coverage(entry: TensorEntry) -> Iterator[Problem]:
    """Chunks inside the tensor, each element exactly once."""
    inside = []
    for chunk in entry.chunks:
        if chunk.box.within(entry.shape):
            inside.append(chunk)
            continue
        message = f"{entry.name}: chunk {chunk.box} reaches out of its tensor of shape {list(entry.shape)}"
        yield Problem("out-of-bounds", message, file=chunk.span.file, tensor=entry.name, box=chunk.box)
    boxes = [chunk.box for chunk in inside]
    double = False
    for number, (i, j) in enumerate(overlaps(boxes)):
        double = True
        if number < _MAX_PAIRS:
            message = (
                f"{entry.name}: chunks {boxes[i]} ({inside[i].span.file}) and {boxes[j]} ({inside[j].span.file})"
                " hold the same elements"
            )
            yield Problem(
                "overlap", message, file=inside[j].span.file, tensor=entry.name, box=boxes[i].intersect(boxes[j])
            )
    stored = sum(box.numel for box in boxes)
    gap = None if double else missing_part(boxes, entry.shape)
    if gap is not None:
        message = (
            f"{entry.name}: {gap} of {list(entry.shape)} is stored nowhere ({stored} of {entry.numel} elements are)"
        )
        yield Problem("missing-chunk", message, tensor=entry.name, box=gap)


def _spans(index: Index) -> Iterator[Problem]:
    """Spans inside files that exist, long enough for what they hold, zips not on top of each other."""
    reported: set[str] = set()
    for file, items in index.spans().items():
        entry = index.files.get(file)
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            yield Problem("escape", f"{file}: the index names a file outside the checkpoint directory", file=file)
            continue
        if entry is None or entry.size_bytes < 0:
            names = sorted({name for _, name, _ in items})
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            message = f"{file}: missing; it holds parts of {len(names)} tensors and objects: {shown}"
            yield Problem("missing-file", message, file=file, rank=rank_of(file))
            continue
        end = 0
        for span, name, chunk in items:
            if span.offset_bytes < 0 or span.length_bytes < 0 or span.end_bytes > entry.size_bytes:
                message = f"{file}: {name} needs bytes {span.offset_bytes} to {span.end_bytes}, the file has {entry.size_bytes}"
                yield Problem(
                    "size", message, file=file, tensor=name, rank=rank_of(file), box=chunk.box if chunk else None
                )  # fmt: skip
            packed = chunk is None or chunk.encoding is Encoding.TORCH_ZIP
            if packed and span.offset_bytes < end and name not in reported:
                reported.add(name)
                yield Problem(
                    "overlap",
                    f"{file}: {name} begins at byte {span.offset_bytes}, inside the item before it",
                    file=file,
                    tensor=name,
                )
            if packed:
                end = max(end, span.end_bytes)
            if chunk is not None and not chunk.transforms and chunk.strides is None:
                yield from _too_short(index.tensors[name], chunk.box.numel, span)


def _too_short(entry: TensorEntry, numel: int, span: Span) -> Iterator[Problem]:
    needed = numel * entry.dtype.itemsize
    if needed > span.length_bytes:
        message = f"{span.file}: {entry.name} wants {needed} bytes of data in a span of {span.length_bytes}"
        yield Problem("size", message, file=span.file, tensor=entry.name)


def _files(index: Index, sealed: frozenset[str]) -> Iterator[Problem]:
    """Files that nothing needs, and links that lead out."""
    used = set(index.roles) | sealed
    used.update(chunk.span.file for entry in index.tensors.values() for chunk in entry.chunks)
    used.update(entry.span.file for entry in index.objects.values())
    yield from links(index.files)
    for name, entry in index.files.items():
        if name in used:
            continue
        if _DATA_FILE.fullmatch(name):
            message = (
                f"{name}: a data file of {entry.size_bytes} bytes that the index does not name; is it of another save?"
            )
            yield Problem("extra-file", message, file=name, rank=rank_of(name))
        else:
            yield Problem("note", f"{name}: not part of the checkpoint format", file=name)


def links(files: Mapping[str, FileEntry]) -> list[Problem]:
    """Symlinks that lead out of the directory."""
    return [
        Problem("escape", f"{name}: a symlink out of the checkpoint directory, to {entry.link_target}", file=name)
        for name, entry in files.items()
        if not entry.inside
    ]


def said(problems: Sequence[Problem]) -> str:
    """The first few problems, each with its file."""
    shown = [p.message if not p.file or p.file in p.message else f"{p.file}: {p.message}" for p in problems[:3]]
    return "; ".join([*shown, f"and {len(problems) - 3} more"] if len(problems) > 3 else shown)
