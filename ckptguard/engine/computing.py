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
from ckptguard.core.plan import Computed, Stored

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
    elif source.kind == "fp8_blocks":
        out = _fp8_blocks(source, begin, end, read)
    elif source.kind == "fp8_scaled":
        out = _fp8_scaled(source, begin, end, read)
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


def _fp8_blocks(source: Computed, begin: int, end: int, read: ReadRows) -> Any:
    """One scale per block of 128 x 128; multiplied in fp32."""
    import torch

    weight, scale = source.of
    width, blocks = source.shape[1], scale.shape[1]
    values = _tensor(read, weight, begin * width, end * width).reshape(-1, width).float()
    first, last = begin // _BLOCK, (end - 1) // _BLOCK + 1
    scales = _tensor(read, scale, first * blocks, last * blocks).reshape(-1, blocks).float()
    row_of = torch.arange(begin, end) // _BLOCK - first
    return (values * scales.repeat_interleave(_BLOCK, dim=1)[:, :width][row_of]).to(getattr(torch, source.dtype.name))


def _fp8_scaled(source: Computed, begin: int, end: int, read: ReadRows) -> Any:
    """Scales per row, per row and tile of columns, or per block, told apart by their shape."""
    import torch

    weight, scale = source.of
    height, width = source.shape
    values = _tensor(read, weight, begin * width, end * width).reshape(-1, width).float()
    if len(scale.shape) == 2 and scale.shape[0] != height:
        return _fp8_blocks(source, begin, end, read)
    tiles = prod(scale.shape) // height
    if tiles * height != prod(scale.shape) or width % tiles:
        raise UnsupportedError(
            f"{weight.entry.name}: its scales have shape {list(scale.shape)}, which fits no form known for {[height, width]}"
        )
    scales = _tensor(read, scale, begin * tiles, end * tiles).reshape(-1, tiles).float()
    return (values * scales.repeat_interleave(width // tiles, dim=1)).to(getattr(torch, source.dtype.name))


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
