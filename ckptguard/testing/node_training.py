"""Megatron-LM's own training on simulated nodes: every rank a fork of a process that has imported Megatron."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptguard.testing.nodes import Cluster, Ended
from ckptguard.testing.recipes import Recipe

PRELOAD = ("ckptguard.testing.node_training:prepare",)
"""For the :class:`Cluster` in which is trained."""

_PORT = 29400
_TIMEOUT_SECONDS = 150.0
_LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+)")


def prepare() -> None:
    """Stand-ins and imports, for the process that forks ranks."""
    from ckptguard.testing import cpu_stand_in

    cpu_stand_in.install()
    for name in ("megatron.training", "megatron.training.arguments", "megatron.training.argument_utils"):
        importlib.import_module(name)


def train(
    cluster: Cluster,
    recipe: Recipe,
    *,
    save: Sequence[Path] | None,
    load: Sequence[Path] | None = None,
    clock_minutes: int = 2,
) -> list[Ended]:
    """Run one training to its last step, with as many ranks on every node; returns how each rank ended.

    Args:
        cluster: The nodes; they share the recipe's ranks evenly, the first ones on node 0.
        recipe: What to train, how far, and in which form to save.
        save: ``--save``, as each node sees it; None saves nothing.
        load: ``--load``, likewise; None starts anew.
        clock_minutes: ``--distributed-timeout-minutes``.
    """
    on_node = recipe.world_size // len(cluster.nodes)
    flags = [*recipe.megatron_flags(), "--ckpt-format", recipe.ckpt_format]
    flags += ["--distributed-timeout-minutes", str(clock_minutes)]
    if load is not None:
        flags += ["--exit-on-missing-checkpoint", "--use-checkpoint-opt_param-scheduler"]
    calls = []
    cluster.warm()
    for rank in range(recipe.world_size):
        node = cluster.nodes[rank // on_node]
        own = [part for flag, places in (("--save", save), ("--load", load)) if places is not None
               for part in (flag, str(places[node.number]))]  # fmt: skip
        env = {
            "RANK": str(rank), "WORLD_SIZE": str(recipe.world_size), "LOCAL_RANK": str(rank % on_node),
            "LOCAL_WORLD_SIZE": str(on_node), "MASTER_ADDR": cluster.nodes[0].address, "MASTER_PORT": str(_PORT),
        }  # fmt: skip
        calls.append(cluster.call(node, "ckptguard.testing.tiny_trainer:main", argv=[*flags, *own], env=env))
    return [call.wait(_TIMEOUT_SECONDS) for call in calls]


def losses(ends: Sequence[Ended]) -> Mapping[int, str]:
    """Loss of every step as Megatron prints it, by the step's number."""
    return {int(step): loss for end in ends for step, loss in _LOSS.findall(end.out)}


def gather(cluster: Cluster, name: str, out: Path) -> Path:
    """Copy what each node has at ``name`` into one directory: the shared one that would have been saved to; returns it."""
    for node in cluster.nodes:
        shutil.copytree(node.path(name), out, dirs_exist_ok=True)
    return out
