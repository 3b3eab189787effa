"""Getting files of one step to the nodes that need them: which copies are looked into, and who gets what from whom. Pure.

A generator of orders, like ``directing``. What is known of every copy is kept here: nothing yet, its fast digest, its digest
(it is sound), or what is wrong with it (it is dropped).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

from ckptguard.view.choosing import Candidate
from ckptguard.view.orders import Answer, Order, Refusal
from ckptguard.view.spreading import origin, spread
from ckptguard.view.values import Copy, Delivered, Delivery, Digest, NodeReport

Orders = Generator[Order, tuple[Answer, ...]]
Collected = Mapping[int, Mapping[str, Delivered]]


_BLOCK_BYTES = 1 << 20  # of files whose digest is not known yet
_UNREACHABLE = (
    "Check the network between the nodes (--interface chooses the one that is used), then run the command again."
)
_FULL = "Free space where the view is to stand, or put it elsewhere with --view."


class UnableError(Exception):
    """The step cannot be made whole; the message says why, in a sentence. ``refusal``: no other step could be either."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal


class Collecting:
    """The files of one step.

    Attributes:
        told: What was found wrong with copies, in sentences.
    """

    def __init__(self, candidate: Candidate, reports: Sequence[NodeReport]) -> None:
        self.told: list[str] = []
        self._step = candidate.step
        self._reports = {report.node: report for report in reports}
        self._copies = {name: list(copies) for name, copies in {**candidate.small, **candidate.data}.items()}
        self._sound: dict[Copy, Digest] = {
            copy: Digest(copy.size_bytes, copy.blake3) for copies in candidate.small.values() for copy in copies
        }
        self._fast: dict[Copy, str] = {}
        self._why: dict[str, list[str]] = {}
        self._have: dict[int, dict[str, Delivered]] = {report.node: {} for report in reports}
        self._from: dict[int, dict[str, str]] = {report.node: {} for report in reports}
        self._load: dict[int, int] = {}
        self._urls = {report.node: report.url for report in reports}
        self._afresh: set[tuple[int, str]] = set()
        self._pulled: dict[Copy, tuple[Copy, Delivered]] = {}

    def bring(self, wanted: Mapping[str, Sequence[int]]) -> Orders:
        """Brings each of some files to the nodes that need it.

        Args:
            wanted: Nodes by name.

        Raises:
            UnableError: A file has no sound copy left, or sound copies contradict each other; or the network or a disk is at
                fault (with its ``refusal``).
        """
        while open_ := self._open(wanted):
            if gone := [name for name in open_ if not self._copies[name]]:
                raise UnableError("; ".join(self._gone(name) for name in gone[:4]))
            if pulls := self._pulls(open_):
                yield from self._deliver(pulls)
                continue
            origins = {name: self._origin(name, nodes) for name, nodes in open_.items()}
            asked = [copy for name, nodes in open_.items() for copy in self._to_check(nodes, origins[name])]
            if asked:
                self._hear((yield Order("check", self._step, copies=tuple(asked))))
                continue
            others = [c for name in open_ for c in self._copies[name] if c not in self._fast and c not in self._sound]
            if others := [copy for copy in others if copy.place == 0]:
                self._hear((yield Order("compare", self._step, copies=tuple(others))))
            if doubtful := [copy for name in open_ for copy in self._doubtful(name)]:
                self._hear((yield Order("check", self._step, copies=tuple(doubtful))))
                continue
            self._refuse_contradictions(open_)
            yield from self._deliver(self._spread(open_, origins))

    def planned(self, wanted: Mapping[str, Sequence[int]]) -> tuple[Delivery, ...]:
        """What would be moved, before anything is checked; digests are not known."""
        out: list[Delivery] = []
        for name, nodes in wanted.items():
            source = self._origin(name, nodes)
            own = [copy for copy in self._copies[name] if copy.node in nodes and copy.place == 0]
            out += spread(name, Digest(source.size_bytes, ""), nodes, own, source)
        return tuple(out)

    def result(self) -> Collected:
        """How each file came, per node."""
        return self._have

    def digests(self) -> dict[str, Digest]:
        """Of every file that was brought to any node."""
        names = {name for have in self._have.values() for name in have}
        return {name: self._digest(name) for name in sorted(names)}

    def origins(self) -> dict[int, dict[str, str]]:
        """Per node and file: how it came and whence."""
        return {node: dict(sorted(names.items())) for node, names in self._from.items() if names}

    # --- what is to be done next

    def _open(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        left = {name: tuple(n for n in nodes if name not in self._have[n]) for name, nodes in wanted.items()}
        return {name: nodes for name, nodes in left.items() if nodes}

    def _is_here(self, copy: Copy) -> bool:
        """Whether it stands on a disk that its node reads without asking a shared file system or a store."""
        return copy.place in (0, self._reports[copy.node].earlier, self._staged(copy.node))

    def _staged(self, node: int) -> int:
        """Number of the place that stands for a node's staging directory."""
        return len(self._reports[node].places)

    def _pulls(self, open_: Mapping[str, Sequence[int]]) -> list[Delivery]:
        """Files that only sources have: one node gets each, and only then is it checked, so that a source is read once."""
        out = []
        for name, nodes in open_.items():
            copies = self._copies[name]
            if any(self._is_here(copy) or copy in self._sound for copy in copies):
                continue
            first = min(copy.place for copy in copies)
            near = [copy for copy in copies if copy.place == first and copy.node in nodes]
            chosen = origin(name, near or [copy for copy in copies if copy.place == first], self._load)
            self._load[chosen.node] = self._load.get(chosen.node, 0) + chosen.size_bytes
            unknown = Digest(chosen.size_bytes, "", _BLOCK_BYTES)
            out.append(Delivery(name, chosen.node, unknown, chosen, afresh=(chosen.node, name) in self._afresh))
        return out

    def _origin(self, name: str, nodes: Sequence[int]) -> Copy:
        """The copy that is read for nodes without one: a sound one if there is, else one that is checked anyway."""
        copies = self._copies[name]
        here = [copy for copy in copies if self._is_here(copy)] or copies
        sound = [copy for copy in here if copy in self._sound]
        own = [copy for copy in here if copy.node in nodes]
        return origin(name, sound or own or here, self._load)

    def _to_check(self, nodes: Sequence[int], source: Copy) -> list[Copy]:
        own = [copy for copy in self._copies[source.name] if copy.node in nodes and self._is_here(copy)]
        lacking = set(nodes) - {copy.node for copy in own}
        asked = dict.fromkeys([*own, *([source] if lacking else [])])
        return [copy for copy in asked if copy not in self._sound]

    def _doubtful(self, name: str) -> list[Copy]:
        """Copies nobody needs that differ from a sound one at either end: damaged, or of another save."""
        ends = {self._fast[copy] for copy in self._copies[name] if copy in self._sound and copy in self._fast}
        return [
            copy
            for copy in self._copies[name]
            if ends and copy in self._fast and copy not in self._sound and self._fast[copy] not in ends
        ]

    def _spread(self, open_: Mapping[str, Sequence[int]], origins: Mapping[str, Copy]) -> list[Delivery]:
        out: list[Delivery] = []
        for name, nodes in open_.items():
            sound = [copy for copy in self._copies[name] if copy in self._sound and self._is_here(copy)]
            out += spread(name, self._digest(name), nodes, sound, origins[name])
        return out

    def _digest(self, name: str) -> Digest:
        known = [self._sound[copy] for copy in self._copies[name] if copy in self._sound]
        return max(known, key=lambda digest: digest.block_bytes)

    def _refuse_contradictions(self, names: Iterable[str]) -> None:
        for name in names:
            sound = [copy for copy in self._copies[name] if copy in self._sound]
            if len({self._sound[copy].blake3 for copy in sound}) > 1:
                nodes = ", ".join(f"node {copy.node}" for copy in sound)
                raise UnableError(f"{name}: the copies on {nodes} are sound each, and differ: they are of two saves")

    # --- orders and answers

    def _deliver(self, deliveries: Sequence[Delivery]) -> Orders:
        self._refuse_full(deliveries)
        offered = tuple(d for d in deliveries if d.via == d.copy.node)
        if offered:
            yield Order("offer", self._step, deliveries=offered)
        answers = yield Order("deliver", self._step, deliveries=tuple(deliveries), urls=self._urls)
        came = {(answer.node, one.name): one for answer in answers for one in answer.delivered}
        failed = {key for key, one in came.items() if one.problem}
        for delivery in deliveries:
            one = came[delivery.node, delivery.name]
            if not one.problem:
                self._keep(delivery, one)
            elif (delivery.via, delivery.name) not in failed:  # else it is a consequence
                self._lose(delivery, one)

    def _keep(self, delivery: Delivery, one: Delivered) -> None:
        node, name = delivery.node, delivery.name
        source = delivery.copy
        whence = f"node {delivery.via} ({self._reports[delivery.via].host})" if delivery.via is not None else ""
        whence = whence or self._reports[node].places[source.place]
        self._from[node][name] = "kept from an earlier attempt" if one.how == "kept" else f"{one.how} from {whence}"
        if delivery.digest.is_known:
            self._have[node][name] = one
            return
        staged = Copy(node, self._staged(node), name, name, source.size_bytes)
        self._copies[name].append(staged)
        self._pulled[staged] = (source, one)

    def _hear(self, answers: Iterable[Answer]) -> None:
        for checked in (one for answer in answers for one in answer.checked):
            copy = checked.copy
            if checked.fast:
                self._fast[copy] = checked.fast
            if checked.problems:
                self._drop(copy, checked.problems)
            elif checked.digest is not None:
                self._sound[copy] = checked.digest
                if copy in self._pulled:
                    self._have[copy.node][copy.name] = self._pulled[copy][1]

    def _drop(self, copy: Copy, problems: Sequence[str]) -> None:
        """Does without a copy; a source that gave a bad one is the same for all nodes."""
        if (
            copy in self._pulled and self._pulled[copy][1].how == "kept"
        ):  # an earlier attempt's: the source may be sound
            self._afresh.add((copy.node, copy.name))
            self._copies[copy.name].remove(copy)
            return
        source = self._pulled[copy][0] if copy in self._pulled else copy
        report = self._reports[source.node]
        where = f"node {source.node} ({report.host}), {report.places[source.place]}"
        self._why.setdefault(copy.name, []).append(f"{where}: {'; '.join(problems)}")
        self.told.append(f"{where}: {'; '.join(problems)}")
        gone = {copy, source}
        if copy in self._pulled:
            same = report.places[source.place]
            gone |= {c for c in self._copies[copy.name] if self._place_of(c) == same and c.path == source.path}
        self._copies[copy.name] = [c for c in self._copies[copy.name] if c not in gone]
        for one in gone:
            self._sound.pop(one, None)

    def _place_of(self, copy: Copy) -> str:
        places = self._reports[copy.node].places
        return places[copy.place] if copy.place < len(places) else ""

    def _lose(self, delivery: Delivery, one: Delivered) -> None:
        problem = one.problem
        if delivery.via is not None:  # nodes know each other's addresses only
            giver = self._reports[delivery.via]
            problem = problem.replace(f"({giver.url})", f"({giver.host}, {giver.url})")
        message = f"node {delivery.node} ({self._reports[delivery.node].host}): {problem}"
        if one.unreachable:
            raise UnableError(message, Refusal("environment", message, _UNREACHABLE))
        self._drop(
            delivery.copy, [problem if delivery.via is None else f"{problem} (on its way to node {delivery.node})"]
        )

    def _refuse_full(self, deliveries: Sequence[Delivery]) -> None:
        """Raises if a node has too little room for what cannot be linked."""
        for node, report in self._reports.items():
            ours = [d for d in deliveries if d.node == node and (d.via is not None or not self._is_here(d.copy))]
            needed_bytes = sum(d.digest.size_bytes for d in ours)
            if needed_bytes > report.free_bytes:
                lacks = f"{needed_bytes} bytes are missing there, and {report.free_bytes} bytes are free"
                message = f"node {node} ({report.host}): {lacks}"
                raise UnableError(message, Refusal("environment", message, _FULL))

    def _gone(self, name: str) -> str:
        return f"{name}: no sound copy left ({'; '.join(self._why.get(name, ['no node has it']))})"
