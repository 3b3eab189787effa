"""What a load plan names holds for Megatron itself: no rank of a real run opens another file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from opened_files import opened, watching

from ckptguard.layout.layouts import Layout
from ckptguard.testing.recipes import RECIPES, check_loads
from ckptguard.view.needs import needed
from ckptguard.view.values import Step

pytestmark = [pytest.mark.megatron, pytest.mark.slow]
SHARED_OUT = ("--ckpt-fully-parallel-load",)
"""Data parallel ranks read a share each; a plan names what all of them read together."""


@pytest.mark.parametrize(
    ("source", "layout", "flags", "most"),
    [
        pytest.param("dense_tp2_pp2_full", Layout(tp=1, pp=4), (), 1.0, id="TP2PP2-as-PP4"),
        pytest.param("moe_ep2_pp2", None, SHARED_OUT, 1.5, id="MoE-EP2PP2-as-saved"),
    ],
)
def test_no_rank_opens_a_file_that_is_not_named(
    real_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    layout: Layout | None,
    flags: tuple[str, ...],
    most: float,
) -> None:
    checkpoint, saved = real_checkpoint(source), RECIPES[source]
    recipe = dataclasses.replace(saved, extra_flags=flags)
    if layout is not None:
        recipe = dataclasses.replace(recipe, tp=layout.tp, pp=layout.pp, dp=4 // layout.tp // layout.pp)
    names = [f"{checkpoint.name}/{path.name}" for path in sorted(checkpoint.glob("*.distcp"))]
    step = Step("global", str(int(checkpoint.name.removeprefix("iter_"))))
    ranks = {rank: (rank,) for rank in range(recipe.world_size)}
    needs = needed(checkpoint.parent, step, ranks=ranks, layout=layout, names=names)
    assert needs.how.startswith("the load plan of TP")
    assert min(map(len, needs.names.values())) < len(names)

    for name, value in watching(tmp_path / "opened").items():
        monkeypatch.setenv(name, value)
    check_loads(checkpoint.parent, recipe)
    read = opened(tmp_path / "opened")
    named = {rank: {name.split("/")[1] for name in needs.names[rank]} for rank in ranks}
    assert read.keys() == named.keys()
    assert all(read[rank] <= named[rank] for rank in ranks), (read, named)
    assert sum(map(len, named.values())) <= most * sum(map(len, read.values())), (read, named)
