"""From a chunk to its elements: finding them in the file, checking that they are what the index says, reading ranges."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckptguard.core.boxes import unravel
from ckptguard.core.dtypes import DType
from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.index import Chunk, Encoding, ObjectEntry, Span, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.formats import safetensors_files
from ckptguard.formats.pickles import TensorRef, load
from ckptguard.formats.storage import Directory
from ckptguard.formats.torch_zips import TorchZip, read_torch_zip
from ckptguard.formats.zip_checks import ReadAt, ZipRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_WINDOW_BYTES = 4096
_ZSTD = "stream.zstd"
_ZIP_OVERHEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Located:
    """Where a chunk's elements stand.

    Attributes:
        dtype: Element type.
        size: Elements per dim.
        span: The storage, as bytes of a file; of ``memory`` instead, if that is set.
        first_element: Element of the storage at which the chunk begins.
        strides: Elements to skip per dim; None means row-major without holes.
        crc32: CRC-32 of the whole storage, where one is stored beside it.
        memory: The decompressed bytes of a transformed chunk.
    """

    dtype: DType
    size: tuple[int, ...]
    span: Span
    first_element: int = 0
    strides: tuple[int, ...] | None = None
    crc32: int | None = None
    memory: bytes | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)


class Reader:
    """Reads the chunks and objects of one open checkpoint. Thread-safe; holds no tensor data between calls."""

    def __init__(self, files: Directory) -> None:
        self.files = files

    def locate(self, entry: TensorEntry, chunk: Chunk) -> Located:
        """Finds a chunk's elements, reading a few kilobytes at most (all of it, if it is compressed).

        Raises:
            DamagedError: The stored bytes are not what the index says of them.
            UnsupportedError: A transform or a tensor class that is not known.
        """
        if chunk.encoding is Encoding.RAW:
            needed = _storage_elements(chunk.box.size, chunk.strides, chunk.first_element) * entry.dtype.itemsize
            if needed > chunk.span.length_bytes:
                raise _mismatch(entry, chunk, f"{chunk.span.length_bytes} bytes are stored, {needed} are needed")
            return Located(entry.dtype, chunk.box.size, chunk.span, chunk.first_element, chunk.strides, chunk.crc32)
        if chunk.encoding is Encoding.SAFETENSORS:
            return self._in_safetensors(entry, chunk)
        where = f"{chunk.span.file}, {entry.name} {chunk.box}"
        if chunk.transforms:
            limit = entry.dtype.itemsize * chunk.box.numel + _ZIP_OVERHEAD_BYTES
            memory = self._undo(chunk.span, chunk.transforms, limit, where)
            archive = read_torch_zip(
                _in_memory(memory), len(memory), where=where, file=chunk.span.file, tensor=entry.name
            )
            return _located(entry, chunk, archive, memory)
        archive = self.open_zip(chunk.span, where=where, tensor=entry.name)
        return _located(entry, chunk, archive, None)

    def open_zip(self, span: Span, *, where: str, tensor: str | None = None) -> TorchZip:
        """The directory and the inert value of a torch.save zip that fills a span."""
        return read_torch_zip(self._window(span), span.length_bytes, where=where, file=span.file, tensor=tensor)

    def _window(self, span: Span) -> ReadAt:
        """Reads inside a span through two cached windows: a zip's headers stand at its two ends."""
        length = span.length_bytes
        cut = min(_WINDOW_BYTES, length)
        head = self.files.read_span(Span(span.file, span.offset_bytes, cut))
        tail = self.files.read_span(Span(span.file, span.end_bytes - cut, cut)) if length > cut else head

        def read_at(offset: int, count: int) -> bytes:
            if offset < 0 or count < 0 or offset + count > length:
                raise ValueError(f"bytes {offset} to {offset + count} of {length}")
            if offset + count <= cut:
                return head[offset : offset + count]
            if offset >= length - cut:
                return tail[offset - (length - cut) : offset - (length - cut) + count]
            return self.files.read_span(Span(span.file, span.offset_bytes + offset, count))

        return read_at

    def _in_safetensors(self, entry: TensorEntry, chunk: Chunk) -> Located:
        header = safetensors_files.read_header(self.files, chunk.span.file, offset_bytes=chunk.span.offset_bytes)
        item = header.tensors.get(entry.name)
        if item is None:
            raise _mismatch(entry, chunk, f"the safetensors header at byte {chunk.span.offset_bytes} does not name it")
        if item.dtype != entry.dtype or prod(item.shape) != chunk.box.numel:
            raise _mismatch(entry, chunk, f"{item.dtype} {list(item.shape)} is stored")
        return Located(entry.dtype, chunk.box.size, item.span)

    def _undo(self, span: Span, transforms: tuple[str, ...], limit_bytes: int, where: str) -> bytes:
        """Decompresses a chunk; never to more bytes than its tensor explains."""
        if len(transforms) != 1 or transforms[0].partition("/")[0] != _ZSTD:
            raise UnsupportedError(f"{where}: stored through {', '.join(transforms)}; only {_ZSTD} can be undone")
        import zstandard

        packed = self.files.read_span(span)
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        try:
            data = bytes(reader.read(limit_bytes + 1))
        except zstandard.ZstdError as error:
            message = f"{where}: not a whole zstd stream ({error})"
            raise DamagedError(message, problems=[Problem("unreadable", message, file=span.file)]) from error
        if len(data) > limit_bytes:
            message = f"{where}: decompresses to more than the {limit_bytes} bytes that its tensor can need"
            raise DamagedError(message, problems=[Problem("size", message, file=span.file)])
        return data

    def object_value(self, entry: ObjectEntry) -> Any:
        """An object's value, inert.

        Raises:
            DamagedError: It is not a whole pickle or torch.save file.
            UnsafePickleError: It names something outside the allow-list.
        """
        where = f"{entry.span.file}, {entry.name}"
        if entry.transforms:
            data = self._undo(entry.span, entry.transforms, 1 << 30, where)
            return read_torch_zip(
                _in_memory(data), len(data), where=where, file=entry.span.file, tensor=entry.name
            ).value
        if entry.span.length_bytes == 0:
            return b""
        head = self.files.read_span(Span(entry.span.file, entry.span.offset_bytes, min(4, entry.span.length_bytes)))
        if head == b"PK\x03\x04":
            return self.open_zip(entry.span, where=where, tensor=entry.name).value
        return load(self.files.read_span(entry.span), where=where, file=entry.span.file, tensor=entry.name)

    def read_elements(self, at: Located, begin: int, buffer: memoryview) -> None:
        """Fills a buffer with elements in row-major order.

        Args:
            at: From ``locate``.
            begin: First element, counted row-major inside the chunk.
            buffer: Writable bytes, a multiple of the itemsize long.
        """
        itemsize = at.dtype.itemsize
        if at.strides is None and at.memory is None:
            self.files.read_into(at.span.file, at.span.offset_bytes + (at.first_element + begin) * itemsize, buffer)
        elif at.strides is None:
            start = at.span.offset_bytes + (at.first_element + begin) * itemsize
            buffer[:] = (at.memory or b"")[start : start + len(buffer)]
        else:
            self._read_strided(at, begin, buffer)

    def _read_strided(self, at: Located, begin: int, buffer: memoryview) -> None:
        """Gathers from a mapped file, so that no more than the buffer is held in memory."""
        import numpy as np  # here and below: whoever only verifies need not wait for it

        itemsize = at.dtype.itemsize
        if at.memory is not None:
            storage: Any = memoryview(at.memory)[at.span.offset_bytes : at.span.end_bytes]
        else:
            storage = self._mapped(at.span)
        item = np.dtype((np.void, itemsize))
        flat = np.frombuffer(storage, item, count=len(storage) // itemsize)
        view = np.lib.stride_tricks.as_strided(
            flat[at.first_element :], at.size, [s * itemsize for s in at.strides or ()], writeable=False
        )
        out = np.frombuffer(buffer, item)
        _copy_range(view, begin, out)

    def _mapped(self, span: Span) -> memoryview:
        if not self.files.local:  # a store maps nothing: strided storages are those of legacy files, and small
            return memoryview(self.files.read_span(span))
        page = mmap.ALLOCATIONGRANULARITY
        start = span.offset_bytes // page * page
        with self.files.checked_path(span.file).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), span.end_bytes - start, offset=start, prot=mmap.PROT_READ)
        return memoryview(mapped)[span.offset_bytes - start :]

    def read_box(self, at: Located, offset: tuple[int, ...], size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Elements of a box inside the chunk, row-major, as bytes.

        Args:
            at: From ``locate``.
            offset: First element per dim, counted from the chunk's own corner.
            size: Elements per dim.
        """
        import numpy as np

        out = np.empty(prod(size) * at.dtype.itemsize, np.uint8)
        run, lines = _runs(at.size, size)
        step = run * at.dtype.itemsize
        view = memoryview(out.data)
        for line in range(lines):
            coordinates = _line_start(line, offset, size, run)
            begin = 0
            for at_dim, extent in zip(coordinates, at.size, strict=True):
                begin = begin * extent + at_dim
            self.read_elements(at, begin, view[line * step : (line + 1) * step])
        return out


def _runs(full: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, int]:
    """(elements per contiguous run, number of runs) of a box of ``size`` inside a row-major area of ``full``."""
    run, dim = 1, len(size)
    while dim > 0:
        dim -= 1
        run *= size[dim]
        if size[dim] != full[dim]:
            break
    return run, prod(size) // run if run else 0


def _line_start(line: int, offset: tuple[int, ...], size: tuple[int, ...], run: int) -> tuple[int, ...]:
    inside = unravel(line * run, size)
    return tuple(o + i for o, i in zip(offset, inside, strict=True))


def _copy_range(view: npt.NDArray[Any], begin: int, out: npt.NDArray[Any]) -> None:
    """Copies ``len(out)`` row-major elements of a strided view, whole rows of its first dim at a time where it can."""
    if view.ndim == 0:
        out[:] = view
        return
    row = prod(view.shape[1:])
    done = 0
    while done < len(out):
        at_row, inside = divmod(begin + done, row)
        if inside or len(out) - done < row:
            count = min(row - inside, len(out) - done)
            if view.ndim == 1:
                out[done : done + count] = view[at_row : at_row + count]
            else:
                _copy_range(view[at_row], inside, out[done : done + count])
        else:
            rows = (len(out) - done) // row
            count = rows * row
            out[done : done + count] = view[at_row : at_row + rows].reshape(-1)
        done += count


def _in_memory(data: bytes) -> ReadAt:
    def read_at(offset: int, count: int) -> bytes:
        if offset < 0 or offset + count > len(data):
            raise ValueError(f"bytes {offset} to {offset + count} of {len(data)}")
        return data[offset : offset + count]

    return read_at


def _located(entry: TensorEntry, chunk: Chunk, archive: TorchZip, memory: bytes | None) -> Located:
    """Checks the tensor that a zip holds against the index."""
    value = archive.value
    if not isinstance(value, TensorRef):
        raise _mismatch(entry, chunk, f"a {type(value).__name__} is stored, expected a plain tensor")
    if value.dtype != entry.dtype:
        raise _mismatch(entry, chunk, f"{value.dtype} is stored")
    try:
        record = archive.storage(value.storage.key)
    except KeyError:
        raise _mismatch(entry, chunk, f"its record data/{value.storage.key} is missing") from None
    size, strides = value.size, value.strides
    if size != chunk.box.size:
        if prod(size) != chunk.box.numel or not row_major(size, strides):
            raise _mismatch(entry, chunk, f"a tensor of shape {list(size)} is stored")
        size, strides = chunk.box.size, ()
    needed = _storage_elements(size, strides or None, value.offset) * entry.dtype.itemsize
    if needed > record.length_bytes:
        raise _mismatch(entry, chunk, f"{record.length_bytes} bytes are stored, {needed} are needed")
    kept = None if not strides or row_major(size, strides) else strides
    base = 0 if memory is not None else chunk.span.offset_bytes
    return Located(
        entry.dtype, size, _record_span(chunk, record, base), value.offset, kept, record.crc32, memory
    )  # fmt: skip


def _record_span(chunk: Chunk, record: ZipRecord, base_bytes: int) -> Span:
    return Span(chunk.span.file, base_bytes + record.data_bytes, record.length_bytes)


def row_major(size: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides describe row-major order without holes (dims of one element may have any stride)."""
    expected = 1
    if len(size) != len(strides):
        return False
    for extent, stride in zip(reversed(size), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return prod(size) == 0
        expected *= extent
    return True


def _storage_elements(size: tuple[int, ...], strides: tuple[int, ...] | None, first: int) -> int:
    """Elements a storage must have; negative strides and offsets are refused by asking for the impossible."""
    if not prod(size):
        return 0
    if first < 0 or any(s < 0 for s in strides or ()):
        return 1 << 62
    if strides is None:
        return first + prod(size)
    return first + sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + 1


def _mismatch(entry: TensorEntry, chunk: Chunk, found: str) -> DamagedError:
    message = (
        f"{chunk.span.file}: {entry.name} {chunk.box}: {found}; the index says {entry.dtype} {list(chunk.box.size)}"
        f" in {chunk.span.length_bytes} bytes at {chunk.span.offset_bytes}"
    )
    problem = Problem("layout", message, file=chunk.span.file, tensor=entry.name, box=chunk.box)
    return DamagedError(message, problems=[problem], next_step="Index and file are not of the same save.")
