"""Serves files of the agreed step to the other nodes: by ranges, read-only, to whoever has the token of this run.

HTTP is aiohttp's (3.14: web_server.py ``Server``, web_response.py ``StreamResponse``, which sends its headers in ``prepare``);
bytes go by ``loop.sendfile``, from the page cache to the socket. aiohttp's own FileResponse opens by path, so what it sends
can be another file than the one that was checked, and it prefers a ``.gz`` beside it.

A request names a file by its name in the view, which is looked up in a table. No path is ever made from a request.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import os
import re
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ckptguard.core.errors import EnvironmentFailedError, NotFoundError, UsageError
from ckptguard.view.values import Digest

if TYPE_CHECKING:
    from aiohttp import web

FILES = "/files/"
STATE = "/state"
ARRIVED = "Ckptguard-Arrived"  # bytes that this node has got so far: whether waiting for it has a point
_LONGEST_WAIT_SECONDS = 5
_KEEP_ALIVE_SECONDS = 75
_PREFER = re.compile(r"wait=(\d{1,6})")  # RFC 7240, section 4.3


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file system says of a file. It differs after the file was written to or replaced; a new link changes nothing.

    Attributes:
        size_bytes: Its size.
        mtime_ns: Time of its last change, nanoseconds since 1970.
        inode: Its number in its file system.
        device: The file system.
    """

    size_bytes: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path | int) -> Stamp:
        """The stamp of a path or an open file.

        Raises:
            OSError: It cannot be looked up.
        """
        status = os.stat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


class _Changed(Exception):  # noqa: N818 -- no error of ours: the answer to a request
    """A file is not what it was when it was offered."""


class _Moving(Exception):  # noqa: N818 -- likewise
    """A file is just getting its final name."""


class _Whole:
    """A file that is all there."""

    def __init__(self, path: Path, digest: Digest, stamp: Stamp) -> None:
        self.path = path
        self.digest = digest
        self.stamp = stamp

    def open(self, name: str) -> IO[bytes]:
        """Opens it.

        Raises:
            _Changed: It is not the file that was offered.
        """
        was = f"{self.digest.size_bytes} bytes, inode {self.stamp.inode}, written at {self.stamp.mtime_ns} ns"
        try:
            file = _opened(self.path)
        except OSError as error:
            raise _Changed(f"changed since it was checked: {error.strerror}; it was {was}") from error
        now = Stamp.of(file.fileno())
        if now != self.stamp or now.size_bytes != self.digest.size_bytes:
            file.close()
            found = f"{now.size_bytes} bytes, inode {now.inode}, written at {now.mtime_ns} ns"
            raise _Changed(f"changed since it was checked: {found}; it was {was}")
        return file


class Arriving:
    """A file that is on its way to this node, and is served as it comes. Thread-safe."""

    def __init__(self, server: Server, name: str, path: Path, digest: Digest) -> None:
        self.digest = digest
        self.why = ""
        self._server = server
        self._name = name
        self._path = path
        self._block_bytes = digest.block_bytes or max(1, digest.size_bytes)
        self._there = bytearray(-(-digest.size_bytes // self._block_bytes))

    def have(self, first: int, stop: int) -> None:
        """Blocks ``[first, stop)`` are in the file and are what the digest says."""
        self._there[first:stop] = b"\1" * (stop - first)
        self._server.news()

    def whole(self, path: Path) -> None:
        """All of it is there, under this path."""
        self._server.offer(self._name, path, self.digest)

    def failed(self, why: str) -> None:
        """It will not come; whoever waits for it hears why."""
        self.why = why
        self._server.news()

    def covers(self, begin_bytes: int, end_bytes: int) -> bool:
        """Whether bytes ``[begin_bytes, end_bytes)`` have come."""
        first, stop = begin_bytes // self._block_bytes, -(-end_bytes // self._block_bytes)
        return self._there.find(0, first, stop) < 0

    def open(self, name: str) -> IO[bytes]:
        """Opens it.

        Raises:
            _Moving: It is just getting its final name, under which it is going to be offered.
            _Changed: It cannot be opened.
        """
        try:
            return _opened(self._path)
        except FileNotFoundError as error:
            raise _Moving from error
        except OSError as error:
            raise _Changed(f"what has come of it cannot be opened: {error.strerror}") from error


def _opened(path: Path) -> IO[bytes]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the last: it never waits for a pipe's writer
    return os.fdopen(os.open(path, flags), "rb", 0)


class Server:
    """Serves what is offered, from a thread of its own, until the block is left.

    Args:
        address: Of the interface that the other nodes reach; a name or a number, never all interfaces.
        token: Who does not send it learns nothing. One per run.

    Attributes:
        url: Where it answers, without the token.
        state: Text that other nodes can ask for.
        served_bytes: Bytes of files sent so far.
    """

    def __init__(self, address: str, token: str) -> None:
        self.url = ""
        self.state = ""
        self._told: set[str] = set()
        self.served_bytes = 0
        self._address = address
        self._authorization = f"Bearer {token}".encode()
        self._offers: dict[str, _Whole | Arriving] = {}
        self._arrived_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._news: asyncio.Event
        self._ending: asyncio.Event

    def __enter__(self) -> Server:
        listening, host = _listen(self._address)
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening, started)), name="ckptguard-server", daemon=True
        )
        self._thread.start()
        started.result()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._tell(self._ending.set)
            self._thread.join()
            self._thread = None

    def settle(self, state: str, *, unless_told: str) -> bool:
        """Changes the state, unless a node has been told another one on which it has acted already.

        Returns:
            Whether it was changed.
        """
        with self._lock:
            if unless_told in self._told:
                return False
            self.state = state
            return True

    def offer(self, name: str, path: Path, digest: Digest, stamp: Stamp | None = None) -> None:
        """Lets the other nodes read a file; takes the place of an earlier offer of that name.

        Args:
            name: In the view.
            path: Where it is. It is resolved now; a symlink that leads elsewhere later changes nothing.
            digest: What it is, as was checked.
            stamp: From before it was checked, so that a change since then is noticed; by default what it is now.

        Raises:
            NotFoundError: It is not there any more.
            EnvironmentFailedError: It cannot be looked up.
        """
        try:
            real = path.resolve(strict=True)
            offer = _Whole(real, digest, stamp or Stamp.of(real))
        except FileNotFoundError as error:
            raise NotFoundError(f"{path}: not there any more, though it has just been checked") from error
        except OSError as error:
            raise EnvironmentFailedError(f"{path}: cannot be looked up: {error.strerror}") from error
        with self._lock:
            self._offers[name] = offer
        self.news()

    def arriving(self, name: str, path: Path, digest: Digest) -> Arriving:
        """Lets the other nodes read a file while it comes. A whole file of that name and digest goes on being served instead.

        Args:
            name: In the view.
            path: Where it grows.
            digest: What it will be.
        """
        coming = Arriving(self, name, path, digest)
        with self._lock:
            there = self._offers.get(name)
            if not isinstance(there, _Whole) or there.digest != digest:
                self._offers[name] = coming
        return coming

    def serves(self, name: str, path: Path, digest: Digest) -> bool:
        """Whether just this file is offered and is still what it was then."""
        there = self._offers.get(name)
        if not isinstance(there, _Whole) or there.digest != digest:
            return False
        try:
            return path.resolve(strict=True) == there.path and Stamp.of(there.path) == there.stamp
        except OSError:
            return False

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of the names under which a whole file is offered that is not what it was then."""
        out = []
        for name in names:
            there = self._offers.get(name)
            try:
                if isinstance(there, _Whole) and Stamp.of(there.path) != there.stamp:
                    out.append(name)
            except OSError:
                out.append(name)
        return out

    def heard(self, count_bytes: int) -> None:
        """So many bytes have come to this node; shows those who wait for it that waiting has a point. Thread-safe."""
        with self._lock:
            self._arrived_bytes += count_bytes

    def news(self) -> None:
        """Something is there, or failed, that somebody may wait for. Thread-safe."""
        if self._thread is not None:
            self._tell(self._wake)

    def _tell(self, what: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(what)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _serve(self, listening: socket.socket, started: Future[None]) -> None:
        from aiohttp import web

        self._loop = asyncio.get_running_loop()
        self._news, self._ending = asyncio.Event(), asyncio.Event()
        server = web.Server(self._answer, access_log=None, logger=_logger(), keepalive_timeout=_KEEP_ALIVE_SECONDS)
        runner = web.ServerRunner(server, shutdown_timeout=0.25)
        try:
            await runner.setup()
            await web.SockSite(runner, listening).start()
            started.set_result(None)
            await self._ending.wait()
            self._loop.remove_reader(listening)
            await asyncio.sleep(0.01)  # asyncio drops, open, what it has accepted just before its server is closed
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)  # raised where the server was to be started
        finally:
            transports = [connection.transport for connection in server.connections]
            await runner.cleanup()
            for transport in transports:
                if transport is not None:
                    transport.abort()  # a client that does not read would keep it open
            await asyncio.sleep(0)  # the loop closes them in its next round

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            return _text(401, "", {"WWW-Authenticate": "Bearer"})
        if request.method not in ("GET", "HEAD"):
            return _text(405, "read-only", {"Allow": "GET, HEAD"})
        if request.path == STATE:
            with self._lock:
                self._told.add(self.state)
                return _text(200, self.state)
        name = request.path.removeprefix(FILES) if request.path.startswith(FILES) else ""
        offer = self._offers.get(name)
        if offer is None:
            return _text(404, "not offered")
        try:
            begin, end = _range(request, offer.digest.size_bytes)
        except ValueError:
            return _text(416, "", {"Content-Range": f"bytes */{offer.digest.size_bytes}"})
        if isinstance(offer, Arriving):
            offer = await self._waited(request, name, offer, begin, end)
        if isinstance(offer, Arriving) and offer.why:
            return _text(410, offer.why)
        if isinstance(offer, Arriving) and not offer.covers(begin, end):
            return self._not_yet()
        return await self._send(request, name, offer, begin, end)

    def _not_yet(self) -> web.Response:
        return _text(503, "on its way", {"Retry-After": "1", ARRIVED: str(self._arrived_bytes)})

    async def _waited(
        self, request: web.BaseRequest, name: str, offer: Arriving, begin: int, end: int
    ) -> _Whole | Arriving:
        """What is offered once the bytes have come, or the time is over that the client is ready to wait."""
        asked = _PREFER.search(request.headers.get("Prefer", ""))
        seconds = min(int(asked[1]) if asked else _LONGEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
        until = self._loop.time() + seconds
        while True:
            news, now = self._news, self._offers.get(name, offer)
            if isinstance(now, _Whole) or now.why or now.covers(begin, end):
                return now
            try:
                async with asyncio.timeout_at(until):
                    await news.wait()
            except TimeoutError:
                return now

    async def _send(
        self, request: web.BaseRequest, name: str, offer: _Whole | Arriving, begin: int, end: int
    ) -> web.StreamResponse:
        from aiohttp import web

        try:
            file = await self._loop.run_in_executor(None, self._open, name, offer, begin, end)
        except _Changed as changed:
            return _text(409, str(changed))
        except _Moving:
            return self._not_yet()
        try:
            size = offer.digest.size_bytes
            headers = {"Server": "ckptguard", "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
            if "Range" in request.headers:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            response = web.StreamResponse(status=206 if "Range" in request.headers else 200, headers=headers)
            response.content_length = end - begin
            await response.prepare(request)
            if request.method == "GET" and end > begin and request.transport is not None:
                sent = 0
                self.served_bytes += end - begin  # before they go: the client may have them all before the call returns
                with suppress(OSError):  # the client has gone, or the disk cannot be read
                    sent = await self._loop.sendfile(request.transport, file, begin, end - begin)
                self.served_bytes -= end - begin - sent
                if sent < end - begin:  # cut short meanwhile: the client must not wait for the rest
                    request.transport.abort()
                    return response
            await response.write_eof()
            return response
        finally:
            file.close()

    def _open(self, name: str, offer: _Whole | Arriving, begin: int, end: int) -> IO[bytes]:
        try:
            file = offer.open(name)
        except (_Changed, _Moving):
            now = self._offers[name]
            if now is offer:
                raise
            file = now.open(name)  # it has become whole, under another path
        # Reads of several requests begin side by side here, or else each would hold up the loop's one thread.
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
        return file


@functools.cache
def _logger() -> logging.Logger:
    """aiohttp's, without wrong requests and clients that go away: the user of this node can do nothing about them."""
    from aiohttp.http_exceptions import HttpProcessingError

    logger = logging.getLogger("aiohttp.server").getChild("ckptguard")
    of_clients = (HttpProcessingError, ConnectionError)
    logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], of_clients)))
    return logger


def _listen(address: str) -> tuple[socket.socket, str]:
    """A socket at a free port of one interface, and the interface's address as a number."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        host = str(where[0])
        if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
            raise UsageError(
                f"{address}: stands for all interfaces, also those that face other networks",
                next_step="Give the address of the interface that joins the nodes.",
            )
        return socket.create_server((host, 0), family=family, backlog=1024), host
    except OSError as error:
        raise EnvironmentFailedError(
            f"{address}: no server can listen there: {error.strerror}",
            next_step="Give the address of an interface of this node that the other nodes reach.",
        ) from error


def _text(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    from aiohttp import web

    return web.Response(status=status, text=text, headers={"Server": "ckptguard", **(headers or {})})


def _range(request: web.BaseRequest, size_bytes: int) -> tuple[int, int]:
    """Bytes ``[begin, end)`` that are asked for.

    Raises:
        ValueError: No single range, or one beyond the end.
    """
    asked = request.http_range
    if "Range" not in request.headers:
        return 0, size_bytes
    begin, end, _ = asked.indices(size_bytes)
    if begin >= end:
        raise ValueError("beyond the end")
    return begin, end
