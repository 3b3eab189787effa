"""Plans of made-up models: there and back again is the identity, whatever the layouts and forms in between."""

from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.convert.reshard_plan import plan_torch_dist
from ckptguard.convert.target import OptimizerForm
from ckptguard.layout.ranks import Grid, smallest_dp
from ckptguard.testing import synthetic
from ckptguard.testing.synthetic import Kind, Model

KINDS = (
    Kind("embedding", (24, 4), 0, where="first"),
    Kind("qkv", (24, 4), 0),
    Kind("proj", (4, 24), 1),
    Kind("norm", (5,), None),
    Kind("fc1", (48, 3), 0, fused=2),
    Kind("fc1_expert", (16, 3), 0, fused=2, expert=True),
    Kind("fc2_expert", (3, 8), 1, expert=True),
    Kind("final_norm", (5,), None, where="last"),
    Kind("output", (24, 4), 0, where="last"),
)


@st.composite
def layouts(draw: st.DrawFn, layers: int) -> tuple[Grid, tuple[tuple[int, ...], ...]]:
    """A grid, and layers cut unevenly into its stages, virtual ones too."""
    tp, etp = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 4]))
    ep, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2]))
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dp = smallest_dp(tp, cp, etp, ep) * draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    edges = [0, *cuts, layers]
    stages = tuple(tuple(range(a, b)) for a, b in pairwise(edges))
    return Grid(tp, pp, cp, dp, etp, ep), stages


FORMS: list[OptimizerForm] = ["dp_reshardable", "fully_reshardable"]


# tools/stress/reshard_plans.py asks for thousands.
@settings(max_examples=int(os.environ.get("CKPTGUARD_PLAN_EXAMPLES", "40")), deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from(FORMS), st.sampled_from(FORMS))
def test_a_to_b_to_a_is_the_identity(
    data: st.DataObject, layers: int, form: OptimizerForm, other: OptimizerForm
) -> None:
    model = Model(KINDS, layers, 4)
    a = synthetic.target(model, *data.draw(layouts(layers)), form)
    b = synthetic.target(model, *data.draw(layouts(layers)), other)
    origin = synthetic.whole_checkpoint(model)
    start = origin.state(a.structures)
    in_a = origin.written(start, plan_torch_dist(start, a))
    state_a = in_a.state(a.structures)
    in_b = in_a.written(state_a, plan_torch_dist(state_a, b))
    state_b = in_b.state(b.structures)
    back = in_b.written(state_b, plan_torch_dist(state_b, a))
    assert back.chunks.keys() == in_a.chunks.keys()
    assert all(np.array_equal(back.chunks[key], values) for key, values in in_a.chunks.items())
    whole = plan_torch_dist(state_b, synthetic.target(model, Grid(1, 1), (tuple(range(layers)),), "fully_reshardable"))
    in_one = in_b.written(state_b, whole)
    assert {name for name, _ in in_one.chunks} == {name for name, _ in origin.chunks}
    for (name, _), values in origin.chunks.items():
        parts = [(box, part) for (other_name, box), part in in_one.chunks.items() if other_name == name]
        for box, part in parts:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            assert np.array_equal(values[place], part)
