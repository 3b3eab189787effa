"""From damaged bytes of a file to what they are: which tensor, which box of it, written by which rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptguard.core.boxes import bounding_box
from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.index import Chunk, Encoding, Index, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.engine.contents import Record, crc_matches, object_records
from ckptguard.engine.structure import rank_of
from ckptguard.engine.workers import BUFFER_BYTES, aligned_buffer
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.chunks import Located


@dataclass(frozen=True, slots=True)
class _Suspect:
    """An item that shares bytes with the damage; ``sound`` if its own CRC clears it."""

    problem: Problem
    sound: bool


class Placer:
    """Places damage in the files of one checkpoint, as its index describes them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._spans = checkpoint.index.spans()
        self._buffer = aligned_buffer(BUFFER_BYTES)
        self._known: dict[Record, bool] = {}

    def place(self, file: str, block: int, begin_bytes: int, end_bytes: int) -> list[Problem]:
        """What stands in the damaged bytes ``[begin_bytes, end_bytes)`` of a file.

        A block holds parts of several tensors when they are small; those whose own CRC-32 still matches are cleared, unless
        that clears all of them: then headers changed, or the file is of another save with CRCs that fit it.
        """
        base = f"{file}: block {block} (bytes {begin_bytes} to {end_bytes}) is not what was sealed"
        suspects = list(self._suspects(file, block, begin_bytes, end_bytes, base))
        guilty = [s.problem for s in suspects if not s.sound]
        if not guilty:
            hint = " (its own CRC-32 fits: its headers changed, or it is of another save)"
            guilty = [replace(s.problem, message=s.problem.message + hint) for s in suspects]
        if not guilty:
            role = self.checkpoint.index.roles.get(file)
            what = f"the {role}" if role else "bytes that belong to no tensor (headers or padding)"
            return [
                Problem(
                    "changed",
                    f"{base}: {what}",
                    file=file,
                    block=block,
                    bytes_range=(begin_bytes, end_bytes),
                    rank=rank_of(file),
                )
            ]
        return guilty

    def _suspects(self, file: str, block: int, begin: int, end: int, base: str) -> Iterator[_Suspect]:
        """Tensors first; objects only if no tensor is guilty, since a legacy file is one object around its tensors."""
        index: Index = self.checkpoint.index
        objects, guilty = [], False
        for span, name, chunk in self._spans.get(file, ()):
            # Where a safetensors blob begins is no place of a tensor: that one has to be looked up first.
            apart = span.offset_bytes >= end or span.end_bytes <= begin
            if apart and (chunk is None or chunk.encoding is not Encoding.SAFETENSORS):
                continue
            if chunk is None:
                objects.append(name)
                continue
            entry = index.tensors[name]
            try:
                located = self.checkpoint.reader.locate(entry, chunk)
            except (DamagedError, UnsupportedError) as error:
                text = f"{name} {chunk.box}, whose header is damaged ({error.message})"
                suspect = _Suspect(self._problem(base, text, file, block, begin, end, name, chunk), False)
            else:
                if apart and (located.span.offset_bytes >= end or located.span.end_bytes <= begin):
                    continue
                suspect = self._tensor_suspect(base, file, block, begin, end, entry, chunk, located)
            guilty = guilty or not suspect.sound
            yield suspect
        for name in () if guilty else objects:
            records = object_records(self.checkpoint.reader, index.objects[name])
            problem = self._problem(base, f"object {name}", file, block, begin, end, name)
            yield _Suspect(problem, bool(records) and all(self._fits(record) for record in records))

    def _tensor_suspect(
        self, base: str, file: str, block: int, begin: int, end: int, entry: TensorEntry, chunk: Chunk, at: Located
    ) -> _Suspect:
        sound = self._fits(Record(at.span, at.crc32, at.memory))
        box = chunk.box
        if at.memory is None and at.strides is None and at.numel:
            itemsize, start = at.dtype.itemsize, at.span.offset_bytes + at.first_element * at.dtype.itemsize
            first = max(0, (begin - start) // itemsize)
            last = min(at.numel, -(-(end - start) // itemsize))
            if first >= last:  # the damage is in the zip's own headers
                text = f"the headers around {entry.name} {box}"
                return _Suspect(self._problem(base, text, file, block, begin, end, entry.name, chunk), sound)
            box = bounding_box(chunk.box, first, last)
        problem = Problem(
            "changed", f"{base}: {entry.name} {box}", file=file, block=block, bytes_range=(begin, end), tensor=entry.name,
            box=box, rank=rank_of(file),
        )  # fmt: skip
        return _Suspect(problem, sound)

    def _fits(self, record: Record) -> bool:
        """Whether a CRC is stored and matches; each is computed once, however many blocks are damaged."""
        if record not in self._known:
            try:
                fits = record.crc32 is not None and crc_matches(self.checkpoint.reader, record, self._buffer)
            except DamagedError:  # the file ends before the record does
                fits = False
            self._known[record] = fits
        return self._known[record]

    def _problem(
        self, base: str, text: str, file: str, block: int, begin: int, end: int, tensor: str, chunk: Chunk | None = None
    ) -> Problem:
        return Problem(
            "changed", f"{base}: {text}", file=file, block=block, bytes_range=(begin, end), tensor=tensor,
            box=chunk.box if chunk else None, rank=rank_of(file),
        )  # fmt: skip
