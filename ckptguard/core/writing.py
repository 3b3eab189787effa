"""What is to be written: files as rows of parts, and how they are cut into windows of bounded size. Frozen values, pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known in advance."""

    data: bytes

    @property
    def length_bytes(self) -> int:
        """Number of bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes that ``fill`` provides when their turn comes.

    Attributes:
        key: What the caller knows them by.
        length_bytes: Number of bytes.
        step_bytes: They are asked for in pieces that begin and end at multiples of it (the last ends where they end), so that
            the caller may work in whole rows.
    """

    key: int
    length_bytes: int
    step_bytes: int = 1

    def __post_init__(self) -> None:
        if self.length_bytes < 0 or self.step_bytes < 1:
            raise ValueError(f"elements {self.key}: {self.length_bytes} bytes in steps of {self.step_bytes}")


@dataclass(frozen=True, slots=True)
class Closing:
    """Bytes that depend on the CRC-32 of the elements just before them, such as the tail of a torch zip.

    Attributes:
        length_bytes: Number of bytes; known in advance, so that what follows has its place.
        make: From the CRC-32 (as ``zlib.crc32`` gives it) to the bytes. Pure: it is called anew when a run is repeated.
        elements: How many parts of elements just before it the CRC-32 runs over.
    """

    length_bytes: int
    make: Callable[[int], bytes]
    elements: int = 1


@dataclass(frozen=True, slots=True)
class Ending:
    """Bytes that depend on the CRC-32 of all elements that were closed before them in the file, such as a zip's directory.

    Attributes:
        length_bytes: Number of bytes, known in advance.
        make: From what each closing part was given, in order, to the bytes. Pure, as ``Closing.make``.
    """

    length_bytes: int
    make: Callable[[tuple[int, ...]], bytes]


Part = Literal | Elements | Closing | Ending


class Fill(Protocol):
    """Provides the bytes of elements. Called from several threads at once, in any order, once for every byte."""

    def __call__(self, key: int, begin_bytes: int, out: memoryview, /) -> None:
        """Fills ``out`` with bytes ``[begin_bytes, begin_bytes + len(out))`` of the elements."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written.

    Attributes:
        path: POSIX path relative to the directory that is made.
        parts: Its content, in order and without gaps.
    """

    path: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        run = 0  # parts of elements that follow each other
        for part in self.parts:
            if isinstance(part, Closing) and not 1 <= part.elements <= run:
                raise ValueError(
                    f"{self.path}: a closing part that follows {run or 'no'} elements asks for the CRC-32 of {part.elements}"
                )
            run = run + 1 if isinstance(part, Elements) else 0

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return sum(part.length_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """All files but the small last ones that ``Staging.commit`` writes.

    Attributes:
        files: In the order in which they are begun.
        identity: Digest of everything that the bytes depend on: source, arguments, version of the rules. Two plans of one
            identity write the same bytes.
    """

    files: tuple[TargetFile, ...]
    identity: str

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for file in self.files:
            check_relative(file.path)
            if file.path in seen:
                raise ValueError(f"{file.path}: planned twice")
            seen.add(file.path)


def check_relative(path: str) -> None:
    """Raises ValueError unless a POSIX path stays below the directory that it is relative to."""
    if not path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r}: not a plain relative path")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[begin_bytes, begin_bytes + length_bytes)`` of a part; ``closes`` if a closing part asks for their CRC-32."""

    part: Part
    begin_bytes: int
    length_bytes: int
    closes: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring pieces of a file that are filled, digested and stored at once."""

    offset_bytes: int
    length_bytes: int
    pieces: tuple[Piece, ...]


def widest_piece(plan: WritePlan) -> int:
    """The least size in bytes that a window may have: pieces of a step, closing parts and endings are never cut."""
    widest = 1
    for file in plan.files:
        for part in file.parts:
            if isinstance(part, Elements):
                widest = max(widest, min(part.step_bytes, part.length_bytes))
            elif isinstance(part, Closing | Ending):
                widest = max(widest, part.length_bytes)
    return widest


def windows(file: TargetFile, window_bytes: int) -> Iterator[Window]:
    """Cuts a file into windows, in order; an empty file is one empty window.

    Args:
        file: The file.
        window_bytes: Most bytes of a window, ``widest_piece`` at least.
    """
    offset, used = 0, 0
    pieces: list[Piece] = []
    for part, closes in zip(file.parts, _closed(file.parts), strict=True):
        begin = 0
        while begin < part.length_bytes:
            take = _fitting(part, begin, window_bytes - used)
            if take:
                pieces.append(Piece(part, begin, take, closes))
                begin, used = begin + take, used + take
            else:
                assert used, "a piece wider than a window"
                yield Window(offset, used, tuple(pieces))
                offset, used, pieces = offset + used, 0, []
    if used or not offset:
        yield Window(offset, used, tuple(pieces))


def _closed(parts: tuple[Part, ...]) -> list[bool]:
    """Of every part, whether a closing part asks for its CRC-32."""
    out = [False] * len(parts)
    for number, part in enumerate(parts):
        if isinstance(part, Closing):
            out[number - part.elements : number] = [True] * part.elements
    return out


def _fitting(part: Part, begin_bytes: int, room_bytes: int) -> int:
    """How many bytes of a part, from ``begin_bytes`` on, go into so much room."""
    left = part.length_bytes - begin_bytes
    if left <= room_bytes:
        return left
    if isinstance(part, Closing | Ending):
        return 0
    step = part.step_bytes if isinstance(part, Elements) else 1
    return room_bytes // step * step
