"""Layouts that a model fits in: every one that fits, none that does not, and what their ranks hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.layout.fits import Dimensions, expert_ranks, wrong
from ckptguard.layout.layouts import Layout
from ckptguard.layout.possible import Counts, Elements, possible
from ckptguard.report.layouts import layout_lines, layouts_dict

# Mixtral 8x7B, about: 32 layers, 8 experts of 3 x 4096 x 14336.
MIXTRAL = Counts(
    dimensions=Dimensions(layers=32, heads=32, groups=8, head_width=128, experts=8, expert_width=14336),
    vocabulary=32000,
    layers=Elements(cut=32 * 41_943_040, copied=32 * 40_960, experts=32 * 8 * 176_160_768),
    first=Elements(cut=131_072_000),
    last=Elements(cut=131_072_000, copied=4096),
    again=Elements(),
    weight_bytes=2,
    optimizer_bytes=12,
    distributed=True,
)
DENSE = replace(
    MIXTRAL, dimensions=Dimensions(layers=30, heads=8, groups=8), layers=Elements(cut=30_000), first=Elements(100)
)


def test_sixteen_gpus() -> None:
    found = possible(MIXTRAL, 16)
    sizes = {(c.layout.tp, c.layout.pp, c.layout.ep, c.layout.etp) for c in found}
    assert len(sizes) == len(found)
    assert {(8, 2, 8, 1), (1, 2, 8, None), (16, 1, 1, None), (1, 16, 1, None), (2, 1, 8, 1)} <= sizes
    assert (16, 1, 2, None) not in sizes  # ETP x EP are 32
    assert (1, 16, 2, None) not in sizes
    assert found == tuple(sorted(found, key=lambda c: c.total_bytes))
    best = found[0]
    whole = MIXTRAL.first + MIXTRAL.layers + MIXTRAL.last
    assert best.total_bytes >= 14 * (whole.cut + whole.experts) // 16


def test_what_the_largest_rank_holds() -> None:
    one = next(
        c for c in possible(MIXTRAL, 16) if (c.layout.tp, c.layout.pp, c.layout.ep, c.layout.etp) == (2, 2, 4, 1)
    )
    dense = (131_072_000 + 16 * 41_943_040) // 2 + 16 * 40_960 + 4096  # the last stage, with the final norm
    experts = 16 * 2 * 176_160_768
    assert one.weight_bytes == 2 * (dense + experts)
    assert one.optimizer_bytes == 12 * (dense // 4 + experts // 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"distributed": False}, 12 * 15_100),
        ({"optimizer_bytes": 0}, 0),
        ({"again": Elements(900)}, 12 * 15_900 // 2),
    ],
)
def test_optimizer_state(change: dict[str, object], expected: int) -> None:
    counts = replace(DENSE, last=Elements(), **change)  # type: ignore[arg-type]
    one = next(c for c in possible(counts, 4) if (c.layout.tp, c.layout.pp) == (1, 2))
    assert one.optimizer_bytes == expected


def test_layers_that_cannot_be_cut_evenly_leave_fewer_on_the_last_stage() -> None:
    cuts = {c.layout.pp: c.layout.last_pp_layers for c in possible(DENSE, 64) if c.layout.tp == 1}
    assert cuts == {1: None, 2: None, 4: 6, 8: 2}


@given(
    layers=st.integers(1, 40), groups=st.sampled_from([1, 2, 3, 4, 8]), per_group=st.integers(1, 8),
    experts=st.sampled_from([0, 1, 4, 6]), gpus=st.integers(1, 48),
)  # fmt: skip
def test_every_candidate_fits_and_uses_all_gpus(
    layers: int, groups: int, per_group: int, experts: int, gpus: int
) -> None:
    dims = Dimensions(
        layers=layers, heads=groups * per_group, groups=groups, head_width=64, over_tp=(("the MLP's width", 96),),
        experts=experts, expert_width=24 if experts else 0,
    )  # fmt: skip
    found = possible(replace(MIXTRAL, dimensions=dims), gpus)
    for layout in (candidate.layout for candidate in found):
        assert not list(wrong(dims, layout))
        assert layout.dp is not None
        assert layout.tp * layout.pp * layout.dp == gpus
        assert gpus % expert_ranks(layout) == 0
    assert Layout(dp=gpus) in {candidate.layout for candidate in found}


def test_report() -> None:
    found = possible(MIXTRAL, 16)
    lines = list(layout_lines(found, 16))
    assert f"{len(found)} layouts fit 16 GPUs" in lines[0]
    assert lines[1].endswith("  weights  optimizer  largest rank")
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert lines[-1] == f"  and {len(found) - 40} more; --json lists all" if len(found) > 40 else "GiB" in lines[-1]
    assert "6 layers" in "\n".join(layout_lines(possible(DENSE, 4), 4))
    data = json.loads(json.dumps(layouts_dict(found, 16)))
    assert len(data["layouts"]) == len(found)
    assert data["layouts"][0]["layout"]["dp"] == found[0].layout.dp
    assert list(layout_lines((), 7)) == ["no layout without context parallelism and virtual stages fits 7 GPUs"]
