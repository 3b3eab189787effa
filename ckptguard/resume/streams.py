"""A rank's stream followed while it grows: how far the rank is, without its values. ``records.read_rank`` reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import zstandard

from ckptguard.resume.orders import FAILED
from ckptguard.resume.records import file_name, stream_paths

_EVENT = re.compile(rb'\{"event":\["(loaded|step|saved)",(-?\d+),')
_READ_BYTES = 1 << 20


class Stream:
    """What a rank told so far.

    Attributes:
        facts: Its first line; empty before that is written.
        loaded: The step it started from, once it said so.
        steps: Steps it made, in order.
        saved: Steps after which it began a save.
        failures: What the recorder says of its own failing.
        ended: The last line was written.
        damaged: The file is no stream.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.loaded: int | None = None
        self.steps: list[int] = []
        self.saved: list[int] = []
        self.failures: list[str] = []
        self.ended = self.damaged = False
        self._read_bytes, self._rest = 0, b""
        self._decompress = zstandard.ZstdDecompressor().decompressobj()

    @property
    def step(self) -> int | None:
        """The last finished step; None before anything was said of one."""
        return self.steps[-1] if self.steps else self.loaded

    def follow(self) -> bool:
        """Reads on; whether there was anything new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                before = self._read_bytes
                while data := file.read(_READ_BYTES):
                    self._read_bytes += len(data)
                    self._take(data)
        except OSError:  # not there yet
            return False
        return self._read_bytes > before

    def _take(self, data: bytes) -> None:
        if self.damaged or self._decompress.eof:
            return
        try:
            lines = (self._rest + self._decompress.decompress(data)).split(b"\n")
        except zstandard.ZstdError:
            self.damaged = True
            return
        self._rest = lines.pop()
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        if match := _EVENT.match(line):
            kind, step = match[1], int(match[2])
            if kind == b"loaded":
                self.loaded = step
            else:
                (self.steps if kind == b"step" else self.saved).append(step)
        elif line.startswith(b'{"facts":'):
            self.facts = json.loads(line)["facts"]
        elif line.startswith(b'{"unobserved":'):
            self.failures += [words for words in json.loads(line)["unobserved"] if words.startswith(FAILED)]
        elif line.startswith(b'{"end":'):
            self.ended = True


def read_streams(folder: Path) -> dict[int, Stream]:
    """All streams of an arm as they are now, by rank."""
    found = {rank: Stream(path) for rank, path in stream_paths(folder).items()}
    for stream in found.values():
        stream.follow()
    return found


def first_stream(folder: Path) -> Stream:
    """Rank 0's stream, which need not be there yet."""
    return Stream(folder / file_name(0))
