"""Which node of how many this process stands for, the ranks that training will have on each, and where the nodes meet.

What options say comes first, then the launch line, then variables: of torchrun and Kubernetes, of Slurm.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ckptguard.core.errors import UsageError
from ckptguard.megatron.launch_line import LaunchLine
from ckptguard.view.addresses import of_interface, own_address
from ckptguard.view.node_sources import Said, of_line, of_variables, refuse_spreading

_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/?#@\[\]]+):([0-9]{1,5})")
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What options say.

    Attributes:
        number: Which node this is, from 0.
        count: How many nodes there are.
        meeting: Where they meet, ``host:port`` at node 0.
        ranks_each: Ranks on every node.
        ranks: Ranks of every node, as ``ranks_of`` takes them.
        interface: Network interface by which other nodes reach this one.
        address: This node's address there.
    """

    number: int | None = None
    count: int | None = None
    meeting: str | None = None
    ranks_each: int | None = None
    ranks: str | None = None
    interface: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """This node and the others.

    Attributes:
        number: Which node this is, from 0.
        count: How many there are.
        ranks: Per node, the global ranks that training will have there; empty tuples where that is not known.
        rendezvous: Where the nodes meet: a URL that ``torch.distributed.rendezvous`` takes; "" for a single node.
        address: This node's, at which others reach it.
        host: Its name, for messages.
        notes: What people should know: ports chosen, ranks that are not known.
    """

    number: int = 0
    count: int = 1
    ranks: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({0: ()}))
    rendezvous: str = ""
    address: str = "127.0.0.1"
    host: str = field(default_factory=socket.gethostname)
    notes: tuple[str, ...] = ()

    def without_ranks(self, why: str) -> Nodes:
        """The same nodes, and no ranks known: each will get all files."""
        note = f"every node gets all files: {why}"
        return replace(self, ranks=MappingProxyType(dict.fromkeys(range(self.count), ())), notes=(*self.notes, note))


def here(
    given: Given,
    line: LaunchLine | None,
    environment: Mapping[str, str],
    *,
    timeout_seconds: float = 60.0,
) -> Nodes:
    """Finds out which node this is, of which.

    Args:
        given: Options.
        line: The launch line that will be run on this node, if there is one.
        environment: Variables of this process.
        timeout_seconds: How long the name of node 0 may stay unknown: a pod has one once it runs.

    Raises:
        UsageError: Options, line and variables contradict each other, or do not say enough.
        EnvironmentFailedError: The name of node 0 stays unknown, or it cannot be reached from this node.
    """
    of_options = Said(source="the options", number=given.number, count=given.count, each=given.ranks_each)
    said = [of_options, *([of_line(line, environment)] if line else [])]
    _refuse_contradictions(said)
    count = _first(said, lambda one: one.count)
    known = count is not None and (_first(said, lambda one: one.number) is not None)
    met = given.meeting is not None or _first(said, lambda one: one.host) is not None
    if count != 1 and not (known and met):
        said.append(of_variables(environment))
        count = _first(said, lambda one: one.count) or 1
    assert count is not None
    if line:
        refuse_spreading(line, count)
    number = _number(said, count)
    if count == 1:
        ranks, notes = _ranks(given, said, 1)
        return Nodes(ranks=ranks, notes=notes)
    host, port, met_notes = _meeting(given, said)
    ranks, notes = _ranks(given, said, count)
    return Nodes(
        number=number,
        count=count,
        ranks=ranks,
        rendezvous=f"tcp://{host}:{port}",
        address=_address(given, host.strip("[]"), port, timeout_seconds),
        notes=(*met_notes, *notes),
    )


def _first[T](said: Sequence[Said], value: Callable[[Said], T | None]) -> T | None:
    return next((found for found in map(value, said) if found is not None), None)


def _refuse_contradictions(said: Sequence[Said]) -> None:
    """Options against the launch line: training will follow the line."""
    if len(said) < 2:
        return
    options, line = said
    pairs = [
        ("--nodes", options.count, line.count),
        ("--node-rank", options.number, None if line.unordered else line.number),
        ("--ranks-per-node", options.each, line.each),
    ]
    for option, one, other in pairs:
        if one is not None and other is not None and one != other:
            raise UsageError(
                f"{option} is {one}, and {line.source} says {other}",
                next_step=f"Leave {option} out, or change the launch line.",
            )


def _number(said: Sequence[Said], count: int) -> int:
    number = _first(said, lambda one: one.number)
    if number is None:
        if count > 1:
            sources = " and ".join(one.source for one in said[1:]) or "nothing"
            raise UsageError(
                f"there are {count} nodes, and which of them this is is not known ({sources} was looked at)",
                next_step="Give --node-rank, from 0.",
            )
        return 0
    if count < 1 or not 0 <= number < count:
        raise UsageError(
            f"node {number} of {count}: nodes are numbered from 0", next_step="Put --node-rank or --nodes right."
        )
    return number


def _meeting(given: Given, said: Sequence[Said]) -> tuple[str, int, tuple[str, ...]]:
    """Host and port where the nodes meet, and a note if the port was chosen here."""
    if given.meeting is not None:
        match = _HOST_AND_PORT.fullmatch(given.meeting)
        if match is None or not 0 < int(match[2]) <= _LAST_PORT:
            raise UsageError(
                f"--rdzv {given.meeting}: not of the form host:port",
                next_step="Give node 0's host and a free port of it.",
            )
        return match[1], int(match[2]), ()
    source = next((one for one in said if one.host), None)
    if source is None or source.host is None:
        raise UsageError(
            "where the nodes meet is not known",
            next_step="Give --rdzv HOST:PORT on all of them: node 0's host, and a port that is free there.",
        )
    host = f"[{source.host}]" if ":" in source.host.strip("[]") and not source.host.startswith("[") else source.host
    if source.port is None:
        assert source.own_port is not None
        return host, source.own_port, (f"nodes meet at {host}:{source.own_port} (--rdzv chooses another port)",)
    port = source.port + 1 if source.port < _LAST_PORT else source.port - 1
    return host, port, (f"nodes meet at {host}:{port}, beside training's port {source.port} (--rdzv chooses another)",)


# ---- ranks ----


def _ranks(given: Given, said: Sequence[Said], count: int) -> tuple[Mapping[int, tuple[int, ...]], tuple[str, ...]]:
    if given.ranks is not None:
        if given.ranks_each is not None:
            raise UsageError("--ranks and --ranks-per-node were both given", next_step="Give one of them.")
        return ranks_of(given.ranks, count), ()
    each = _first(said, lambda one: one.each)
    if count > 1 and any(one.unordered for one in said):
        why = "the c10d rendezvous gives nodes their ranks only when training starts; --ranks says them"
    elif each is None:
        why = "their ranks are not known; --ranks-per-node says them"
    else:
        return MappingProxyType({n: tuple(range(n * each, (n + 1) * each)) for n in range(count)}), ()
    note = (f"every node gets all files: {why}",) if count > 1 else ()
    return MappingProxyType(dict.fromkeys(range(count), ())), note


def ranks_of(text: str, count: int) -> Mapping[int, tuple[int, ...]]:
    """Ranks of every node: ``0-3/4-7`` for two nodes, ``0,2/1,3`` where they alternate.

    Raises:
        UsageError: Not ranks of so many nodes, from 0 on, each once.
    """
    groups = [_numbers(part, text) for part in text.split("/")]
    flat = sorted(rank for group in groups for rank in group)
    if len(groups) != count or flat != list(range(len(flat))):
        raise UsageError(
            f"--ranks {text}: not the ranks of {count} nodes, from 0 on, each once",
            next_step="Write those of every node, in order, with / between nodes: 0-7/8-15.",
        )
    return MappingProxyType(dict(enumerate(groups)))


def _numbers(part: str, text: str) -> tuple[int, ...]:
    out: list[int] = []
    for item in part.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", item)
        if match is None:
            raise UsageError(f"--ranks {text}: {item!r} is neither a rank nor a range", next_step="Write 0-7 or 0,2,4.")
        out += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(out)


def _address(given: Given, host: str, port: int, timeout_seconds: float) -> str:
    if given.address is not None:
        return given.address
    if given.interface is not None:
        return of_interface(given.interface)
    return own_address(host, port, timeout_seconds)
