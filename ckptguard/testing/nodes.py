"""Several nodes on one machine: each with its own address, host name, files and processes.

::

    with Cluster(2, workdir=tmp_path) as cluster:
        one, two = cluster.nodes
        (one.path("ckpt") / "file").write_text("only node 0 has it")
        server = one.popen([sys.executable, "-m", "http.server", "--bind", one.address])
        two.run(["curl", f"http://{one.address}:8000"])
        call = cluster.call(two, "package.module:function", ["argument"])  # a fork: starts in milliseconds

Kind ``namespaces`` (Linux, root): every node has a network namespace, joined by a veth pair to a bridge that stands in one
more namespace, so that nothing of the host's own network is touched; a mount namespace in which one directory is that of the
node, so that one path holds different files on every node; a host name. The namespaces have no names on the file system: they
vanish with their last process, also when the owner is killed. Kind ``loopback`` needs nothing: addresses are 127.x.y.n, and
paths differ.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Literal, Self

from ckptguard.testing import nodes_server

Kind = Literal["namespaces", "loopback"]

_MARK = "CKPTGUARD_SIMULATED_NODE"
_SWITCH = -1
_TIMEOUT_SECONDS = 60.0
_START_SECONDS = 120.0  # importing torch and Megatron on a busy machine
_TRIAL = "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1 && mount --bind /etc /etc"


class NotPermittedError(RuntimeError):
    """The machine, its kernel or this kind of cluster cannot do what was asked; says why."""


@functools.cache
def reason_against() -> str | None:
    """Why this machine cannot have the kind ``namespaces``; None if it can."""
    missing = [name for name in ("ip", "tc", "nsenter", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    trial = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _TRIAL]
    done = subprocess.run(trial, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    return None if done.returncode == 0 else f"namespaces are not allowed: {done.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process of a node ended: exit code (negative: the signal), all output, seconds since its start."""

    code: int
    out: str
    err: str
    seconds: float


class Call:
    """A running process that ``Cluster.call`` forked; ``pid`` is as the host sees it, and leads a session of its own."""

    def __init__(self, cluster: Cluster, pid: int, number: int, out: Path, err: Path) -> None:
        self.pid, self._cluster, self._out, self._err = pid, cluster, out, err
        self._number = number
        self._began = time.monotonic()

    def wait(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> Ended:
        """Until it has ended.

        Raises:
            TimeoutError: It still runs; its output so far is in the message.
        """
        ended = self._cluster._wait(self._number, timeout_seconds)
        if ended is None:
            tail = (self._out.read_text() + self._err.read_text())[-2000:]
            raise TimeoutError(f"process {self.pid} still runs after {timeout_seconds:g} s. Its last words:\n{tail}")
        code, when = ended
        return Ended(code, self._out.read_text(), self._err.read_text(), when - self._began)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._cluster._wait(self._number, 0) is None

    def kill(self) -> None:
        """SIGKILL it and what it started. Nothing once it has ended: its pid may be another's by then."""
        if self.running():
            nodes_server.kill_all(lambda: nodes_server.in_sessions([self.pid]))


class Node:
    """One node; made by :class:`Cluster`."""

    def __init__(self, cluster: Cluster, number: int, address: str) -> None:
        self.number, self.address, self.host = number, address, f"node{number}"
        self._cluster = cluster
        self._disks: list[Path] = []
        self._holder = 0

    @property
    def files(self) -> Path:
        """Where the host sees the node's own directory."""
        return self._cluster.workdir / self.host

    def path(self, name: str) -> Path:
        """Where the host sees a file or directory of the node's own."""
        if any(Path(name).is_relative_to(disk) for disk in self._disks):
            return Path(f"/proc/{self._holder}/root") / self.place(name).relative_to("/")
        return self.files / name

    def place(self, name: str) -> Path:
        """The same as the node's own processes see it; in namespaces one path for all nodes."""
        return (self._cluster.local if self._cluster.kind == "namespaces" else self.files) / name

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        """Start a process on the node; its pid is that of ``argv`` itself.

        Args:
            argv: Command and arguments.
            env: Variables beside the caller's and those of :meth:`environment`.
            cwd: Where; the node's own directory by default.
            more: For ``subprocess.Popen``.
        """
        command = ["env", "-C", str(cwd or self.place("")), *argv]
        if self._cluster.kind == "namespaces":
            spaces = [f"--{name}=/proc/{self._holder}/ns/{kind}" for name, kind in _NSENTER.items()]
            command = ["nsenter", *spaces, "--", *command]
        more = {"stdin": subprocess.DEVNULL, "text": True} | more
        return subprocess.Popen(command, env=os.environ | self.environment() | dict(env or {}), **more)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> Ended:
        """Run a command on the node to its end.

        Raises:
            subprocess.TimeoutExpired: It took longer, and was killed.
        """
        began = time.monotonic()
        with self.popen(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Ended(process.returncode, out, err, time.monotonic() - began)

    def environment(self) -> dict[str, str]:
        """Variables of the node's processes: the package on the path, gloo on the node's interface, one thread."""
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        interface = "eth0" if self._cluster.kind == "namespaces" else "lo"
        return {
            _MARK: f"{self._cluster.id}:{self.number}", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def disk(self, name: str, size_bytes: int) -> Path:
        """Mount an empty file system of a limited size at ``name``, on this node; returns :meth:`place` of it.

        Raises:
            NotPermittedError: In a loopback cluster.
        """
        self._cluster._only_namespaces("file systems of their own")
        self.path(name).mkdir(parents=True, exist_ok=True)
        done = self.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(self.place(name))])
        if done.code:
            raise NotPermittedError(done.err.strip())
        self._disks.append(Path(name))
        return self.place(name)

    def remove_disk(self, name: str) -> None:
        """Unmount what :meth:`disk` mounted."""
        self.run(["umount", "--lazy", str(self.place(name))])
        self._disks.remove(Path(name))


_NSENTER = {"net": "net", "uts": "uts", "mount": "mnt"}


class Cluster:
    """Nodes on this machine; use it in a ``with`` statement, which ends everything in them.

    Args:
        count: How many nodes.
        workdir: An empty directory of one's own: ``node0/``, ``node1/`` ... hold the nodes' files.
        kind: None is ``namespaces`` where they are allowed, otherwise ``loopback``.
        preload: Modules that :meth:`call` finds imported, or functions ``module:function`` that import them; the first call
            waits for them.

    Raises:
        NotPermittedError: ``namespaces`` were asked for and are not allowed.
    """

    _numbers: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(
        self, count: int, *, workdir: Path, kind: Kind | None = None, preload: Sequence[str] = ("torch.distributed",)
    ) -> None:
        against = reason_against() if kind != "loopback" else None
        if kind == "namespaces" and against:
            raise NotPermittedError(against)
        self.kind: Kind = kind or ("loopback" if against else "namespaces")
        self.workdir = workdir.resolve()
        self.local = self.workdir / "local"
        number = next(self._numbers)
        self.id = f"{_owner(os.getpid())}.{number}"
        net = "10.77.0" if self.kind == "namespaces" else f"127.{1 + os.getpid() % 250}.{number % 250}"
        self.nodes = tuple(Node(self, n, f"{net}.{n + 1}") for n in range(count))
        self._preload, self._calls = list(preload), itertools.count(1)
        self._ends: dict[int, tuple[int, float]] = {}
        self._running: dict[int, int] = {}
        self._started = itertools.count()
        self._answers: list[dict[str, Any]] = []
        self._sessions: dict[int, int] = {}
        self._changed, self._ordering = threading.Condition(), threading.Lock()

    def __enter__(self) -> Self:
        for path in (self.local, self.workdir / "calls", *(node.files for node in self.nodes)):
            path.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ckptguard.testing.nodes_server"]
        env = os.environ | self.nodes[0].environment() | {_MARK: f"{self.id}:helper"}
        self._helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, args=(self._helper.stdout,), daemon=True)
        self._reader.start()
        try:
            if self.kind == "namespaces":
                self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process in the nodes, and the nodes. Idempotent."""
        for node in self.nodes:
            self.kill(node)
        assert self._helper.stdin
        assert self._helper.stdout
        self._helper.stdin.close()
        try:
            self._helper.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            self._helper.wait()
        self._reader.join()
        self._helper.stdout.close()

    def warm(self) -> None:
        """Wait until what calls need is imported."""
        with self._ordering:
            self._warm()

    def call(
        self,
        node: Node,
        target: str,
        args: Sequence[Any] = (),
        *,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Call:
        """Run a function on a node, in a fork of a process that has imported the preloaded modules.

        Args:
            node: Where.
            target: ``package.module:function``. An int that it returns is the exit code, an exception is code 1.
            args: Its arguments, as plain as JSON.
            argv: What it finds in ``sys.argv`` after the program's name.
            env: Variables beside those of :meth:`Node.environment`.
        """
        number = next(self._calls)
        out, err = (self.workdir / "calls" / f"{number}.{name}" for name in ("out", "err"))
        out.touch()
        err.touch()
        order = {
            "do": "call", "node": node.number, "target": target, "args": list(args), "argv": list(argv),
            "cwd": str(node.place("")), "env": node.environment() | dict(env or {}), "out": str(out), "err": str(err),
        }  # fmt: skip
        with self._ordering:
            self._warm()
            answer = self._order(order)
        pid = int(answer["pid"])
        self._sessions[pid] = node.number
        return Call(self, pid, int(answer["number"]), out, err)

    def slow(self, node: Node, *, rate_mbit: float, delay_ms: float = 0) -> None:
        """Limit a node's link in both directions, until the next call of it.

        Uses the kernel's netem; where it has none, tbf, which has no delay.

        Raises:
            NotPermittedError: A delay without netem, or a loopback cluster.
        """
        self._only_namespaces("links to slow down")
        rate, delay = f"{rate_mbit:g}mbit", f"{delay_ms:g}ms"
        ways = [["netem", "rate", rate, "delay", delay, "limit", "10000"]]
        if not delay_ms:
            ways.append(["tbf", "rate", rate, "burst", "64kb", "latency", "20ms"])
        for space, device in ((self._switch, f"port{node.number}"), (node._holder, "eth0")):
            tries = [_inside(space, ["tc", "qdisc", "replace", "dev", device, "root", *way]) for way in ways]
            if not any(code == 0 for code, _ in tries):
                raise NotPermittedError(f"the link cannot be slowed down: {tries[0][1].strip()}")

    def cut(self, node: Node) -> None:
        """Pull a node's cable: packets are lost, nothing is reset."""
        self._port(node, "down")

    def join(self, node: Node) -> None:
        """Put the cable back."""
        self._port(node, "up")

    def kill(self, node: Node) -> None:
        """SIGKILL all processes of a node; new ones can be started afterwards."""
        nodes_server.kill_all(lambda: self.processes(node))

    def processes(self, node: Node) -> list[int]:
        """Pids of all processes of a node."""
        if self.kind == "namespaces":
            namespace = nodes_server.net_namespace(node._holder) if node._holder else None
            return [pid for pid in nodes_server.inside({namespace} if namespace else set()) if pid != node._holder]
        sessions = [pid for pid, number in self._sessions.items() if number == node.number and pid in self._running]
        marked = [pid for pid, mark in _marks() if mark == f"{self.id}:{node.number}"]
        return sorted({*marked, *nodes_server.in_sessions(sessions)})

    @staticmethod
    def sweep() -> None:
        """Kill what clusters of dead processes left: nothing, unless their helper was killed too."""
        nodes_server.kill_all(lambda: [pid for pid, mark in _marks() if not _lives(mark.rpartition(".")[0])])

    def _connect(self) -> None:
        """Make the namespaces and the network between them."""
        hosts = self.workdir / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{n.address} {n.host}\n" for n in self.nodes))
        self._switch = self._hold(_SWITCH, "switch", [])
        _ip(self._switch, "link add bridge type bridge", "link set bridge up")
        for node in self.nodes:
            mounts = [["--bind", str(node.files), str(self.local)], ["--bind", str(hosts), "/etc/hosts"]]
            node._holder = self._hold(node.number, node.host, mounts)
            port = f"port{node.number}"
            _ip(
                self._switch, f"link add {port} type veth peer name eth0 netns {node._holder}",
                f"link set {port} master bridge", f"link set {port} up",
            )  # fmt: skip
            _ip(node._holder, "link set lo up", f"addr add {node.address}/24 dev eth0", "link set eth0 up")

    def _hold(self, node: int, host: str, mounts: list[list[str]]) -> int:
        with self._ordering:
            return int(self._order({"do": "hold", "node": node, "host": host, "mounts": mounts})["pid"])

    def _port(self, node: Node, state: str) -> None:
        self._only_namespaces("links to cut")
        _ip(self._switch, f"link set port{node.number} {state}")

    def _only_namespaces(self, what: str) -> None:
        if self.kind != "namespaces":
            raise NotPermittedError(f"nodes that share the host's own network and files have no {what}")

    def _warm(self) -> None:
        if self._preload:
            self._order({"do": "preload", "modules": self._preload})
            self._preload = []

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send one order to the helper and wait for its answer."""
        assert self._helper.stdin
        self._helper.stdin.write(json.dumps(order) + "\n")
        self._helper.stdin.flush()
        with self._changed:
            self._changed.wait_for(lambda: self._answers, _START_SECONDS)
            answer = self._answers.pop(0) if self._answers else {"error": "no answer from the helper process"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            said = json.loads(line)
            with self._changed:
                if "ended" in said:
                    self._ends[self._running.pop(said["ended"])] = (said["code"], time.monotonic())
                else:
                    if "pid" in said:  # pids come again after some thousand processes
                        said["number"] = self._running[said["pid"]] = next(self._started)
                    self._answers.append(said)
                self._changed.notify_all()
        with self._changed:
            self._answers.append({"error": "the helper process ended"})
            self._changed.notify_all()

    def _wait(self, number: int, timeout_seconds: float) -> tuple[int, float] | None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._ends, timeout_seconds)
            return self._ends.get(number)


def _inside(holder: int, command: Sequence[str], text: str = "") -> tuple[int, str]:
    """Run a command of the host's in a network namespace: exit code and what it complained about."""
    command = ["nsenter", f"--net=/proc/{holder}/ns/net", *command]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    return done.returncode, done.stderr


def _ip(holder: int, *lines: str) -> None:
    code, error = _inside(holder, ["ip", "-batch", "-"], "\n".join(lines) + "\n")
    if code:
        raise NotPermittedError(f"ip {'; '.join(lines)}: {error.strip()}")


def _marks() -> list[tuple[int, str]]:
    """Processes of simulated nodes: pid, and ``<owner's pid>.<its start>.<cluster>:<node>``."""
    out, start = [], f"{_MARK}=".encode()
    for pid in nodes_server.pids():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        out += [(pid, v[len(start) :].decode()) for v in variables if v.startswith(start)]
    return [(pid, mark) for pid, mark in out if pid != os.getpid()]


def _owner(pid: int) -> str:
    """``pid.start``, which no later process has; "" if there is no such process."""
    try:
        return f"{pid}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def _lives(owner: str) -> bool:
    return _owner(int(owner.partition(".")[0])) == owner
