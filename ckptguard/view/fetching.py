"""Gets ranges of files from another node's server. Network faults become sentences that name the node and the cause.

The client is Python's own http.client: its responses read straight into a buffer, which aiohttp's and urllib3's do not.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from urllib.parse import quote, urlsplit

from ckptguard.core.errors import DamagedError, EnvironmentFailedError
from ckptguard.view.server import ARRIVED, FILES, STATE

_LONGEST_WAIT_SECONDS = 2  # a thread that waits longer for one range could have had another
_PAUSE_SECONDS = 0.1
_MOST_TEXT_BYTES = 1 << 20
_READ_BYTES = (
    256 << 10
)  # a read ends when all of it has come: on a slow link, smaller ones show earlier that something comes
_PATIENCE = 2  # times the time-out: a node that another one stalls says so itself after one


class NotYetError(Exception):
    """The node is still getting these bytes itself."""


class BrokenError(Exception):
    """The connection broke; another one may do better."""


class Peer:
    """Another node's server. Thread-safe: every thread has a connection of its own, which is used again.

    Args:
        node: Its number, for messages.
        url: Where it answers.
        token: Of this run.
        timeout_seconds: Longest time to connect, and between two bytes.
        heard: Called with every few bytes that come.
    """

    def __init__(
        self, node: int, url: str, token: str, timeout_seconds: float, heard: Callable[[int], None] = lambda _: None
    ) -> None:
        self.title = f"node {node} ({url})"
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Prefer": f"wait={min(int(timeout_seconds / 2), _LONGEST_WAIT_SECONDS)}",
        }
        self._timeout_seconds = timeout_seconds
        self._heard = heard
        self._lost = ""
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._arrived: tuple[str, float] | None = None  # what it said last that it has got, and since when
        self._unknown_since: dict[str, float] = {}

    def read(
        self, name: str, offset_bytes: int, lengths_bytes: Sequence[int], buffer: memoryview, *, waits: bool = False
    ) -> Iterator[memoryview]:
        """Yields neighbouring ranges of a file, the first of which begins at the offset; each is valid until the next.

        Args:
            name: In the view.
            offset_bytes: Where to begin.
            lengths_bytes: Of the ranges.
            buffer: For their bytes; at least as long as the longest.
            waits: The node may not have heard yet that it is to offer the file: it is given it too.

        Raises:
            NotYetError: The node does not have all of it yet; ask again.
            BrokenError: The connection broke.
            EnvironmentFailedError: The node is gone, stalls or refuses.
            DamagedError: Its file is not there or not what it was.
        """
        end = offset_bytes + sum(lengths_bytes)
        response = self._ask(FILES + quote(name), {"Range": f"bytes={offset_bytes}-{end - 1}"})
        try:
            if response.status != 206:
                self._refuse(name, response, waits=waits)
            if response.length != end - offset_bytes:
                raise BrokenError(f"{self.title} sends {response.length} bytes, not {end - offset_bytes}")
            for length in lengths_bytes:
                self._fill(response, buffer[:length])
                yield buffer[:length]
        finally:
            if not response.isclosed():  # the rest of the answer stands in the connection
                self._drop()

    def text(self, path: str) -> str:
        """A short text.

        Raises:
            EnvironmentFailedError: The node is gone, stalls or refuses.
        """
        try:
            response = self._ask(path, {})
            body = self._body(response)
        except BrokenError as error:
            raise EnvironmentFailedError(str(error)) from error
        if response.status != 200:
            raise EnvironmentFailedError(self._refusal(response.status, body))
        return body

    def close(self) -> None:
        """Ends all connections; a read under way in another thread ends with an error."""
        with self._lock:
            self._lost = self._lost or f"{self.title}: not asked any more"
            connections, self._connections = self._connections, []
        for connection in connections:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _ask(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        while True:
            connection, fresh = self._connection()
            try:
                connection.request("GET", path, headers={**self._headers, **headers})
                return connection.getresponse()
            except TimeoutError as error:
                raise self._gone(f"does not answer within {self._timeout_seconds:g} s") from error
            except (OSError, http.client.HTTPException, AttributeError) as error:  # the last: closed by another thread
                self._drop()
                if fresh:
                    raise self._gone(f"cannot be reached: {_words(error)}") from error
                # It has closed a connection that stood idle.

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection, and whether it is a new one."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        fresh = connection is None
        with self._lock:
            if self._lost:
                raise EnvironmentFailedError(self._lost)
            if connection is None:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
                self._connections.append(connection)
        self._local.connection = connection
        return connection, fresh

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = self._local.connection
        self._local.connection = None
        if connection is None:
            return
        connection.close()
        with self._lock, suppress(ValueError):
            self._connections.remove(connection)

    def _gone(self, how: str) -> EnvironmentFailedError:
        """The error of a node that is not asked again: each further file would wait as long for the same."""
        with self._lock:
            self._lost = self._lost or f"{self.title} {how}"
            return EnvironmentFailedError(self._lost)

    def _fill(self, response: http.client.HTTPResponse, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = response.readinto(view[done : done + _READ_BYTES])
            except TimeoutError as error:
                raise self._gone(f"sent no byte for {self._timeout_seconds:g} s") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise BrokenError(f"the connection to {self.title} broke: {_words(error)}") from error
            if not count:
                raise BrokenError(f"the connection to {self.title} ended before all bytes had come")
            self._heard(count)
            done += count

    def _body(self, response: http.client.HTTPResponse) -> str:
        body = memoryview(bytearray(min(response.length or 0, _MOST_TEXT_BYTES)))
        self._fill(response, body)
        if not response.isclosed():
            self._drop()
        return bytes(body).decode(errors="replace")

    def _refuse(self, name: str, response: http.client.HTTPResponse, *, waits: bool) -> None:
        """Raises what an answer other than the bytes means."""
        status, arrived = response.status, response.headers.get(ARRIVED, "")
        body = self._body(response)
        if status == 503:
            self._wait(arrived)
        if status == 404 and waits:
            self._wait_for(name)
        message = self._refusal(status, body)
        if status == 401:
            with self._lock:
                self._lost = self._lost or message
        if status in (401, 405, 500):
            raise EnvironmentFailedError(message)
        raise DamagedError(message)

    def _refusal(self, status: int, body: str) -> str:
        meaning = {
            401: "does not accept the token: it serves another run",
            404: "does not offer it",
            409: f"has a copy that {body}" if body.startswith("changed") else f"cannot give it: {body}",
            410: f"could not get it itself: {body}",
            416: "offers a shorter file of that name",
        }
        return f"{self.title} {meaning.get(status, f'answers with status {status} {body}'.rstrip())}"

    def _wait(self, arrived: str) -> None:
        """Raises NotYetError for as long as the node gets anything at all."""
        now = time.monotonic()
        with self._lock:
            if self._arrived is None or self._arrived[0] != arrived:
                self._arrived = (arrived, now)
            still = now - self._arrived[1]
        if still > _PATIENCE * self._timeout_seconds:
            raise self._gone(f"has got nothing itself for {still:.0f} s")
        time.sleep(_PAUSE_SECONDS)
        raise NotYetError

    def _wait_for(self, name: str) -> None:
        """Raises NotYetError for a while: nodes are not told at the same instant what they will be given."""
        now = time.monotonic()
        with self._lock:
            since = self._unknown_since.setdefault(name, now)
        if now - since <= self._timeout_seconds:
            time.sleep(_PAUSE_SECONDS)
            raise NotYetError


def ask_state(url: str, token: str, timeout_seconds: float = 20.0) -> str:
    """What a node's server says its state is.

    Raises:
        EnvironmentFailedError: It is gone, stalls or refuses; says which.
    """
    peer = Peer(-1, url, token, timeout_seconds)
    peer.title = url
    try:
        return peer.text(STATE)
    finally:
        peer.close()


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
