"""Weights against their fp32 masters: clean on what Megatron writes rightly, red on what it writes wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage_cases import DENSE, MOE

from ckptguard.engine.masters import check_masters, pairs, rounded
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_rounding_is_that_of_torch(name: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    values = bits.view(torch.float32)
    expected = values.to(getattr(torch, name))
    found, is_nan = rounded(bits.numpy().view(np.uint32), name)
    same = found == expected.view(torch.int32 if name == "float32" else torch.int16).numpy().view(found.dtype)
    assert (same | is_nan).all()
    assert np.array_equal(is_nan, torch.isnan(values).numpy())


def test_a_real_checkpoint_agrees() -> None:
    with open_checkpoint(MOE) as checkpoint:
        assert len(pairs(checkpoint.index)) == 10
        assert check_masters(checkpoint) == ([], 10)
    assert not verify(MOE, masters=True).damaged


def test_other_formats_say_that_nothing_was_compared() -> None:
    report = verify(DENSE, masters=True)
    assert not report.damaged
    assert any("masters were not compared" in p.message for p in report.problems)


def test_one_changed_weight_is_found(tmp_path: Path) -> None:
    master = torch.randn(300, 40, generator=torch.Generator().manual_seed(1))
    weight = master.bfloat16()
    state = {"a.weight": weight, "optimizer.state.param.a.weight": master}
    dcp.save(state, checkpoint_id=tmp_path / "good", no_dist=True)
    assert not verify(tmp_path / "good", masters=True).damaged
    weight[123, 7] += 1
    dcp.save(state, checkpoint_id=tmp_path / "bad", no_dist=True)
    (problem,) = [p for p in verify(tmp_path / "bad", masters=True).problems if p.is_damage]
    assert (problem.kind, problem.tensor) == ("masters", "a.weight")
    assert problem.box is not None
    assert problem.box.offset == (123, 7)
    assert "1 of 12000 elements" in problem.message


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense_tp2_pp2_full", "moe_ep2_pp2_full", "dense_pp4_uneven_full"])
def test_what_megatron_writes_agrees(real_checkpoint: Callable[[str], Path], name: str) -> None:
    report = verify(real_checkpoint(name), masters=True)
    assert not report.damaged, report.problems


@pytest.mark.megatron
@pytest.mark.slow
def test_a_real_fault_of_megatron_is_found(tmp_path: Path) -> None:
    """Megatron Core 0.19.2 shifts fully_reshardable optimizer state behind a padded bucket; loading says nothing."""
    from ckptguard.testing.recipes import DENSE_TP1_PP1_FULL, make_checkpoint

    flags = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
    recipe = dataclasses.replace(DENSE_TP1_PP1_FULL, name="padded_buckets", extra_flags=flags)
    path = make_checkpoint(recipe, tmp_path / "root")
    assert not verify(path).damaged
    wrong = [p for p in verify(path, masters=True).problems if p.kind == "masters"]
    assert wrong
