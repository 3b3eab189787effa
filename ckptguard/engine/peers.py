"""The ranks of one run hear of each other: a word from rank 0, who has arrived, who failed, and who has fallen silent.

All of it goes through the key-value store of torch.distributed; there is no process group and no tensor traffic. One thread of
each process owns the connection, because a call of the store blocks every other one: it shows that the rank is alive, looks for
the others, and answers the main thread. What it finds wrong it raises in the main thread, by way of SIGTERM, which is also what
torchrun sends to the ranks beside one that died. So a rank ends wherever it is, with what it made kept for a later run.

Rank 0 watches all ranks and every rank watches rank 0, so the traffic grows with the ranks, not with their square.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from ckptguard.core.errors import CkptguardError, EnvironmentFailedError
from ckptguard.engine.ranks import World
from ckptguard.engine.workers import Progress

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # as torch documents it

ARRIVAL_SECONDS = 180.0  # for a rank to come at all: schedulers start machines one after the other
SILENCE_SECONDS = 20.0  # without a sign of life; a beating thread waits for the interpreter at most seconds
STALL_SECONDS = 600.0  # without a byte written: file servers that fail over answer again after minutes
GRACE_SECONDS = 30.0  # for a rank's threads to end once the run has failed: torchrun kills after 30 s too
LINGER_SECONDS = 5.0  # for the others to hear of an error before the process, and with it maybe the store, ends
_BEAT_SECONDS = 1.0
_LATE_SECONDS = 1.0  # more than the store's own clock, which says better what was wrong
_POLL_SECONDS = 0.2
_FIRST_POLL_SECONDS = 0.02
_LONGEST_MESSAGE = 4000
_FAILED = "failed"
_NEW, _LEFT = "new", "left"  # a beat before the first one, and after the last
_AGAIN = "Put right what it names, then run the same command again, with any number of ranks: finished files are kept."


@dataclass(frozen=True, slots=True)
class Terms:
    """How long the processes of a run wait for each other, and what messages call them.

    Attributes:
        arrival_seconds: For a process to come at all.
        silence_seconds: Without a sign of life.
        noun: What a process is to the user: "rank" or "node".
        again: The next step after another process failed.
    """

    arrival_seconds: float = field(default_factory=lambda: ARRIVAL_SECONDS)
    silence_seconds: float = field(default_factory=lambda: SILENCE_SECONDS)
    noun: str = "rank"
    again: str = _AGAIN


class Peers(Protocol):
    """The ranks of a run, for code that does not care whether there are others."""

    world: World

    def tell(self, key: str, text: str = "") -> None:
        """A word to all others. A key is told once, by one rank."""

    def hear(self, key: str) -> str:
        """Waits for the word that a rank tells under the key."""

    def arrive(self, key: str) -> None:
        """Says that this rank has come to a point."""

    def await_all(self, key: str) -> None:
        """Waits until all ranks but rank 0 have come to a point."""

    def undisturbed(self) -> None:
        """From here on neither SIGTERM nor another rank's end stops this one."""

    def moving(self, progress: Progress) -> AbstractContextManager[Progress]:
        """A block whose progress never rests for long; a rank whose does is stuck."""


class Alone:
    """The peers of a single process: none. Nothing of torch is imported, no signal is caught."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()

    def tell(self, key: str, text: str = "") -> None:
        """Nobody listens."""

    def hear(self, key: str) -> str:
        """Nobody speaks."""
        return ""

    def arrive(self, key: str) -> None:
        """Nobody waits."""

    def await_all(self, key: str) -> None:
        """Nobody is missing."""

    def undisturbed(self) -> None:
        """Nobody disturbs."""

    @contextmanager
    def moving(self, progress: Progress) -> Iterator[Progress]:
        """The progress as it is."""
        yield progress


@contextmanager
def joined(world: World, terms: Terms | None = None) -> Iterator[Peers]:
    """Meets the other ranks, for a block that holds all work of a run, planning included.

    An error of the block is told to the others before it is raised. To be used in the main thread.

    Raises:
        EnvironmentFailedError: In the block, at any point: another rank failed or fell silent, SIGTERM came, the ranks did not
            meet. The rank where an error arose raises that error itself.
    """
    if world.size == 1:
        yield Alone(world)
        return
    peers = _Joined(world, terms or Terms())
    before = signal.signal(signal.SIGTERM, peers.on_signal)
    try:
        try:
            peers.meet()
            yield peers
        except BaseException as error:
            peers.leave(error)
            raise
        peers.leave(None)
    finally:
        signal.signal(signal.SIGTERM, before)


def barrier(peers: Peers, name: str) -> None:
    """Returns once every rank has come here; ``name`` is used once in a run."""
    if peers.world.first:
        peers.await_all(name)
        peers.tell(f"{name} by all")
    else:
        peers.arrive(name)
        peers.hear(f"{name} by all")


class _Joined:
    """The peers of one rank of several. ``_watch`` runs in the thread that owns the store, all else in the main thread.

    The two talk through ``SimpleQueue``, which a signal handler may interrupt at any point, unlike a lock.
    """

    def __init__(self, world: World, terms: Terms) -> None:
        self.world = world
        self._terms = terms
        self._host = socket.gethostname()
        self._others = tuple(rank for rank in range(world.size) if rank != world.rank)
        self._failure: EnvironmentFailedError | None = None
        self._raised = self._calm = self._terminated = self._leaving = self._lost = self._gone = False
        self._moved_at: float | None = None
        self._failed_at = 0.0
        self._answered_at = 0.0
        self._limit_seconds = math.inf  # until torch is imported
        self._connected = False
        self._questions: queue.SimpleQueue[Callable[[Store], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._told: str | None = None
        self._beats: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="ckptguard-peers", daemon=True)
        self._clock = threading.Thread(target=self._watch_time, name="ckptguard-clock", daemon=True)

    # --- the main thread

    def meet(self) -> None:
        """Waits until the store is there."""
        self._thread.start()
        self._clock.start()
        self._ask(lambda store: True)

    def tell(self, key: str, text: str = "") -> None:
        """A word to all others. A key is told once, by one rank."""

        def said(store: Store) -> bool:
            store.set(f"word/{key}", text)
            return True

        self._ask(said)

    def hear(self, key: str) -> str:
        """Waits for the word that a rank tells under the key."""
        word = f"word/{key}"
        heard: str = self._ask(lambda store: store.get(word).decode() if store.check([word]) else None)
        return heard

    def arrive(self, key: str) -> None:
        """Says that this rank has come to a point."""
        self._ask(lambda store: store.add(f"count/{key}", 1))

    def await_all(self, key: str) -> None:
        """Waits until all ranks but rank 0 have come to a point."""
        self._ask(lambda store: True if store.add(f"count/{key}", 0) >= self.world.size - 1 else None)

    def undisturbed(self) -> None:
        """From here on neither SIGTERM nor another rank's end stops this one."""
        self._calm = True

    @contextmanager
    def moving(self, progress: Progress) -> Iterator[Progress]:
        """A block whose progress never rests for long; a rank whose does is stuck."""
        self._moved_at = time.monotonic()
        try:
            yield _Moving(progress, self)
        finally:
            self._moved_at = None

    def moved(self) -> None:
        """A byte was written or read."""
        self._moved_at = time.monotonic()

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        """What the question answers once that is not None; the other thread asks it again and again."""
        self._questions.put(question)
        while True:
            try:
                return self._answers.get(timeout=_BEAT_SECONDS)
            except queue.Empty:
                if self._lost:
                    if self._calm:
                        return None
                    assert self._failure is not None
                    self._raised = True
                    raise self._failure from None

    def on_signal(self, number: int, frame: object) -> None:
        """SIGTERM: raises what the other thread found, or has it find out why somebody sent it."""
        if self._calm or self._raised:
            return
        if self._failure is None and self._connected:
            self._terminated = True
            return
        self._raised = True
        raise self._failure or self._ended_by_signal()

    def leave(self, error: BaseException | None) -> None:
        """Ends in order: tells an error that arose here; rank 0 stays until the others have gone."""
        self._calm = True
        if not self._connected:
            self._gone = True
            return
        self._told = None if error is None or error is self._failure else _said(error)
        self._leaving = True
        self._questions.put(lambda store: True)  # wakes it
        while self._thread.is_alive() and not self._lost:
            self._thread.join(_POLL_SECONDS)
        self._gone = True

    # --- the thread that owns the store

    def _watch(self) -> None:
        try:
            store = self._connect()
            while not self._leaving:
                self._look(store)
                self._serve(store)
            self._say_goodbye(store, self._told)
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            self._lose(_first_line(error))

    def _connect(self) -> Store:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its C++ backtraces; the error itself is raised
        from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

        world, limit_seconds = self.world, self._terms.arrival_seconds
        self._answered_at, self._limit_seconds = time.monotonic(), limit_seconds + _LATE_SECONDS
        where, limit = urlsplit(world.rendezvous), timedelta(seconds=limit_seconds)
        if where.scheme == "tcp" and where.hostname and where.port:
            # Does not wait for the others: the beats say which of them does not come.
            server = TCPStore(where.hostname, where.port, world.size, world.first, limit, wait_for_workers=False)
        else:
            server = next(rendezvous(world.rendezvous, world.rank, world.size, timeout=limit))[0]
        store = PrefixStore("ckptguard", server)
        self._answered_at, self._limit_seconds = time.monotonic(), self._terms.silence_seconds
        self._connected = True
        for rank in self._others if world.first else (0,):
            store.compare_set(_beat(rank), "", _NEW)  # only where it is missing
            self._beats[rank] = (_NEW, time.monotonic())
        return store

    def _look(self, store: Store) -> None:
        """Shows that this rank lives, and looks whether the others do."""
        now = time.monotonic()
        store.set(_beat(self.world.rank), f"{now} {self._host}")
        self._look_for_failure(store)
        self._answered_at = time.monotonic()
        if self._failure is not None:
            return
        self._look_at_beats(store)
        stalled = None if self._moved_at is None else now - self._moved_at
        if stalled is not None and stalled > STALL_SECONDS:
            self._report(
                store, self.world.rank, self._host, f"not a byte was read or written for {stalled:.0f} s: it is stuck"
            )
        if self._terminated and self._failure is None:
            self._report(store, self.world.rank, self._host, self._ended_by_signal().message)
        self._look_for_failure(store)

    def _look_for_failure(self, store: Store) -> None:
        if store.check([_FAILED]):
            self._fail(self._failed(**json.loads(store.get(_FAILED))))

    def _look_at_beats(self, store: Store) -> None:
        terms = self._terms
        values = store.multi_get([_beat(rank) for rank in self._beats])
        for (rank, (before, since)), value in zip(list(self._beats.items()), values, strict=True):
            now, beat = time.monotonic(), value.decode()
            if beat != before:
                self._beats[rank] = (beat, now)
            elif beat == _NEW and now - since > terms.arrival_seconds:
                self._silent.add(rank)
                self._report(
                    store, rank, "?", f"it did not come to {self.world.address} within {terms.arrival_seconds:.0f} s"
                )
            elif not beat.startswith((_NEW, _LEFT)) and now - since > terms.silence_seconds:
                silence = f"no sign of life for {terms.silence_seconds:.0f} s: it was killed, its machine is down, or it hangs"
                self._silent.add(rank)
                self._report(store, rank, beat.partition(" ")[2], silence)

    def _report(self, store: Store, rank: int, host: str, message: str) -> None:
        """Tells all ranks of a failure, unless they know of one."""
        entry = {"rank": rank, "host": host, "message": message[:_LONGEST_MESSAGE]}
        store.compare_set(_FAILED, "", json.dumps(entry))

    def _failed(self, rank: int, host: str, message: str) -> EnvironmentFailedError:
        who = f"{self._terms.noun} {rank} of {self.world.size} ({host})"
        return EnvironmentFailedError(f"{who} failed: {message}", next_step=self._terms.again)

    def _ended_by_signal(self) -> EnvironmentFailedError:
        return EnvironmentFailedError(
            "ended by SIGTERM, which torchrun sends to the ranks beside one that died, and a scheduler at the end of a job",
            next_step=self._terms.again,
        )

    def _fail(self, error: EnvironmentFailedError) -> None:
        """Has the error raised in the main thread, once."""
        if self._failure is None:
            self._failed_at = time.monotonic()
            self._failure = error
            if not self._calm:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGTERM)

    def _lose(self, why: str) -> None:
        """The store is gone, with rank 0 or with the network; or it never came."""
        noun, what = self._terms.noun, "lost" if self._beats else "did not meet"
        self._fail(
            EnvironmentFailedError(
                f"{noun} {self.world.rank} of {self.world.size} ({self._host}): {what} the other {noun}s at"
                f" {self.world.address}, where {noun} 0 or its launcher listens: {why}",
                next_step=f"See how {noun} 0 ended, and whether that address is {noun} 0's and reachable. {self._terms.again}",
            )
        )
        self._lost = True  # after the signal: the main thread then stops catching it

    def _serve(self, store: Store) -> None:
        """Answers the main thread until it is time for the next sign of life."""
        until = time.monotonic() + _BEAT_SECONDS
        pause = _FIRST_POLL_SECONDS
        while (left := until - time.monotonic()) > 0 and not self._leaving:
            try:
                question = self._questions.get(timeout=left)
            except queue.Empty:
                return
            answer = question(store)
            if answer is not None:
                self._answers.put(answer)
            else:
                self._questions.put(question)
                time.sleep(min(pause, left))
                pause = min(2 * pause, _POLL_SECONDS)

    def _say_goodbye(self, store: Store, told: str | None) -> None:
        """Says that this rank ends, and waits for the others where they may need what ends with it."""
        if told is not None:
            self._report(store, self.world.rank, self._host, told)
        failed = told is not None or self._failure is not None
        store.set(_beat(self.world.rank), f"{_LEFT} {self._host}")
        if not self.world.first and told is None:
            return
        since = time.monotonic()
        while not self._others_left(store):
            failed = failed or store.check([_FAILED])
            if failed and time.monotonic() - since > LINGER_SECONDS:
                return
            if not failed:
                since = time.monotonic()
                self._look_at_beats(store)
            self._answered_at = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _others_left(self, store: Store) -> bool:
        """Whether all have said goodbye that still can."""
        keys = [_beat(rank) for rank in self._others if rank not in self._silent]
        return not keys or (
            store.check(keys) and all(value.startswith(_LEFT.encode()) for value in store.multi_get(keys))
        )

    # --- the clock

    def _watch_time(self) -> None:
        """Ends what has no time limit of its own: calls of a store whose process is frozen, and threads that are stuck."""
        while not self._gone:
            now = time.monotonic()
            if not self._lost and now - self._answered_at > self._limit_seconds and self._thread.is_alive():
                self._lose(f"no answer for {self._limit_seconds:.0f} s")
            if self._failure is not None and not self._calm and now - self._failed_at > GRACE_SECONDS:
                sys.stderr.write(f"{self._failure}\n")
                sys.stderr.flush()
                os._exit(int(self._failure.exit_code))
            time.sleep(_POLL_SECONDS)


class _Moving:
    """A progress display that also shows that the work goes on."""

    def __init__(self, shown: Progress, peers: _Joined) -> None:
        self._shown = shown
        self._peers = peers

    def start(self, label: str, total_bytes: int) -> None:
        """A phase begins."""
        self._peers.moved()
        self._shown.start(label, total_bytes)

    def advance(self, count_bytes: int) -> None:
        """So many more bytes are done."""
        self._peers.moved()
        self._shown.advance(count_bytes)


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _said(error: BaseException) -> str:
    """An error in a sentence for the other ranks."""
    if isinstance(error, CkptguardError):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
