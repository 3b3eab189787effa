"""States that hold every dtype and awkward shape, and their elements as numpy arrays."""

from __future__ import annotations

import numpy as np
import torch

from ckptguard.core.dtypes import BY_NAME


def elements(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """(dtype name, elements as unsigned integers of the itemsize, or structured bytes)."""
    name = str(tensor.dtype).removeprefix("torch.")
    kind = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}[BY_NAME[name].itemsize]
    plain = tensor.detach().contiguous()
    flat = plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
    return name, flat.numpy().reshape(-1).view(kind).reshape(tuple(tensor.shape))


def every_kind(*, views: bool = True) -> dict[str, torch.Tensor]:
    """A tensor of each dtype; 0-d, empty, long, and (with views) transposed, sliced and expanded ones."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(0, 256, (16 * 6 * 10,), generator=generator, dtype=torch.uint8)
    out = {}
    for name, dtype in BY_NAME.items():
        if name == "bool":
            out[f"kind.{name}"] = (bits[:60] > 127).reshape(6, 10)
        else:
            out[f"kind.{name}"] = bits[: 60 * dtype.itemsize].clone().view(getattr(torch, name)).reshape(6, 10)
    out["zero_dim"] = torch.tensor(1.5, dtype=torch.bfloat16)
    out["empty"] = torch.empty(0, 7)
    out["long"] = torch.randn(10_000, generator=generator)
    out["nan"] = torch.tensor([float("nan"), -0.0, 0.0, float("inf")])
    if views:
        base = torch.randn(12, 20, 3, generator=generator)
        out["transposed"] = base.permute(2, 0, 1)
        out["sliced"] = base[2:9:2, 1::3]
        out["expanded"] = torch.randn(5, 1, generator=generator).expand(5, 8)
    return out
