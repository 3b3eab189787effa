"""Nodes that exist in memory only, for tests of what node 0 orders: each answers as a real one would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from ckptguard.view.directing import Outcome, Wanted, direct
from ckptguard.view.orders import Answer, Order
from ckptguard.view.values import Checked, Copy, Delivered, Digest, FoundStep, Needs, NodeReport, Step

GIB = 1 << 30


def digest_of(content: str) -> str:
    """A digest of made-up content."""
    return blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass
class MadeUpNode:
    """A node: what its places hold, by place, step number and file; ``!`` at the end of a content makes it damaged.

    ``.metadata`` is the save's name; data files are all others that begin with ``__``. Sizes are those of the content.
    """

    places: Sequence[Mapping[str, Mapping[str, str]]]
    tracker: str = ""
    free_bytes: int = GIB
    sees: tuple[int, ...] = ()
    earlier: int | None = None
    reads: tuple[str, ...] | None = None
    staged: dict[str, str] = field(default_factory=dict)
    view: str = ""
    confirmed: bool = False
    unreachable: bool = False


@dataclass
class MadeUpCluster:
    """Runs a director against made-up nodes, and keeps count of what is moved.

    Attributes:
        nodes: The nodes.
        expected: Per save, its data files and their sizes.
        common: Data files with common state.
    """

    nodes: Sequence[MadeUpNode]
    expected: Mapping[str, Mapping[str, int]]
    common: tuple[str, ...] = ()
    orders: list[Order] = field(default_factory=list)
    sent: dict[tuple[int, str], int] = field(default_factory=dict)

    def run(self, wanted: Wanted | None = None) -> Outcome:
        """Follows the orders to the end."""
        work = direct(wanted or Wanted("1f2e3d4c", "2026-01-01T00:00:00+00:00"))
        order = next(work)
        while True:
            self.orders.append(order)
            try:
                order = work.send(tuple(self._answer(number, order) for number in range(len(self.nodes))))
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome

    def _answer(self, number: int, order: Order) -> Answer:
        if order.verb == "survey":
            return Answer(number, report=self._report(number))
        if order.verb == "needs":
            if number:
                return Answer(number)
            reads = {n: node.reads if node.reads is not None else order.names for n, node in enumerate(self.nodes)}
            return Answer(0, needs=Needs(reads, "as the test says"))
        if order.verb in ("check", "compare"):
            own = [copy for copy in order.copies if copy.node == number]
            return Answer(number, checked=tuple(self._checked(copy, whole=order.verb == "check") for copy in own))
        if order.verb == "deliver":
            mine = [one for one in order.deliveries if one.node == number]
            assert len({one.name for one in mine}) == len(mine), "a file twice at once"
            return Answer(number, delivered=tuple(self._delivered(number, order, n) for n in range(len(mine))))
        if order.verb == "publish" and order.agreement is not None and number in order.agreement.origins:
            assert order.agreement.origins[number].keys() <= self.nodes[number].staged.keys()
            self.nodes[number].view = order.agreement.step.number
        if order.verb == "confirm":
            assert all(node.view or node.sees for node in self.nodes), "confirmed before all had it"
            self.nodes[number].confirmed = True
        return Answer(number)

    def _report(self, number: int) -> NodeReport:
        node = self.nodes[number]
        found = [
            self._found(number, place, step, files)
            for place, steps in enumerate(node.places)
            for step, files in steps.items()
        ]
        trackers = {"0:latest_checkpointed_iteration.txt": node.tracker} if node.tracker else {}
        places = tuple("/ckpt" if place == 0 else f"/source{place}" for place in range(len(node.places)))
        return NodeReport(
            number, f"host{number}", places, f"http://10.0.0.{number}", trackers, tuple(found), (), node.free_bytes,
            node.earlier, node.sees or (number,),
        )  # fmt: skip

    def _found(self, number: int, place: int, step: str, files: Mapping[str, str]) -> FoundStep:
        save = files.get(".metadata", "")
        copies = tuple(
            Copy(
                number, place, f"iter_{step}/{name}", f"iter_{step}/{name}", len(content),
                "" if name.startswith("__") else digest_of(content),
            )
            for name, content in files.items()
        )  # fmt: skip
        expected = {f"iter_{step}/{name}": size for name, size in self.expected.get(save, {}).items()}
        common = tuple(f"iter_{step}/{name}" for name in self.common) if save else ()
        identity = digest_of(save) if save else ""
        return FoundStep(Step("global", step, identity), number, place, copies, expected, common)

    def _content(self, copy: Copy) -> str:
        node = self.nodes[copy.node]
        if copy.place == len(node.places):
            return node.staged[copy.name]
        folder, _, name = copy.path.partition("/")
        return node.places[copy.place][folder.removeprefix("iter_")][name]

    def _checked(self, copy: Copy, *, whole: bool) -> Checked:
        content = self._content(copy)
        digest = Digest(len(content), digest_of(content), 1 << 20, "00" * 8) if whole else None
        if whole and content.endswith("!"):
            return Checked(copy, digest_of(content), None, (f"{copy.name}: its bytes do not match the CRC-32",))
        return Checked(copy, digest_of(content), digest)

    def _delivered(self, number: int, order: Order, at: int) -> Delivered:
        delivery = [one for one in order.deliveries if one.node == number][at]
        node = self.nodes[number]
        content = self._content(delivery.copy)
        if delivery.via is None:
            assert delivery.copy.node == number
            how, moved = ("linked", 0) if delivery.copy.place == 0 else ("copied", len(content))
        else:
            giver = self.nodes[delivery.via]
            if giver.unreachable:
                return Delivered(
                    delivery.name, "", 0, f"{delivery.name}: node {delivery.via} is gone", unreachable=True
                )
            gets = [one for one in order.deliveries if (one.node, one.name) == (delivery.via, delivery.name)]
            assert delivery.via == delivery.copy.node or gets, "from a node that has nothing"
            key = (delivery.via, delivery.name)
            self.sent[key] = self.sent.get(key, 0) + 1
            how, moved = "fetched", len(content)
        if content.endswith("?"):
            return Delivered(delivery.name, "", 0, f"{delivery.name}: changed since it was checked")
        node.staged[delivery.name] = content
        return Delivered(delivery.name, how, moved)


def with_file(files: Mapping[str, str], name: str, content: str) -> dict[str, str]:
    """The files with one replaced."""
    return {**files, name: content}


def reading(node: MadeUpNode, *names: str) -> MadeUpNode:
    """The node, with ranks that read only these."""
    return replace(node, reads=names)
