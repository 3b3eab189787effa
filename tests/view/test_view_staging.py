from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from staging_cases import (
    BLOCK,
    HOST,
    NAME,
    TOKEN,
    Node,
    data_of,
    digest_of,
    fetch,
    local,
    names_below,
    nodes_at,
    put,
    spoil,
)

from ckptguard.core.errors import EnvironmentFailedError
from ckptguard.engine.workers import Silent
from ckptguard.view import filling, linking, staging
from ckptguard.view.server import Stamp
from ckptguard.view.values import Copy, Delivered, Delivery, Digest

DATA = data_of(300 * BLOCK + 11)
SMALL = b"tensor_parallel: 2\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with nodes_at(tmp_path, 3) as running:
        yield running


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place on another file system."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(linking.fcntl, "ioctl", refuse)
    monkeypatch.setattr(Path, "hardlink_to", refuse)


class Counting(Silent):
    """Adds up what a progress display hears."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, label: str, total_bytes: int) -> None:
        self.total += total_bytes

    def advance(self, count_bytes: int) -> None:
        self.done += count_bytes


def test_fetches_files_of_all_sizes_from_another_node(nodes: list[Node]) -> None:
    sizes = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, len(DATA)]
    digests = {f"iter_0000020/{size}": nodes[0].offer(f"iter_0000020/{size}", DATA[:size]) for size in sizes}
    digests |= {f"root{size}": nodes[0].offer(f"root{size}", DATA[:size], 0) for size in sizes}
    progress = Counting()
    results = nodes[1].deliver([fetch(name, 1, digest) for name, digest in digests.items()], progress=progress)
    assert [r.name for r in results] == list(digests)
    for result, digest in zip(results, digests.values(), strict=True):
        assert result == Delivered(result.name, "fetched", digest.size_bytes)
        assert (nodes[1].staging / result.name).read_bytes() == DATA[: digest.size_bytes]
    assert names_below(nodes[1].staging) == {name: digest.size_bytes for name, digest in sorted(digests.items())}
    assert progress.done == progress.total == 2 * sum(sizes) == nodes[0].server.served_bytes


def test_what_has_come_is_offered(nodes: list[Node]) -> None:
    digest = nodes[0].offer(NAME, DATA)
    nodes[1].deliver([fetch(NAME, 1, digest)])
    shutil.rmtree(nodes[0].place)
    assert nodes[2].deliver([fetch(NAME, 2, digest, via=1)])[0].how == "fetched"
    again = nodes[2].deliver([fetch(NAME, 2, digest, via=1)])
    assert again == [Delivered(NAME, "kept")]


def test_in_a_chain_every_byte_leaves_every_node_once(nodes: list[Node]) -> None:
    names = [f"iter_0000020/__{rank}_0.distcp" for rank in range(3)] + ["iter_0000020/.metadata"]
    digests = {name: nodes[0].offer(name, DATA, 0 if name.endswith("a") else BLOCK) for name in names}
    results: dict[int, list[Delivered]] = {}

    def get(node: Node, pause: float) -> None:
        time.sleep(pause)
        orders = [fetch(name, node.number, digest, via=node.number - 1) for name, digest in digests.items()]
        results[node.number] = node.deliver(orders, threads=3)

    # The last node is told first: it asks a node that does not know yet what it will get.
    threads = [threading.Thread(target=get, args=(nodes[1], 0.3)), threading.Thread(target=get, args=(nodes[2], 0.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in (1, 2):
        assert [(r.how, r.problem) for r in results[number]] == [("fetched", "")] * len(names)
        assert sum(r.moved_bytes for r in results[number]) == len(names) * len(DATA)
        for name in names:
            assert (nodes[number].staging / name).read_bytes() == DATA
    assert [node.server.served_bytes for node in nodes] == [len(names) * len(DATA)] * 2 + [0]


def test_nodes_that_wait_for_each_other_go_on(nodes: list[Node]) -> None:
    """One thread each, and each node first wants what the other one has put off."""
    first, second = (nodes[0].offer(name, DATA) for name in ("first", "second"))
    orders = {
        1: [fetch("first", 1, first, via=2), fetch("second", 1, second, via=0)],
        2: [fetch("second", 2, second, via=1), fetch("first", 2, first, via=0)],
    }
    results: dict[int, list[Delivered]] = {}

    def get(number: int) -> None:
        results[number] = nodes[number].deliver(orders[number], threads=1)

    threads = [threading.Thread(target=get, args=(number,)) for number in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(r.how, r.problem) for number in (1, 2) for r in results[number]] == [("fetched", "")] * 4
    assert nodes[0].server.served_bytes == 2 * len(DATA)


def test_a_spoiled_block_is_named(nodes: list[Node]) -> None:
    digest = nodes[0].offer(NAME, DATA)
    spoil(nodes[0].place / NAME, 130 * BLOCK + 5)
    other = nodes[0].offer("other", DATA)
    results = nodes[1].deliver([fetch(NAME, 1, digest), fetch("other", 1, other)])
    assert results[1].how == "fetched"
    assert results[0].how == ""
    assert results[0].problem == (
        f"{NAME}: block 130 (bytes {130 * BLOCK} to {131 * BLOCK}) came wrong twice from node 0"
        f" ({nodes[0].server.url}): its copy is not what was checked, or the way from there damages bytes"
    )
    assert not (nodes[1].staging / NAME).exists()
    assert nodes[0].server.served_bytes == 2 * len(DATA) + BLOCK  # that block alone was asked for again


def test_a_spoiled_file_without_blocks_is_named(nodes: list[Node]) -> None:
    digest = nodes[0].offer(NAME, SMALL, 0)
    spoil(nodes[0].place / NAME, 3)
    result = nodes[1].deliver([fetch(NAME, 1, digest)])[0]
    assert result.problem.startswith(
        f"{NAME}: node 0 ({nodes[0].server.url}) gave other bytes than were checked, twice"
    )
    assert not (nodes[1].staging / NAME).exists()


def test_what_fails_on_the_way_is_told_down_the_chain(nodes: list[Node]) -> None:
    digest = nodes[0].offer(NAME, DATA)
    spoil(nodes[0].place / NAME, 7)
    results: list[Delivered] = []
    last = threading.Thread(target=lambda: results.extend(nodes[2].deliver([fetch(NAME, 2, digest, via=1)])))
    last.start()
    nodes[1].deliver([fetch(NAME, 1, digest)])
    last.join(30)
    url = nodes[1].server.url
    assert results[0].problem.startswith(f"{NAME}: node 1 ({url}) could not get it itself: {NAME}: block 0 (bytes 0 to")


def test_a_changed_source_is_named(nodes: list[Node]) -> None:
    digest = nodes[0].offer(NAME, DATA)
    put(nodes[0].place / NAME, DATA)
    problem = nodes[1].deliver([fetch(NAME, 1, digest)])[0].problem
    assert problem.startswith(f"{NAME}: node 0 ({nodes[0].server.url}) has a copy that changed since it was checked")


def test_a_wrong_block_is_asked_for_once_more(tmp_path: Path, nodes: list[Node]) -> None:
    class Flaky:
        how = title = "flaky"
        asked: list[tuple[int, int]] = []  # noqa: RUF012

        def read(self, offset: int, lengths: Sequence[int], buffer: memoryview) -> Iterator[memoryview]:
            self.asked.append((offset, sum(lengths)))
            for length in lengths:
                part = bytearray(DATA[offset : offset + length])
                if len(self.asked) == 1 and offset <= 9 * BLOCK < offset + length:
                    part[9 * BLOCK - offset] ^= 1
                yield memoryview(part)
                offset += length

    digest = digest_of(DATA[: 20 * BLOCK])
    coming = nodes[0].server.arriving(NAME, tmp_path / "x.partial", digest)
    file = filling.Filling(NAME, tmp_path / "x", digest, Flaky(), coming, lambda: 0)
    (unit,) = file.begin()
    assert file.fill(unit, memoryview(bytearray(filling.UNIT_BYTES)))
    assert file.finish() == "flaky"
    assert (tmp_path / "x").read_bytes() == DATA[: 20 * BLOCK]
    assert Flaky.asked == [(0, 20 * BLOCK), (9 * BLOCK, BLOCK)]


@pytest.mark.parametrize("under", ["partial", "whole"])
def test_blocks_that_an_earlier_attempt_left_are_kept(nodes: list[Node], under: str) -> None:
    digest = nodes[0].offer(NAME, DATA)
    left = bytearray(DATA[: 200 * BLOCK + 100])
    left[50 * BLOCK : 60 * BLOCK] = bytes(10 * BLOCK)  # a hole
    left[70 * BLOCK] ^= 1
    put(nodes[1].partial(NAME) if under == "partial" else nodes[1].staging / NAME, bytes(left))
    result = nodes[1].deliver([fetch(NAME, 1, digest)])[0]
    missing = 10 * BLOCK + BLOCK + len(DATA) - 200 * BLOCK
    assert result == Delivered(NAME, "fetched", missing)
    assert nodes[0].server.served_bytes == missing
    assert (nodes[1].staging / NAME).read_bytes() == DATA


@pytest.mark.parametrize("block_bytes", [0, BLOCK])
@pytest.mark.parametrize("under", ["partial", "whole"])
@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_file_that_an_earlier_attempt_finished_is_kept(
    nodes: list[Node], block_bytes: int, under: str, extra: bytes
) -> None:
    digest = nodes[0].offer(NAME, DATA, block_bytes)
    put(nodes[1].partial(NAME) if under == "partial" else nodes[1].staging / NAME, DATA + extra)
    assert nodes[1].deliver([fetch(NAME, 1, digest)]) == [Delivered(NAME, "kept")]
    assert nodes[0].server.served_bytes == 0
    assert names_below(nodes[1].staging) == {NAME: len(DATA)}
    assert (nodes[1].staging / NAME).read_bytes() == DATA


def test_leftovers_that_belong_to_others_are_never_written_to(nodes: list[Node], tmp_path: Path) -> None:
    """An earlier attempt may have linked a file: to go on writing it would change its original."""
    digest = nodes[0].offer(NAME, DATA)
    linked, symlinked = put(tmp_path / "linked", b"theirs"), put(tmp_path / "symlinked", b"theirs")
    final = nodes[1].staging / NAME
    final.parent.mkdir(parents=True)
    final.hardlink_to(linked)
    nodes[1].partial(NAME).symlink_to(symlinked)
    assert nodes[1].deliver([fetch(NAME, 1, digest)])[0].how == "fetched"
    assert final.read_bytes() == DATA
    assert (linked.read_bytes(), symlinked.read_bytes()) == (b"theirs", b"theirs")


SERVER = """
import sys
from pathlib import Path
from ckptguard.view.server import Server
from ckptguard.view.values import Digest
with Server(sys.argv[1], sys.argv[2]) as server:
    server.offer(sys.argv[3], Path(sys.argv[4]), Digest(int(sys.argv[5]), ""))
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_midway_is_named_in_time(nodes: list[Node], tmp_path: Path, how: signal.Signals) -> None:
    data = data_of(64 << 20)
    path, digest = put(tmp_path / "large", data), digest_of(data, 1 << 20)
    arguments = [sys.executable, "-c", SERVER, HOST, TOKEN, NAME, str(path), str(len(data))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        class Killing(Silent):
            def advance(self, count_bytes: int) -> None:
                process.send_signal(how)

        begin = time.monotonic()
        orders = [fetch(NAME, 1, digest), *(fetch(f"{NAME}.{n}", 1, digest) for n in range(50))]
        results = nodes[1].deliver(orders, urls={0: url}, progress=Killing(), timeout_seconds=1.5, threads=2)
        took = time.monotonic() - begin
        process.kill()
    assert took < 6
    assert all(result.how == "" and f"node 0 ({url})" in result.problem for result in results)
    assert 0 < results[0].moved_bytes + nodes[1].partial(NAME).stat().st_size < len(data)
    nodes[0].server.offer(NAME, path, digest)
    rest = nodes[1].deliver([fetch(NAME, 1, digest)])[0]
    assert (rest.how, (nodes[1].staging / NAME).read_bytes() == data) == ("fetched", True)
    assert rest.moved_bytes < len(data)


def test_is_stopped_at_once(nodes: list[Node]) -> None:
    digest = digest_of(DATA)
    nodes[0].server.arriving(NAME, nodes[0].partial(NAME), digest)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    begin = time.monotonic()
    results = nodes[1].deliver([fetch(NAME, 1, digest)], stop=stop, timeout_seconds=30)
    assert time.monotonic() - begin < 5
    assert results == [Delivered(NAME, "", 0, f"{NAME}: the run was stopped before it had come")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run(nodes: list[Node], small_disk: Path) -> None:
    digest = nodes[0].offer(NAME, DATA)
    nodes[1].staging = small_disk / "staging"
    with pytest.raises(
        EnvironmentFailedError, match=r"staging/iter_0000020/__0_0.distcp: cannot be written: No space"
    ) as caught:
        nodes[1].deliver([fetch(NAME, 1, digest)])
    message = str(caught.value)
    assert " bytes are still to come, " in message
    assert int(message.partition("; ")[2].split()[0]) > len(DATA) - (6 << 20)
    with pytest.raises(EnvironmentFailedError, match="No space"):
        nodes[1].deliver([fetch(NAME, 1, digest)])
    with nodes_at(small_disk.parent / "more", 1) as (last,):
        result = last.deliver([replace(fetch(NAME, 0, digest, origin=7), via=1)], urls={1: nodes[1].server.url})[0]
    assert "could not get it itself" in result.problem
    assert "No space left on device" in result.problem


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_noticed_late_too(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    digest = nodes[0].offer(NAME, DATA)

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(filling.os, call, fails)
    with pytest.raises(EnvironmentFailedError, match=f"{NAME}: cannot be written: {os.strerror(code)}") as caught:
        nodes[1].deliver([fetch(NAME, 1, digest)])
    assert ("are free there" in str(caught.value)) == (code != errno.EIO)
    assert not (nodes[1].staging / NAME).exists()


def test_links_what_is_on_this_node(nodes: list[Node]) -> None:
    put(nodes[0].place / NAME, DATA)
    put(nodes[0].place / "empty", b"")
    progress = Counting()
    orders = [local(NAME, 0, digest_of(DATA)), local("iter_0000020/empty", 0, digest_of(b""), "empty")]
    results = nodes[0].deliver(orders, recheck=True, progress=progress)
    assert {r.how for r in results} <= {"linked", "cloned"}
    assert [r.moved_bytes for r in results] == [0, 0]
    assert progress.done == progress.total == len(DATA)
    if results[0].how == "linked":
        assert os.path.samefile(nodes[0].place / NAME, nodes[0].staging / NAME)
    assert nodes[0].deliver(orders)[0].how == "kept"
    nodes[0].server._offers.clear()  # as in a later attempt
    assert nodes[0].deliver(orders)[0].how == results[0].how
    assert set(names_below(nodes[0].staging)) == {NAME, "iter_0000020/empty"}
    assert nodes[1].deliver([fetch(NAME, 1, digest_of(DATA))])[0].how == "fetched"


def test_clones_where_the_file_system_can(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is answered as btrfs and XFS do: the new file has the bytes of the other, and is one of its own."""

    def ficlone(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        os.write(target, os.pread(source, 1 << 26, 0))
        return 0

    monkeypatch.setattr(linking.fcntl, "ioctl", ficlone)
    put(nodes[0].place / NAME, DATA)
    assert nodes[0].deliver([local(NAME, 0, digest_of(DATA))]) == [Delivered(NAME, "cloned")]
    assert not os.path.samefile(nodes[0].place / NAME, nodes[0].staging / NAME)
    assert (nodes[0].staging / NAME).read_bytes() == DATA


def test_copies_where_it_cannot_link(nodes: list[Node], no_links: None) -> None:
    put(nodes[0].place / NAME, DATA)
    put(nodes[0].place / "small", SMALL)
    orders = [local(NAME, 0, digest_of(DATA)), local("small", 0, digest_of(SMALL, 0))]
    results = nodes[0].deliver(orders)
    assert results == [Delivered(NAME, "copied", len(DATA)), Delivered("small", "copied", len(SMALL))]
    assert (nodes[0].staging / NAME).read_bytes() == DATA
    assert not os.path.samefile(nodes[0].place / NAME, nodes[0].staging / NAME)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_links_that_are_refused(nodes: list[Node], monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    put(nodes[0].place / NAME, DATA)
    assert nodes[0].deliver([local(NAME, 0, digest_of(DATA))])[0].how in ("copied", "cloned")


def test_a_copy_that_is_not_what_was_checked(nodes: list[Node], no_links: None) -> None:
    spoil(put(nodes[0].place / NAME, DATA), 5 * BLOCK)
    problem = nodes[0].deliver([local(NAME, 0, digest_of(DATA))])[0].problem
    assert problem.startswith(
        f"{NAME}: block 5 (bytes {5 * BLOCK} to {6 * BLOCK}) came wrong twice from {nodes[0].place / NAME}"
    )


@pytest.mark.parametrize("block_bytes", [0, BLOCK])
def test_a_linked_file_is_what_was_checked(nodes: list[Node], block_bytes: int) -> None:
    path = put(nodes[0].place / NAME, DATA)
    order, seen = local(NAME, 0, digest_of(DATA, block_bytes)), Stamp.of(path)
    spoil(path, 9 * BLOCK)
    problem = nodes[0].deliver([order], recheck=True)[0].problem
    assert problem.startswith(f"{NAME}: {path}")
    assert "changed since it was checked" in problem
    assert ("block 9" in problem) == bool(block_bytes)
    path.touch()
    assert "changed since it was checked" in nodes[0].deliver([order], stamps={order.copy: seen})[0].problem
    put(path, DATA[:-1])
    assert f"{len(DATA) - 1} bytes, {len(DATA)} checked" in nodes[0].deliver([order])[0].problem
    assert names_below(nodes[0].staging) == {}


def test_symlinks_in_a_place_are_resolved_and_stay_inside(nodes: list[Node], tmp_path: Path) -> None:
    real = put(nodes[0].place / "pool" / "blob", DATA)
    outside = put(tmp_path / "outside", DATA)
    for name, target in (("inside", real), ("outside", outside), ("dangling", tmp_path / "absent")):
        (nodes[0].place / name).symlink_to(target)
    inside, out, dangling = nodes[0].deliver([local(n, 0, digest_of(DATA)) for n in ("inside", "outside", "dangling")])
    assert inside.how in ("linked", "cloned")
    assert not (nodes[0].staging / "inside").is_symlink()
    assert out.problem.startswith(f"outside: outside: leads out of the checkpoint directory (to {outside}")
    assert dangling.problem


def test_a_source_that_is_gone(nodes: list[Node], no_links: None) -> None:
    results = nodes[0].deliver([local(NAME, 0, digest_of(DATA))], places=[str(nodes[0].place)])
    assert f"{nodes[0].place / NAME}: " in results[0].problem


@pytest.mark.parametrize("block_bytes", [0, BLOCK])
def test_downloads_from_a_store(nodes: list[Node], block_bytes: int) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/run/iter_0000020/__0_0.distcp", DATA)
    store.pipe("/run/empty", b"")
    try:
        digest = digest_of(DATA, block_bytes)
        orders = [
            Delivery(NAME, 0, digest, Copy(0, 1, NAME, NAME, len(DATA))),
            Delivery("empty", 0, digest_of(b""), Copy(0, 1, "empty", "empty", 0)),
            Delivery("absent", 0, digest, Copy(0, 1, "absent", "absent", len(DATA))),
        ]
        whole, empty, absent = nodes[0].deliver(orders, places=[str(nodes[0].place), "memory://run"])
        assert whole == Delivered(NAME, "downloaded", len(DATA))
        assert empty == Delivered("empty", "downloaded", 0)
        assert absent.problem.startswith("absent: memory://run/absent: ")
        assert (nodes[0].staging / NAME).read_bytes() == DATA
        assert nodes[1].deliver([fetch(NAME, 1, digest)])[0].how == "fetched"
        store.pipe("/run/iter_0000020/__0_0.distcp", DATA[:-1])
        shutil.rmtree(nodes[0].staging)
        assert "memory://run/iter_0000020/__0_0.distcp" in nodes[0].deliver(
            orders[:1], places=["", "memory://run"]
        )[0].problem  # fmt: skip
    finally:
        store.rm("/run", recursive=True)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a//b", ".", "x.partial", "a\0b", "a\udcff"])
def test_names_that_lead_elsewhere_are_refused(nodes: list[Node], name: str) -> None:
    digest = digest_of(SMALL, 0)
    put(nodes[0].place / "x", SMALL)
    for order in (fetch(name, 1, digest), replace(local("x", 1, digest), copy=Copy(1, 0, name, "x", len(SMALL)))):
        result = nodes[1].deliver([order])[0]
        assert result.how == ""
        assert "name" in result.problem or "path" in result.problem
    assert names_below(nodes[1].staging) == {}


def test_orders_that_cannot_be_carried_out(nodes: list[Node]) -> None:
    digest = nodes[0].offer(NAME, DATA)
    cases = {
        "ordered twice": [fetch(NAME, 1, digest), fetch(NAME, 1, digest)],
        "it is for node 2; this is node 1": [fetch(NAME, 2, digest)],
        "no server is known": [fetch(NAME, 1, digest, via=None)],
        "no server is known ": [fetch(NAME, 1, digest, via=9)],
        "place 4 is none of the 1": [Delivery(NAME, 1, digest, Copy(1, 4, NAME, NAME, len(DATA)))],
        "300 block digests, 301 expected": [fetch(NAME, 1, replace(digest, blocks=digest.blocks[:-16]))],
        "in blocks of -1": [fetch(NAME, 1, Digest(3, "", -1))],
        "does not offer it": [fetch("unknown", 1, digest)],
        "does not accept the token": [fetch("unseen", 1, digest)],
    }
    for says, orders in cases.items():
        if says == "does not accept the token":
            nodes[1].urls = {0: nodes[0].server.url}
            nodes[0].server._authorization = b"Bearer another"
        result = nodes[1].deliver(orders)[-1]
        assert says in result.problem
        assert result.problem.startswith(orders[-1].name)


def test_bytes_over_the_network_are_those_that_are_missing(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the client's sockets: requests, headers and all."""
    import socket

    counted = [0]

    class Counted(socket.socket):
        def recv_into(self, *arguments: object, **options: object) -> int:
            count = super().recv_into(*arguments, **options)  # type: ignore[arg-type]
            counted[0] += count
            return count

        def sendall(self, data: bytes, *arguments: object) -> None:  # type: ignore[override]
            counted[0] += len(data)
            super().sendall(data, *arguments)  # type: ignore[arg-type]

    data = data_of(24 << 20)
    digest = nodes[0].offer(NAME, data, 1 << 20)
    put(nodes[1].partial(NAME), data[: 8 << 20])
    monkeypatch.setattr(socket, "socket", Counted)
    result = nodes[1].deliver([fetch(NAME, 1, digest)])[0]
    assert result.moved_bytes == 16 << 20
    assert result.moved_bytes < counted[0] < 1.001 * result.moved_bytes


def test_the_first_error_of_a_thread_is_raised(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    digest = nodes[0].offer(NAME, DATA)

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(staging.Filling, "fill", breaks)
    with pytest.raises(ZeroDivisionError):
        nodes[1].deliver([fetch(NAME, 1, digest)])
