"""What ranks record, as values and as streams: one append-only zstd file of JSON lines per rank.

Every line is an object with one key that says what it is. A stream is flushed at the end of every event, so that what a killed
process saw can be read up to its last step; a torn end is not an error, a missing ``end`` line says that it is torn.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import zstandard

from ckptguard.core.errors import DamagedError, NotFoundError
from ckptguard.core.watching import Group

VERSION = 1
Value = (
    Any  # a digest (``"#<32 hex> bfloat16[64, 32]"``), or a plain JSON value; equal values are ``==`` after ``same``
)
Kind = Literal["loaded", "step", "saved"]


@dataclass(frozen=True, slots=True)
class Event:
    """State at one moment of one rank.

    Attributes:
        kind: ``loaded`` before the first step of the process, ``step`` after a step, ``saved`` when a save begins.
        step: The last finished step.
        values: By item name, in the order of observation.
    """

    kind: Kind
    step: int
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module or an operation.

    Attributes:
        step: In which step.
        scope: The module that runs, or ``optimizer`` or ``data``.
        phase: ``forward``, ``backward`` or ``step``.
        op: Empty for the module as a whole, else the operation, such as ``aten.mm.default``.
        occurrence: How many calls with the same step, scope, phase and op came before.
        inputs: Digests of the tensors that went in, with plain arguments.
        outputs: Digests of what came out.
    """

    step: int
    scope: str
    phase: str
    op: str
    occurrence: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(slots=True)
class RankRecord:
    """All that one rank recorded, in order.

    Attributes:
        facts: What ``Watcher.started`` was told, with rank, world size, host and pid.
        groups: Group of every item by name.
        events: States.
        calls: Module and op calls, in execution order.
        unobserved: What could not be observed, in words.
        ended: The process ended its loop or was stopped on purpose; False is a torn stream.
        stored_bytes: Size of the file.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    unobserved: list[str] = field(default_factory=list)
    ended: bool = False
    stored_bytes: int = 0

    def event(self, kind: Kind, step: int) -> Event | None:
        """The event of that kind after that step, or None."""
        return next((e for e in self.events if e.kind == kind and e.step == step), None)


class RankWriter:
    """Appends a rank's stream. Not thread-safe."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / file_name(rank)).open("wb", buffering=0)  # a fork must have nothing to flush
        self._stream = zstandard.ZstdCompressor(level=1).stream_writer(self._file, closefd=True)
        self._ids: dict[str, int] = {}

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Who this is; the first line."""
        self._line({"facts": {"version": VERSION, **facts}})

    def unobserved(self, words: Sequence[str]) -> None:
        """What could not be observed."""
        self._line({"unobserved": list(words)})

    def event(self, kind: Kind, step: int, values: Sequence[tuple[str, Group, Value]]) -> None:
        """A state, flushed to the file."""
        new = [[name, group] for name, group, _ in values if name not in self._ids]
        if new:
            self._ids.update((name, len(self._ids)) for name, _ in new)
            self._line({"items": new})
        self._line({"event": [kind, step, [self._ids[name] for name, _, _ in values], [v for _, _, v in values]]})
        self.flush()

    def call(self, call: Call) -> None:
        """A call; in the file with the next event or ``flush``."""
        self._line(
            {
                "call": [
                    call.step,
                    call.scope,
                    call.phase,
                    call.op,
                    call.occurrence,
                    list(call.inputs),
                    list(call.outputs),
                ]
            }
        )

    def flush(self) -> None:
        """Everything so far can be read by others."""
        self._stream.flush(zstandard.FLUSH_BLOCK)
        self._file.flush()

    def end(self) -> None:
        """The last line; closes the file. Once."""
        self._line({"end": True})
        self._stream.close()  # type: ignore[no-untyped-call]

    def _line(self, value: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")


def file_name(rank: int) -> str:
    """Name of a rank's stream in its arm's folder."""
    return f"rank_{rank:05d}.jsonl.zst"


def stream_paths(folder: Path) -> dict[int, Path]:
    """The streams that are there in an arm's folder, by rank."""
    return {int(path.name[5:10]): path for path in sorted(folder.glob("rank_*.jsonl.zst"))}


def in_scope(scope: str, wanted: str) -> bool:
    """Whether a call's scope is the wanted one or a part of it: a module in it, or what it does outside of these."""
    return scope == wanted or scope.startswith((f"{wanted}.", f"{wanted} "))


def read_arm(folder: Path) -> dict[int, RankRecord]:
    """All streams of an arm, by rank.

    Raises:
        NotFoundError: There is none.
        DamagedError: One is not a stream.
    """
    paths = stream_paths(folder)
    if not paths:
        raise NotFoundError(f"{folder}: no rank recorded anything", next_step="See the arm's log.")
    return {rank: read_rank(path) for rank, path in paths.items()}


def read_rank(path: Path) -> RankRecord:
    """One rank's stream, up to where it is torn.

    Raises:
        DamagedError: The file holds something else.
    """
    record = RankRecord(stored_bytes=path.stat().st_size)
    names: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            ((kind, value),) = line.items()
            _take(record, names, kind, value)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise DamagedError(f"{path}: line {number} is not a record of ckptguard ({error})") from error
    return record


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        data, reader = b"", zstandard.ZstdDecompressor().stream_reader(file)
        while True:
            try:
                part = reader.read(1 << 20)
            except zstandard.ZstdError:  # cut off inside a block
                part = b""
            if not part:
                break
            data += part
    for line in io.BytesIO(data):
        if line.endswith(b"\n"):
            yield json.loads(line)


def _take(record: RankRecord, names: list[str], kind: str, value: Any) -> None:
    if kind == "facts":
        record.facts = value
    elif kind == "items":
        names += [name for name, _ in value]
        record.groups.update(dict(value))
    elif kind == "event":
        event, step, ids, values = value
        record.events.append(Event(event, step, dict(zip((names[i] for i in ids), values, strict=True))))
    elif kind == "call":
        step, scope, phase, op, occurrence, inputs, outputs = value
        record.calls.append(Call(step, scope, phase, op, occurrence, tuple(inputs), tuple(outputs)))
    elif kind == "unobserved":
        record.unobserved += value
    elif kind == "end":
        record.ended = True
    else:
        raise ValueError(f"unknown kind {kind!r}")


def same(one: Value, other: Value) -> bool:
    """Whether two recorded values are equal bit for bit: -0.0 is not 0.0, and NaN equals itself."""
    if type(one) is str and type(other) is str:  # nearly all values are, and this is far faster
        return one == other
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
