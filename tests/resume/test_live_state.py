"""State of a live process as items: what is listed, that it can be put back, and that what appears later is picked up."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.core.boxes import Box, overlaps
from ckptguard.core.watching import GROUPS, LiveItem
from ckptguard.megatron.live_state import LiveState, live_state, plain_name
from ckptguard.megatron.live_values import plain
from ckptguard.megatron.placed_state import joined

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron tells what is not installed
    import megatron.core.tensor_parallel.random


class Wrapped(torch.Tensor):
    """Keeps its elements in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, told: bool) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        if told:
            made.get_metadata = lambda: {"rowwise_data": inner, "data_transpose": inner, "fp8_dtype": "e4m3"}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_buffer("expert_bias", torch.ones(2))
        self.register_buffer("counts", torch.zeros(2), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.fp8_meta: dict[str, Any] = {}


class Told(torch.nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Wrapper(torch.nn.Module):
    """As Megatron's wrappers: names of what is inside begin with ``module.``."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.told, self.silent = Layer(), Told(b"state"), Told(None)


class Scaler:
    def __init__(self) -> None:
        self.scale, self.growth = torch.tensor([4.0]), 3

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.growth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.growth = state["scale"], state["growth_tracker"]


def run() -> tuple[Wrapper, Any, Any]:
    """A model, a chain of one fp32 optimizer with a scaler, and a scheduler."""
    model = Wrapper(Wrapper(Model()))
    inner = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75))
    scheduler = SimpleNamespace(num_steps=7, state_dict=lambda: {"num_steps": 0})
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner, grad_scaler=Scaler())])
    return model, chain, scheduler


def step(model: Wrapper, chain: Any) -> None:
    model.module.module.layer.weight.grad = torch.ones(2, 3)
    chain.chained_optimizers[0].optimizer.step()


def named(items: Sequence[LiveItem]) -> dict[str, LiveItem]:
    assert len({item.name for item in items}) == len(items)
    return {item.name: item for item in items}


def put(item: LiveItem, value: Any) -> None:
    assert item.write is not None
    item.write(value)


def test_everything_is_listed_in_the_order_of_a_step() -> None:
    model, chain, scheduler = run()
    step(model, chain)
    counter = LiveItem("counter iteration", "counter", lambda: 5)
    items, unobserved = live_state([model], chain, scheduler, [counter])
    order = [GROUPS.index(item.group) for item in items]
    assert order == sorted(order)
    assert unobserved == ()
    names = {item.name for item in items}
    assert names > {
        "counter iteration", "scaler 0 scale", "scaler 0 growth_tracker", "parameter chunk 0 layer.weight",
        "optimizer exp_avg chunk 0 layer.weight", "optimizer step chunk 0 layer.weight",
        "buffer chunk 0 layer.expert_bias", "unsaved buffer chunk 0 layer.counts", "extra state chunk 0 told",
        "param group 0.0 betas", "param group 0.0 params", "scheduler num_steps", "rng python", "rng numpy",
        "rng torch cpu", "other forward pre-hooks chunk 0",
    }  # fmt: skip
    assert not [name for name in names if name.startswith(("master", "extra state chunk 0 silent"))]
    found = named(items)
    assert found["param group 0.0 params"].read() == ["chunk 0 layer.weight"]
    assert found["param group 0.0 betas"].read() == [0.5, 0.75]
    assert found["extra state chunk 0 told"].read() == b"state"


def test_what_was_read_can_be_put_back() -> None:
    model, chain, scheduler = run()
    step(model, chain)
    items = [item for item in live_state([model], chain, scheduler)[0] if item.write is not None]
    kept = {i.name: (v := i.read(), v.clone() if isinstance(v, torch.Tensor) else v)[1] for i in items}
    step(model, chain)
    random.random(), np.random.rand(), torch.rand(1)
    inner = chain.chained_optimizers[0].optimizer
    inner.param_groups[0].update(lr=9.0, betas=(0.1, 0.2))
    chain.chained_optimizers[0].grad_scaler.scale = torch.tensor([8.0])
    scheduler.num_steps = 8
    model.module.module.layer.expert_bias.zero_()
    model.module.module.told.state = b"other"
    changed = [
        i.name for i in items if not torch.equal(torch.tensor(_bits(i.read())), torch.tensor(_bits(kept[i.name])))
    ]
    assert {name.split(" ")[0] for name in changed} == {
        "scaler", "optimizer", "parameter", "buffer", "extra", "param", "scheduler", "rng",
    }  # fmt: skip
    for item in items:
        put(item, kept[item.name])
    assert [i.name for i in items if _bits(i.read()) != _bits(kept[i.name])] == []
    assert inner.param_groups[0]["betas"] == (0.5, 0.75)  # a tuple again
    assert model.module.module.layer.weight.requires_grad


def _bits(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(-1).view(torch.uint8).tolist()
    return list(value if isinstance(value, bytes) else repr(value).encode())


def test_state_that_appears_is_picked_up_and_else_nothing_is_made_again() -> None:
    model, chain, scheduler = run()
    state = LiveState([model], chain, scheduler)
    before = state.items()
    assert state.items() is before
    assert not [item for item in before if item.group == "optimizer"]
    step(model, chain)
    assert [item.name for item in state.items() if item.group == "optimizer"] == [
        f"optimizer {key} chunk 0 layer.weight" for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    layer = model.module.module.layer
    layer.later = torch.ones(1)
    assert "unsaved buffer chunk 0 layer.later" in named(state.items())
    layer.fp8_meta["scaling_fwd"] = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))
    names = named(state.items())
    assert names["extra state chunk 0 layer scaling_fwd amax_history"].read().shape == (4, 3)
    assert "extra state chunk 0 layer scaling_fwd scale" in names


def test_a_replaced_state_and_group_are_read_where_they_are_now() -> None:
    model, chain, scheduler = run()
    step(model, chain)
    items = named(LiveState([model], chain, scheduler).items())
    inner = chain.chained_optimizers[0].optimizer
    other = inner.state_dict()
    other["state"][0]["exp_avg"] = torch.full((2, 3), 5.0)
    other["param_groups"][0]["lr"] = 0.25
    inner.load_state_dict(other)
    assert items["optimizer exp_avg chunk 0 layer.weight"].read().tolist() == [[5.0] * 3] * 2
    assert items["param group 0.0 lr"].read() == 0.25


def test_masters_are_told_from_views_of_the_model() -> None:
    model, _, _ = run()
    weight = model.module.module.layer.weight
    master = torch.nn.Parameter(weight.detach().double())
    weight.main_param = master
    assert "master chunk 0 layer.weight" in named(live_state([model], torch.optim.SGD([master]), None)[0])
    view = torch.nn.Parameter(weight.detach().view(-1)[2:5])
    items = live_state([model], torch.optim.SGD([view]), None)[0]
    assert [item.name for item in items if item.group == "master"] == []


def test_gradients_of_a_distributed_optimizer_are_its_own_elements() -> None:
    model, _, _ = run()
    weight = model.module.module.layer.weight
    shard = torch.nn.Parameter(weight.detach().view(-1)[2:5].clone())
    link = SimpleNamespace(
        optimizer=torch.optim.SGD([shard]),
        model_param_group_index_map={weight: (0, 0)},
        model_param_gbuf_map={weight: None},
        _get_model_param_range_map=lambda param: {"param": SimpleNamespace(start=2, end=5)},
    )
    state = LiveState([model], link, None)
    weight.main_grad = torch.arange(6.0).view(2, 3)
    (item,) = state.gradients()
    assert (item.name, item.read().tolist()) == ("gradient chunk 0 layer.weight", [2.0, 3.0, 4.0])
    put(item, torch.tensor([7.0, 8.0, 9.0]))
    assert weight.main_grad.tolist() == [[0.0, 1.0, 7.0], [8.0, 9.0, 5.0]]
    assert "master chunk 0 layer.weight" in named(state.items())


def test_a_tensor_made_of_others_is_told_by_those_or_said() -> None:
    for told in (True, False):
        model, _, _ = run()
        model.module.module.layer.expert_bias = Wrapped(torch.ones(2, 3), told)
        items, unobserved = live_state([model], None, None)
        names = [item.name for item in items if item.group == "buffer"]
        if told:
            assert (names, unobserved) == (["buffer chunk 0 layer.expert_bias.rowwise_data"], ())
        else:
            assert names == []
            assert [words.split(":")[0] for words in unobserved] == ["buffer chunk 0 layer.expert_bias"]


def test_an_optimizer_that_is_not_known_is_said() -> None:
    model, _, _ = run()
    assert live_state([model], SimpleNamespace(optimizer=object()), None)[1] == (
        "optimizer 0: a SimpleNamespace is not known here",
    )
    stub = SimpleNamespace(optimizer=None, is_stub_optimizer=True)
    assert live_state([model], stub, None)[1] == ()


def test_generators_of_the_tracker_are_items() -> None:
    tracker = megatron.core.tensor_parallel.random.get_cuda_rng_tracker()
    kept = tracker.get_states()
    graph_safe = torch.Generator().manual_seed(3)
    try:
        tracker.set_states({"model-parallel-rng": torch.get_rng_state(), "expert-parallel-rng": graph_safe})
        model, chain, scheduler = run()
        items = named(live_state([model], chain, scheduler)[0])
        for name in ("rng tracker model-parallel-rng", "rng tracker expert-parallel-rng"):
            before = items[name].read().clone()
            put(items[name], torch.Generator().manual_seed(4).get_state())
            assert not torch.equal(items[name].read(), before)
            put(items[name], before)
            assert torch.equal(items[name].read(), before)
        assert tracker.get_states()["expert-parallel-rng"] is graph_safe
    finally:
        tracker.set_states(kept)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.module.decoder.layers.0.mlp", "decoder.layers.0.mlp"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("module", ""),
        ("encoder.module.submodule.weight", "encoder.submodule.weight"),
    ],
)
def test_wrappers_leave_no_trace_in_names(name: str, expected: str) -> None:
    assert plain_name(name) == expected


def test_values_that_are_no_tensor_have_a_plain_form() -> None:
    assert plain({1: torch.tensor([1, 2]), "a": (1, {"b": b"\x00"})}) == {"1": [1, 2], "a": [1, {"b": "00"}]}
    assert plain(torch.bfloat16) == "torch.bfloat16"
    assert plain(torch.optim.SGD) == "torch.optim.sgd.SGD"
    assert plain(object()) == "builtins.object"
    assert plain({3, 1}) == [1, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), unique=True), st.randoms())
def test_joined_boxes_hold_the_same_cells_in_any_order(cells: list[tuple[int, int]], shuffler: random.Random) -> None:
    boxes = [Box(cell, (1, 1)) for cell in cells]
    once = joined(boxes)
    shuffler.shuffle(boxes)
    assert joined(boxes) == once
    assert list(overlaps(once)) == []
    assert sum(box.numel for box in once) == len(cells)
    assert all(any(box.intersect(one) for one in once) for box in boxes)


def test_neighbours_are_joined() -> None:
    rows = [Box((layer, 4, 0), (1, 2, 8)) for layer in range(6)]
    assert joined(rows) == [Box((0, 4, 0), (6, 2, 8))]
    assert joined([]) == []
