"""torch Distributed Checkpoint: the ``.metadata`` index and what the formats built on it share.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py (2.14.1). ``.metadata`` is a pickle of ``Metadata``; each stored
chunk is an independent torch.save zip at (relative_path, offset, length), or, with SerializationFormat.SAFETENSORS, a tensor
of a safetensors blob that begins at ``offset``; ``transform_descriptors`` name the streams it went through.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Chunk, Encoding, ObjectEntry, Span, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.formats.pickles import Record, load
from ckptguard.formats.storage import Directory

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class DcpTable:
    """The content of a ``.metadata`` file.

    Attributes:
        tensors: By name.
        objects: By name.
        problems: Entries that name something that is stored nowhere, or stored without being named.
        mcore_data: Megatron Core's extra table of 0.12 to 0.15, by key.
        megatron_classes: Whether it was pickled with Megatron's own metadata classes (0.14 and 0.15).
    """

    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    problems: tuple[Problem, ...]
    mcore_data: dict[str, Any]
    megatron_classes: bool


def read_table(files: Directory, name: str = METADATA) -> DcpTable:
    """Reads a ``.metadata`` file.

    Raises:
        DamagedError: It is not a whole pickle of torch's Metadata.
        UnsafePickleError: It names something outside the allow-list.
    """
    return parse_table(files.read(name), str(files.root / name), name)


def parse_table(data: bytes, where: str, name: str = METADATA) -> DcpTable:
    """As ``read_table``, for the content of a ``.metadata`` file.

    Args:
        data: The content.
        where: Its path, for messages.
        name: Its name, for problems.
    """
    with collector_paused():
        return _parse_table(data, where, name)


StoredItem = tuple[str, str, int, int]
"""A chunk or an object: its tensor's or its own name, its file, offset and length in bytes."""


def stored_items(data: bytes, where: str) -> tuple[list[StoredItem], tuple[Problem, ...]]:
    """Every item that the content of a ``.metadata`` file says is stored, and what is wrong with it as in ``DcpTable``.

    Takes two thirds of the time of ``parse_table``, since it makes no entries of chunks where the tables agree.
    """
    with collector_paused():
        value = load(data, where=where, file=METADATA)
        if (items := _agreeing(value)) is not None:
            return items, ()
        table = _tables_of(value, where, METADATA)
    spans = [(key, chunk.span) for key, entry in table.tensors.items() for chunk in entry.chunks]
    spans += [(key, blob.span) for key, blob in table.objects.items()]
    return [(key, span.file, span.offset_bytes, span.length_bytes) for key, span in spans], table.problems


def _agreeing(value: Any) -> list[StoredItem] | None:
    """The stored items; None unless just those items are stored that are declared, each once."""
    try:
        items, stored, declared, count = [], set(), set(), 0
        for index, info in value.storage_data.items():
            items.append((index.fqn, info.relative_path, info.offset, info.length))
            stored.add((index.fqn, getattr(index, "offset", None)))
        for key, entry in value.state_dict_metadata.items():
            if type(entry).__name__ == "BytesStorageMetadata":
                declared.add((key, None))
                count += 1
            elif not isinstance(entry.properties.dtype, DType):
                return None
            else:
                declared.update([(key, chunk.offsets) for chunk in entry.chunks])
                count += len(entry.chunks)
    except (AttributeError, TypeError):
        return None
    wanted = (str, str, int, int)
    plain = all(
        set(map(type, column)) == {kind} for column, kind in zip(zip(*items, strict=True), wanted, strict=False)
    )
    return items if plain and stored == declared and len(items) == len(stored) == count else None


def _parse_table(data: bytes, where: str, name: str) -> DcpTable:
    return _tables_of(load(data, where=where, file=name), where, name)


def _tables_of(value: Any, where: str, name: str) -> DcpTable:
    try:
        stored = _stored(value.storage_data)
        declared = value.state_dict_metadata
        out = _Tables(name)
        for key, entry in declared.items():
            if type(entry).__name__ == "BytesStorageMetadata":
                out.add_object(key, stored.pop(key, {}))
            else:
                out.add_tensor(key, entry, stored.pop(key, {}))
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        message = f"{where}: not the Metadata of torch.distributed.checkpoint ({error})"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=name)]) from error
    for key in stored:
        out.problems.append(Problem("layout", f"{name}: {key} is stored but not declared", file=name, tensor=key))
    mcore = getattr(value, "mcore_data", None)
    return DcpTable(
        out.tensors,
        out.objects,
        tuple(out.problems),
        dict(mcore) if isinstance(mcore, dict) else {},
        type(value).__name__ == "MCoreMetadata",
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cycle collector walks all live objects again and again while hundreds of thousands are made; they hold none."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


Place = tuple[Span, tuple[str, ...]]


def _stored(storage_data: dict[Any, Any]) -> dict[str, dict[tuple[int, ...] | None, Place]]:
    """Groups ``storage_data`` by name and offset."""
    out: dict[str, dict[tuple[int, ...] | None, Place]] = {}
    for index, info in storage_data.items():
        offset = getattr(index, "offset", None)  # an object has none
        if not isinstance(info.relative_path, str):
            raise ValueError(f"a chunk of {index.fqn} is stored in {info.relative_path!r}, which is no file name")
        span = Span(info.relative_path, int(info.offset), int(info.length))
        transforms = getattr(info, "transform_descriptors", None) or ()
        out.setdefault(index.fqn, {})[None if offset is None else tuple(offset)] = (span, tuple(map(str, transforms)))
    return out


class _Tables:
    """Collects entries while the pickled tables are walked once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, ObjectEntry] = {}
        self.problems: list[Problem] = []

    def add_object(self, key: str, places: dict[tuple[int, ...] | None, Place]) -> None:
        if not places:
            message = f"{self.name}: object {key} is declared but stored nowhere"
            self.problems.append(Problem("missing-tensor", message, file=self.name, tensor=key))
        for span, transforms in places.values():
            self.objects[key] = ObjectEntry(key, span, transforms)

    def add_tensor(self, key: str, entry: Record, places: dict[tuple[int, ...] | None, Place]) -> None:
        dtype = entry.properties.dtype  # type: ignore[attr-defined]
        if not isinstance(dtype, DType):
            raise ValueError(f"dtype of {key} is {dtype!r}")
        shape = tuple(entry.size)  # type: ignore[attr-defined]
        chunks = []
        for declared in entry.chunks:  # type: ignore[attr-defined]
            box = Box(tuple(declared.offsets), tuple(declared.sizes))
            place = places.pop(box.offset, None) or places.pop(None, None)
            if place is not None:
                chunks.append(_chunk(box, place, dtype))
            elif box.numel:
                message = f"{self.name}: {key} {box} is declared but stored nowhere"
                self.problems.append(Problem("missing-chunk", message, file=self.name, tensor=key, box=box))
        for offset in places:
            message = f"{self.name}: {key} has a stored chunk at {offset} that is not declared"
            self.problems.append(Problem("layout", message, file=self.name, tensor=key))
        self.tensors[key] = TensorEntry(key, dtype, shape, tuple(chunks))


def _chunk(box: Box, place: Place, dtype: DType) -> Chunk:
    span, transforms = place
    # A torch.save zip is always longer than its data, so equal lengths mean the safetensors serialisation.
    if not transforms and span.length_bytes == box.numel * dtype.itemsize:
        return Chunk(box, span, Encoding.SAFETENSORS)
    return Chunk(box, span, Encoding.TORCH_ZIP, transforms)


def data_files(table: DcpTable) -> set[str]:
    """Every file that the table stores something in."""
    return set(_files(table))


def _files(table: DcpTable) -> Iterable[str]:
    for entry in table.tensors.values():
        for chunk in entry.chunks:
            yield chunk.span.file
    for blob in table.objects.values():
        yield blob.span.file
