"""What ``inspect`` says of a checkpoint, worked out from the index alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptguard.core.index import Index, TensorEntry
from ckptguard.engine import structure
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.facts import kind_of

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])")


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that have something in common.

    Attributes:
        name: A kind, a dtype, or a name with its numbers replaced by ``*``.
        tensors: How many.
        chunks: In how many pieces they are stored.
        elements: How many elements in all.
        size_bytes: How many bytes.
        dtype: Their dtype, or "mixed".
        shape: The shape of the first; others may differ.
    """

    name: str
    tensors: int
    chunks: int
    elements: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a checkpoint.

    Attributes:
        parameters: Elements of all weights.
        kinds: By use: weights, masters, moments, objects.
        dtypes: By dtype.
        patterns: By name pattern.
        data_files: Files that tensors and objects stand in.
        other_files: Path and role of the others.
        sealed: Whether there is a manifest.
        problems: Structural damage that the index alone shows.
    """

    index: Index
    parameters: int
    kinds: tuple[Group, ...]
    dtypes: tuple[Group, ...]
    patterns: tuple[Group, ...]
    data_files: int
    other_files: Mapping[str, str]
    sealed: bool
    problems: tuple[Any, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        facts = self.index.facts
        return {
            "location": self.index.location,
            "format": self.index.format,
            "megatron_version": facts.version,
            "iteration": facts.iteration,
            "layout": dict(facts.layout),
            "optimizer_format": facts.optimizer_format,
            "parameters": self.parameters,
            "tensors": len(self.index.tensors),
            "objects": len(self.index.objects),
            "kinds": [asdict(g) for g in self.kinds],
            "dtypes": [asdict(g) for g in self.dtypes],
            "patterns": [asdict(g) for g in self.patterns],
            "data_files": self.data_files,
            "other_files": dict(self.other_files),
            "sealed": self.sealed,
            "extra": dict(facts.extra),
            "content_metadata": dict(facts.content_metadata),
            "problems": [p.as_dict() for p in self.problems],
        }


def summarise(index: Index) -> Summary:
    """Sorts the tensors by use, dtype and name pattern."""
    entries = list(index.tensors.values())
    kinds = _groups((kind_of(e), e) for e in entries)
    blobs = list(index.objects.values())
    if blobs:
        size = sum(blob.span.length_bytes for blob in blobs)
        kinds.append(Group("objects", len(blobs), len(blobs), 0, size, "-", ()))
    used = {c.span.file for e in entries for c in e.chunks} | {b.span.file for b in blobs}
    others = {name: index.roles.get(name, "") for name in index.files if name not in used or name in index.roles}
    return Summary(
        index=index,
        parameters=sum(e.numel for e in entries if kind_of(e) == "weights"),
        kinds=tuple(kinds),
        dtypes=tuple(_groups((e.dtype.name, e) for e in entries)),
        patterns=tuple(
            _groups((pattern_of(e.name), e) for e in sorted(entries, key=lambda e: (kind_of(e) != "weights", e.name)))
        ),
        data_files=len(used),
        other_files=others,
        sealed=FILE_NAME in index.files,
        problems=tuple(p for p in structure.check(index, sealed=frozenset({FILE_NAME})) if p.is_damage),
    )


def pattern_of(name: str) -> str:
    """A name with its numbers replaced, so that layers and experts fall together: ``layers.11.mlp`` -> ``layers.*.mlp``."""
    return _NUMBER.sub("*", name)


def _groups(pairs: Iterable[tuple[str, TensorEntry]]) -> list[Group]:
    found: dict[str, list[TensorEntry]] = {}
    for key, entry in pairs:
        found.setdefault(key, []).append(entry)
    return [
        Group(
            key,
            len(items),
            sum(len(e.chunks) for e in items),
            sum(e.numel for e in items),
            sum(e.size_bytes for e in items),
            items[0].dtype.name if len({e.dtype for e in items}) == 1 else "mixed",
            items[0].shape,
        )
        for key, items in found.items()
    ]
