"""Looking into the files without a manifest: chunk headers against the index, pickles against the allow-list, CRCs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptguard.core.boxes import Box
from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.index import Chunk, Index, ObjectEntry, Span, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.engine.checksums import crc32
from ckptguard.engine.structure import rank_of
from ckptguard.engine.workers import SILENT, Buffers, Progress, run
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Located, Reader
from ckptguard.formats.pickles import FENCE
from ckptguard.formats.storage import Directory
from ckptguard.formats.zip_checks import ReadAt, is_zip, stored_records

Place = tuple[TensorEntry, Chunk]
Found = list[tuple[Place, Located]]


def check_headers(checkpoint: Checkpoint) -> tuple[list[Problem], Found]:
    """Finds every chunk in its file and reads every object's pickle, inertly.

    Returns:
        The problems, and where the chunks that are sound stand.
    """
    problems: list[Problem] = []
    found: Found = []
    with FENCE:
        for place in places(checkpoint.index):
            located, wrong = check_chunk(checkpoint.reader, *place)
            problems += wrong
            if located is not None:
                found.append((place, located))
        for blob in checkpoint.index.objects.values():
            if _in_file(checkpoint.index, blob.span):
                problems += check_object(checkpoint.reader, blob)
    return problems, found


def check_chunk(reader: Reader, entry: TensorEntry, chunk: Chunk) -> tuple[Located | None, list[Problem]]:
    """Where a chunk stands in its file, if its header is what the index says of it; else what is wrong."""
    try:
        return reader.locate(entry, chunk), []
    except DamagedError as error:
        return None, placed(error, chunk.span, entry, chunk)
    except UnsupportedError as error:
        return None, [_unreadable(error, chunk.span, entry.name, chunk.box)]


def check_object(reader: Reader, blob: ObjectEntry) -> list[Problem]:
    """An object's pickle against the allow-list. Objects that are no pickle at all (raw state) are left alone."""
    try:
        reader.object_value(blob)
    except DamagedError as error:
        return [
            p
            for p in placed(error, blob.span, None, None, name=blob.name)
            if p.kind != "unreadable" or _is_pickle(reader, blob)
        ]
    except UnsupportedError as error:
        return [_unreadable(error, blob.span, blob.name, None)]
    return []


def _unreadable(error: UnsupportedError, span: Span, name: str, box: Box | None) -> Problem:
    return Problem("unreadable", error.message, file=span.file, tensor=name, box=box, rank=rank_of(span.file))


def _is_pickle(reader: Reader, blob: ObjectEntry) -> bool:
    head = reader.files.read_span(Span(blob.span.file, blob.span.offset_bytes, min(1, blob.span.length_bytes)))
    return head == b"\x80" or is_zip(reading(reader.files, blob.span), blob.span.length_bytes)


def places(index: Index) -> Iterator[Place]:
    """Every chunk whose file is there and long enough, in the order of the files."""
    out = [(entry, chunk) for entry in index.tensors.values() for chunk in entry.chunks]
    out.sort(key=lambda place: (place[1].span.file, place[1].span.offset_bytes))
    return (place for place in out if _in_file(index, place[1].span))


def _in_file(index: Index, span: Span) -> bool:
    """Whether the file is there and long enough; if not, ``structure`` has said so."""
    file = index.files.get(span.file)
    return file is not None and 0 <= span.offset_bytes <= span.end_bytes <= file.size_bytes and file.inside


def placed(
    error: DamagedError, span: Span, entry: TensorEntry | None, chunk: Chunk | None, *, name: str | None = None
) -> list[Problem]:
    """The problems of an error, with tensor, box and rank filled in where they are known here."""
    given = error.problems or (Problem("unreadable", error.message, file=span.file),)
    return [
        replace(
            p,
            file=p.file or span.file,
            tensor=p.tensor or (entry.name if entry else name),
            box=p.box or (chunk.box if chunk else None),
            rank=p.rank or rank_of(span.file),
        )
        for p in given
    ]


def check_crcs(
    checkpoint: Checkpoint, found: Found, progress: Progress = SILENT, *, threads: int | None = None
) -> tuple[list[Problem], int]:
    """Checks every stored CRC-32. Detects any damage to a tensor's or object's bytes, and needs no manifest.

    Returns:
        The problems, and how many bytes had a CRC to be checked against.
    """
    reader, buffers = checkpoint.reader, Buffers()
    items: list[tuple[Record, tuple[str, Box | None]]] = [
        (Record(at.span, at.crc32, at.memory), (entry.name, chunk.box)) for (entry, chunk), at in found
    ]
    for blob in checkpoint.index.objects.values():
        if _in_file(checkpoint.index, blob.span):
            items += [(record, (blob.name, None)) for record in object_records(reader, blob)]
    # A storage is read once, and said by the first name it has: tensors come before the object around them.
    items = list(dict(item for item in reversed(items) if item[0].crc32 is not None).items())[::-1]
    total = sum(record.span.length_bytes for record, _ in items)
    progress.start("checking CRCs", total)

    def work(item: tuple[Record, tuple[str, Box | None]]) -> Problem | None:
        record, (name, box) = item
        ok = crc_matches(reader, record, buffers.view)
        progress.advance(record.span.length_bytes)
        if ok:
            return None
        return wrong_crc(record.span.file, name, box)

    return [p for p in run(items, work, threads=threads) if p is not None], total


def wrong_crc(file: str, name: str, box: Box | None) -> Problem:
    """What is said of a chunk, or of an object (which has no box), whose bytes changed."""
    where = f"{name} {box}" if box else f"object {name}"
    message = f"{file}: {where}: its bytes do not match the CRC-32 stored beside them"
    return Problem("crc", message, file=file, tensor=name, box=box, rank=rank_of(file))


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes that have a CRC-32 stored beside them, or None; of ``memory`` instead of the file if that is set."""

    span: Span
    crc32: int | None
    memory: bytes | None = None


def object_records(reader: Reader, blob: ObjectEntry) -> list[Record]:
    """The records of an object that is a zip of torch.save; none for other objects or for a broken zip."""
    if blob.transforms or blob.span.length_bytes < 4:
        return []
    try:
        records = reader.open_zip(blob.span, where=blob.name).records.values()
    except (DamagedError, UnsupportedError):
        return []
    file, start = blob.span.file, blob.span.offset_bytes
    return [Record(Span(file, start + r.data_bytes, r.length_bytes), r.crc32) for r in records]


def zip_records(
    files: Directory, span: Span, *, where: str, tensor: str | None = None, memory: bytes | None = None
) -> list[tuple[str, Record]]:
    """All records of a zip of torch.save that fills a span, the pickle's own among them, each with its name.

    Args:
        files: The directory.
        span: The zip, in its file.
        where: What it is, for messages.
        tensor: Tensor or object concerned, for the problem record.
        memory: The zip itself, where the span holds it compressed.

    Raises:
        DamagedError: It is not a zip that torch can load (``formats.zip_checks``).
    """
    length = span.length_bytes if memory is None else len(memory)
    read_at = reading(files, span) if memory is None else lambda at, count: memory[at : at + count]
    base = span.offset_bytes if memory is None else 0
    found = stored_records(read_at, length, where=where, file=span.file, tensor=tensor)
    return [(r.name, Record(Span(span.file, base + r.data_bytes, r.length_bytes), r.crc32, memory)) for r in found]


def reading(files: Directory, span: Span) -> ReadAt:
    """Reads inside a span."""
    return lambda at, count: files.read_span(Span(span.file, span.offset_bytes + at, count))


def crc_matches(reader: Reader, record: Record, buffer: memoryview) -> bool:
    """Whether bytes have the CRC-32 that is stored beside them. True where none is."""
    span = record.span
    if record.crc32 is None:
        return True
    if record.memory is not None:
        return crc32(record.memory[span.offset_bytes : span.end_bytes]) == record.crc32
    crc, done = 0, 0
    while done < span.length_bytes:
        part = buffer[: min(len(buffer), span.length_bytes - done)]
        reader.files.read_into(span.file, span.offset_bytes + done, part)
        crc = crc32(part, crc)
        done += len(part)
    return crc == record.crc32
