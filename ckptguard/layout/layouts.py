"""Parallel layouts: sizes of the axes, and how layers are cut into stages. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the model-parallel axes of a run. Data and context parallel ranks hold copies and are left out.

    Attributes:
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        etp: Tensor parallel size of experts; None is Megatron's default, ``tp``.
        vpp: Virtual stages per pipeline rank; 1 is none.
        first_pp_layers: Layers on the first stage; None is an even split.
        last_pp_layers: Layers on the last stage; None is an even split.
        pp_layout: Megatron's ``--pipeline-model-parallel-layout``, such as ``Et*3|t*4,L``; None is none.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    first_pp_layers: int | None = None
    last_pp_layers: int | None = None
    pp_layout: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Its fields, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = [f"TP{self.tp}", f"PP{self.pp}", f"EP{self.ep}"]
        sizes += [f"ETP{self.etp}"] if self.etp is not None else []
        sizes += [f"VPP{self.vpp}"] if self.vpp > 1 else []
        return " ".join(sizes)
