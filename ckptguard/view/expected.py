"""What the bytes of a copy are compared with, and what its headers show before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.core.index import Encoding, Index, Span
from ckptguard.core.problems import Problem
from ckptguard.engine import contents
from ckptguard.engine.contents import Record
from ckptguard.engine.digests import size_problem
from ckptguard.engine.structure import rank_of
from ckptguard.engine.workers import BUFFER_BYTES, aligned_buffer
from ckptguard.fingerprint.manifest import FileDigest
from ckptguard.formats.chunks import Reader
from ckptguard.formats.pickles import FENCE
from ckptguard.formats.storage import Directory
from ckptguard.formats.zip_checks import is_zip
from ckptguard.view.saved import Item, Saved


@dataclass(frozen=True, slots=True)
class Mark:
    """A record with the CRC-32 that is stored for it, and whose it is: ``decoder.x [0:4]``, ``object rng_state/shard_0``."""

    record: Record
    owner: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What a copy is compared with.

    Attributes:
        problems: What is wrong with it already; then nobody need read its bytes.
        marks: Its records, in the order in which they stand; they do not overlap.
        sealed: What the manifest says of it.
        sha256: What integrity.json says of it, or "".
    """

    problems: tuple[Problem, ...] = ()
    marks: tuple[Mark, ...] = ()
    sealed: FileDigest | None = None
    sha256: str = ""


def problems_of(error: CkptguardError) -> Sequence[Problem]:
    """The problems of an error, or the error as one."""
    given = error.problems if isinstance(error, DamagedError) else ()
    return given or [Problem("unreadable", error.message)]


def of_local(files: Directory, name: str) -> Expected:
    """A local file is one zip. Its pickle names the writer's own classes and is not looked into.

    Raises:
        DamagedError: It is not a whole zip of torch.save.
    """
    return Expected(marks=tuple(_marks(files, Span(name, 0, files.size(name)), None)))


def of_small(files: Directory, name: str) -> Expected:
    """A file beside the data files, or a tracker: whoever listed it has its BLAKE3; what torch.save wrote has CRCs too.

    Raises:
        DamagedError: It was a zip of torch.save, and is not whole.
    """
    span = Span(name, 0, files.size(name))
    if not name.endswith(".pt") or not is_zip(contents.reading(files, span), span.length_bytes):
        return Expected()
    return Expected(marks=tuple(_marks(files, span, None)))


def by_manifest(saved: Saved, files: Directory, name: str) -> Expected:
    """A file of a sealed step; the manifest itself is compared with the index that was agreed on."""
    assert saved.manifest is not None
    sealed = saved.manifest.files.get(name)
    if sealed is None:
        text = f"{name}: was not there when the checkpoint was sealed"
        return Expected((Problem("extra-file", text, file=name, rank=rank_of(name)),))
    resized = size_problem(name, sealed, files.size(name))
    return Expected((resized,)) if resized else Expected(sealed=sealed)


def of_manifest(saved: Saved, files: Directory, name: str) -> Expected:
    """The manifest is compared with itself, and with the index that was agreed on."""
    return Expected(tuple(saved.read_manifest(files.read(name), name)[1]))


def by_index(saved: Saved, files: Directory, name: str) -> Expected:
    """A data file: each item stands where the index says and is what it says.

    Raises:
        DamagedError: The staged index is not whole.
        EnvironmentFailedError: The file cannot be read.
    """
    items, size = saved.items(name), files.size(name)
    problem = _misplaced(name, items, size)
    if problem is not None:
        return Expected((problem,))
    index, reader = saved.index, Reader(files)
    problems: list[Problem] = []
    marks: list[Mark] = []
    with FENCE:
        for item in items:
            span, owner, chunk = item
            if chunk is None:
                wrong, memory = contents.check_object(reader, index.objects[owner]), None
            else:
                located, wrong = contents.check_chunk(reader, index.tensors[owner], chunk)
                memory = located.memory if located else None
            problems += wrong
            if wrong:
                continue
            if memory is not None:
                problems += _of_unpacked(reader, item, memory)
            elif _is_zip(index, files, item):
                try:
                    marks += _marks(files, span, item)
                except DamagedError as error:
                    problems += problems_of(error)
    return Expected(tuple(problems), tuple(marks), sha256=saved.sha256.get(name, ""))


def _misplaced(name: str, items: Sequence[Item], size: int) -> Problem | None:
    """The first thing that keeps the items from standing in a file of this size, one behind the other."""
    if not items:
        text = f"{name}: a data file of {size} bytes that the index does not name; is it of another save?"
        return Problem("extra-file", text, file=name, rank=rank_of(name))
    end = max(span.end_bytes for span, _, _ in items)
    if size < end:
        lost = [item for item in items if item[0].end_bytes > size]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        text = f"{name}: cut short: {size} bytes, the index needs {end}; {_owner(lost[0])}{more} cannot be read from it"
        return Problem("size", text, file=name, bytes_range=(size, end), rank=rank_of(name))
    free = 0
    for item in items:
        span, _, chunk = item
        if chunk is not None and chunk.encoding is Encoding.SAFETENSORS:  # its span begins where the blob of all begins
            continue
        if span.offset_bytes < free or span.length_bytes < 0:
            text = f"{name}: by the index {_owner(item)} begins at byte {span.offset_bytes}, inside the item before it"
            return Problem("overlap", text, file=name, rank=rank_of(name))
        free = span.end_bytes
    return None


def _owner(item: Item) -> str:
    _, name, chunk = item
    return f"{name} {chunk.box}" if chunk else f"object {name}"


def _is_zip(index: Index, files: Directory, item: Item) -> bool:
    """Whether an item is a zip that stands in the file as it is. Objects may also be raw bytes."""
    span, name, chunk = item
    if chunk is not None:
        return chunk.encoding is Encoding.TORCH_ZIP
    return not index.objects[name].transforms and is_zip(contents.reading(files, span), span.length_bytes)


def _marks(files: Directory, span: Span, item: Item | None) -> Iterator[Mark]:
    """The records of a zip that have a CRC-32."""
    owner = _owner(item) if item else ""
    where = f"{span.file}: {owner}" if item else span.file
    for name, record in contents.zip_records(files, span, where=where, tensor=item[1] if item else None):
        if record.crc32 is not None:
            yield Mark(record, owner or f"record {name}")


def _of_unpacked(reader: Reader, item: Item, memory: bytes) -> Sequence[Problem]:
    """Checks the records of a zip that stands compressed in the file, while it is in memory."""
    (span, name, chunk), buffer = item, aligned_buffer(BUFFER_BYTES)
    try:
        where = f"{span.file}: {_owner(item)}"
        records = contents.zip_records(reader.files, span, where=where, tensor=name, memory=memory)
    except DamagedError as error:
        return problems_of(error)
    if all(contents.crc_matches(reader, record, buffer) for _, record in records):
        return ()
    return (contents.wrong_crc(span.file, name, chunk.box if chunk else None),)
