from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from staging_cases import BLOCK, HOST, NAME, TOKEN, data_of, digest_of, put, spoil

from ckptguard.core.errors import CkptguardError, DamagedError, EnvironmentFailedError
from ckptguard.view.fetching import BrokenError, NotYetError, Peer, ask_state
from ckptguard.view.server import Server

DATA = data_of(5 * BLOCK + 3)


@contextmanager
def answering(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that does with every connection what it is told to."""
    listening = socket.create_server((HOST, 0))
    open_ones: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            open_ones.append(connection)
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        for connection in open_ones:
            connection.close()


@contextmanager
def peer_at(url: str, token: str = TOKEN, timeout_seconds: float = 1.0) -> Iterator[Peer]:
    peer = Peer(3, url, token, timeout_seconds)
    try:
        yield peer
    finally:
        peer.close()


def got(peer: Peer, begin: int = 0, end: int = len(DATA), name: str = NAME, **options: bool) -> bytes:
    lengths = [min(BLOCK, end - at) for at in range(begin, end, BLOCK)]
    return b"".join(bytes(view) for view in peer.read(name, begin, lengths, memoryview(bytearray(BLOCK)), **options))


def asked_again(ask: Callable[[], object]) -> None:
    """Asks until there is another answer than "not yet"."""
    while True:
        with suppress(NotYetError):
            ask()
            return


def test_reads_ranges_over_one_connection(tmp_path: Path) -> None:
    with Server(HOST, TOKEN) as server, peer_at(server.url) as peer:
        server.offer(NAME, put(tmp_path / "shard", DATA), digest_of(DATA))
        for begin, end in ((0, len(DATA)), (BLOCK, 3 * BLOCK), (len(DATA) - 1, len(DATA)), (7, 8)):
            assert got(peer, begin, end) == DATA[begin:end]
        assert len(peer._connections) == 1
        odd = "iter_0000020/a name with ? # % ü and +"
        server.offer(odd, tmp_path / "shard", digest_of(DATA))
        assert got(peer, name=odd) == DATA


def test_a_read_that_is_given_up_leaves_no_rest_behind(tmp_path: Path) -> None:
    with Server(HOST, TOKEN) as server, peer_at(server.url) as peer:
        server.offer(NAME, put(tmp_path / "shard", DATA), digest_of(DATA))
        views = peer.read(NAME, 0, [BLOCK, BLOCK], memoryview(bytearray(BLOCK)))
        next(views)
        views.close()  # type: ignore[attr-defined]
        assert got(peer, 5, 9) == DATA[5:9]


def test_a_connection_that_stood_idle_too_long_is_made_again(tmp_path: Path) -> None:
    with Server(HOST, TOKEN) as server, peer_at(server.url) as peer:
        server.offer(NAME, put(tmp_path / "shard", DATA), digest_of(DATA))
        assert got(peer, 0, 4) == DATA[:4]
        peer._connections[0].sock.shutdown(socket.SHUT_RDWR)
        assert got(peer, 4, 9) == DATA[4:9]


def test_refusals_name_the_node_and_the_cause(tmp_path: Path) -> None:
    path = put(tmp_path / "shard", DATA)
    with Server(HOST, TOKEN) as server:
        server.offer(NAME, path, digest_of(DATA))
        with peer_at(server.url, "another") as peer:
            for _ in range(2):
                with pytest.raises(EnvironmentFailedError, match=rf"node 3 \({server.url}\) does not accept the token"):
                    got(peer)
        with peer_at(server.url) as peer:
            with pytest.raises(DamagedError, match=r"node 3 \(.*\) does not offer it$"):
                got(peer, name="iter_0000020/other")
            with pytest.raises(DamagedError, match=r"node 3 \(.*\) offers a shorter file"):
                got(peer, len(DATA), len(DATA) + 1)
            with pytest.raises((DamagedError, BrokenError)):
                got(peer, len(DATA) - 1, len(DATA) + 1)
            spoil(path, 3)
            path.touch()
            with pytest.raises(
                DamagedError, match=r"node 3 \(.*\) has a copy that changed since it was checked: .* bytes"
            ):
                got(peer)
            server.arriving("coming", tmp_path / "coming.partial", digest_of(DATA)).failed("node 2 is gone")
            with pytest.raises(DamagedError, match=r"node 3 \(.*\) could not get it itself: node 2 is gone"):
                got(peer, name="coming")


def test_a_node_that_is_to_offer_it_soon_is_asked_again_for_a_while() -> None:
    with Server(HOST, TOKEN) as server, peer_at(server.url) as peer:
        begin = time.monotonic()
        with pytest.raises(DamagedError, match="does not offer it"):
            asked_again(lambda: got(peer, waits=True))
        assert 1 <= time.monotonic() - begin < 4


def test_a_node_that_gets_nothing_itself_is_given_up(tmp_path: Path) -> None:
    with Server(HOST, TOKEN) as server, peer_at(server.url) as peer:
        server.arriving(NAME, tmp_path / "shard.partial", digest_of(DATA))
        begin, asked = time.monotonic(), []

        def ask() -> None:
            asked.append(time.monotonic())
            if asked[-1] - begin < 1.5:
                server.heard(1)  # it does get something, of another file
            got(peer)

        with pytest.raises(EnvironmentFailedError, match=r"node 3 \(.*\) has got nothing itself for"):
            asked_again(ask)
        assert len(asked) > 3
        assert 3.0 < time.monotonic() - begin < 8


def silent(connection: socket.socket) -> None:
    """Accepts, reads, never answers."""
    connection.recv(4096)


def half(connection: socket.socket) -> None:
    """Sends a part and stops."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n\r\n" % len(DATA) + DATA[:1000])


def cut(connection: socket.socket) -> None:
    """Sends a part and closes."""
    half(connection)
    connection.close()


def shut(connection: socket.socket) -> None:
    connection.close()


def babble(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"220 mail.example ESMTP\r\n\r\n")
    connection.close()


def whole_file(connection: socket.socket) -> None:
    """Knows no ranges."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * len(DATA)) + 2 * DATA)


def longer(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n\r\n" % (2 * len(DATA)) + 2 * DATA)


def broken_server(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops")


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (silent, "does not answer within 1 s"),
        (half, "sent no byte for 1 s"),
        (cut, "ended before all bytes had come"),
        (shut, "cannot be reached"),
        (babble, "cannot be reached"),
        (whole_file, "answers with status 200"),
        (longer, f"sends {2 * len(DATA)} bytes, not {len(DATA)}"),
        (broken_server, "answers with status 500 oops"),
    ],
)
def test_network_faults_end_in_time_with_a_sentence(talk: Callable[[socket.socket], None], says: str) -> None:
    with answering(talk) as url, peer_at(url) as peer:
        begin = time.monotonic()
        with pytest.raises((CkptguardError, BrokenError)) as caught:
            got(peer)
        assert says in str(caught.value)
        assert f"node 3 ({url})" in str(caught.value)
        assert time.monotonic() - begin < 4


def test_a_node_that_is_lost_is_not_asked_again() -> None:
    with answering(silent) as url, peer_at(url) as peer:
        with pytest.raises(EnvironmentFailedError):
            got(peer)
        begin = time.monotonic()
        for _ in range(100):
            with pytest.raises(EnvironmentFailedError, match="does not answer within 1 s"):
                got(peer, name="another")
        assert time.monotonic() - begin < 0.5


def test_nothing_listens() -> None:
    with socket.create_server((HOST, 0)) as listening:
        url = f"http://{HOST}:{listening.getsockname()[1]}"
    with peer_at(url) as peer, pytest.raises(EnvironmentFailedError, match=r"node 3 .*: Connection refused"):
        got(peer)


def test_closing_wakes_a_read(tmp_path: Path) -> None:
    with answering(silent) as url, peer_at(url, timeout_seconds=30) as peer:
        threading.Timer(0.2, peer.close).start()
        begin = time.monotonic()
        with pytest.raises(CkptguardError):
            got(peer)
        assert time.monotonic() - begin < 5


def test_asking_for_the_state() -> None:
    with Server(HOST, TOKEN) as server:
        assert ask_state(server.url, TOKEN) == ""
        server.state = "published äöü" * 5000
        assert ask_state(server.url, TOKEN) == server.state
        with pytest.raises(EnvironmentFailedError, match=rf"^{server.url} does not accept the token") as caught:
            ask_state(server.url, "another")
        assert TOKEN not in str(caught.value)
        gone = server.url
    with pytest.raises(EnvironmentFailedError, match=rf"^{gone} cannot be reached: Connection refused"):
        ask_state(gone, TOKEN)
    for talk in (silent, half, cut, shut, babble):
        with answering(talk) as url, pytest.raises(EnvironmentFailedError, match=f"{url}"):
            ask_state(url, TOKEN, 0.3)
