"""Who gets which file from whom, so that each byte leaves a node as few times as possible. Pure.

Nodes that lack a file form a chain behind one that has it: each serves on to the next what it has of it already. So every node
sends a file at most once, and all links carry data at the same time. The chains begin at different nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from ckptguard.view.values import Copy, Delivery, Digest


def origin(name: str, copies: Sequence[Copy], load: Mapping[int, int]) -> Copy:
    """Which of several copies is read for the others: of the nodes that have it, one that has been given least so far."""
    least = min(load.get(copy.node, 0) for copy in copies)
    equal = [copy for copy in copies if load.get(copy.node, 0) == least]
    return equal[_turn(name) % len(equal)]


def spread(name: str, digest: Digest, nodes: Sequence[int], sound: Sequence[Copy], source: Copy) -> list[Delivery]:
    """How the nodes get a file.

    Args:
        name: In the view.
        digest: What it must be.
        nodes: Those that need it.
        sound: Copies that were found sound: a node that has one takes its own.
        source: The one that the other nodes get it from; its own node reads it too.

    Returns:
        A delivery per node.
    """
    own = {source.node: source} | {copy.node: copy for copy in reversed(sound)}
    out = [Delivery(name, node, digest, own[node]) for node in nodes if node in own]
    lacking = [node for node in nodes if node not in own]
    turn = _turn(name) % len(lacking) if lacking else 0
    via = source.node
    for node in (*lacking[turn:], *lacking[:turn]):
        out.append(Delivery(name, node, digest, source, via))
        via = node
    return out


def _turn(name: str) -> int:
    return zlib.crc32(name.encode())
