"""The processes of one run, as torchrun or srun started them, and how the files of a plan are spread over them."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptguard.core.errors import UsageError
from ckptguard.core.writing import WritePlan
from ckptguard.engine.workers import default_threads


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: Which one this is, from 0.
        size: How many there are.
        local_size: Most processes that share a machine.
        rendezvous: Where they meet: a URL that ``torch.distributed.rendezvous`` takes; "" for a single process.
        address: The same for people, ``host:port``.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    rendezvous: str = ""
    address: str = ""

    @property
    def first(self) -> bool:
        """Whether this is the process that makes and commits the target."""
        return self.rank == 0

    def threads(self, wanted: int | None) -> int:
        """Worker threads of this process: as many as wanted, or a fair part of the machine's cores."""
        return wanted or min(default_threads(), max(1, (os.cpu_count() or 1) // self.local_size))


def world(rdzv: str | None = None) -> World:
    """The processes that this one was started with, from its environment; a world of one where nothing is said.

    torchrun sets RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torch/distributed/elastic/agent/server/
    local_elastic_agent.py, torch 2.8 to 2.14); srun sets SLURM_PROCID, SLURM_NTASKS and SLURM_TASKS_PER_NODE and no address.

    Args:
        rdzv: ``host:port`` at which rank 0 listens; needed under srun, whose variables count only with it, because a batch
            script's own commands see them too.

    Raises:
        UsageError: The variables contradict each other, or no address is known.
    """
    env = os.environ
    names = ("RANK", "WORLD_SIZE")
    if rdzv is not None and "RANK" not in env and "WORLD_SIZE" not in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS")
    if not any(name in env for name in names):
        if rdzv is not None:
            raise UsageError(
                f"--rdzv {rdzv}: no rank of a run, neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS are set",
                next_step="Start it with srun or torchrun, or leave --rdzv out.",
            )
        return World()
    rank, size = (_number(name) for name in names)
    if not 0 <= rank < size:
        raise UsageError(f"{names[0]} is {rank} and {names[1]} is {size}: a rank is at least 0 and below the size")
    if size == 1:
        return World()
    if rdzv is not None:
        url, address = f"tcp://{rdzv}", rdzv
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/?#@]+):[0-9]{1,5}", rdzv):
            raise UsageError(
                f"--rdzv {rdzv}: not of the form host:port", next_step="Give rank 0's host and a free port."
            )
    else:
        if not env.get("MASTER_ADDR"):
            raise UsageError(
                f"{names[1]} is {size}, and MASTER_ADDR and MASTER_PORT do not say where the ranks meet",
                next_step=f"Start it with torchrun or give --rdzv host:port; to run it alone, unset {names[0]} and {names[1]}.",
            )
        url, address = "env://", f"{env['MASTER_ADDR']}:{_number('MASTER_PORT')}"
    return World(rank, size, _local_size(), url, address)


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not re.fullmatch("[0-9]+", value):
        raise UsageError(
            f"the environment variable {name} is {value!r}, not a number",
            next_step="Start ckptguard with torchrun or srun; to run it alone, unset RANK and WORLD_SIZE.",
        )
    return int(value)


def _local_size() -> int:
    """Slurm writes ``8(x4),2``: four nodes with 8 tasks each and one with 2."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    return max(1, *(int(count) for count in re.findall(r"(?:^|,)([0-9]+)", said)), 1)


def share(plan: WritePlan, size: int) -> tuple[WritePlan, ...]:
    """The files of a plan spread over ranks: the largest first, each to the rank with the fewest bytes so far.

    Every rank finds the same shares by itself. A file is written by one rank: one that is larger than an even share bounds how
    much is gained.

    Args:
        plan: What to write.
        size: Number of ranks.

    Returns:
        A plan per rank, of the same identity, its files in the plan's order. Together they are the plan.
    """
    shares = dealt_out({file.path: file.size_bytes for file in plan.files}, size)
    rank_of = {path: rank for rank, paths in enumerate(shares) for path in paths}
    rows: list[list[int]] = [[] for _ in range(size)]
    for number, file in enumerate(plan.files):
        rows[rank_of[file.path]].append(number)
    return tuple(WritePlan(tuple(plan.files[number] for number in row), plan.identity) for row in rows)


def dealt_out(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names dealt out to so many shares: the largest first, each to the share with the least so far. Always the same way."""
    loads = [(0, number) for number in range(count)]
    out: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heapq.heappop(loads)
        out[number].append(name)
        heapq.heappush(loads, (load + sizes[name], number))
    return out
