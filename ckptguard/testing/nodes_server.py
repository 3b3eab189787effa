"""The helper process of ``nodes.Cluster``: holds the nodes' namespaces and forks processes inside them.

``python -m ckptguard.testing.nodes_server``: one JSON order a line on stdin, JSON lines on stdout. Modules that calls need are
imported once, here, so that a process of a node is a fork and starts in milliseconds. When stdin ends, because the cluster was
closed or its owner was killed, every process in the nodes is killed; the namespaces vanish with their last process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAMESPACES = os.CLONE_NEWNET | os.CLONE_NEWUTS | os.CLONE_NEWNS
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILL_SECONDS = 10.0


class Helper:
    """Answers orders until stdin ends."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what imported modules print
        self._holders: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """The loop: orders from stdin, ends of children from their pidfds."""
        self._selector.register(0, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._ended(key.fd, key.data)
                    continue
                read = os.read(0, 1 << 16)
                if not read:
                    self._end()
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._say(self._follow(json.loads(line)))

    def _follow(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            match order["do"]:
                case "hold":
                    return {"pid": self._hold(order["node"], order["host"], order["mounts"])}
                case "preload":
                    return self._preload(order["modules"])
                case _:
                    return {"pid": self._call(order)}
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def _hold(self, node: int, host: str, mounts: list[list[str]]) -> int:
        """Fork a process that does nothing in namespaces of its own; returns its pid once they are set up."""
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            _die_with_parent()
            text = b"ok"
            try:
                os.unshare(NAMESPACES)
                _run("mount", "--make-rprivate", "/")
                for arguments in mounts:
                    _run("mount", *arguments)
                socket.sethostname(host)
            except (OSError, subprocess.CalledProcessError) as error:
                text = str(error).encode()
            os.write(told, text)
            while True:
                signal.pause()
        os.close(told)
        with os.fdopen(ready, "rb", buffering=0) as answer:
            text = answer.read(4096) or b"its process ended"
        self._holders[node] = pid
        if text != b"ok":
            raise OSError(text.decode())
        return pid

    def _preload(self, modules: list[str]) -> dict[str, Any]:
        for name in modules:
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # forks cannot use a pool of threads that was started here
        gc.freeze()
        return {}

    def _call(self, order: dict[str, Any]) -> int:
        entered, told = os.pipe()
        pid = os.fork()
        if not pid:
            _child(order, self._holders.get(order["node"]), told)
        os.close(told)
        with os.fdopen(entered, "rb") as answer:
            answer.read()  # until it is inside: who kills the node from now on finds it there
        self._sessions[pid] = order["node"]
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        return pid

    def _ended(self, fd: int, pid: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _end(self) -> None:
        namespaces = {namespace for pid in self._holders.values() if (namespace := net_namespace(pid))}
        kill_all(lambda: inside(namespaces) + in_sessions(self._sessions))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(order: dict[str, Any], holder: int | None, told: int) -> None:
    """What a forked process does; never returns. Exit hooks of imported modules are not run."""
    code = 1
    try:
        os.setsid()
        for number, name in enumerate((os.devnull, order["out"], order["err"])):
            file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        if holder is not None:
            os.setns(os.pidfd_open(holder), NAMESPACES)
        os.close(told)
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        module, _, name = order["target"].partition(":")
        sys.argv = [module, *order["argv"]]
        result = getattr(importlib.import_module(module), name)(*order["args"])
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - torch's CheckpointException is no Exception
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def net_namespace(pid: int) -> str | None:
    """Identity of a process's network namespace; None if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None


def pids() -> list[int]:
    """All processes that this one can see."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def inside(namespaces: set[str]) -> list[int]:
    """Processes in one of these network namespaces."""
    return [pid for pid in pids() if namespaces and net_namespace(pid) in namespaces]


def in_sessions(leaders: Iterable[int] | Mapping[int, int]) -> list[int]:
    """Processes in one of these sessions that have not ended."""
    wanted = frozenset(leaders)
    return [pid for pid in pids() if wanted and _session(pid) in wanted]


def _session(pid: int) -> int | None:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state == "Z" else int(session)


def kill_all(find: Any) -> None:
    """SIGKILL what ``find()`` lists until it lists nothing: processes may fork meanwhile.

    Raises:
        TimeoutError: Some do not end.
    """
    until = time.monotonic() + _KILL_SECONDS
    while found := find():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise TimeoutError(f"processes {', '.join(map(str, found))} do not end")
        time.sleep(0.01)


if __name__ == "__main__":
    Helper().run()
