"""The target of a resharding: its ranks, and how its optimizer state is stored. Frozen values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ckptguard.core.boxes import Box
from ckptguard.core.pieces import Assembly
from ckptguard.layout.ranks import Grid
from ckptguard.megatron.structure import Buffer, RankStructure, Structures

OptimizerForm = Literal["dp_reshardable", "fully_reshardable", "plain"]


@dataclass(frozen=True)
class Target:
    """What is to be written.

    Attributes:
        structures: The ranks of the target layout, each once.
        grid: All ranks of the run, with data and context parallel ones.
        optimizer: Form of the optimizer's state; None leaves it out. "plain" is that of an optimizer that is not distributed.
        instances: Distributed optimizer instances; only the first one saves.
    """

    structures: Structures
    grid: Grid
    optimizer: OptimizerForm | None
    instances: int = 1

    @cached_property
    def _small_stage(self) -> int:
        """Ranks of a stage of the smallest world, whose ranks the structures are."""
        return (max(rank.rank for rank in self.structures.ranks) + 1) // self.grid.pp

    def rank_of(self, rank: RankStructure) -> int:
        """The global rank at the place of a rank of the smallest world."""
        if self.grid.stages_first:
            return rank.rank
        return rank.at["pp"] * (self.grid.world // self.grid.pp) + rank.rank % self._small_stage

    def optimizer_groups(self, rank: RankStructure) -> Iterator[tuple[str, tuple[Buffer, ...], list[int]]]:
        """(prefix of the keys, buffers, global ranks that share the state) of the optimizers whose first rank this is.

        Source: megatron/core/optimizer/{distrib_optimizer,optimizer}.py ``sharded_state_dict`` (0.19.2).
        """
        grid, at = self.grid, rank.at
        if not at["dense_dp"]:
            count = grid.dp * grid.cp // self.instances
            ranks = [grid.dense(at["tp"], at["pp"], replica) for replica in range(count)]
            prefix = "chained_0." if self.structures.has_expert_optimizer else ""
            yield f"{prefix}optimizer.distributed.dp_group_idx_{at['dense_group']}", rank.dense, ranks
        if not at["expert_dp"] and self.structures.has_expert_optimizer:
            ranks = [grid.expert(at["etp"], at["ep"], at["pp"], replica) for replica in range(grid.expert_dp)]
            yield f"chained_1.optimizer.distributed.dp_group_idx_{at['expert_group']}", rank.expert, ranks


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk that a rank is to write.

    Attributes:
        rank: Global rank.
        name: Of the stored tensor.
        shape: Of the whole stored tensor.
        box: Which part.
        made: What it is made of, where that is known already; else the global tensor of this name has it.
        run: As ``Made.run``.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    box: Box
    made: Assembly | None = None
    run: int | None = None
