"""Faults while a view is prepared on several nodes: what is done to them, and how the run then has to end.

Every kind says how a run may end; what holds for all of them is in ``view_trials``: it ends, with one clear message, and no
node is left with a view that is not whole, or with one that the others do not have.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ckptguard.testing.view_node import Plants
from ckptguard.testing.view_runs import CHECKPOINT, VIEW, VIEWS, Bench, Running

Ends = Literal["failure", "success", "older", "any", "failure or late"]
"""``failure``: on all nodes, none has the view; ``success``: all have the newest step; ``older``: all have the older one, and
the reason is told; ``any``: all the same of these; ``failure or late``: a failure, unless all have the view by then."""

LINK_MBIT = 60.0
HOUR = 3600.0
_ROOM_BYTES = 64 << 20
_ORDERS = (
    ("start", 1.5, 3), ("survey", 0.05, 1), ("check", 0.1, 2), ("offer", 0.05, 1), ("deliver", 1.5, 6), ("needs", 0.02, 1),
    ("publish", 0.03, 5), ("confirm", 0.02, 4), ("compare", 0.05, 1),
)  # fmt: skip
"""Orders at which a fault happens, within how many seconds of their begin, and how often."""


@dataclass(slots=True)
class Run:
    """One run of ``prepare`` and what is done to it.

    Attributes:
        bench: The nodes.
        rng: Chooses.
        victim: The node that it happens to.
        ends: How the run may end.
        words: Patterns that the message of every node that fails has to have; a node that fails for a reason of its own may
            lack the name of the node.
        own: Instead of those, patterns for the victim's message.
        notes: Patterns that the notes have to have where the run ends well.
        variant: What was chosen, in words.
        when: When it happened, as the victim's last order says; "" if it has not: then the run tells nothing.
        parted: Some nodes cannot hear each other, so that what they do at the end may differ.
        copies: Of each shard.
        plants: Faults inside processes.
        asked: By node, options that differ.
        absent: Nodes that are not started.
        mend: Undoes what was done, beside what is always undone.
        other: A second run at the same time.
    """

    bench: Bench
    rng: random.Random
    victim: int
    ends: Ends = "failure"
    words: tuple[str, ...] = ()
    own: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    variant: str = ""
    when: str = ""
    parted: bool = False
    copies: int = 1
    plants: dict[int, Plants] = field(default_factory=dict)
    asked: dict[int, dict[str, Any]] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    mend: list[Callable[[], object]] = field(default_factory=list)
    other: Running | None = None

    @property
    def node(self) -> str:
        """The victim as messages name it."""
        return rf"node {self.victim} (of {self.bench.count} )?\((node{self.victim}[,)]|\?\) failed: it did not come)"

    @property
    def newest(self) -> str:
        """Number of the newest step."""
        return self.bench.truth.newest

    def shard(self) -> str:
        """A shard of the newest step that the victim has."""
        own = [
            name for name in self.bench.truth.shards(self.newest) if self.victim in self.bench.owners(name, self.copies)
        ]
        return self.rng.choice(own)

    def source(self, name: str) -> Path:
        """The victim's file of that name."""
        return self.bench.path(self.victim, f"{CHECKPOINT}/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        share: Of 500 faults.
        before: Done before the nodes start.
        during: Done while they run; sets ``Run.when``.
        heals: A second prepare always follows.
    """

    share: int
    before: Callable[[Run], None]
    during: Callable[[Run, Running], None] | None = None
    heals: bool = False


# ---- nodes that die or freeze


def _signalled(run: Run, number: int, orders: tuple[tuple[str, float, int], ...] = _ORDERS) -> None:
    order, most, _ = run.rng.choices(orders, [weight for *_, weight in orders])[0]
    run.plants[run.victim] = Plants(order=order, after_seconds=run.rng.uniform(0, most), signal=number)
    run.variant = f"after the begin of {order}"
    run.ends = "failure or late"
    run.words = (run.node if run.victim else r"node 0|other nodes",)


def _kill(run: Run) -> None:
    _signalled(run, signal.SIGKILL)


def _freeze(run: Run) -> None:
    _signalled(run, signal.SIGSTOP)


def _kill_staging(run: Run) -> None:
    _signalled(run, signal.SIGKILL, (("deliver", 1.5, 1),))


def _own_signal(run: Run, running: Running) -> None:
    running.killed.add(run.victim)
    while not run.when and any(call.running() for node, call in running.calls.items() if node != run.victim):
        time.sleep(0.01)
        if "fault" in running.said(run.victim).splitlines():
            run.when = running.doing(run.victim)


def _absent(run: Run) -> None:
    run.absent.add(run.victim)
    for node in range(run.bench.count):
        run.asked[node] = {"timeout_seconds": 5.0}
    run.words = (rf"node {run.victim} of {run.bench.count} .*did not come",) if run.victim else (r"did not meet",)
    run.when = "never started"


# ---- links


def _any_link(run: Run) -> None:
    run.parted = True
    run.ends = "failure or late"
    run.words = (r"node \d",)


def _cut(run: Run, running: Running) -> None:
    order, most, _ = run.rng.choices(_ORDERS, [weight for *_, weight in _ORDERS])[0]
    run.variant = f"after the begin of {order}"
    if run.bench.wait_for(running, run.victim, order, run.rng.uniform(0, most)):
        run.bench.cluster.cut(run.bench.nodes[run.victim])
        run.when = running.doing(run.victim)


def _crawling(run: Run) -> None:
    _any_link(run)
    run.ends = "any"


def _crawl(run: Run, running: Running) -> None:
    """The link is bad for some seconds, then as it was: some runs outlast that, the others end."""
    cluster, node = run.bench.cluster, run.bench.nodes[run.victim]
    if not run.bench.wait_for(running, run.victim, run.rng.choice(("start", "deliver")), run.rng.uniform(0, 0.5)):
        return
    run.when = running.doing(run.victim)
    until = time.monotonic() + run.rng.uniform(2, 12)
    if run.rng.random() < 0.5:
        rate = run.rng.choice((0.05, 0.2, 1.0))
        run.variant = f"{rate} Mbit/s"
        cluster.slow(node, rate_mbit=rate)
        while time.monotonic() < until and running.calls[run.victim].running():
            time.sleep(0.02)
        cluster.slow(node, rate_mbit=LINK_MBIT)
        return
    run.variant = "comes and goes"
    while time.monotonic() < until and running.calls[run.victim].running():
        cluster.cut(node)
        time.sleep(run.rng.uniform(0.05, 0.8))
        cluster.join(node)
        time.sleep(run.rng.uniform(0.05, 0.8))


# ---- disks


def _small_disk(run: Run) -> None:
    whole = sum(map(len, run.bench.truth.steps[run.newest].values()))
    run.bench.disk(run.victim, int(whole * run.rng.uniform(0.05, 0.95)))
    run.words = (run.node, r"No space left|bytes are free")
    run.own = (r"No space left|bytes are free",)
    run.when = "from the beginning"


def _big_disk(run: Run) -> None:
    run.bench.disk(run.victim, _ROOM_BYTES)
    run.ends = "failure or late"
    run.words = (run.node, r"No space left|bytes are free")
    run.own = (r"No space left|bytes are free",)


def _fill(run: Run, running: Running) -> None:
    if not run.bench.wait_for(running, run.victim, run.rng.choice(("survey", "deliver")), run.rng.uniform(0, 1)):
        return
    at = running.doing(run.victim)
    with (run.bench.path(run.victim, VIEWS) / "filling").open("wb", buffering=0) as file:
        try:
            for size in (1 << 20, 4096, 1):
                while True:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        break
        finally:
            run.when = at


def _read_only(run: Run) -> None:
    run.bench.disk(run.victim, _ROOM_BYTES)
    node = run.bench.nodes[run.victim]
    done = node.run(["mount", "-o", "remount,ro", str(run.bench.place(run.victim, VIEWS))])
    assert not done.code, done.err
    run.words = (run.node, r"Read-only file system", VIEW)
    run.own = (r"Read-only file system", VIEW)
    run.when = "from the beginning"


def _garbage(run: Run) -> None:
    """What an earlier attempt might have left, and worse."""
    run.ends = "success"
    run.when = "from the beginning"
    staging = run.bench.path(run.victim, f"{VIEW}.d/.staging")
    for name, data in run.bench.truth.steps[run.newest].items():
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        match run.rng.randrange(7):
            case 0:
                path.write_bytes(run.rng.randbytes(len(data)))
            case 1:
                partial.write_bytes(run.rng.randbytes(run.rng.randrange(2 * len(data) + 1)))
            case 2:
                partial.write_bytes(data[: len(data) // 2] + run.rng.randbytes(len(data)))
            case 3:
                partial.symlink_to(run.source(name))
            case 4:
                path.symlink_to("/etc/hostname")
            case 5 if not path.name.startswith("."):
                partial.mkdir()
                (partial / "file").write_bytes(b"of somebody")
            case _:
                pass
    (staging / "iter_0000099").mkdir()
    (staging / "iter_0000099" / "left").write_bytes(b"left")


def _foreign(run: Run) -> None:
    view = run.bench.path(run.victim, VIEW)
    run.variant = run.rng.choice(
        ("a directory", "a file", "a symlink elsewhere", "a file for the versions", "dangling")
    )
    run.when = "from the beginning"
    run.words = (run.node, r"is a (directory|file|symbolic link)", VIEW)
    run.own = (r"is a (directory|file|symbolic link)", VIEW)
    match run.variant:
        case "a directory":
            view.mkdir()
            run.mend.append(view.rmdir)
        case "a file":
            view.write_text("mine")
        case "a symlink elsewhere":
            view.symlink_to(run.bench.place(run.victim, CHECKPOINT))
        case "a file for the versions":
            view = view.with_name(f"{view.name}.d")
            view.write_text("mine")
        case _:
            view.symlink_to(f"{view.name}.d/0000010-abcdef12")
            run.ends = "success"
            return
    if run.variant != "a directory":
        run.mend.append(view.unlink)


# ---- files


def _lost(run: Run, name: str) -> None:
    """A shard that the victim cannot give: another copy is taken, or the older step."""
    run.ends = "success" if run.copies > 1 else "older"
    run.notes = (name.rpartition("/")[2],)
    run.when = "from the beginning"


def _some_copies(run: Run) -> None:
    run.copies = run.rng.choice((1, 2))
    run.bench.lay_out(copies=run.copies)


def _damage(run: Run) -> None:
    _some_copies(run)
    name = run.shard()
    path = run.source(name)
    data = bytearray(path.read_bytes())
    run.variant = run.rng.choice(("a bit", "cut short", "zeros", "empty", "another shard's"))
    match run.variant:
        case "a bit":
            data[run.bench.truth.inside(name, run.rng)] ^= 1 << run.rng.randrange(8)
        case "cut short":
            del data[run.rng.randrange(1, len(data)) :]
        case "zeros":
            at = run.bench.truth.inside(name, run.rng)
            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        case "empty":
            data.clear()
        case _:
            others = [other for other in run.bench.truth.shards(run.newest) if other != name]
            data[:] = run.bench.truth.steps[run.newest][run.rng.choice(others)]
    path.write_bytes(data)
    _lost(run, name)


def _no_file(run: Run) -> None:
    _some_copies(run)
    name = run.shard()
    path = run.source(name)
    path.unlink()
    run.variant = run.rng.choice(("a directory", "a pipe", "leads nowhere", "leads out", "gone"))
    match run.variant:
        case "a directory":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "leads nowhere":
            path.symlink_to("nowhere")
        case "leads out":
            path.symlink_to("/etc/hostname")
        case _:
            pass
    _lost(run, name)
    if run.copies > 1 and run.variant in ("gone", "a directory"):
        run.notes = ()  # as if the node had never had it


def _no_permission(run: Run) -> None:
    _some_copies(run)
    name = run.shard()
    run.source(name).chmod(0)
    run.plants[run.victim] = Plants(powerless=True)
    _lost(run, name)


def _served(run: Run) -> None:
    _some_copies(run)
    run.ends = "any"
    run.words = (r"node \d",)
    run.own = ()


def _change(run: Run, running: Running) -> None:
    """A file that others are being given."""
    name = run.shard()
    path = run.source(name)
    run.variant = run.rng.choice(("cut short", "longer", "written over", "gone", "replaced"))
    if not run.bench.wait_for(
        running, run.victim, "deliver", run.rng.uniform(0, 0.5), times=run.rng.choice((1, 2, 3, 3, 3))
    ):
        return
    match run.variant:
        case "cut short":
            os.truncate(path, path.stat().st_size // 2)
        case "longer":
            with path.open("ab") as file:
                file.write(b"more")
        case "written over":
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"something else")
        case "gone":
            path.unlink()
        case _:
            other = path.with_name(".other")
            other.write_bytes(run.rng.randbytes(path.stat().st_size))
            other.replace(path)
    now = running.doing(run.victim)
    run.when = (
        now if now in ("check", "compare", "offer", "deliver", "needs") else ""
    )  # later it is the user's own view


# ---- servers


def _asked_wrongly(run: Run) -> None:
    run.plants[run.victim] = Plants(tells=str(run.bench.place(run.victim, "told")))
    run.ends = "success"


def _client(function: str) -> Callable[[Run, Running], None]:
    def during(run: Run, running: Running) -> None:
        told = run.bench.path(run.victim, "told")
        if not run.bench.wait_for(running, run.victim, run.rng.choice(("survey", "deliver"))):
            return
        said = json.loads(told.read_text())
        shard = run.shard()
        asker = run.rng.choice([node for node in range(run.bench.count) if node != run.victim])
        target = f"ckptguard.testing.view_faults:{function}"
        ended = run.bench.cluster.call(run.bench.nodes[asker], target, [said["url"], said["token"], shard]).wait()
        if ended.code == 0:
            run.when = running.doing(run.victim)
        elif ended.code != _GONE:
            run.when = "answered"
            run.ends = "failure"  # which it will not: what the client says is the miss
            run.variant = f"WRONG ANSWERS {ended.out}{ended.err}"

    return during


_GONE = 9


def _tries(url: str, tries: Mapping[str, tuple[str, Mapping[str, str]]], right: Mapping[str, tuple[int, ...]]) -> int:
    parts = urlsplit(url)
    wrong = 0
    for what, (target, headers) in tries.items():
        try:
            connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=5)
            connection.putrequest("GET", target, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            body = response.read(4096)
        except http.client.HTTPException:
            continue  # refused without an answer
        except OSError:
            return _GONE
        finally:
            connection.close()
        if response.status not in right[what] or b"root:" in body or b"iter_" in body:
            wrong += 1
            sys.stdout.write(f"{what}: {response.status} {body[:100]!r}\n")
    return min(wrong, 5)


def ask_without_token(url: str, token: str, shard: str) -> int:
    """A client that does not have the token; returns 0 if it gets nothing."""
    given = {
        "none": {}, "empty": {"Authorization": ""}, "other": {"Authorization": f"Bearer {'x' * len(token)}"},
        "begin": {"Authorization": f"Bearer {token[:-1]}"}, "longer": {"Authorization": f"Bearer {token}x"},
        "basic": {"Authorization": f"Basic {token}"}, "bare": {"Authorization": token},
    }  # fmt: skip
    targets = (f"/files/{shard}", "/state", "/files/../../etc/passwd", "/", f"/files/{shard}?token={token}")
    tries = {f"{name} {target}": (target, headers) for name, headers in given.items() for target in targets}
    return _tries(url, tries, dict.fromkeys(tries, (401,)))


def ask_for_more(url: str, token: str, shard: str) -> int:
    """A client that has the token and asks for what is not offered; returns 0 if it gets nothing."""
    headers = {"Authorization": f"Bearer {token}"}
    targets = (
        "/files/../../../../etc/passwd", "/files/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/files//etc/passwd", "/etc/passwd",
        "/files/iter_0000020/../../../etc/passwd", "/files/..%2f..%2fetc%2fpasswd", f"/files/{shard}%00", "/files/%00",
        f"/files/{shard}/../../latest_checkpointed_iteration.txt", "/files/", "/files", "/files/.", "/files/%2Fetc%2Fpasswd",
        f"/files/{shard}.partial", "/files/\\..\\etc", "/files/iter_0000010", "file:///etc/passwd", "//etc/passwd",
    )  # fmt: skip
    tries: dict[str, tuple[str, Mapping[str, str]]] = {target: (target, headers) for target in targets}
    return _tries(url, tries, dict.fromkeys(tries, (400, 404)))


def _other_token(run: Run) -> None:
    run.plants[run.victim] = Plants(token="of-another-run")
    run.words = (r"node \d+ \(node\d+\)|node \d+ of", r"does not accept the token")
    run.when = "from the beginning"


# ---- what nodes are told


def _clock(run: Run) -> None:
    ahead = run.rng.choice((HOUR, -HOUR))
    run.plants[run.victim] = Plants(clock_seconds=ahead)
    for path in run.bench.path(run.victim, CHECKPOINT).rglob("*"):
        moment = time.time() + ahead
        os.utime(path, (moment, moment))
    run.ends = "success"
    run.variant = f"{ahead:+g} s"
    run.when = "from the beginning"


def _other_step(run: Run) -> None:
    run.asked[run.victim] = {"step": run.bench.truth.oldest}
    run.words = (r"step", rf"node {run.victim}\b" if run.victim else r"node \d")
    run.own = (r"step",)
    run.when = "from the beginning"


def _other_places(run: Run) -> None:
    _some_copies(run)
    elsewhere = run.bench.path(run.victim, "elsewhere")
    run.variant = run.rng.choice(("empty", "not there"))
    if run.variant == "empty":
        elsewhere.mkdir()
    run.asked[run.victim] = {"places": [str(run.bench.place(run.victim, "elsewhere"))]}
    run.ends = "success" if run.copies > 1 and run.victim else "failure"  # node 0 alone has the index
    run.words = (r"\.metadata|\.distcp|no checkpoint",)
    run.when = "from the beginning"


def _two(run: Run) -> None:
    run.ends = "any"
    run.words = (r"is preparing",)


def _second(run: Run, running: Running) -> None:
    time.sleep(run.rng.uniform(0, 1))
    run.other = run.bench.start()
    run.when = running.doing(run.victim)


KINDS: Mapping[str, Kind] = {
    "killed": Kind(share=110, before=_kill, during=_own_signal),
    "killed staging": Kind(share=20, before=_kill_staging, during=_own_signal, heals=True),
    "frozen": Kind(share=40, before=_freeze, during=_own_signal),
    "never started": Kind(share=12, before=_absent),
    "link cut": Kind(share=45, before=_any_link, during=_cut),
    "link crawls": Kind(share=25, before=_crawling, during=_crawl),
    "disk too small": Kind(share=16, before=_small_disk),
    "disk fills up": Kind(share=20, before=_big_disk, during=_fill),
    "read-only": Kind(share=10, before=_read_only),
    "old garbage": Kind(share=16, before=_garbage),
    "foreign view": Kind(share=18, before=_foreign),
    "damaged": Kind(share=36, before=_damage),
    "no plain file": Kind(share=20, before=_no_file),
    "no permission": Kind(share=10, before=_no_permission),
    "changed": Kind(share=40, before=_served, during=_change),
    "no token": Kind(share=8, before=_asked_wrongly, during=_client("ask_without_token")),
    "escapes": Kind(share=8, before=_asked_wrongly, during=_client("ask_for_more")),
    "other token": Kind(share=8, before=_other_token),
    "clock": Kind(share=8, before=_clock),
    "other step": Kind(share=8, before=_other_step),
    "other places": Kind(share=10, before=_other_places),
    "two at once": Kind(share=12, before=_two, during=_second),
}
"""All kinds, by name."""
