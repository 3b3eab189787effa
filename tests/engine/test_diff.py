"""Comparing: every sort of difference is counted and placed, across chunk grids, dtypes and formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage_cases import DENSE, MOE
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UsageError
from ckptguard.core.index import Facts
from ckptguard.engine import padding
from ckptguard.engine.diff import Counts, TensorDiff, diff_checkpoints
from ckptguard.engine.values import as_numbers, largest_difference
from ckptguard.formats.registry import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(state: dict[str, torch.Tensor], path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def compare(a: Path, b: Path, **options) -> dict[str, TensorDiff]:
    with open_checkpoint(a) as one, open_checkpoint(b) as other:
        return {d.name: d for d in diff_checkpoints(one, other, **options)}


def test_each_sort_of_difference(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    changed = base.clone()
    changed[2, 3] += 0.5
    changed[3, 0] = -changed[3, 0]
    a = saved(
        {"same": base, "x": base, "gone": base, "dtype": base, "shape": base, "zero": torch.zeros(3)}, tmp_path / "a"
    )
    b = saved(
        {"same": base, "x": changed, "new": base, "dtype": base.bfloat16(), "shape": base.T.clone(), "zero": -torch.zeros(3)},
        tmp_path / "b",
    )  # fmt: skip
    found = compare(a, b)
    assert {n: d.status for n, d in found.items()} == {
        "same": "same", "x": "different", "gone": "only in a", "new": "only in b", "dtype": "dtype", "shape": "shape",
        "zero": "different",
    }  # fmt: skip
    assert (found["x"].used.elements, found["x"].used.first, found["x"].used.largest) == (2, (2, 3), 36.0)
    assert found["zero"].used == Counts(3, 3, (0,), 0.0)


def test_across_formats_and_chunk_grids(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch_states import every_kind  # tests/formats

    state = {n: t.contiguous() for n, t in every_kind().items() if "complex128" not in n}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    saved(state, tmp_path / "dcp")
    found = compare(tmp_path / "hf", tmp_path / "dcp")
    assert {d.status for d in found.values()} == {"same"}
    assert set(found) == set(state)


def test_no_common_name_is_an_error(tmp_path: Path) -> None:
    a, b = saved({"x": torch.ones(2)}, tmp_path / "a"), saved({"y": torch.ones(2)}, tmp_path / "b")
    with pytest.raises(UsageError, match="no tensor name in common"):
        compare(a, b)


def test_vocabulary_padding_is_told_apart() -> None:
    from ckptguard.core.boxes import Box
    from ckptguard.core.index import TensorEntry

    entry = TensorEntry("embedding.word_embeddings.weight", BY_NAME["bfloat16"], (512, 4), ())
    rules = padding.Rules(Facts(args={"vocab_size": 500}), Facts(args={"vocab_size": 500}), {})
    kinds = rules.kinds(entry, Box((496, 0), (8, 4)), np.array([0, 15, 16, 31]))
    assert kinds.tolist() == [padding.USED, padding.USED, padding.PADDING, padding.PADDING]
    longer = TensorEntry("embedding.word_embeddings.weight", BY_NAME["bfloat16"], (640, 4), ())
    assert rules.only_padding_rows(entry, longer)
    assert not padding.Rules(Facts(), Facts(), {}).only_padding_rows(entry, longer)


def test_unused_elements_do_not_count(tmp_path: Path) -> None:
    x = torch.arange(10.0)
    y = x.clone()
    y[7] = 99
    a, b = saved({"x": x}, tmp_path / "a"), saved({"x": y}, tmp_path / "b")
    assert compare(a, b)["x"].status == "different"
    found = compare(a, b, unused_ranges={"x": ((6, 8),)})["x"]
    assert (found.status, found.unused.elements, found.differs) == ("unused", 1, False)


def test_two_different_real_checkpoints_differ() -> None:
    found = compare(DENSE, MOE)
    assert any(d.differs for d in found.values())


@pytest.mark.parametrize("name", [n for n, d in BY_NAME.items() if d.kind == "float"])
def test_numbers_are_those_of_torch(name: str) -> None:
    dtype = BY_NAME[name]
    bits = torch.randint(0, 256, (256 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    if dtype.itemsize == 1:
        bits = torch.arange(256).to(torch.uint8)
    expected = bits.view(getattr(torch, name)).to(torch.float64).numpy()
    found = as_numbers(bits.numpy(), dtype)
    assert np.array_equal(found, expected, equal_nan=True)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=5))
@settings(max_examples=100)
def test_integer_differences_do_not_overflow(pairs) -> None:
    a, b = (np.array(side, np.int64).view(np.uint8) for side in zip(*pairs, strict=True))
    found = largest_difference(a, b, BY_NAME["int64"])
    assert found is not None
    assert found == pytest.approx(max(abs(p - q) for p, q in pairs), rel=1e-9)


def test_signalling_nans_make_no_noise() -> None:
    for name, bits in (("float32", 0x7F800001), ("bfloat16", 0x7F81), ("float16", 0x7C01)):
        dtype = BY_NAME[name]
        a = np.array([bits] * 9, f"<u{dtype.itemsize}").view(np.uint8)  # warnings are errors here
        assert np.isnan(as_numbers(a, dtype)).all()
        assert largest_difference(a, np.zeros_like(a), dtype) == float("inf")
