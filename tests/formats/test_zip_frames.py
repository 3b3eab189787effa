"""Frames against torch.save itself: every dtype, every kind of size, and past 4 GiB."""

from __future__ import annotations

import io
import subprocess
import sys
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_states import every_kind

from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.formats.zip_frames import Frame, empty_tensor_in_list, frame

SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 300]), max_size=6).filter(
    lambda s: torch.Size(s).numel() < 1 << 14
)


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def of(tensor: torch.Tensor) -> tuple[DType, tuple[int, ...]]:
    return BY_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape)


def framed(around: Frame, data: bytes) -> bytes:
    tail = around.tail(zlib.crc32(data))
    assert (len(data), len(tail)) == (around.data_bytes, around.tail_bytes)
    assert around.data_begin_bytes % 64 == 0
    out = around.head + data + tail
    assert len(out) == around.length_bytes
    return out


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.mark.parametrize("name", list(every_kind(views=False)))
def test_every_kind(name: str) -> None:
    tensor = every_kind(views=False)[name]
    assert framed(frame(*of(tensor)), raw(tensor)) == saved(tensor)


@settings(max_examples=150, deadline=None)
@given(size=SIZES, name=st.sampled_from(sorted(BY_NAME)), seed=st.integers(0, 2**32 - 1))
def test_any_size_and_content(size: list[int], name: str, seed: int) -> None:
    data = torch.randint(
        0, 2, (torch.Size(size).numel() * BY_NAME[name].itemsize,), generator=torch.Generator().manual_seed(seed)
    )
    tensor = data.to(torch.uint8).view(getattr(torch, name)).reshape(size)
    assert framed(frame(*of(tensor)), raw(tensor)) == saved(tensor)


@pytest.mark.parametrize(
    "kind", ["detached parameter", "clone of a view", "prepended axes", "loaded from shared memory"]
)
def test_what_megatron_hands_over(kind: str) -> None:
    """How filesystem_async.py (0.19.2) and sharded_tensor_to_torch_sharded_tensor come by the tensors they save."""
    base = torch.randn(6, 4)
    tensor = {
        "detached parameter": lambda: torch.nn.Parameter(base).detach(),
        "clone of a view": lambda: base[2:5].detach().clone(),
        "prepended axes": lambda: base.view(1, 1, 6, 4),
        "loaded from shared memory": lambda: base.clone().share_memory_(),
    }[kind]()
    assert framed(frame(*of(tensor)), raw(tensor)) == saved(tensor.to("cpu", non_blocking=True))


def test_the_one_case_that_torch_counts_otherwise() -> None:
    """It loads all the same: nothing reads the serialization id."""
    tensor = torch.frombuffer(bytearray(b"PK\x07\x08abcdefgh"), dtype=torch.uint8)
    ours, theirs = framed(frame(*of(tensor)), raw(tensor)), saved(tensor)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 28  # 20 digits and twice their record's CRC-32
    assert torch.equal(torch.load(io.BytesIO(ours)), tensor)


class Sink:
    """Keeps the small writes and, of the large one, its place and CRC-32."""

    def __init__(self) -> None:
        self.at, self.small, self.large = 0, {}, {}

    def write(self, data: memoryview) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes > 1 << 20:
            self.large[self.at] = zlib.crc32(view)
        else:
            self.small[self.at] = bytes(view)
        self.at += view.nbytes
        return view.nbytes

    def seek(self, offset: int, _whence: int) -> None:
        self.at += offset

    def flush(self) -> None:
        return None


@pytest.mark.parametrize("excess", [-65, -1], ids=["offsets pass 4 GiB", "the size does too"])
def test_beyond_4_gib(excess: int) -> None:
    """The tensor's pages are never touched, so the kernel lends one page of zeros for all of them."""
    tensor = torch.zeros((1 << 32) + excess, dtype=torch.uint8)
    sink = Sink()
    torch.save(tensor, sink)
    around = frame(*of(tensor))
    ((begin, crc32),) = sink.large.items()
    assert (begin, sink.at) == (around.data_begin_bytes, around.length_bytes)
    assert around.head == b"".join(part for at, part in sink.small.items() if at < begin)
    assert around.tail(crc32) == b"".join(part for at, part in sink.small.items() if at > begin)


@pytest.mark.parametrize("numel", [255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31])
def test_numbers_of_every_pickled_width(numel: int) -> None:
    sink = Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(numel, dtype=torch.uint8), sink)
    head = frame(BY_NAME["uint8"], (numel,)).head
    assert sink.small[64].endswith(b".")  # the pickle
    assert head[64:].startswith(sink.small[64] + b"PK\x07\x08")


def test_the_extra_state_of_transformer_engine() -> None:
    assert empty_tensor_in_list() == saved([torch.empty(0, dtype=torch.uint8)])


def test_frames_are_cached_and_need_no_torch() -> None:
    assert frame(BY_NAME["bfloat16"], (4, 4)) is frame(BY_NAME["bfloat16"], (4, 4))
    code = "import sys, ckptguard.formats.zip_frames; print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
