"""Quantised weights become, bit for bit, what Megatron-Bridge makes of them, whichever rows are asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, Span, TensorEntry
from ckptguard.core.pieces import narrow, of_source, permute
from ckptguard.core.plan import Computed, Made, Stored
from ckptguard.engine import computing
from ckptguard.engine.filling import Filler, row_bytes
from ckptguard.megatron import bridges

Rows = Callable[[int, int], torch.Tensor]
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.fixture(scope="module")
def bridge() -> ModuleType:
    """Bridge's module of quantisation, which imports nothing but torch."""
    place = bridges.root()
    assert place is not None
    path = Path(place, "models", "conversion", "quantization_utils.py")
    spec = importlib.util.spec_from_file_location("bridge_quantization_utils", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _words(tensor: torch.Tensor) -> Any:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(_WORDS[tensor.element_size()])


def _computed(kind: str, shape: tuple[int, ...], *tensors: torch.Tensor) -> tuple[Computed, Rows]:
    """A source made of tensors in memory, and a function that computes rows of it."""
    of = []
    for number, tensor in enumerate(tensors):
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        chunk = Chunk(whole(tuple(tensor.shape)), Span(str(number), 0, tensor.numel() * dtype.itemsize))
        of.append(Stored(TensorEntry(f"w{number}", dtype, tuple(tensor.shape), (chunk,)), chunk))
    source = Computed(kind, tuple(of), shape, BY_NAME["bfloat16"])

    def read(stored: Stored, begin: int, end: int) -> Any:
        return _words(tensors[of.index(stored)])[begin:end].copy()

    def rows(begin: int, end: int) -> torch.Tensor:
        words = computing.rows(source, begin, end, read)
        return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).reshape(end - begin, -1)

    return source, rows


def _same_in_any_rows(rows: Rows, expected: torch.Tensor) -> None:
    flat = expected.reshape(-1, expected.shape[-1])
    height = flat.shape[0]
    cuts = sorted({min(n, height) for n in (0, 1, 3, height // 3, 127, 129, height - 1, height)})
    for begin, end in [(0, height), *pairwise(cuts)]:
        if begin < end:
            assert np.array_equal(_words(rows(begin, end)), _words(flat[begin:end]))


def _fp8(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 40).to(dtype)


@pytest.mark.parametrize("shape", [(256, 128), (300, 130), (1, 1), (127, 257), (129, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks(bridge: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _fp8(shape)
    scale = (torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) * 0.01).to(dtype)
    _, rows = _computed("fp8_blocks", shape, weight, scale)
    _same_in_any_rows(rows, bridge.dequantize_fp8_blockwise(weight, scale))


@pytest.mark.parametrize("scale_shape", [(200,), (200, 1), (200, 4), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_with_scales_told_by_their_shape(
    bridge: ModuleType, scale_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight, scale = _fp8((200, 256)), (torch.rand(scale_shape) + 0.01).to(dtype)
    _, rows = _computed("fp8_scaled", (200, 256), weight, scale)
    _same_in_any_rows(rows, bridge.dequantize_fp8_e4m3fn_with_scale(weight, scale))


def test_scales_that_fit_nothing_are_refused() -> None:
    _, rows = _computed("fp8_scaled", (200, 256), _fp8((200, 256)), torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"w0.*\[3\]"):
        rows(0, 1)


def test_mxfp4_with_every_code_and_every_scale(bridge: ModuleType) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256).reshape(4, 64, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat(16).reshape(4, 64, 16)
    _, rows = _computed("mxfp4", (4, 64, 512), codes, scales)
    with np.errstate(all="ignore"):
        _same_in_any_rows(rows, bridge.dequantize_mxfp4(codes, scales))


def test_fp4_rows(bridge: ModuleType) -> None:
    packed = torch.randint(-128, 128, (37, 64), dtype=torch.int8)
    scales = torch.exp2(torch.randint(-20, 20, (37, 4)).float()).to(torch.float8_e8m0fnu)
    _, rows = _computed("fp4_rows", (37, 128), packed, scales)
    _same_in_any_rows(rows, bridge.dequantize_mxfp4_e2m1_packed(packed, scales))


def test_ones() -> None:
    _, rows = _computed("ones", (5, 3))
    assert torch.equal(rows(1, 4), torch.ones(3, 3, dtype=torch.bfloat16))


def test_what_is_not_known_is_refused() -> None:
    _, rows = _computed("nvfp4", (5, 3), torch.ones(5, 3))
    with pytest.raises(UnsupportedError, match="nvfp4"):
        rows(0, 1)


@pytest.mark.parametrize("old", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("new", ["float32", "float16", "bfloat16"])
def test_casts_are_those_of_torch(old: str, new: str) -> None:
    size = BY_NAME[old].itemsize
    words = np.arange(256, dtype=np.uint8) if size == 1 else np.random.default_rng(5).integers(0, 2 ** (8 * size), 5000)
    words = words.astype(_WORDS[size])
    signed = words.view({1: np.uint8, 2: np.int16, 4: np.int32}[size])
    expected = torch.from_numpy(signed).view(getattr(torch, old)).to(getattr(torch, new))
    assert np.array_equal(computing.cast(words, BY_NAME[old], BY_NAME[new]), _words(expected))


def test_parts_of_computed_sources_are_filled(bridge: ModuleType, tmp_path: Path) -> None:
    """The filler takes any part of a computed source, turned and cut, through its own windows of rows."""
    from safetensors.torch import save_file

    from ckptguard.formats.registry import open_checkpoint

    weight, scale = _fp8((700, 900)), torch.rand(6, 8) + 0.1
    save_file({"w": weight, "s": scale}, tmp_path / "model.safetensors")
    expected = bridge.dequantize_fp8_blockwise(weight, scale)
    whole_of = of_source("computed", (700, 900))
    parts = {
        "as it is": (whole_of, expected),
        "turned": (permute(whole_of, (1, 0)), expected.t()),
        "columns": (narrow(whole_of, 1, 100, 333), expected[:, 100:333]),
        "every fifth row": (narrow(whole_of, 0, 2, 700, 5), expected[2::5]),
    }
    with open_checkpoint(tmp_path) as checkpoint:
        stored = tuple(Stored(e, e.chunks[0]) for e in (checkpoint.index.tensors["w"], checkpoint.index.tensors["s"]))
        sources = {"computed": Computed("fp8_blocks", stored, (700, 900), BY_NAME["bfloat16"])}
        for name, (assembly, tensor) in parts.items():
            made = Made(name, BY_NAME["bfloat16"], assembly.shape, whole(assembly.shape), assembly)
            filler, out = Filler([made], sources, checkpoint), bytearray(made.size_bytes)
            step = 100 * row_bytes(made)
            for begin in range(0, len(out), step):
                filler(0, begin, memoryview(out)[begin : begin + step])
            assert bytes(out) == _words(tensor).tobytes(), name
