"""Fingerprints of live tensors are those of the CPU path over their bytes, however they lie in memory."""

from __future__ import annotations

import subprocess
import sys
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.fingerprint import live
from ckptguard.fingerprint.live import LiveSum, collect, fingerprint_tensor, live_sum, slabs
from ckptguard.fingerprint.tensors import fingerprint_array
from ckptguard.fingerprint.values import Fingerprint

DTYPES = list(BY_NAME.values())


def _make(
    dtype: DType, size: tuple[int, ...], seed: int = 0
) -> tuple[torch.Tensor, np.ndarray[tuple[int, ...], np.dtype[np.void]]]:
    """A tensor with random bits, and the same elements for the CPU path."""
    raw = np.random.default_rng(seed).integers(0, 256, prod(size) * dtype.itemsize, dtype=np.uint8)
    if dtype.name == "bool":
        raw &= 1
    plain = raw.view(np.dtype((np.void, dtype.itemsize))).reshape(size)
    tensor = torch.empty(size, dtype=getattr(torch, dtype.name))
    if raw.size:
        tensor = torch.from_numpy(raw.copy()).view(tensor.dtype).reshape(size)
    return tensor, plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(), (1,), (7,), (3, 5), (0, 4), (5, 0), (2, 3, 4), (2, 5000), (1, 1, 1)], ids=str)
def test_every_dtype_and_shape(dtype: DType, size: tuple[int, ...]) -> None:
    tensor, plain = _make(dtype, size)
    assert fingerprint_tensor(tensor) == fingerprint_array(plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_contiguous(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SLAB_BYTES", 4096)
    tensor, plain = _make(dtype, (12, 34, 40))
    expected = fingerprint_array(plain[:, 3:, ::2].transpose(2, 0, 1), dtype)
    assert fingerprint_tensor(tensor[:, 3:, ::2].permute(2, 0, 1)) == expected


def test_odd_strides_of_dims_of_extent_one() -> None:
    """Contiguous for torch, and yet their last stride is not 1."""
    column = torch.randn(3, 5)[:, 1]
    for tensor in (column[1:2], column[1:2].reshape(1, 1), torch.randn(1).expand(1), torch.ones(()).expand(1, 1)):
        assert tensor.is_contiguous()
        assert fingerprint_tensor(tensor) == fingerprint_tensor(tensor.clone(memory_format=torch.contiguous_format))


def test_expanded_tensor() -> None:
    tensor = torch.tensor([1.5, -2.0]).expand(3000, 2)
    assert fingerprint_tensor(tensor) == fingerprint_tensor(tensor.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_add_up(dtype: DType) -> None:
    tensor, plain = _make(dtype, (10, 70))
    parts = [live_sum(tensor[a:b, c:d], (10, 70), (a, c)) for a, b in ((0, 3), (3, 10)) for c, d in ((0, 64), (64, 70))]
    total = Fingerprint(dtype.name, (10, 70), (0, 0))
    for part in collect(parts):
        total = total + part
    assert total == fingerprint_array(plain, dtype)


def test_parameters_and_graphs() -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 7))
    assert fingerprint_tensor(parameter) == fingerprint_tensor(parameter.detach().clone())
    assert fingerprint_tensor(parameter * 2) == fingerprint_tensor(parameter.detach() * 2)
    assert parameter.grad is None


def test_conjugates_and_negatives_that_torch_puts_off() -> None:
    tensor = torch.randn(6, 7, dtype=torch.complex64)
    for lazy in (tensor.conj(), tensor.conj().imag, tensor.mH, tensor.conj()[2, 3]):
        assert lazy.is_conj() or lazy.is_neg()
        assert fingerprint_tensor(lazy) == fingerprint_tensor(lazy.clone().resolve_conj().resolve_neg().contiguous())
    assert fingerprint_tensor(tensor.conj()) != fingerprint_tensor(tensor)


@pytest.mark.parametrize("view", [False, True])
def test_nan_payloads_and_signs_of_zero_survive(view: bool) -> None:
    bits = torch.tensor([[0x7F800001, 0x7FC00001], [0x7FFFFFFF, -0x80000000]], dtype=torch.int32)
    same = bits.view(torch.float32)
    made = fingerprint_tensor(same.t() if view else same)
    assert made.sums == fingerprint_tensor(bits.t() if view else bits).sums
    for row, column, other in ((0, 0, 0x7F800002), (1, 1, 0)):
        changed = bits.clone()
        changed[row, column] = other
        floats = changed.view(torch.float32)
        assert fingerprint_tensor(floats.t() if view else floats) != made


def test_local_part_of_a_dtensor() -> None:
    """As a rank gives it: its local tensor, with the global shape and offset that torch computes."""
    tensor, plain = _make(BY_NAME["bfloat16"], (9, 16))
    total = Fingerprint("bfloat16", (9, 16), (0, 0))
    for begin, end in ((0, 5), (5, 9)):
        total = total + fingerprint_tensor(tensor[begin:end], (9, 16), (begin, 0))
    assert total == fingerprint_array(plain, BY_NAME["bfloat16"])


class _Wrapper(torch.Tensor):
    """A tensor that keeps its elements elsewhere, as DTensor and quantized parameters do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        """Pass wrapped tensors on unchanged."""
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


def test_what_has_no_plain_elements_is_refused() -> None:
    wrapper = torch.Tensor._make_wrapper_subclass(_Wrapper, (2, 3))
    with pytest.raises(TypeError, match="keeps its elements in other tensors"):
        fingerprint_tensor(wrapper)
    with pytest.raises(TypeError, match="layout"):
        fingerprint_tensor(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="meta tensor"):
        fingerprint_tensor(torch.empty(2, 3, device="meta"))
    with pytest.raises(ValueError, match="bits8 have no fingerprint"):
        fingerprint_tensor(torch.zeros(2, dtype=torch.uint8).view(torch.bits8))


@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ((3, 4), (0, 1)),
        ((3, 4), (-1, 0)),
        ((3,), (0,)),
        ((2, 4), None),
        ((9, 9), (0,)),
        (None, (1, 0)),
        (None, (0, 0, 0)),
    ],
)
def test_position_outside_the_global_shape_is_refused(
    shape: tuple[int, ...] | None, offset: tuple[int, ...] | None
) -> None:
    with pytest.raises(ValueError, match="not inside a tensor"):
        live_sum(torch.zeros(3, 4), shape, offset)


def test_device_sums_are_fetched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums on a device, here the CPU's, among ready ones: the order is kept, and one copy fetches all."""
    copies: list[torch.Size] = []
    to_host = torch.Tensor.cpu

    def counted(self: torch.Tensor) -> torch.Tensor:
        copies.append(self.shape)
        return to_host(self)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    ready = LiveSum("int8", (0,), (0, 0))
    pending = [LiveSum("int8", (n,), torch.tensor([n, 2**61 - 2])) for n in range(1, 5)]
    made = collect([pending[0], ready, *pending[1:]])
    assert [item.sums for item in made] == [(1, 2**61 - 2), (0, 0), *((n, 2**61 - 2) for n in (2, 3, 4))]
    assert copies == [torch.Size([4, 2])]
    assert pending[2].result() == Fingerprint("int8", (3,), (3, 2**61 - 2))


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=3).map(tuple), st.integers(64, 5000))
def test_slabs_are_row_major_runs_that_cover_the_box_once(size: tuple[int, ...], limit: int) -> None:
    numbers = np.arange(prod(size)).reshape(size)
    end = 0
    for begin, box in slabs(size, limit):
        part = numbers[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))].reshape(-1)
        assert begin == end
        assert 0 < part.size <= limit
        assert (part == np.arange(begin, begin + part.size)).all()
        end += part.size
    assert end == prod(size)


def test_copies_stay_within_the_slab() -> None:
    parts = list(slabs((3, 100, 1000), 64))
    assert max(box.numel for _, box in parts) == 64
    assert parts[-1] == (300_000 - 40, Box((2, 99, 960), (1, 1, 40)))


def test_import_is_light() -> None:
    script = """
import sys
import ckptguard.fingerprint, ckptguard.fingerprint.live, ckptguard.fingerprint.roots
print(*{"torch", "triton"} & set(sys.modules))
"""
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == ""
