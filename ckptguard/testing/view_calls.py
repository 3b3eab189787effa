"""Functions that run on simulated nodes, all at once, and what they tell in the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptguard.testing.nodes import Call, Cluster, Ended, Node
from ckptguard.view.nodes import Nodes
from ckptguard.view.preparing import Options

PRELOAD = ("ckptguard.testing.view_calls:imported",)
"""For the :class:`Cluster`: what a command imports before it does anything."""
PORT = 29511
SECONDS = 170.0
POLL_SECONDS = 0.002


def imported() -> None:
    """Imports what the nodes will need."""
    import aiohttp.web  # noqa: F401
    import torch.distributed  # noqa: F401


def all_at_once(cluster: Cluster, target: str, args: Sequence[Any], ckpt: str) -> list[dict[str, Any]]:
    """Runs a function on every node.

    Args:
        cluster: The nodes.
        target: ``package.module:function``. It is given the arguments, its node, and the name of a file that appears when all
            of them run.
        args: As plain as JSON.
        ckpt: Name of the checkpoint's directory on each node.
    """
    cluster.warm()
    go = fresh(cluster, "go")
    calls = [cluster.call(node, target, [*args, _described(cluster, node, ckpt), str(go)]) for node in cluster.nodes]
    time.sleep(0.5)  # until the last of them waits
    go.touch()
    return [answer_of(call.wait(SECONDS)) for call in calls]


def _described(cluster: Cluster, node: Node, ckpt: str) -> dict[str, Any]:
    return {
        "number": node.number, "count": len(cluster.nodes), "first": cluster.nodes[0].address, "address": node.address,
        "host": node.host, "ckpt": str(node.place(ckpt)), "view": str(node.place("views") / "view"),
    }  # fmt: skip


def options_of(node: Mapping[str, Any], *, dry_run: bool) -> Options:
    """What a node is asked, as ``all_at_once`` describes it. Its ranks are not known, so it needs all files."""
    meeting = f"tcp://{node['first']}:{PORT}"
    ranks = dict.fromkeys(range(node["count"]), ())
    nodes = Nodes(
        number=node["number"], count=node["count"], ranks=ranks, rendezvous=meeting, address=node["address"],
        host=node["host"],
    )  # fmt: skip
    return Options(places=(node["ckpt"],), nodes=nodes, view=Path(node["view"]), dry_run=dry_run)


def answer_of(ended: Ended) -> dict[str, Any]:
    """What a function said on its node.

    Raises:
        RuntimeError: It failed.
    """
    refuse_failed(ended)
    answer: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return answer


def await_file(path: Path) -> None:
    """Returns once it is there."""
    while not path.exists():
        time.sleep(POLL_SECONDS)


def fresh(cluster: Cluster, name: str) -> Path:
    """A path of the cluster's, outside the nodes, where nothing is."""
    path = cluster.workdir / name
    path.unlink(missing_ok=True)
    return path


def tell(path: Path, text: str) -> None:
    """Whoever waits for the file finds all of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)


def told_in(path: Path, call: Call) -> str:
    """What a process tells in a file."""
    while not path.exists():
        if not call.running():
            refuse_failed(call.wait())
        time.sleep(POLL_SECONDS)
    return path.read_text()


def refuse_failed(ended: Ended) -> None:
    """Raises RuntimeError with what a process complained about, unless it ended well."""
    if ended.code:
        raise RuntimeError(f"exit code {ended.code}: {ended.err}")


def say(**values: Any) -> None:
    """On a node: what ``answer_of`` will find."""
    sys.stdout.write(json.dumps(values) + "\n")
