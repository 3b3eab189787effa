"""Values that are computed on the way: casts, and quantised weights made what they stand for. A few rows at a time.

Sources: DeepSeek-V3's ``weight_scale_inv`` (one fp32 scale per 128 x 128 block), the MX formats of the OCP specification
(E2M1 values, E8M0 scales per 32) as GPT-OSS and DeepSeek-V4 store them. Results are those of megatron-bridge 0.6.2
``models/conversion/quantization_utils.py``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptguard.core.dtypes import DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.plan import Computed, Made, Stored

Array = npt.NDArray[Any]
ReadRows = Callable[[Stored, int, int], Array]
_BLOCK = 128
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def cast(values: Array, old: DType, new: DType) -> Array:
    """Elements of one dtype as another, rounded to nearest even where bits are lost; as unsigned words in and out."""
    import torch

    words = torch.from_numpy(np.ascontiguousarray(values).view(_SIGNED[old.itemsize]))
    out = words.view(getattr(torch, old.name)).to(getattr(torch, new.name))
    result: Array = out.view(getattr(torch, _word(new))).numpy()
    return result.view(np.dtype(f"u{new.itemsize}"))


def _word(dtype: DType) -> str:
    return {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[dtype.itemsize]


def rows(source: Computed, begin: int, end: int, read: ReadRows) -> Array:
    """Rows ``[begin, end)`` of a computed source, all dims but the last counted as one.

    Args:
        source: What to compute.
        begin: First row.
        end: One past the last.
        read: Gives elements of a stored source, flat, as unsigned words.

    Returns:
        Words of the source's dtype, of shape (rows, width).
    """
    import torch

    width = source.shape[-1] if source.shape else 1
    if source.kind == "ones":
        out = torch.ones(end - begin, width, dtype=getattr(torch, source.dtype.name))
    elif source.kind in ("fp8_blocks", "fp8_scaled"):
        out = _fp8(source, begin, end, read)
    elif source.kind in ("mxfp4", "fp4_rows"):
        out = _fp4(source, begin, end, read)
    else:
        raise UnsupportedError(f"{source.of[0].entry.name}: values of kind {source.kind} cannot be computed")
    result: Array = out.contiguous().view(getattr(torch, _word(source.dtype))).numpy()
    return result.view(np.dtype(f"u{source.dtype.itemsize}"))


def _tensor(read: ReadRows, source: Stored, begin: int, end: int) -> Any:
    """Elements of a stored source as a torch tensor of their own dtype."""
    import torch

    words = read(source, begin, end).view(_SIGNED[source.dtype.itemsize])
    return torch.from_numpy(words).view(getattr(torch, source.dtype.name))


def to_fp8(values: Array, weight: Made, begin: int, read: ReadRows) -> Array:
    """The fp8 that bfloat16 values stand for under kept scales: what they were before they were dequantised.

    fp8's steps are 2^5 times as wide as bfloat16's rounding, so the division finds the very value again.

    Args:
        values: Rows from ``begin`` on, as words of bfloat16.
        weight: The tensor; it has scales.
        begin: Row of the first value.
        read: As in ``rows``.
    """
    import torch

    assert weight.scale is not None
    height, width = weight.shape
    wide = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).reshape(-1, width).float()
    scales = _scales(weight.name, weight.scale, (height, width), begin, begin + len(wide), read)
    small = (wide / scales).to(getattr(torch, weight.dtype.name))
    result: Array = small.view(torch.uint8).numpy()
    return result.reshape(values.shape)


def from_fp8(small: Array, weight: Made, begin: int, read: ReadRows) -> Array:
    """The way there again: words of the bfloat16 that rows of fp8 stand for. Arguments as ``to_fp8``."""
    import torch

    assert weight.scale is not None
    height, width = weight.shape
    values = torch.from_numpy(small.copy()).view(getattr(torch, weight.dtype.name)).reshape(-1, width).float()
    scales = _scales(weight.name, weight.scale, (height, width), begin, begin + len(values), read)
    result: Array = (values * scales).to(torch.bfloat16).view(torch.int16).numpy()
    return result.view(np.uint16).reshape(small.shape)


def _fp8(source: Computed, begin: int, end: int, read: ReadRows) -> Any:
    """Multiplied in fp32."""
    import torch

    weight, scale = source.of
    height, width = source.shape
    values = _tensor(read, weight, begin * width, end * width).reshape(-1, width).float()
    scales = _scales(weight.entry.name, scale, (height, width), begin, end, read)
    return (values * scales).to(getattr(torch, source.dtype.name))


def _scales(name: str, scale: Stored, shape: tuple[int, int], begin: int, end: int, read: ReadRows) -> Any:
    """The scale of every element of some rows: one per 128 x 128 block, per row, or per row and tile of columns."""
    import torch

    height, width = shape
    blocks = -(-height // _BLOCK), -(-width // _BLOCK)
    if tuple(scale.shape) == blocks:
        first, last = begin // _BLOCK, (end - 1) // _BLOCK + 1
        some = _tensor(read, scale, first * blocks[1], last * blocks[1]).reshape(-1, blocks[1]).float()
        row_of = torch.arange(begin, end) // _BLOCK - first
        return some.repeat_interleave(_BLOCK, dim=1)[:, :width][row_of]
    tiles, uneven = divmod(prod(scale.shape), height)
    if uneven or not tiles or width % tiles:
        raise UnsupportedError(
            f"{name}: its scales have shape {list(scale.shape)}, which fits no form known for {list(shape)}"
        )
    some = _tensor(read, scale, begin * tiles, end * tiles).reshape(-1, tiles).float()
    return some.repeat_interleave(width // tiles, dim=1)


def _fp4(source: Computed, begin: int, end: int, read: ReadRows) -> Any:
    """Two values of four bits a byte, the lower bits first, and one power of two for each run of them in a row."""
    import torch

    packed, scale = source.of
    width = source.shape[-1]
    height = prod(source.shape[:-1])
    tiles = prod(scale.shape) // height
    codes = torch.from_numpy(read(packed, begin * width // 2, end * width // 2).view(np.uint8)).reshape(-1, width // 2)
    table = torch.tensor(_E2M1, dtype=torch.float32)
    values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).reshape(
        -1, tiles, width // tiles
    )
    if scale.dtype.name == "uint8":  # the exponent itself
        exponents = torch.from_numpy(read(scale, begin * tiles, end * tiles).view(np.uint8)).int() - 127
        scaled = torch.ldexp(values, exponents.reshape(-1, tiles, 1))
    else:
        scaled = values * _tensor(read, scale, begin * tiles, end * tiles).float().reshape(-1, tiles, 1)
    return scaled.reshape(-1, width).to(getattr(torch, source.dtype.name))
