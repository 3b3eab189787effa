"""Several nodes on one machine: what they share, what they do not, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptguard.testing import nodes, nodes_server
from ckptguard.testing.nodes import Cluster, Node, NotPermittedError

needs_namespaces = pytest.mark.skipif(nodes.reason_against() is not None, reason=str(nodes.reason_against()))
KINDS = [pytest.param("namespaces", marks=needs_namespaces), "loopback"]
SECONDS = 30.0
MEGABYTE = 1_000_000
_READ = """import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(len(opener.open(sys.argv[1], timeout=float(sys.argv[2])).read()))
"""


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(2, workdir=tmp_path / "nodes", kind=request.param, preload=["email.message"]) as cluster:
        yield cluster


@pytest.fixture
def separate(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(2, workdir=tmp_path / "nodes", kind="namespaces", preload=[]) as cluster:
        yield cluster


def _serve(node: Node) -> int:
    """An HTTP server of the node's files; returns once it answers on the node itself."""
    server = [sys.executable, "-m", "http.server", "8123", "--bind", node.address]
    process = node.popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.returncode = 0  # nobody waits for it: the cluster ends it
    until = time.monotonic() + SECONDS
    while _get(node, node, "").code:
        assert time.monotonic() < until
        time.sleep(0.02)
    return process.pid


def _get(node: Node, server: Node, name: str, seconds: float = SECONDS) -> nodes.Ended:
    return node.run([sys.executable, "-c", _READ, f"http://{server.address}:8123/{name}", str(seconds)])


def test_nodes_reach_each_other_and_have_files_of_their_own(cluster: Cluster) -> None:
    one, two = cluster.nodes
    one.path("name").write_text("0")
    two.path("name").write_text("three")
    assert (one.place("name") == two.place("name")) == (cluster.kind == "namespaces")
    assert [node.run(["cat", str(node.place("name"))]).out for node in cluster.nodes] == ["0", "three"]
    _serve(one)
    assert _get(two, one, "name").out == "1\n"


def test_function_runs_in_the_node(cluster: Cluster) -> None:
    one = cluster.nodes[1]
    call = cluster.call(one, "os:system", ["pwd; echo $A; echo E >&2"], env={"A": "a"})
    ended = call.wait(SECONDS)
    assert (ended.code, ended.out, ended.err) == (0, f"{one.place('')}\na\n", "E\n")
    assert ended.seconds < SECONDS


def test_function_that_fails_shows_its_error(cluster: Cluster) -> None:
    ended = cluster.call(cluster.nodes[0], "os:rmdir", ["nothing"]).wait(SECONDS)
    assert ended.code == 1
    assert "FileNotFoundError" in ended.err


def test_killing_a_node_kills_all_that_runs_there_and_nothing_else(cluster: Cluster) -> None:
    one, two = cluster.nodes
    calls = [cluster.call(node, "os:system", ["sleep 100 & sleep 100"]) for node in cluster.nodes]
    started = one.popen(["sleep", "100"])
    cluster.kill(one)
    assert calls[0].wait(SECONDS).code == started.wait(SECONDS) == -signal.SIGKILL
    assert cluster.processes(one) == []
    assert calls[1].running()
    assert calls[1].pid in cluster.processes(two)
    calls[1].kill()
    assert calls[1].wait(SECONDS).code == -signal.SIGKILL
    assert one.run(["true"]).code == 0


def test_a_call_that_does_not_end_is_told(cluster: Cluster) -> None:
    call = cluster.call(cluster.nodes[0], "os:system", ["echo started; sleep 100"])
    with pytest.raises(TimeoutError, match=r"still runs after 0\.5 s"):
        call.wait(0.5)


def test_nothing_stays(tmp_path: Path) -> None:
    started: list[int] = []

    def fail() -> None:
        with Cluster(2, workdir=tmp_path / "nodes", preload=[]) as cluster:
            started.extend([cluster.call(cluster.nodes[0], "time:sleep", [100]).pid, cluster._helper.pid])
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert not set(started) & set(nodes_server.pids())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_when_the_owner_is_killed(kind: str, tmp_path: Path) -> None:
    owner = (
        "import sys, time; from pathlib import Path; from ckptguard.testing.nodes import Cluster\n"
        "cluster = Cluster(2, workdir=Path(sys.argv[1]), kind=sys.argv[2], preload=[]).__enter__()\n"
        "call = cluster.call(cluster.nodes[0], 'time:sleep', [100])\n"
        "print(call.pid, cluster._helper.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner, str(tmp_path / "nodes"), kind], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = {int(pid) for pid in process.stdout.readline().split()}
        assert pids <= set(nodes_server.pids())
        process.kill()
    until = time.monotonic() + SECONDS
    while pids & set(nodes_server.pids()):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_sweep_leaves_clusters_of_living_owners_alone(cluster: Cluster) -> None:
    call = cluster.call(cluster.nodes[0], "time:sleep", [100])
    ended = subprocess.Popen(["true"])
    ended.wait()
    orphan = subprocess.Popen(["sleep", "100"], env=os.environ | {nodes._MARK: f"{ended.pid}.1.1:0"})
    Cluster.sweep()
    assert orphan.wait(SECONDS) == -signal.SIGKILL
    assert call.running()


@needs_namespaces
def test_cut_link(separate: Cluster) -> None:
    one, two = separate.nodes
    _serve(one)
    separate.cut(one)
    assert _get(two, one, "", seconds=1).code == 1
    separate.join(one)
    assert _get(two, one, "").code == 0


@needs_namespaces
def test_slow_link(separate: Cluster) -> None:
    one, two = separate.nodes
    one.path("data").write_bytes(bytes(MEGABYTE))
    _serve(one)
    separate.slow(one, rate_mbit=20)
    ended = _get(two, one, "data")
    assert ended.out == f"{MEGABYTE}\n"
    assert ended.seconds > 0.25  # 0.4 s, less what a burst carries


@needs_namespaces
def test_small_disk(separate: Cluster) -> None:
    one, two = separate.nodes
    place = one.disk("small", MEGABYTE)
    ended = one.run(["dd", "if=/dev/zero", f"of={place}/data", "bs=1M", "count=2"])
    assert "No space left" in ended.err
    assert (one.path("small") / "data").stat().st_size <= MEGABYTE + 65536
    assert not two.path("small").exists()


@needs_namespaces
def test_hosts_have_names(separate: Cluster) -> None:
    ended = separate.nodes[1].run(["sh", "-c", "hostname; getent hosts node0"])
    assert ended.out.split() == ["node1", separate.nodes[0].address, "node0"]


def test_loopback_says_what_it_cannot_do(tmp_path: Path) -> None:
    with Cluster(1, workdir=tmp_path, kind="loopback", preload=[]) as cluster:
        for refused in (
            lambda: cluster.cut(cluster.nodes[0]),
            lambda: cluster.slow(cluster.nodes[0], rate_mbit=1),
            lambda: cluster.nodes[0].disk("small", 1),
        ):
            with pytest.raises(NotPermittedError, match="share the host's own"):
                refused()


def test_fewer_permissions_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes, "reason_against", lambda: "namespaces are not allowed: no")
    assert Cluster(1, workdir=tmp_path).kind == "loopback"
    with pytest.raises(NotPermittedError, match="not allowed: no"):
        Cluster(1, workdir=tmp_path, kind="namespaces")
