"""Filled buffers hold what torch's own moves and casts give, whatever windows they are asked for in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptguard.core import pieces
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.pieces import Assembly
from ckptguard.core.plan import Made, Source, Stored
from ckptguard.engine import filling
from ckptguard.engine.filling import Filler, row_bytes
from ckptguard.engine.proving import fingerprints_of
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint

SHAPES = {"bfloat16": (6, 8), "float32": (5, 4, 3), "float16": (24,), "float8_e4m3fn": (4, 6), "int64": (3, 4)}


@dataclass(frozen=True)
class World:
    """Sources in a file, and as torch tensors."""

    checkpoint: Checkpoint
    sources: dict[str, Source]
    tensors: dict[str, torch.Tensor]

    def filled(self, made: Made, windows: list[int]) -> bytes:
        """All bytes of a chunk, asked for in windows of so many rows each, repeated."""
        filler, out = Filler([made], self.sources, self.checkpoint), bytearray(made.size_bytes)
        at, turn = 0, 0
        while at < len(out):
            end = min(len(out), at + windows[turn % len(windows)] * row_bytes(made))
            filler(0, at, memoryview(out)[at:end])
            at, turn = end, turn + 1
        return bytes(out)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("sources")
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in SHAPES.items():
        dtype = getattr(torch, name)
        values = torch.randn(shape, generator=generator) * 9
        tensors[name] = values.to(dtype) if dtype.is_floating_point else values.long()
    tensors["big"] = torch.randn(300, 500, generator=generator).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        sources: dict[str, Source] = {n: Stored(e, e.chunks[0]) for n, e in checkpoint.index.tensors.items()}
        yield World(checkpoint, sources, tensors)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes()


Both = tuple[Assembly, torch.Tensor]


@st.composite
def _moved(draw: st.DrawFn, both: Both) -> Both:
    """One more move, on the plan and on the data."""
    a, x = both
    dim = draw(st.integers(0, x.dim() - 1))
    kind = draw(st.sampled_from(["permute", "narrow", "zeros", "twice", "flat"]))
    if kind == "permute":
        dims = draw(st.permutations(range(x.dim())))
        return pieces.permute(a, dims), x.permute(*dims)
    if kind == "narrow":
        begin, step = draw(st.integers(0, x.shape[dim] - 1)), draw(st.integers(1, 3))
        at = (slice(None),) * dim + (slice(begin, None, step),)
        return pieces.narrow(a, dim, begin, x.shape[dim], step), x[at]
    if kind == "zeros":
        shape = [2 if d == dim else n for d, n in enumerate(x.shape)]
        zeros = torch.zeros(shape, dtype=x.dtype)
        return pieces.concatenate([a, pieces.of_source("", shape)], dim), torch.cat([x, zeros], dim)
    if kind == "twice":
        return pieces.concatenate([a, pieces.narrow(a, dim, 0, 1)], dim), torch.cat([x, x.narrow(dim, 0, 1)], dim)
    return pieces.reshape(a, (prod(x.shape),)), x.reshape(-1)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("direct", [True, False], ids=["read", "mapped"])
def test_any_assembly_in_any_windows(world: World, direct: bool, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    to = data.draw(st.sampled_from([name] if name == "int64" else [name, "float32", "bfloat16", "float16"]))
    windows = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    tensor = world.tensors[name]
    words = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    both: Both = (pieces.of_source(name, tensor.shape), words)
    for _ in range(data.draw(st.integers(0, 5))):
        both = data.draw(_moved(both))
    assembly, moved = both
    box = whole(assembly.shape)
    made = Made("out", BY_NAME[to], assembly.shape, box, assembly)
    expected = moved.contiguous().view(tensor.dtype).to(getattr(torch, to))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_DIRECT_BYTES", 1 if direct else 1 << 14)
        assert world.filled(made, windows) == _raw(expected)


def test_a_chunk_of_a_stacked_tensor(world: World) -> None:
    """The box's corner is no part of an assembly's coordinates; leading dims of one index are stepped over."""
    assembly = pieces.reshape(pieces.of_source("bfloat16", (6, 8)), (1, 1, 6, 8))
    made = Made("x", BY_NAME["bfloat16"], (9, 3, 6, 8), Box((4, 2, 0, 0), (1, 1, 6, 8)), assembly)
    assert row_bytes(made) == 16
    assert world.filled(made, [1]) == _raw(world.tensors["bfloat16"])


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("rows", lambda a: pieces.narrow(a, 0, 10, 290)),
        ("columns", lambda a: pieces.narrow(a, 1, 3, 497)),
        ("transposed", lambda a: pieces.permute(a, (1, 0))),
        ("every third row", lambda a: pieces.narrow(a, 0, 1, 300, 3)),
    ],
)
def test_large_pieces(world: World, name: str, move: Callable[[Assembly], Assembly]) -> None:
    moves: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "rows": lambda x: x[10:290], "columns": lambda x: x[:, 3:497], "transposed": lambda x: x.t(),
        "every third row": lambda x: x[1::3],
    }  # fmt: skip
    assembly = move(pieces.of_source("big", (300, 500)))
    made = Made("out", BY_NAME["bfloat16"], assembly.shape, whole(assembly.shape), assembly)
    assert world.filled(made, [7, 64]) == _raw(moves[name](world.tensors["big"]))


def test_fingerprints_are_those_of_the_result(world: World) -> None:
    """The engine's other user of a filler adds up the same elements in its own windows."""
    straight = pieces.of_source("big", (300, 500))
    turned = pieces.permute(pieces.permute(straight, (1, 0)), (1, 0))
    made = [Made(n, BY_NAME["bfloat16"], (300, 500), whole((300, 500)), a) for n, a in (("a", straight), ("b", turned))]
    found = fingerprints_of(Filler(made, world.sources, world.checkpoint), threads=2)
    assert found["a"].sums == found["b"].sums
    swapped = pieces.concatenate([pieces.narrow(straight, 0, 1, 300), pieces.narrow(straight, 0, 0, 1)], 0)
    other = Made("c", BY_NAME["bfloat16"], (300, 500), whole((300, 500)), swapped)
    assert fingerprints_of(Filler([other], world.sources, world.checkpoint))["c"].sums != found["a"].sums


def test_casts_round_to_nearest_even(world: World) -> None:
    assembly = pieces.of_source("float32", SHAPES["float32"])
    made = Made("out", BY_NAME["bfloat16"], SHAPES["float32"], whole(SHAPES["float32"]), assembly)
    words = np.frombuffer(_raw(world.tensors["float32"]), np.uint32).astype(np.uint64)
    expected = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    assert world.filled(made, [2]) == expected.tobytes()
