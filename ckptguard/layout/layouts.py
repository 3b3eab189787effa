"""Parallel layouts: sizes of the axes, and how layers are cut into stages. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel axes of a run.

    Attributes:
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        etp: Tensor parallel size of experts; None is Megatron's default, ``tp``.
        vpp: Virtual stages per pipeline rank; 1 is none.
        first_pp_layers: Layers on the first stage; None is an even split.
        last_pp_layers: Layers on the last stage; None is an even split.
        pp_layout: Megatron's ``--pipeline-model-parallel-layout``, such as ``Et*3|t*4,L``; None is none.
        count_embedding: The embedding counts as a layer when layers are dealt out to stages.
        count_loss: The loss counts as a layer when layers are dealt out to stages.
        dp: Data parallel size, without context parallel ranks; it cuts optimizer state only. None leaves it open.
        cp: Context parallel size; it cuts nothing that is stored but optimizer state.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    first_pp_layers: int | None = None
    last_pp_layers: int | None = None
    pp_layout: str | None = None
    count_embedding: bool = False
    count_loss: bool = False
    dp: int | None = None
    cp: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Its fields, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = [f"TP{self.tp}", f"PP{self.pp}", f"EP{self.ep}"]
        sizes += [f"ETP{self.etp}"] if self.etp is not None else []
        sizes += [f"VPP{self.vpp}"] if self.vpp > 1 else []
        sizes += [f"CP{self.cp}"] if self.cp > 1 else []
        sizes += [f"DP{self.dp}"] if self.dp is not None else []
        return " ".join(sizes)
