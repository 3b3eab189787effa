from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from staging_cases import BLOCK, HOST, NAME, TOKEN, data_of, digest_of, put

from ckptguard.core.errors import EnvironmentFailedError, NotFoundError, UsageError
from ckptguard.view.server import Server, Stamp
from ckptguard.view.values import Digest

DATA = data_of(3 * BLOCK + 17)
RIGHT = f"Bearer {TOKEN}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(HOST, TOKEN) as running:
        yield running


@pytest.fixture
def path(server: Server, tmp_path: Path) -> Path:
    path = put(tmp_path / "place" / "shard", DATA)
    server.offer(NAME, path, digest_of(DATA))
    return path


def ask(
    server: Server, path: str = f"/files/{NAME}", *, method: str = "GET", token: str | None = RIGHT, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    try:
        given = {"Authorization": token} if token is not None else {}
        connection.request(method, path, headers={**given, **headers})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def raw(server: Server, target: bytes, token: str = TOKEN) -> bytes:
    """What a request line that no client would send is answered with, status line first."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
        connection.sendall(
            b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
            + token.encode() + b"\r\n\r\n"
        )  # fmt: skip
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
        return answer


def test_gives_a_file_that_was_offered(server: Server, path: Path) -> None:
    status, headers, body = ask(server)
    assert (status, body) == (200, DATA)
    assert headers["content-length"] == str(len(DATA))
    assert TOKEN not in server.url
    assert server.url.startswith(f"http://{HOST}:")
    assert server.served_bytes == len(DATA)


@pytest.mark.parametrize(
    "token",
    [None, "", "Bearer", "Bearer ", TOKEN, f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xe4\xf6", f"bearer{TOKEN}"],
)
@pytest.mark.parametrize("target", [f"/files/{NAME}", "/state", "/files/no-such", "/"])
def test_says_nothing_without_the_token(server: Server, path: Path, token: str | None, target: str) -> None:
    server.state = "published"
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        status, headers, body = ask(server, target, method=method, token=token)
        assert (status, body) == (401, b"")
        assert headers["server"] == "ckptguard"
    assert server.served_bytes == 0


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "MKCOL"])
def test_is_read_only(server: Server, path: Path, method: str) -> None:
    status, headers, _ = ask(server, method=method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert path.read_bytes() == DATA


@pytest.mark.parametrize(
    "target",
    [
        "/files/../secret",
        "/files/iter_0000020/../../secret",
        "/files/%2e%2e/secret",
        "/files/..%2fsecret",
        "/files/%2e%2e%2fsecret",
        "/files/%252e%252e/secret",
        "/files/iter_0000020%5c..%5csecret",
        "/files//etc/passwd",
        "/files/%2fetc%2fpasswd",
        "/files/iter_0000020/__0_0.distcp%00",
        "/files/iter_0000020/__0_0.distcp/",
        "/files/iter_0000020/./__0_0.distcp",
        "/files/iter_0000020",
        "/files/",
        "/files",
        "/files/secret",
        "/secret",
        "/",
        "/../state",
        "/files/iter_0000020/__0_0.distcp.gz",
        "//files/iter_0000020/__0_0.distcp",
        "/etc/passwd",
        "http://elsewhere/files/secret",
    ],
)
def test_a_path_is_never_made_from_a_request(server: Server, path: Path, target: str) -> None:
    put(path.parent / "secret", b"secret")
    put(path.parent.parent / "secret", b"secret")
    answer = raw(server, target.encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"secret" not in answer
    assert b"root:" not in answer


@pytest.mark.parametrize(
    "target", [b"/files/\x00", b"/files/\xff\xfe", b"*", b"", b"/" + b"a" * 100_000, b"/files/%zz"]
)
def test_requests_that_are_none_give_nothing(server: Server, path: Path, target: bytes) -> None:
    status = raw(server, target).partition(b"\r\n")[0]
    assert status.split()[1] in (b"400", b"404", b"414")
    assert ask(server)[0] == 200  # and it goes on


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        (f"bytes=0-{len(DATA) - 1}", 0, len(DATA)),
        (f"bytes={len(DATA) - 1}-{len(DATA) - 1}", len(DATA) - 1, len(DATA)),
        ("bytes=100-", 100, len(DATA)),
        ("bytes=-5", len(DATA) - 5, len(DATA)),
        (f"bytes=-{len(DATA) + 5}", 0, len(DATA)),
        (f"bytes=7-{10**30}", 7, len(DATA)),
    ],
)
def test_ranges(server: Server, path: Path, asked: str, begin: int, end: int) -> None:
    status, headers, body = ask(server, Range=asked)
    assert (status, body) == (206, DATA[begin:end])
    assert headers["content-range"] == f"bytes {begin}-{end - 1}/{len(DATA)}"
    status, headers, body = ask(server, method="HEAD", Range=asked)
    assert (status, body, headers["content-length"]) == (206, b"", str(end - begin))


@pytest.mark.parametrize(
    "asked", [f"bytes={len(DATA)}-", "bytes=5-4", "bytes=-", "bytes=0-1,3-4", "lines=0-1", "bytes=a-b", "bytes=--1"]
)
def test_ranges_that_cannot_be_given(server: Server, path: Path, asked: str) -> None:
    status, headers, body = ask(server, Range=asked)
    assert (status, headers["content-range"], body) == (416, f"bytes */{len(DATA)}", b"")


def test_an_empty_file(server: Server, tmp_path: Path) -> None:
    server.offer("empty", put(tmp_path / "empty", b""), digest_of(b""))
    assert ask(server, "/files/empty")[::2] == (200, b"")
    assert ask(server, "/files/empty", Range="bytes=0-0")[0] == 416


def test_a_neighbour_with_another_ending_is_never_sent(server: Server, path: Path) -> None:
    put(path.with_name("shard.gz"), b"another file")
    status, headers, body = ask(server, **{"Accept-Encoding": "gzip, br"})
    assert (status, body) == (200, DATA)
    assert "content-encoding" not in headers


@pytest.mark.parametrize("what", ["written", "replaced", "shorter", "longer", "gone", "directory", "pipe"])
def test_a_file_that_changed_is_not_given(server: Server, path: Path, what: str) -> None:
    if what == "written":
        path.write_bytes(DATA)
    elif what == "shorter":
        os.truncate(path, len(DATA) - 1)
    elif what == "longer":
        os.truncate(path, len(DATA) + 1)
    elif what == "replaced":
        times = path.stat()
        other = put(path.with_name("other"), DATA)
        os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
        other.replace(path)
    else:
        path.unlink()
        if what == "directory":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
    for method in ("GET", "HEAD"):
        assert ask(server, method=method, Range="bytes=0-9")[0] == 409
    assert b"changed since it was checked" in ask(server)[2]


def test_a_change_between_checking_and_offering_is_noticed(server: Server, tmp_path: Path) -> None:
    path = put(tmp_path / "shard", DATA)
    before = Stamp.of(path)
    spoiled = bytearray(DATA)
    spoiled[5] ^= 1
    path.write_bytes(spoiled)
    server.offer(NAME, path, digest_of(DATA), before)
    assert ask(server)[0] == 409


def test_a_new_link_changes_nothing_and_a_symlink_is_followed_when_it_is_offered(
    server: Server, tmp_path: Path
) -> None:
    path = put(tmp_path / "shard", DATA)
    link = tmp_path / "link"
    link.symlink_to(path)
    server.offer(NAME, link, digest_of(DATA))
    (tmp_path / "again").hardlink_to(path)
    assert ask(server)[2] == DATA
    link.unlink()
    link.symlink_to("/etc/passwd")
    assert ask(server)[2] == DATA


def test_offering_what_is_not_there(server: Server, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="absent: not there any more"):
        server.offer(NAME, tmp_path / "absent", digest_of(DATA))


def test_a_file_cut_short_while_it_is_sent_ends_the_connection(server: Server, tmp_path: Path) -> None:
    size = 64 << 20
    path = put(tmp_path / "large", b"")
    os.truncate(path, size)
    server.offer("large", path, Digest(size, ""))
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    connection.request("GET", "/files/large", headers={"Authorization": RIGHT})
    answer = connection.getresponse()
    answer.read(1)
    os.truncate(path, 10)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()


def test_state(server: Server) -> None:
    assert ask(server, "/state")[::2] == (200, b"")
    server.state = "veröffentlicht 7"
    assert ask(server, "/state")[2].decode() == "veröffentlicht 7"


def test_what_is_arriving_is_given_block_by_block(server: Server, tmp_path: Path) -> None:
    path = put(tmp_path / "shard.partial", DATA)
    coming = server.arriving(NAME, path, digest_of(DATA))
    coming.have(1, 2)
    inside = f"bytes={BLOCK}-{2 * BLOCK - 1}"
    assert ask(server, Range=inside)[::2] == (206, DATA[BLOCK : 2 * BLOCK])
    status, headers, _ = ask(server, Range=f"bytes={BLOCK}-{2 * BLOCK}", Prefer="wait=0")
    assert (status, headers["retry-after"]) == (503, "1")
    timer = threading.Timer(0.2, coming.have, (2, 4))
    timer.start()
    begin = time.monotonic()
    assert ask(server, Range=f"bytes={2 * BLOCK}-")[::2] == (206, DATA[2 * BLOCK :])
    assert 0.1 < time.monotonic() - begin < 4
    timer.join()
    final = path.with_name("shard")
    path.rename(final)
    assert ask(server)[0] == 503  # it is whole, and is just getting its name
    coming.whole(final)
    assert ask(server)[::2] == (200, DATA)


def test_what_failed_to_arrive_says_why(server: Server, tmp_path: Path) -> None:
    coming = server.arriving(NAME, tmp_path / "shard.partial", digest_of(DATA))
    threading.Timer(0.2, coming.failed, ("node 3 burns",)).start()
    assert ask(server)[::2] == (410, b"node 3 burns")


def test_what_is_whole_is_given_on_while_the_same_arrives_again(server: Server, path: Path) -> None:
    server.arriving(NAME, path.with_name("shard.partial"), digest_of(DATA))
    assert ask(server)[2] == DATA
    server.arriving(NAME, path.with_name("shard.partial"), digest_of(DATA[:-1]))
    assert ask(server, Prefer="wait=0")[0] == 503


@pytest.mark.parametrize("address", ["0.0.0.0", "::", ""])
def test_refuses_to_listen_everywhere(address: str) -> None:
    with pytest.raises((UsageError, EnvironmentFailedError)), Server(address, TOKEN):
        pass


def test_an_address_of_another_machine() -> None:
    with (
        pytest.raises(EnvironmentFailedError, match=r"192\.0\.2\.7: no server can listen there"),
        Server("192.0.2.7", TOKEN),
    ):
        pass


def test_ends_at_once_with_clients_connected(tmp_path: Path) -> None:
    large = put(tmp_path / "large", b"")
    os.truncate(large, 256 << 20)
    with Server(HOST, TOKEN) as server:
        server.offer("large", large, Digest(256 << 20, ""))
        server.arriving("never", tmp_path / "never.partial", Digest(10, ""))
        where = urlsplit(server.url)
        idle = socket.create_connection((where.hostname or "", where.port or 0))
        reading, waiting = (http.client.HTTPConnection(where.hostname or "", where.port, timeout=10) for _ in range(2))
        for connection, name in ((reading, "large"), (waiting, "never")):
            connection.request("GET", f"/files/{name}", headers={"Authorization": RIGHT})
        begin = time.monotonic()
    assert time.monotonic() - begin < 4
    for connection in (idle, reading, waiting):
        connection.close()
