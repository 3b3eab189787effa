"""What one simulated node does in tests of ``view.prepare``: prepares, with faults planted in its own process.

``prepare_here`` is for ``nodes.Cluster.call``. It prints a line per order that the node carries out (``order deliver``), a line
``fault`` before a fault of its own, and at the end one line of JSON. An error goes to stderr as the command line has it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptguard.core.errors import CkptguardError
from ckptguard.engine.workers import Progress
from ckptguard.view import preparing
from ckptguard.view.nodes import Nodes
from ckptguard.view.orders import Answer, Order
from ckptguard.view.preparing import Options
from ckptguard.view.server import Server

PRELOAD = ("ckptguard.testing.view_node:imported",)
"""For the ``Cluster`` whose nodes prepare views."""
_CAPABILITY_VERSION_3, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 0x20080522, 1, 2  # linux/capability.h
TARGET = "ckptguard.testing.view_node:prepare_here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plants:
    """Faults of one process.

    Attributes:
        order: The order after whose begin the process sends itself a signal; ``start`` for its own begin; "" for none.
        after_seconds: So long after it.
        signal: Which.
        token: Of another run.
        clock_seconds: The clocks of the process are so much ahead.
        powerless: The process may read only what modes let it, though it is root's.
        tells: File into which the server's URL and the token are written.
    """

    order: str = ""
    after_seconds: float = 0.0
    signal: int = signal.SIGKILL
    token: str = ""
    clock_seconds: float = 0.0
    powerless: bool = False
    tells: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a node is asked to prepare; as ``Options`` and ``Nodes``, as plain as JSON."""

    places: list[str]
    view: str
    number: int
    count: int
    rendezvous: str
    address: str
    host: str
    ranks: list[list[int]] = field(default_factory=list)
    step: str | None = None
    timeout_seconds: float = 12.0
    dry_run: bool = False
    plants: dict[str, Any] = field(default_factory=dict)


def imported() -> None:
    """Imports what nodes need, in the process that they are forks of."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = (
        "FATAL"  # read when torch is imported; ``engine.peers`` sets it before it does that
    )
    for name in ("aiohttp.web", "torch.distributed"):
        importlib.import_module(name)


def prepare_here(asked: dict[str, Any]) -> int:
    """Prepares; returns the exit code."""
    what = Asked(**asked)
    plants = Plants(**what.plants)
    servers = _watch(plants)
    _plant(plants)
    try:
        result = preparing.prepare(_options(what))
    except CkptguardError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    told = {
        "view": str(result.view) if result.view else None,
        "step": result.agreement.step.number if result.agreement else None,
        "id": result.agreement.id if result.agreement else None,
        "delivered": [[one.name, one.how, one.moved_bytes] for one in result.delivered],
        "planned": [[one.name, one.node, one.via] for one in result.planned],
        "needs": {str(node): list(names) for node, names in result.needs.names.items()} if result.needs else {},
        "notes": list(result.notes),
        "served_bytes": sum(server.served_bytes for server in servers),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


def _options(what: Asked) -> Options:
    ranks = what.ranks or [[] for _ in range(what.count)]
    nodes = Nodes(
        number=what.number,
        count=what.count,
        ranks={node: tuple(own) for node, own in enumerate(ranks)},
        rendezvous=what.rendezvous,
        address=what.address,
        host=what.host,
    )
    return Options(
        places=tuple(what.places),
        nodes=nodes,
        view=Path(what.view),
        step=what.step,
        timeout_seconds=what.timeout_seconds,
        wait_seconds=1.0,
        dry_run=what.dry_run,
    )


def _watch(plants: Plants) -> list[Server]:
    """Has the process tell what it does; returns the servers that it will start."""
    servers: list[Server] = []
    do, enter = preparing._Worker.do, Server.__enter__

    def told(self: preparing._Worker, order: Order, progress: Progress) -> Answer:
        _say(f"order {order.verb}")
        if order.verb == plants.order:
            _light(plants)
        return do(self, order, progress)

    def entered(server: Server) -> Server:
        servers.append(server)
        enter(server)
        if plants.tells:
            token = server._authorization.decode().removeprefix("Bearer ")
            Path(plants.tells).write_text(json.dumps({"url": server.url, "token": token}))
        return server

    preparing._Worker.do = told  # type: ignore[method-assign]
    Server.__enter__ = entered  # type: ignore[method-assign]
    return servers


def _plant(plants: Plants) -> None:
    if plants.order == "start":
        _light(plants)
    if plants.token:
        agreed = preparing._token
        preparing._token = lambda peers: agreed(peers) and plants.token
    if plants.clock_seconds:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + plants.clock_seconds
        time.time_ns = lambda: now_ns() + int(plants.clock_seconds * 1e9)
    if plants.powerless:
        _obey_modes()


def _obey_modes() -> None:
    """Takes the capabilities away for which modes do not count (capabilities(7), capget(2)); before any thread is started."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    for at in (0, 1):  # effective, permitted
        data[at] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def _light(plants: Plants) -> None:
    def act() -> None:
        _say("fault")
        os.kill(os.getpid(), plants.signal)

    timer = threading.Timer(plants.after_seconds, act)
    timer.daemon = True
    timer.start()


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())
