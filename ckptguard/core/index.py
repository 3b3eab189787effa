"""The index: everything known about a checkpoint without reading its tensor data. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from types import MappingProxyType

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.core.problems import Problem


class Encoding(Enum):
    """How a chunk's elements stand in its span."""

    RAW = "raw"  # the span is the storage itself: elements at `first_element` with `strides`
    TORCH_ZIP = "torch_zip"  # the span is a zip made by torch.save of this one tensor
    SAFETENSORS = "safetensors"  # a safetensors file begins at the span's offset and names the tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file.

    Attributes:
        file: POSIX path relative to the checkpoint directory.
        offset_bytes: First byte.
        length_bytes: Number of bytes.
    """

    file: str
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """One past the last byte."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor stored in one place.

    Attributes:
        box: Which part of the global tensor.
        span: Where its encoded bytes are.
        encoding: How to find the elements in the span.
        transforms: Stream transforms to undo first, such as ``stream.zstd/1``.
        first_element: RAW only: element of the storage at which the box's first element stands.
        strides: RAW only: elements to skip per dim; None means row-major without holes.
        crc32: RAW only: CRC-32 of the whole span, where one is stored beside it.
    """

    box: Box
    span: Span
    encoding: Encoding = Encoding.RAW
    transforms: tuple[str, ...] = ()
    first_element: int = 0
    strides: tuple[int, ...] | None = None
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A named global tensor and the chunks that make it up."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the global tensor, each element once."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A named blob of bytes: RNG state, common state, ``_extra_state``."""

    name: str
    span: Span
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that is there.

    Attributes:
        path: POSIX path relative to the checkpoint directory.
        size_bytes: Size on disk.
        link_target: Where a symlink leads, as resolved; None for a plain file.
        inside: False for a symlink that leaves the directory and is not the HF cache's own blob.
    """

    path: str
    size_bytes: int
    link_target: str | None = None
    inside: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checkpoint says about the run that wrote it. None or empty where it does not say.

    Attributes:
        version: Megatron Core version, stated or inferred; the text says which.
        iteration: Training step, or None for a release or a foreign checkpoint.
        layout: Sizes of the parallel axes by short name (``tp``, ``pp``, ``vpp``, ``ep``, ``etp``, ``cp``, ``dp``).
        optimizer_format: ``dp_reshardable``, ``fully_reshardable``, ...
        args: The training arguments as plain values.
        run_config: Bridge's run_config.yaml as plain values.
        content_metadata: Megatron's own description of the stored state.
        extra: Further items for display, in order.
    """

    version: str | None = None
    iteration: int | None = None
    layout: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    optimizer_format: str | None = None
    args: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    run_config: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    content_metadata: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    extra: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Index:
    """Everything known about a checkpoint without reading its tensor data.

    Attributes:
        format: Name of the format that read it.
        location: The directory, as a path or URL.
        tensors: By name, in the order of the file's own table.
        objects: By name.
        files: Every file in the directory, by relative path.
        roles: What each file other than data files is there for (``.metadata``: "index", ...).
        facts: What it says about the run.
        problems: What was wrong on the way; reading goes on where it can.
    """

    format: str
    location: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry]
    files: Mapping[str, FileEntry]
    roles: Mapping[str, str]
    facts: Facts = field(default_factory=Facts)
    problems: tuple[Problem, ...] = ()

    def spans(self) -> dict[str, list[tuple[Span, str, Chunk | None]]]:
        """Per file, what stands in it: (span, tensor or object name, chunk or None for an object), by offset."""
        out: dict[str, list[tuple[Span, str, Chunk | None]]] = {}
        for entry in self.tensors.values():
            for chunk in entry.chunks:
                out.setdefault(chunk.span.file, []).append((chunk.span, entry.name, chunk))
        for blob in self.objects.values():
            out.setdefault(blob.span.file, []).append((blob.span, blob.name, None))
        for items in out.values():
            items.sort(key=lambda item: (item[0].offset_bytes, item[0].length_bytes, item[1]))
        return out

    def with_problems(self, *more: Problem) -> Index:
        """The same index with further problems noted."""
        return replace(self, problems=(*self.problems, *more))
