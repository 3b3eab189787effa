"""One fault, one run of ``prepare``: how it ended, what it left on the nodes, and everything that is wrong with that.

Whatever the fault: every process ends in time, with an exit code of ours and one message; a view is whole or absent, or the one
from before; the nodes that are left agree; and once the nodes are well, the next prepare gives all of them the view.
"""

from __future__ import annotations

import queue
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptguard.core.errors import ExitCode
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.view_faults import KINDS, LINK_MBIT, Run
from ckptguard.testing.view_node import PRELOAD
from ckptguard.testing.view_runs import VIEW, Bench, Running, Seen, Truth

_GOOD_CODES = (ExitCode.OK, ExitCode.USAGE, ExitCode.DAMAGED, ExitCode.ENVIRONMENT)
_MOST_LINES = 20
_ATTEMPTS = 5
_HEALS_EVERY = 3
_HAS_ONE_BEFORE = 0.25
_SLACK_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of a fault.

    Attributes:
        number: Of the trial.
        kind: Of the fault.
        variant: What was chosen.
        nodes: How many there were.
        victim: To which it happened.
        when: During which order of the victim.
        seconds: From the start of the nodes to the end of the last.
        codes: Exit codes by node; negative: the signal.
        came: In a word: ``failure``, ``success``, ``older``, ``parted``.
        left: A killed node has a whole, unconfirmed view that the others have taken back.
        alone: A killed node has a confirmed one that they have not.
        healed: The next prepare, of healed nodes, was looked at too.
        attempts: Until the fault happened while the run was on.
        wrong: Everything that is wrong.
        messages: Last words, where something is wrong.
    """

    number: int
    kind: str
    variant: str
    nodes: int
    victim: int
    when: str
    seconds: float
    codes: dict[int, int]
    came: str
    left: bool
    alone: bool
    healed: bool
    attempts: int
    wrong: list[str]
    messages: list[str]


def trials(
    kinds: Sequence[str],
    truth: Truth,
    scratch: Path,
    *,
    seed: int,
    jobs: int,
    nodes: int,
    timeout_seconds: float = 12.0,
) -> Iterator[Row]:
    """Faults, several runs at a time, each on nodes of its own; rows as they come.

    Args:
        kinds: Keys of ``KINDS``.
        truth: The checkpoint.
        scratch: An empty directory.
        seed: Of all choices.
        jobs: So many runs at a time.
        nodes: The most in a run.
        timeout_seconds: As of ``Options``.
    """
    todo: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    done: queue.SimpleQueue[Row | BaseException] = queue.SimpleQueue()
    for item in enumerate(kinds):
        todo.put(item)

    def work(folder: Path) -> None:
        try:
            with Cluster(nodes, workdir=folder, kind="namespaces", preload=PRELOAD) as cluster:
                cluster.warm()
                while True:
                    number, kind = todo.get_nowait()
                    done.put(trial(cluster, truth, number, kind, seed, timeout_seconds=timeout_seconds))
        except queue.Empty:
            return
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.put(error)

    threads = [threading.Thread(target=work, args=(scratch / f"job{job}",), daemon=True) for job in range(jobs)]
    for thread in threads:
        thread.start()
    for _ in kinds:
        row = done.get()
        if isinstance(row, BaseException):
            raise row
        yield row
    for thread in threads:
        thread.join()


def trial(cluster: Cluster, truth: Truth, number: int, kind: str, seed: int, *, timeout_seconds: float = 12.0) -> Row:
    """One fault; tried again with other choices where the run was over before it happened.

    Args:
        cluster: Nodes; the trial takes two to all of them.
        truth: The checkpoint.
        number: Of the trial.
        kind: Key of ``KINDS``.
        seed: Of all choices, together with the number.
        timeout_seconds: As of ``Options``.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        rng = random.Random(f"{seed}/{number}/{kind}/{attempt}")
        count = rng.choice(range(2, len(cluster.nodes) + 1))
        bench = Bench(cluster, truth, f"run{number}-{attempt}", count, timeout_seconds=timeout_seconds)
        one = _Trial(bench, rng, number, kind)
        try:
            row = one.go(attempt)
        finally:
            one.mend()
            bench.clean()
        if row.when or row.wrong:
            break
    else:
        row.wrong.append(f"the fault did not happen in {_ATTEMPTS} runs")
    return row


class _Trial:
    """One run with a fault."""

    def __init__(self, bench: Bench, rng: random.Random, number: int, kind: str) -> None:
        self.bench, self.number, self.kind = bench, number, kind
        self.run = Run(bench, rng, rng.randrange(bench.count))
        self.wrong: list[str] = []
        self.before: dict[int, Seen] = {}

    def go(self, attempt: int) -> Row:
        """Runs it and judges it."""
        run, kind, bench = self.run, KINDS[self.kind], self.bench
        for node in bench.nodes:
            bench.cluster.slow(node, rate_mbit=LINK_MBIT)
        bench.lay_out()
        if run.rng.random() < _HAS_ONE_BEFORE and self.kind in _CAN_HAVE_ONE:
            self._first_view()
        kind.before(run)
        self.before = {node: bench.seen(node) for node in range(bench.count)}
        began = time.monotonic()
        started = [node for node in range(bench.count) if node not in run.absent]
        running = bench.start(run.plants, nodes=started, asked=run.asked)
        if kind.during is not None:
            kind.during(run, running)
        bench.wait(running)
        if run.other is not None:
            bench.wait(run.other)
        seconds = time.monotonic() - began
        came, left, alone = self._judge(running) if run.when else ("", False, False)
        heals = bool(run.when) and (left or kind.heals or self.number % _HEALS_EVERY == 0)
        if heals:
            self._heal()
        ends = [*running.ends.items(), *(run.other.ends.items() if run.other else ())]
        messages = [f"node {node}: {(end.out + end.err)[-1500:]}" for node, end in ends] if self.wrong else []
        return Row(
            number=self.number, kind=self.kind, variant=run.variant, nodes=bench.count, victim=run.victim, when=run.when,
            seconds=round(seconds, 2), codes=running.codes(), came=came, left=left, alone=alone, healed=heals,
            attempts=attempt, wrong=self.wrong, messages=messages,
        )  # fmt: skip

    def mend(self) -> None:
        """Puts links, disks and paths right."""
        bench, run = self.bench, self.run
        for node in bench.nodes:
            bench.cluster.kill(node)
            bench.cluster.join(node)
            bench.cluster.slow(node, rate_mbit=LINK_MBIT)
        bench.remove_disks()
        while run.mend:
            run.mend.pop()()

    def _first_view(self) -> None:
        running = self.bench.prepare(step=self.bench.truth.oldest)
        if any(running.codes().values()):
            self.wrong += [f"the view before: {end.err}" for end in running.ends.values() if end.code]

    # --- judging

    def _judge(self, running: Running) -> tuple[str, bool, bool]:
        bench = self.bench
        seen = {node: bench.seen(node) for node in range(bench.count)}
        alive = [node for node in running.ends if node not in running.killed]
        self.wrong += [f"node {node} hangs in {running.doing(node)}" for node in running.hung]
        self.wrong += bench.torn + [text for one in seen.values() for text in one.wrong]
        self._judge_ends(running, alive)
        fresh = {node for node, one in seen.items() if one.id and one.id != self.before[node].id}
        for node in set(seen) - fresh:
            if seen[node].id != self.before[node].id:
                self.wrong.append(f"node {node}: the view from before is gone")
        self.wrong += [f"node {n}: its view is not confirmed" for n in alive if n in fresh and not seen[n].confirmed]
        came = self._came(running, alive, seen, fresh)
        lone = [n for n in running.killed if n in fresh and not fresh.intersection(alive)]
        left = any(not seen[node].confirmed for node in lone)
        alone = any(seen[node].confirmed for node in lone)
        if alone:
            self.wrong.append("a killed node has a confirmed view that the others have not")
        self._judge_came(running, came)
        return came, left, alone

    def _came(self, running: Running, alive: Sequence[int], seen: dict[int, Seen], fresh: set[int]) -> str:
        """How the run ended for the nodes that are left; notes where they do not agree."""
        run = self.run
        have = fresh.intersection(alive)
        if have and have != set(alive):
            if not run.parted or ExitCode.OK in running.codes().values():
                self.wrong.append(f"only {sorted(have)} of the nodes {sorted(alive)} have the view")
            return "parted"
        if len({seen[node].id for node in have}) > 1:
            self.wrong.append("the views are of different agreements")
        ended_well = [node for node in alive if running.ends[node].code == 0]
        if ended_well and not have and run.other is None:
            self.wrong.append(f"nodes {ended_well} ended well without the view")
        if not have:
            return "failure"
        return "success" if {seen[node].step for node in have} == {run.newest} else "older"

    def _judge_came(self, running: Running, came: str) -> None:
        run = self.run
        may = {
            "failure": {"failure"}, "success": {"success"}, "older": {"older"}, "any": {"failure", "success", "older"},
            "failure or late": {"failure", "success"},
        }[run.ends]  # fmt: skip
        may |= {"parted"} if run.parted else set()
        if came not in may:
            self.wrong.append(f"ended as {came}, expected {run.ends}")
        codes = {end.code for node, end in running.ends.items() if node not in running.killed}
        if run.ends in ("success", "older") and codes != {0}:
            self.wrong.append(f"ended with {codes}")
        if came in ("success", "older") and codes == {0} and (came == "older" or run.notes):
            notes = "\n".join(running.told(min(running.ends))["notes"])
            self.wrong += [f"no note says {text}: {notes}" for text in run.notes if not re.search(text, notes)]
            if not notes:
                self.wrong.append("the older step was taken without a word")

    def _judge_ends(self, running: Running, alive: Sequence[int]) -> None:
        ends = [(node, running.ends[node]) for node in alive if node not in running.hung]
        if self.run.other is not None:
            ends += self.run.other.ends.items()
        for node, end in ends:
            if end.code not in _GOOD_CODES:
                self.wrong.append(f"node {node}: exit code {end.code}")
            if "Traceback" in end.err or len(end.err.splitlines()) > _MOST_LINES:
                self.wrong.append(f"node {node}: no one clear message: {end.err[-1500:]}")
            if not end.code:
                self.wrong += [f"node {node}: printed {end.err[-500:]}"] if end.err else []
                continue
            run = self.run
            words = run.own if run.own is not None and node == run.victim else run.words
            self.wrong += [f"node {node}: no {text!r} in: {end.err}" for text in words if not re.search(text, end.err)]
            if len(end.err.splitlines()) < 2:
                self.wrong.append(f"node {node}: no next step: {end.err}")

    # --- the next prepare

    def _heal(self) -> None:
        bench, run = self.bench, self.run
        self.mend()
        bench.lay_out(copies=run.copies)
        missing = {node: bench.missing_bytes(node, run.newest) for node in range(bench.count)}
        running = bench.prepare()
        self.wrong += [f"next prepare: node {node}: {end.err}" for node, end in running.ends.items() if end.code]
        self.wrong += [f"next prepare: node {node} hangs" for node in running.hung]
        if any(running.codes().values()):
            return
        seen = [bench.seen(node) for node in range(bench.count)]
        self.wrong += [f"next prepare: {text}" for one in seen for text in one.wrong]
        if {(one.step, one.confirmed) for one in seen} != {(run.newest, True)} or len({one.id for one in seen}) != 1:
            self.wrong.append(f"next prepare: {[(one.step, one.id, one.confirmed) for one in seen]}")
        for node in range(bench.count):
            moved = sum(count for _, _, count in running.told(node)["delivered"])
            if moved > missing[node] * 1.01 + _SLACK_BYTES:
                self.wrong.append(f"next prepare: node {node} moved {moved} bytes where {missing[node]} were missing")
        left = [path.name for node in range(bench.count) for path in bench.path(node, VIEW).parent.glob(".view.next")]
        self.wrong += [f"next prepare: {name} is left" for name in left]


_CAN_HAVE_ONE = frozenset(KINDS) - {
    "disk too small",
    "disk fills up",
    "read-only",
    "foreign view",
    "old garbage",
    "other places",  # the older step would be whole by that view
}
