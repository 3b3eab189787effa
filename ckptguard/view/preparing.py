"""``prepare`` and ``status``: one call per node; node 0 leads, every node does what it is told, and all end the same way.

::

    survey -> choose -> index and common state -> needs -> check, deliver -> publish -> confirm -> end

Orders and answers go through the store of torch.distributed (``engine.peers``), which also tells when a node dies or falls
silent; files go through an HTTP server on each node. A view that was published and not confirmed is taken back by every node
that is left (docs/design/011-views.md).
"""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ckptguard.core.errors import DamagedError, EnvironmentFailedError, UsageError
from ckptguard.engine.peers import Peers, Terms, barrier, joined
from ckptguard.engine.ranks import World
from ckptguard.engine.workers import SILENT, Progress
from ckptguard.formats.remote import RemotePath, path_of
from ckptguard.layout.layouts import Layout
from ckptguard.view.checking import check
from ckptguard.view.choosing import Candidate
from ckptguard.view.directing import Outcome, Wanted, Work, direct, error_of
from ckptguard.view.fetching import ask_state
from ckptguard.view.messages import packed, unpacked
from ckptguard.view.needs import needed
from ckptguard.view.nodes import Nodes
from ckptguard.view.orders import Answer, Order
from ckptguard.view.publishing import Site, Version
from ckptguard.view.records import read_record
from ckptguard.view.server import Server, Stamp
from ckptguard.view.staging import deliver
from ckptguard.view.survey import number_of, survey
from ckptguard.view.values import Agreement, Checked, Copy, Delivered, Delivery, Needs, NodeReport

_AGAIN = "Put right what it names, then run the same command again on all nodes: files that have come are kept."
_MOST_SILENCE_SECONDS = 20.0
_SETTLE_SECONDS = 5.0
_ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one node is asked to prepare. All nodes are given the same, but for ``nodes``.

    Attributes:
        places: CKPT_DIR, then further paths and URLs.
        nodes: Which node this is, of which; and the ranks on each.
        view: Where the view is to stand; not needed for ``status``.
        step: The only step wanted: a number or ``release``.
        layout: The layout that training will load it under; None for the one it was saved with.
        timeout_seconds: For all nodes to come, and three times the silence after which a node is given up.
        wait_seconds: For files that a network file system does not show yet.
        threads: For checking and moving; by default as many as cores.
        dry_run: Move nothing but the index, into a temporary directory.
    """

    places: tuple[str, ...]
    nodes: Nodes
    view: Path | None = None
    step: str | None = None
    layout: Layout | None = None
    timeout_seconds: float = 60.0
    wait_seconds: float = 10.0
    threads: int | None = None
    dry_run: bool = False

    @property
    def silence_seconds(self) -> float:
        """Without a sign of life, after which a node is given up."""
        return min(_MOST_SILENCE_SECONDS, self.timeout_seconds / 3)


@dataclass(frozen=True, slots=True)
class Result:
    """What it came to, seen from one node.

    Attributes:
        agreement: What was agreed; None only from ``status``.
        view: The published view; None in a dry run and from ``status``.
        delivered: How the files of this node came.
        notes: What people should know, in sentences.
        reports: What each node found; node 0 only.
        candidates: The steps, newest first; node 0 only.
        needs: Which files each node reads; node 0 only.
        planned: In a dry run, what would be moved; node 0 only.
    """

    agreement: Agreement | None
    view: Path | None = None
    delivered: tuple[Delivered, ...] = ()
    notes: tuple[str, ...] = ()
    reports: tuple[NodeReport, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    needs: Needs | None = None
    planned: tuple[Delivery, ...] = ()


def prepare(options: Options, progress: Progress = SILENT) -> Result:
    """Makes every node have, under one path, the files that its ranks will read; run on every node at once.

    To be called in the main thread.

    Raises:
        UsageError: The options contradict each other or what stands where the view is to be.
        NotFoundError: No node has any checkpoint.
        DamagedError: No step can be made whole; says why for each.
        EnvironmentFailedError: A node failed, fell silent or did not come, the network broke, a disk is full. On every node.
    """
    if options.view is None:
        raise UsageError("no path for the view is given", next_step="Give one with --view.")
    with _met(options, f"prepare{' --dry-run' if options.dry_run else ''}") as peers, ExitStack() as stack:
        site = Site(options.view)  # only now: the other nodes hear what is wrong with it
        site.refuse_places(options.places)
        sees = _who_shares(site, peers, stack) if not options.dry_run else (peers.world.rank,)
        leads = min(sees) == peers.world.rank
        if options.dry_run:
            staging = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptguard-")))
        else:
            staging = site.staging
            if leads:
                stack.enter_context(site.hold())
        token = _token(peers)
        server = stack.enter_context(Server(options.nodes.address, token))
        notes = site.recover() if leads and not options.dry_run else ()
        worker = _Worker(options, site, server, staging, token, sees, progress, notes)
        try:
            return _follow(options, peers, worker, survey_only=False)
        except BaseException:
            peers.undisturbed()  # another node's end must not stop this half-way
            worker.settle()
            raise


def status(options: Options, progress: Progress = SILENT) -> Result:
    """The survey and the choice alone: what each node has, and which steps could be made whole. Nothing is written.

    Raises:
        EnvironmentFailedError: As ``prepare``.
    """
    with _met(options, "status") as peers:
        return _follow(options, peers, _Surveyor(options, progress), survey_only=True)


@contextmanager
def _met(options: Options, doing: str) -> Iterator[Peers]:
    nodes = options.nodes
    world = World(nodes.number, nodes.count, 1, nodes.rendezvous, nodes.rendezvous.partition("://")[2])
    terms = Terms(options.timeout_seconds, options.silence_seconds, "node", _AGAIN)
    with joined(world, terms) as peers:
        _refuse_differing(options, doing, peers)
        yield peers


def _refuse_differing(options: Options, doing: str, peers: Peers) -> None:
    """Raises UsageError where a node is asked for something else than node 0: a part of it would be prepared, not all."""
    layout = str(options.layout or "")
    own = {"command": doing, "--step": options.step or "", "layout": layout}
    first = json.loads(_word(peers, "options", json.dumps(own)))
    for what, value in own.items():
        if value != first[what]:
            node = f"node {peers.world.rank} ({options.nodes.host})"
            raise UsageError(
                f"{what} is {value or 'not given'} on {node}, and {first[what] or 'not given'} on node 0",
                next_step="Run the same command on all nodes.",
            )


def _who_shares(site: Site, peers: Peers, stack: ExitStack) -> tuple[int, ...]:
    """The nodes whose views would stand in the same directory as this one's: they act as one."""
    run_id = _word(peers, "run", secrets.token_hex(8))
    site.put_probe(run_id, peers.world.rank)
    stack.callback(site.remove_probe, run_id, peers.world.rank)
    barrier(peers, "probes are there")
    sees = site.probes(run_id)
    barrier(peers, "probes were read")
    return tuple(sorted({*sees, peers.world.rank}))


def _token(peers: Peers) -> str:
    return _word(peers, "token", secrets.token_urlsafe(32))


def _word(peers: Peers, key: str, text: str) -> str:
    """Node 0's text, on every node."""
    if peers.world.first:
        peers.tell(key, text)
        return text
    return peers.hear(key)


def _follow(options: Options, peers: Peers, worker: _Surveyor, *, survey_only: bool) -> Result:
    """Does what node 0 orders until the end; on node 0, has it direct."""
    ranks = sum(len(own) for own in options.nodes.ranks.values()) or None
    made = datetime.now(UTC).isoformat(timespec="seconds")
    step = None if options.step is None else number_of(options.step)
    wanted = Wanted(secrets.token_hex(4), made, step, ranks, options.dry_run, survey_only)
    directing = direct(wanted) if peers.world.first else None
    answers: tuple[Answer, ...] | None = None
    number = 0
    while True:
        if directing is not None:
            order = next(directing) if answers is None else directing.send(answers)
            if order.verb == "confirm":
                worker.decide()
            peers.tell(f"order/{number}", packed(order))
        else:
            order = unpacked(Order, peers.hear(f"order/{number}"))
        if order.verb == "end":
            peers.undisturbed()  # it is decided
            break
        answers = _answers(peers, number, worker, order)
        number += 1
    outcome = _outcome_of(directing)
    if order.refusal is not None:
        raise error_of(order.refusal)
    return worker.result(order, outcome)


def _answers(peers: Peers, number: int, worker: _Surveyor, order: Order) -> tuple[Answer, ...]:
    """Carries an order out; on node 0, returns the answers of all, in the order of the nodes.

    Node 0 confirms last: should it die, what it leaves confirmed is confirmed everywhere.
    """
    world = peers.world

    def do() -> Answer:
        with peers.moving(
            worker.progress
        ) as watched:  # a disk or a file server that hangs must not hold the others for ever
            return worker.do(order, watched)

    own = do() if order.verb != "confirm" or not world.first else None
    if not world.first:
        peers.tell(f"answer/{number}/{world.rank}", packed(own))
        return ()
    others = [unpacked(Answer, peers.hear(f"answer/{number}/{node}")) for node in range(1, world.size)]
    return (own or do(), *others)


def _outcome_of(directing: Work | None) -> Outcome | None:
    if directing is None:
        return None
    try:
        directing.send(())
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
    raise AssertionError("an order after the end")


def _made_from(version: Version, place: str) -> bool:
    """Whether a version is of the run that saves there: another run's may hold a step of the same number."""
    try:
        return read_record(version.path).agreement.places[:1] == (place,)
    except DamagedError:
        return False


class _Surveyor:
    """What a node does for ``status``: it looks, and changes nothing."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self.progress = progress
        self.node = options.nodes.number
        self._looked_at = options.places

    def do(self, order: Order, progress: Progress) -> Answer:
        """Carries an order out."""
        assert order.verb == "survey", order
        return Answer(self.node, report=self._look())

    def decide(self) -> None:
        """On node 0, before any node is told to confirm."""

    def result(self, order: Order, outcome: Outcome | None) -> Result:
        """What it came to."""
        if outcome is None:
            return Result(order.agreement, notes=order.notes)
        return Result(
            order.agreement,
            notes=order.notes,
            reports=outcome.reports,
            candidates=outcome.candidates,
            needs=outcome.needs,
            planned=outcome.planned,
        )

    def _look(self) -> NodeReport:
        options = self._options
        return survey(
            self.node, options.nodes.host, self._looked_at, step=options.step, wait_seconds=options.wait_seconds
        )


class _Worker(_Surveyor):
    """What a node does for ``prepare``."""

    def __init__(
        self,
        options: Options,
        site: Site,
        server: Server,
        staging: Path,
        token: str,
        sees: tuple[int, ...],
        progress: Progress,
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(options, progress)
        self._site, self._server, self._staging, self._token, self._sees = site, server, staging, token, sees
        self._notes = notes
        if (earlier := site.current()) is not None and _made_from(earlier, options.places[0]):
            self._looked_at = (*options.places, str(earlier.path))
        self._urls: Mapping[int, str] = {}
        self._stamps: dict[Copy, Stamp] = {}
        self._delivered: dict[str, Delivered] = {}
        self._version: Version | None = None
        self._decided = False

    @property
    def _places(self) -> tuple[str, ...]:
        """Where it looks, and the staging directory as the last one."""
        return (*self._looked_at, str(self._staging))

    def do(self, order: Order, progress: Progress) -> Answer:
        """Carries this node's part of an order out."""
        if order.verb == "survey":
            return Answer(self.node, report=self._look())
        if order.verb == "needs":
            return Answer(self.node, needs=self._needs(order) if self.node == 0 else None)
        if order.verb in ("check", "compare"):
            return Answer(self.node, checked=self._check(order, progress))
        if order.verb == "offer":
            self._offer(order)
        elif order.verb == "deliver":
            return Answer(self.node, delivered=self._deliver(order, progress))
        elif order.verb == "publish":
            self._publish(order)
        elif order.verb == "confirm":
            self._confirm()
        return Answer(self.node)

    def _look(self) -> NodeReport:
        """As of the base; an earlier version of the view is a place too, but its trackers say nothing of what is wanted."""
        given = len(self._options.places)
        report = super()._look()
        trackers = {where: said for where, said in report.trackers.items() if int(where.partition(":")[0]) < given}
        return replace(
            report,
            trackers=trackers,
            url=self._server.url,
            free_bytes=self._site.free_bytes(),
            earlier=given if len(self._looked_at) > given else None,
            sees=self._sees,
            notes=(*self._notes, *report.notes),
        )

    def result(self, order: Order, outcome: Outcome | None) -> Result:
        """As of the base, with what this node published and how its files came."""
        view = None if self._options.dry_run else self._site.view
        delivered = tuple(self._delivered.values())
        return replace(super().result(order, outcome), view=view, delivered=delivered)

    def _needs(self, order: Order) -> Needs:
        assert order.step is not None
        nodes = self._options.nodes
        ranks = {node: nodes.ranks.get(node, ()) for node in range(nodes.count)}
        return needed(self._staging, order.step, ranks=ranks, layout=self._options.layout, names=order.names)

    def _check(self, order: Order, progress: Progress) -> tuple[Checked, ...]:
        own = [copy for copy in order.copies if copy.node == self.node]
        for copy in own:
            self._stamp(copy)
        assert order.step is not None
        whole = order.verb == "check"
        checked = check(
            own,
            self._places,
            step=order.step,
            staged=self._staging,
            digests=whole,
            progress=progress,
            threads=self._options.threads,
        )
        return tuple(checked)

    def _stamp(self, copy: Copy) -> None:
        """Remembers what a file on a disk is before it is read, so that a change after that is noticed."""
        place = path_of(self._places[copy.place])
        if not isinstance(place, RemotePath):
            try:
                self._stamps[copy] = Stamp.of((place / copy.path).resolve(strict=True))
            except OSError:
                self._stamps.pop(copy, None)  # checking says what is wrong with it

    def _offer(self, order: Order) -> None:
        for delivery in order.deliveries:
            if delivery.via == self.node == delivery.copy.node:
                path = path_of(self._places[delivery.copy.place]) / delivery.copy.path
                self._server.offer(delivery.name, path, delivery.digest, self._stamps.get(delivery.copy))

    def _deliver(self, order: Order, progress: Progress) -> tuple[Delivered, ...]:
        own = [delivery for delivery in order.deliveries if delivery.node == self.node]
        came = deliver(
            own,
            node=self.node,
            places=self._places,
            staging=self._staging,
            server=self._server,
            urls=order.urls,
            token=self._token,
            progress=progress,
            threads=self._options.threads,
            timeout_seconds=self._options.silence_seconds,
            stamps=self._stamps,
        )
        self._urls = order.urls
        self._delivered |= {one.name: one for one in came}
        return tuple(came)

    def _publish(self, order: Order) -> None:
        assert order.agreement is not None
        if self.node in order.agreement.origins:
            self._refuse_changed(order.agreement.origins[self.node])
            version = self._site.finish(order.agreement, self.node)
            self._version = version
            version.publish()
        self._server.state = "published"

    def _refuse_changed(self, names: Iterable[str]) -> None:
        """A linked file that is written to is written to in the view too: better not to publish it at all."""
        if changed := self._server.changed(names):
            raise EnvironmentFailedError(
                f"{self._staging / changed[0]}: changed since it was checked: something writes to the checkpoint",
                next_step=f"Find what does. {_AGAIN}",
            )

    def decide(self) -> None:
        """From here on this node keeps what it has published, and says so to nodes that ask.

        Raises:
            EnvironmentFailedError: A node has asked before, and has taken its own back.
        """
        if not self._server.settle("confirmed", unless_told="published"):
            raise EnvironmentFailedError("another node gave this one up before it could confirm", next_step=_AGAIN)
        self._decided = True

    def _confirm(self) -> None:
        if not self._decided:
            self.decide()
        if self._version is not None:
            self._version.confirm()

    def settle(self) -> None:
        """After a failure: keeps a published view only if some node has decided so, which none does before all have it."""
        if self._decided:
            self._confirm()
            time.sleep(_SETTLE_SECONDS)  # others may have to ask
        elif self._version is None:
            return
        elif self._server.state == "published" and self._was_confirmed_elsewhere():
            self._version.confirm()
        else:
            self._version.withdraw()

    def _was_confirmed_elsewhere(self) -> bool:
        said: dict[int, str] = {}

        def ask(node: int, url: str) -> None:
            try:
                said[node] = ask_state(url, self._token, _ASK_SECONDS)
            except EnvironmentFailedError:
                said[node] = ""

        asking = [threading.Thread(target=ask, args=item, daemon=True) for item in self._others()]
        for thread in asking:
            thread.start()
        until = time.monotonic() + _SETTLE_SECONDS
        for thread in asking:
            thread.join(max(0.0, until - time.monotonic()))
        return "confirmed" in said.values()

    def _others(self) -> Sequence[tuple[int, str]]:
        return [(node, url) for node, url in self._urls.items() if node != self.node]
