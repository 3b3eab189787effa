"""A snapshot's tensors as Bridge's conversion code sees them: names, shapes and dtypes, no data. Asking process only."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptguard.core.errors import UnsupportedError
from ckptguard.megatron import tracing
from ckptguard.megatron.tracing import Traced

_FP8_BLOCK = 128
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Names that stand beside a weight's and say how to read it; "~" stands for the weight's name without ".weight".
_BESIDE = ("_scale_inv", "_blocks", "_scales", "~.scale")
Role = list[Any]


class NotInSnapshotError(KeyError):
    """A tensor that Bridge asks for by a name that the snapshot does not have."""


class Source(Mapping[str, torch.Tensor]):
    """The state dict that Bridge reads: ``Traced`` tensors, quantised ones as what they stand for.

    Attributes:
        derived: How each tensor that is computed from others is computed: {name: {"kind", "of", "shape", "dtype"}}.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, list[int]]]) -> None:
        self._tensors = tensors
        self.derived: dict[str, dict[str, Any]] = {}
        self.source = self

    def get_all_keys(self) -> list[str]:
        """All names, as Bridge's ``StateSource`` gives them."""
        return list(self._tensors)

    def has_glob(self, pattern: str) -> bool:
        """Whether a name matches, as Bridge's ``StateSource`` says."""
        return any(fnmatch.fnmatchcase(name, pattern) for name in self._tensors)

    def ones(self, shape: Sequence[int]) -> Traced:
        """A tensor of ones, for what the snapshot has nothing of."""
        return self._derive("ones", [], list(shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise NotInSnapshotError(name)
        dtype, shape = self._tensors[name]
        scale = self._scale_of(name)
        if scale is not None and len(shape) == 2:
            packed = dtype in (torch.int8, torch.uint8)
            kind = "fp4_rows" if packed else "fp8_blocks" if scale.endswith("_scale_inv") else "fp8_scaled"
            blocks = [-(-n // _FP8_BLOCK) for n in shape]
            if kind == "fp8_blocks" and list(self._tensors[scale][1]) != blocks:
                raise UnsupportedError(
                    f"{scale}: has shape {list(self._tensors[scale][1])}; one scale per block of 128 x 128, {blocks}, is what "
                    f"can be read beside {name}"
                )
            return self._derive(kind, [name, scale], [shape[0], shape[1] * 2] if packed else shape)
        return tracing.source(name, shape, dtype)

    def _scale_of(self, name: str) -> str | None:
        """The tensor of scales beside a quantised weight."""
        dtype = self._tensors[name][0]
        beside = [f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"]
        if dtype in _FP8 or (dtype in (torch.int8, torch.uint8) and name.endswith(".weight")):
            return next((scale for scale in beside if scale in self._tensors), None)
        return None

    def _derive(self, kind: str, of: list[str], shape: list[int]) -> Traced:
        name = f"{kind}({', '.join(of)})" if of else f"{kind}({list(shape)})"
        self.derived[name] = {"kind": kind, "of": of, "shape": shape, "dtype": "bfloat16"}
        return tracing.source(name, shape, torch.bfloat16)

    def install(self) -> None:
        """From here on Bridge's MXFP4 unpacking gives a derived tensor too. Before a family is imported: some take the name."""
        module: Any = importlib.import_module("megatron.bridge.models.conversion.quantization_utils")

        def derive(blocks: Traced, scales: Traced, **_: Any) -> Traced:
            *prefix, groups, packed = blocks.shape
            of = [*blocks.assembly.sources, *scales.assembly.sources]
            return self._derive("mxfp4", of, [*prefix, groups * packed * 2])

        module.dequantize_mxfp4 = derive

    def looks_of(self, roles: Mapping[str, str]) -> tuple[Any, ...]:
        """What a mapping can see of its tensors but their names: equal looks lead to equal conversions."""
        out: list[Any] = []
        for role, name in roles.items():
            for beside in ("", *_BESIDE):
                dtype, shape = self._tensors.get(_beside(name, beside), (None, ()))
                out.append((role, beside, dtype, tuple(shape)))
        return tuple(out)

    def roles_of(self, sources: Sequence[str], roles: Mapping[str, str]) -> list[Role]:
        """What each source is to a mapping, so that the same can be said of another layer's; a name if it is nothing."""
        return [self._role(name, roles) for name in sources]

    def _role(self, name: str, roles: Mapping[str, str]) -> Role:
        if name in self.derived:
            entry = self.derived[name]
            return [entry["kind"], [self._role(part, roles) for part in entry["of"]], entry["shape"]]
        for role, whole in roles.items():
            for beside in ("", *_BESIDE):
                if name == _beside(whole, beside):
                    return [role, beside]
        return ["=", name]

    def name_of(self, role: Role, roles: Mapping[str, str]) -> str:
        """The source that has a role, for a mapping with these names."""
        if len(role) == 3:
            kind, of, shape = role
            derived = self._derive(kind, [self.name_of(part, roles) for part in of], shape)
            return derived.assembly.sources[0]
        return str(role[1]) if role[0] == "=" else _beside(roles[role[0]], role[1])


def _beside(name: str, beside: str) -> str:
    return name.removesuffix(".weight") + beside[1:] if beside.startswith("~") else name + beside
