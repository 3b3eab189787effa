"""Brings files into a node's staging directory: linked or cloned, copied, downloaded, or fetched from other nodes.

All of it runs side by side. A file that another node is still getting is asked for range by range, and a range that is not
there yet goes to the end of the line: no thread waits for one file while another could come, so nodes that wait for each
other's files always go on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from ckptguard.core.errors import CkptguardError, EnvironmentFailedError
from ckptguard.core.writing import check_relative
from ckptguard.engine.workers import SILENT, Buffers, Progress, default_threads
from ckptguard.engine.write_calls import sync_directory
from ckptguard.formats.remote import RemoteDirectory, RemotePath, path_of
from ckptguard.formats.storage import Directory
from ckptguard.view.fetching import NotYetError, Peer
from ckptguard.view.filling import (
    PARTIAL,
    UNIT_BYTES,
    Filling,
    Source,
    SourceError,
    Unit,
    digest_problem,
    is_own,
    partial_of,
    writing,
)
from ckptguard.view.lanes import Lanes, Task
from ckptguard.view.linking import clone_or_link
from ckptguard.view.server import Arriving, Server, Stamp
from ckptguard.view.values import Copy, Delivered, Delivery

_LEAST_THREADS = 8  # where they wait for the network more than they work; writers of one file wait for each other
_POLL_SECONDS = 0.2
_NO_STAMPS: Mapping[Copy, Stamp] = MappingProxyType({})


def deliver(
    deliveries: Sequence[Delivery],
    *,
    node: int,
    places: Sequence[str],
    staging: Path,
    server: Server,
    urls: Mapping[int, str],
    token: str,
    progress: Progress = SILENT,
    threads: int | None = None,
    timeout_seconds: float = 20.0,
    stamps: Mapping[Copy, Stamp] = _NO_STAMPS,
    recheck: bool = False,
    stop: threading.Event | None = None,
) -> list[Delivered]:
    """Brings files into the staging directory, and offers each to the other nodes, also while it is still coming.

    A file that has its name there is whole and durable. One that is not whole yet ends in ``.partial``; a later call goes on
    from what it holds.

    Args:
        deliveries: For this node.
        node: Its number.
        places: Its places, paths and URLs.
        staging: The directory; made if it is not there.
        server: Of this node.
        urls: Where the servers of the other nodes answer.
        token: Of this run.
        progress: Hears of all bytes of all deliveries, moved or not.
        threads: As many ranges come at once; by default as many as cores, and at least eight if any comes from elsewhere.
        timeout_seconds: A node that sends no byte for so long is given up.
        stamps: Of copies on this node, from before they were checked.
        recheck: Read again what was linked or cloned.
        stop: When it is set, this ends within a moment; what has not come by then has a problem.

    Returns:
        How each ended, in order. A source that fails is told here, with all others; nothing is raised for it.

    Raises:
        EnvironmentFailedError: This node's disk is full or cannot be written.
    """
    progress.start("staging", sum(delivery.digest.size_bytes for delivery in deliveries))
    with ExitStack() as stack:
        run = _Run(node, places, staging, server, stamps, progress, recheck=recheck)
        stack.callback(run.close)
        for number, url in urls.items():
            if number != node:
                run.peers[number] = Peer(number, url, token, timeout_seconds, server.heard)
                stack.callback(run.peers[number].close)
        run.begin(deliveries)
        try:
            near = all(delivery.copy.node == node and delivery.copy.place == 0 for delivery in deliveries)
            least = default_threads() if near else max(default_threads(), _LEAST_THREADS)
            _work(run, threads or least, stop or threading.Event())
            run.sync()
        except CkptguardError as error:
            run.give_up(error.message)
            raise
        run.give_up("the run was stopped before it had come")
    return [run.results[number] for number in range(len(deliveries))]


def _work(run: _Run, threads: int, stop: threading.Event) -> None:
    """Runs the lanes on threads until they are empty, one fails or the event is set."""
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptguard-staging") as pool:
        workers = [pool.submit(run.lanes.work) for _ in range(threads)]
        try:
            while wait(workers, _POLL_SECONDS).not_done:
                if stop.is_set() or run.lanes.stopped:
                    break
        finally:
            run.lanes.stop()
            if not all(worker.done() for worker in workers):
                for peer in run.peers.values():  # whoever waits for one is not to wait for its time-out
                    peer.close()
        for worker in workers:
            worker.result()


@dataclass(frozen=True, slots=True)
class _Files:
    """A source on this node: a directory or a store."""

    how: str
    title: str
    files: Directory
    path: str

    def read(self, offset_bytes: int, lengths_bytes: Sequence[int], buffer: memoryview) -> Iterator[memoryview]:
        if not self.files.local:  # a request takes long: as much as possible at once
            yield from self._read_wide(offset_bytes, lengths_bytes, buffer)
            return
        for length in lengths_bytes:
            self.files.read_into(self.path, offset_bytes, buffer[:length])
            yield buffer[:length]
            offset_bytes += length

    def _read_wide(self, offset_bytes: int, lengths_bytes: Sequence[int], buffer: memoryview) -> Iterator[memoryview]:
        pending = list(lengths_bytes)
        while pending:
            count = 1
            while count < len(pending) and sum(pending[: count + 1]) <= len(buffer):
                count += 1
            whole = buffer[: sum(pending[:count])]
            self.files.read_into(self.path, offset_bytes, whole)
            offset_bytes, at = offset_bytes + len(whole), 0
            for length in pending[:count]:
                yield whole[at : at + length]
                at += length
            del pending[:count]


@dataclass(frozen=True, slots=True)
class _OnNode:
    """A source on another node."""

    how: str
    title: str
    peer: Peer
    name: str
    waits: bool

    def read(self, offset_bytes: int, lengths_bytes: Sequence[int], buffer: memoryview) -> Iterator[memoryview]:
        try:
            yield from self.peer.read(self.name, offset_bytes, lengths_bytes, buffer, waits=self.waits)
        except EnvironmentFailedError as error:
            raise SourceError(error.message, unreachable=True) from error


@dataclass(slots=True)
class _Job:
    """A delivery under way."""

    number: int
    delivery: Delivery
    lane: object
    arriving: Arriving
    failed: bool = False


class _Run:
    """One call of ``deliver``."""

    def __init__(
        self,
        node: int,
        places: Sequence[str],
        staging: Path,
        server: Server,
        stamps: Mapping[Copy, Stamp],
        progress: Progress,
        *,
        recheck: bool,
    ) -> None:
        self.lanes = Lanes()
        self.peers: dict[int, Peer] = {}
        self.results: dict[int, Delivered] = {}
        self._node = node
        self._places = places
        self._staging = staging
        self._server = server
        self._stamps = stamps
        self._progress = progress
        self._recheck = recheck
        self._buffers = Buffers(UNIT_BYTES)
        self._directories: dict[str, Directory] = {}
        self._lock = threading.Lock()
        self._open_bytes = 0
        self._jobs: list[_Job] = []

    def close(self) -> None:
        """Closes the places."""
        for files in self._directories.values():
            files.close()

    def begin(self, deliveries: Sequence[Delivery]) -> None:
        """Offers all files before the first byte comes: other nodes ask for them at once."""
        with writing(self._staging, self._needed_bytes):
            self._staging.mkdir(parents=True, exist_ok=True)
        names: set[str] = set()
        for number, delivery in enumerate(deliveries):
            if problem := self._problem(delivery, names):
                self.results[number] = Delivered(delivery.name, "", problem=f"{delivery.name}: {problem}")
                continue
            names.add(delivery.name)
            final = self._staging / delivery.name
            arriving = self._server.arriving(delivery.name, partial_of(final), delivery.digest)
            lane = ("place", delivery.copy.place) if delivery.copy.node == self._node else ("node", delivery.via)
            self._jobs.append(_Job(number, delivery, lane, arriving))
            self._open_bytes += delivery.digest.size_bytes
        for job in sorted(self._jobs, key=self._waits):
            self.lanes.add(job.lane, iter([self._task(job)]))

    def give_up(self, why: str) -> None:
        """Whatever has not ended by now will not come. Nodes that wait for it hear why at once."""
        for job in self._jobs:
            if job.number not in self.results:
                self._fail(job, why)

    def sync(self) -> None:
        """Makes the names durable."""
        folders = {self._staging}
        for result in self.results.values():
            if result.how:
                folders.update((self._staging / result.name).parents)
        for folder in folders:
            if folder.is_relative_to(self._staging):
                with writing(folder, self._needed_bytes):
                    sync_directory(folder)

    def _problem(self, delivery: Delivery, names: set[str]) -> str:
        """Why a delivery cannot even begin."""
        for text in (delivery.name, delivery.copy.path):
            try:
                check_relative(text)
                text.encode()
            except ValueError:
                return f"{text!r} is not a plain relative path"
            if "\0" in text or PurePosixPath(text).name.endswith(PARTIAL):
                return f"{text!r} is not a name that a file of a view can have"
        if delivery.name in names:
            return "it was ordered twice"
        if delivery.node != self._node:
            return f"it is for node {delivery.node}; this is node {self._node}"
        if delivery.copy.node == self._node:
            if not 0 <= delivery.copy.place < len(self._places):
                return f"place {delivery.copy.place} is none of the {len(self._places)} of this node"
        elif delivery.via not in self.peers:
            return f"its copy is on node {delivery.copy.node}, and no server is known that would give it"
        return digest_problem(delivery.digest)

    def _waits(self, job: _Job) -> bool:
        """What another node is only just getting comes last in its lane."""
        return job.delivery.copy.node not in (self._node, job.delivery.via)

    def _task(self, job: _Job, filling: Filling | None = None, unit: Unit | None = None) -> Task:
        def task() -> None:
            try:
                if filling is None or unit is None:
                    self._start(job)
                elif not job.failed:
                    self._fill(job, filling, unit)
            except SourceError as error:
                if not self.lanes.stopped:  # what was cut off by the end of the run is told so
                    self._fail(job, str(error), unreachable=error.unreachable)

        return task

    def _start(self, job: _Job) -> None:
        delivery, final = job.delivery, self._staging / job.delivery.name
        if self._server.serves(delivery.name, final, delivery.digest):
            self._advance(delivery.digest.size_bytes)
            self._end(job, "kept", 0)
            return
        if not delivery.digest.is_known and not delivery.afresh and is_own(final, delivery.digest.size_bytes):
            job.arriving.whole(final)
            self._advance(delivery.digest.size_bytes)
            self._end(job, "kept", 0)
            return
        source = self._source(delivery)
        if isinstance(source, _Files) and source.files.local and (how := self._linked(delivery, source, final)):
            job.arriving.whole(final)
            self._advance(delivery.digest.size_bytes)
            self._end(job, how, 0)
            return
        filling = Filling(delivery.name, final, delivery.digest, source, job.arriving, self._needed_bytes)
        units = filling.begin()
        if delivery.digest.size_bytes:
            self.lanes.add(job.lane, (self._task(job, filling, unit) for unit in units), first=True)
        else:
            self._end(job, filling.finish(), 0)

    def _linked(self, delivery: Delivery, source: _Files, final: Path) -> str:
        try:
            real = source.files.checked_path(source.path)
        except CkptguardError as error:
            raise SourceError(error.message) from error
        buffer = self._buffers.view if self._recheck else None
        stamp = self._stamps.get(delivery.copy)
        return clone_or_link(real, final, delivery.digest, stamp, self._needed_bytes, buffer)

    def _fill(self, job: _Job, filling: Filling, unit: Unit) -> None:
        try:
            last = filling.fill(unit, self._buffers.view)
        except NotYetError:
            self.lanes.add(job.lane, iter([self._task(job, filling, unit)]))
            return
        block_bytes = filling.digest.block_bytes or filling.digest.size_bytes
        self._advance(min(unit.stop * block_bytes, filling.digest.size_bytes) - unit.first * block_bytes)
        if last:
            self._end(job, filling.finish(), filling.moved_bytes)

    def _source(self, delivery: Delivery) -> Source:
        copy = delivery.copy
        if copy.node != self._node:
            assert delivery.via is not None
            peer = self.peers[delivery.via]
            return _OnNode("fetched", peer.title, peer, delivery.name, delivery.via != copy.node)
        place = self._places[copy.place]
        try:
            root = path_of(place)
            if not isinstance(root, RemotePath):
                return _Files("copied", str(root / copy.path), self._directory(place, root), copy.path)
            path = root / copy.path
            # Looks up this one object. Listing all that is below a place can take minutes.
            return _Files("downloaded", str(path), RemoteDirectory(path.parent, only=path.name), path.name)
        except CkptguardError as error:
            raise SourceError(error.message) from error

    def _directory(self, place: str, root: Path) -> Directory:
        with self._lock:
            if place not in self._directories:
                self._directories[place] = Directory(root)
            return self._directories[place]

    def _needed_bytes(self) -> int:
        return self._open_bytes

    def _advance(self, count_bytes: int) -> None:
        with self._lock:
            self._open_bytes -= count_bytes
        self._progress.advance(count_bytes)

    def _end(self, job: _Job, how: str, moved_bytes: int) -> None:
        with self._lock:
            self.results[job.number] = Delivered(job.delivery.name, how, moved_bytes)

    def _fail(self, job: _Job, why: str, *, unreachable: bool = False) -> None:
        name = job.delivery.name
        with self._lock:
            if job.failed:
                return
            job.failed = True
            self.results[job.number] = Delivered(name, "", problem=f"{name}: {why}", unreachable=unreachable)
        job.arriving.failed(f"{name}: {why}")
