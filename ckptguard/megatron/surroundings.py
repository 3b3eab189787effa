"""What is installed of all that Megatron models are built with, and what is stood in for where it is not. Imports nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

_NEEDED = ("torch", "megatron-core", "transformers")
OPTIONAL = {
    "transformer_engine": ("transformer-engine", "parameters of the same names and shapes, no kernels"),
    "mamba_ssm": ("mamba-ssm", "the gated norm's parameters, no kernels"),
    "causal_conv1d": ("causal-conv1d", "an empty package"),
    "fla": ("flash-linear-attention", "an empty package"),
    "modelopt": ("nvidia-modelopt", "an empty package"),
    "flash_attn": ("flash-attn", "an empty package"),
    "fast_hadamard_transform": ("fast-hadamard-transform", "an empty package"),
}
_BRIDGE_HELP = "not installed: import and export need it; pip install --no-deps megatron-bridge"


@dataclass(frozen=True, slots=True)
class Package:
    """A package and its state.

    Attributes:
        name: As pip knows it.
        version: Installed version; None if it is not.
        stand_in: What takes its place in the asking process; "" if nothing does.
        missing: What does not work without it; "" if it is there or stood in for.
    """

    name: str
    version: str | None
    stand_in: str = ""
    missing: str = ""


def packages() -> list[Package]:
    """Needed packages first, then Bridge, then the optional ones."""
    out = [Package(name, _version(name), missing="" if _version(name) else "not installed") for name in _NEEDED]
    bridge = _version("megatron-bridge")
    out.append(Package("megatron-bridge", bridge, missing="" if bridge else _BRIDGE_HELP))
    for module, (name, stand_in) in OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        out.append(Package(name, (_version(name) or "unknown version") if there else None, "" if there else stand_in))
    return out


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
