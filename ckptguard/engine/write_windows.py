"""Making the bytes of windows: what fills them, and what depends on the CRC-32 of the elements before it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.core.writing import Closing, Elements, Ending, Fill, Literal, Piece, Window
from ckptguard.engine.checksums import crc32


def provide(fill: Fill, pieces: Sequence[Piece], view: memoryview) -> None:
    """Puts everything but closing parts and endings into the view."""
    at = 0
    for piece in pieces:
        part, begin, end = piece.part, piece.begin_bytes, piece.begin_bytes + piece.length_bytes
        if isinstance(part, Elements):
            fill(part.key, begin, view[at : at + piece.length_bytes])
        elif isinstance(part, Literal):
            view[at : at + piece.length_bytes] = memoryview(part.data)[begin:end]
        at += piece.length_bytes


class Closings:
    """Makes the closing parts and the ending of one file, whose windows come in order. Not thread-safe."""

    def __init__(self) -> None:
        self._crc = 0
        self._crcs: list[int] = []

    def make(self, window: Window, view: memoryview) -> None:
        """Puts them into a window in which all else is there."""
        at = 0
        for piece in window.pieces:
            part = view[at : at + piece.length_bytes]
            at += piece.length_bytes
            if piece.closes:
                self._crc = crc32(part, self._crc)
            elif isinstance(piece.part, Closing):
                part[:] = piece.part.make(self._crc)
                self._crcs.append(self._crc)
                self._crc = 0
            elif isinstance(piece.part, Ending):
                part[:] = piece.part.make(tuple(self._crcs))
