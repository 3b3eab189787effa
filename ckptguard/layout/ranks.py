"""Which global rank stands at a place of the parallel axes. Pure.

Source: megatron/core/parallel_state.py ``RankGenerator`` and ``initialize_model_parallel`` (0.19.2): ranks count up along
tp, cp, dp, pp, in this order; for experts along etp, ep, dp, pp. With ``--use-tp-pp-dp-mapping`` pp comes before dp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a run.

    Attributes:
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        cp: Context parallel size.
        dp: Data parallel size of dense parameters, without context parallel ranks.
        etp: Tensor parallel size of experts.
        ep: Expert parallel size.
        stages_first: Whether pp comes before dp.
    """

    tp: int
    pp: int
    cp: int = 1
    dp: int = 1
    etp: int = 1
    ep: int = 1
    stages_first: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Data parallel size of expert parameters."""
        return self.world // (self.etp * self.ep * self.pp)

    def dense(self, tp: int, pp: int, replica: int = 0) -> int:
        """The rank that holds dense parameters at a place; ``replica`` counts data and context parallel copies."""
        copy, dp = replica % self.cp, replica // self.cp
        if self.stages_first:
            return tp + self.tp * (copy + self.cp * (pp + self.pp * dp))
        return tp + self.tp * (copy + self.cp * (dp + self.dp * pp))

    def expert(self, etp: int, ep: int, pp: int, replica: int = 0) -> int:
        """The rank that holds expert parameters at a place; ``replica`` counts expert data parallel copies."""
        inner = etp + self.etp * ep
        outer = pp + self.pp * replica if self.stages_first else replica + self.expert_dp * pp
        return inner + self.etp * self.ep * outer


def smallest_dp(tp: int, cp: int, etp: int, ep: int) -> int:
    """The least data parallel size with which every expert rank exists."""
    return lcm(tp * cp, etp * ep) // (tp * cp)
