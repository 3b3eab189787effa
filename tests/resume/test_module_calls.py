"""Calls of modules: nothing is changed by recording them, and the first one to blame is the right one."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import call_models
import pytest
import torch
from call_models import Gain, Trained, flipped, train
from torch.autograd import Variable

from ckptguard.resume import module_calls
from ckptguard.resume.call_compare import Located, first_fault
from ckptguard.resume.records import Call

RECOMPUTE = ("", "reentrant", "early")


@pytest.fixture(autouse=True)
def gain_is_right() -> Iterator[None]:
    yield
    Gain.wrong = False


def fault(one: Trained, other: Trained) -> Located:
    found = first_fault(one.record(), other.record())
    assert found is not None
    return found


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recording_changes_nothing(recompute: str) -> None:
    plain = train(hooks=False, recompute=recompute)
    for hooked in (train(recompute=recompute), train(recompute=recompute, ops=None)):
        assert hooked.losses == plain.losses
        assert hooked.calls
        for name, value in plain.model.state_dict().items():
            assert torch.equal(value, hooked.model.state_dict()[name]), name
        assert torch.equal(plain.rng, hooked.rng)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_equal_runs_have_equal_calls(recompute: str) -> None:
    one, other = train(recompute=recompute), train(recompute=recompute)
    assert one.calls == other.calls
    assert first_fault(one.record(), other.record()) is None
    assert one.told == []


def test_calls_are_in_the_order_in_which_they_end() -> None:
    run = train(micro_batches=1)
    names = [call.scope.removeprefix("chunk 0").strip() for call in run.modules("forward")]
    assert names == ["embedding", "skip", "norm", "up", "dropout", "down", "counter", "head", ""]
    backward = list(dict.fromkeys(call.scope.removeprefix("chunk 0 ") for call in run.modules("backward")))
    assert backward == ["head", "down", "dropout", "up", "norm", "embedding", "chunk 0"]
    weights = [call.scope.removeprefix("chunk 0 ") for call in run.modules("weight gradient")]
    assert sorted(weights) == [
        "down",
        "down",
        "embedding",
        "norm",
        "norm",
        "up",
        "up",
    ]  # tied: once, in the first owner
    first = {call.scope: at for at, call in reversed(list(enumerate(run.calls))) if call.phase == "backward"}
    for at, call in enumerate(run.calls):
        if call.phase == "weight gradient":
            assert at > first[call.scope]


def test_micro_batches_and_recomputed_calls_are_told_apart_by_occurrence() -> None:
    run = train(recompute="reentrant", micro_batches=2)
    up = [call for call in run.modules("forward") if call.scope == "chunk 0 up"]
    assert [call.occurrence for call in up] == [0, 1, 2, 3]
    assert up[0].inputs == up[1].inputs  # the first micro-batch, recomputed
    assert up[0].outputs == up[1].outputs
    assert up[0].inputs != up[2].inputs
    assert [call.occurrence for call in run.modules("forward", step=2) if call.scope == "chunk 0 up"] == [0, 1, 2, 3]


def wrong_output(name: str) -> Callable[[Trained], None]:
    def plant(run: Trained) -> None:
        module = run.model.get_submodule(name)
        right = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = right(x)
            if run.step == 2 and run.micro_batch == 1:
                out = out + (flipped(out) - out.detach())
            return out

        module.forward = forward  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize("name", ["embedding", "norm", "up", "dropout", "down", "head"])
def test_a_bit_flipped_in_one_output_names_that_module(name: str) -> None:
    found = fault(train(), train(before=wrong_output(name)))
    call = found.fault.call
    assert (call.step, call.scope, call.phase, call.occurrence) == (2, f"chunk 0 {name}", "forward", 1)
    assert found.fault.sort == "compute"


def wrong_gradient(of: str) -> tuple[Callable[[Trained], None], Callable[[Trained], None]]:
    def plant(run: Trained) -> None:
        run.model.get_submodule(of).gains = True  # type: ignore[assignment]

    def act(run: Trained) -> None:
        Gain.wrong = run.step == 2

    return plant, act


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("of", ["norm", ""])
def test_a_wrong_backward_pass_names_its_module_also_beside_a_residual(of: str, recompute: str) -> None:
    """The block's input has two users: what one adds to its gradient is not blamed on the other."""
    plant, act = wrong_gradient(of)
    right = train(before=plant, recompute=recompute)
    found = fault(right, train(before=plant, at_step=act, recompute=recompute))
    call = found.fault.call
    assert found.fault.sort == "compute"
    assert (call.step, call.scope, call.phase) == (2, f"chunk 0 {of}".strip(), "backward")


def test_a_changed_parameter_blames_no_module() -> None:
    def act(run: Trained) -> None:
        if run.step == 2:
            run.model.up.weight.data = flipped(run.model.up.weight)

    found = fault(train(), train(at_step=act))
    assert found.fault.call.scope == "chunk 0 up"
    assert found.fault.sort == "receiver"


def test_a_changed_generator_blames_no_module() -> None:
    def act(run: Trained) -> None:
        if run.step == 2:
            torch.manual_seed(1)

    found = fault(train(), train(at_step=act))
    assert found.fault.call.scope == "chunk 0 dropout"
    assert found.fault.sort != "compute"


def test_a_changed_buffer_blames_no_module() -> None:
    def act(run: Trained) -> None:
        if run.step == 2:
            run.model.counter.calls += 1

    found = fault(train(), train(at_step=act))
    assert (found.fault.call.scope, found.fault.sort) == ("chunk 0 counter", "receiver")


def test_a_contribution_that_is_not_accumulated_is_named() -> None:
    def plant(run: Trained) -> None:
        bias = run.model.up.bias
        kept: list[torch.Tensor] = []

        def drop(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if run.step == 2 and run.micro_batch == 1:
                parameter.grad.copy_(kept[-1])
            kept.append(parameter.grad.clone())

        bias.register_post_accumulate_grad_hook(drop)

    found = fault(train(), train(before=plant))
    call = found.fault.call
    assert (call.step, call.scope, call.phase) == (2, "chunk 0 up", "weight gradient")
    assert found.fault.sort == "compute"


def test_gradients_left_over_from_before_the_step_blame_no_module() -> None:
    def plant(run: Trained) -> None:
        clear, bias = run.optimizer.zero_grad, run.model.up.bias

        def forgetful() -> None:
            clear()
            bias.grad = torch.ones_like(bias) if run.step == 2 else None

        run.optimizer.zero_grad = forgetful  # type: ignore[method-assign]

    found = fault(train(), train(before=plant))
    call = found.fault.call
    assert (call.scope, call.phase, found.fault.sort) == ("chunk 0 up", "weight gradient", "receiver")


def test_nothing_is_recorded_while_nothing_is_wanted() -> None:
    calls: list[Call] = []
    model = call_models.Model()
    module_calls.install([model], calls.append, lambda: None)
    model(torch.zeros(1, 2, dtype=torch.int64))["logits"].sum().backward()
    assert calls == []


def test_a_limit_is_told_once() -> None:
    run = train(limit=10)
    assert len(run.calls) == 10
    assert len(run.told) == 1
    assert "after the first 10" in run.told[0]


def test_a_module_that_raises_is_left() -> None:
    class Raises(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    calls: list[Call] = []
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), Raises())
    module_calls.install([module], calls.append, lambda: 1)
    with contextlib.suppress(ValueError):
        module(torch.ones(1, 2))
    assert [call.scope for call in calls] == ["chunk 0 0"]
    assert module_calls.current() == (module_calls.OUTSIDE, "step")


def test_an_error_of_the_recording_is_told_and_training_goes_on() -> None:
    def emit(call: Call) -> None:
        raise OSError("disk full")

    failures: list[Exception] = []
    module = torch.nn.Linear(2, 2)
    module_calls.install([module], emit, lambda: 1, failed=failures.append)
    module(torch.ones(1, 2)).sum().backward()
    assert failures
    assert {str(error) for error in failures} == {"disk full"}


def test_outputs_may_be_freed_before_the_backward_pass_and_are_not_kept() -> None:
    """As Megatron's pipeline schedule does: the data are let go, and the C++ engine is called with a gradient of full size."""
    calls: list[Call] = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    module_calls.install([model], calls.append, lambda: 1)
    given, x = torch.rand(3, 4), torch.rand(3, 4)
    out = model(x)
    plain(x).backward(given)
    storage = weakref.ref(out.untyped_storage())
    out.data = torch.empty(1)
    gc.collect()
    assert storage() is None
    Variable._execution_engine.run_backward(
        tensors=(out,), grad_tensors=(given,), keep_graph=False, create_graph=False, inputs=(),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert any(call.phase == "backward" for call in calls)


def test_activations_and_graphs_are_let_go() -> None:
    alive: list[weakref.ref[Any]] = []

    def plant(run: Trained) -> None:
        run.model.up.register_forward_hook(lambda module, args, out: alive.append(weakref.ref(out)))

    run = train(before=plant)
    gc.collect()
    assert len(alive) == 4
    assert all(ref() is None for ref in alive)
    assert run.calls


def test_wrappers_are_not_part_of_names() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    inner = torch.nn.Sequential(torch.nn.Linear(1, 1))
    named = dict(module_calls.named_scopes(2, Wrapper(Wrapper(inner))))
    assert named == {"chunk 2": inner, "chunk 2 0": inner[0]}


def test_what_a_stage_is_handed_is_an_input_of_it_and_of_the_modules_around() -> None:
    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.input_tensor: torch.Tensor | None = None

        def forward(self) -> torch.Tensor:
            return self.layer(self.input_tensor)

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = Stage()

        def forward(self) -> torch.Tensor:
            return self.stage()

    seen = []
    torch.manual_seed(0)
    model = Around()
    calls: list[Call] = []
    module_calls.install([model], calls.append, lambda: 1)
    for value in (1.0, 2.0):
        model.stage.input_tensor = torch.full((1, 2), value, requires_grad=True)
        model().sum().backward()
        seen.append({(call.scope, call.phase): call for call in calls})
        calls.clear()
    for scope in ("chunk 0", "chunk 0 stage", "chunk 0 stage.layer"):
        assert seen[0][scope, "forward"].inputs != seen[1][scope, "forward"].inputs
    assert seen[0]["chunk 0 stage", "backward"].outputs


def test_a_gradient_that_a_kernel_accumulates_belongs_to_the_backward_call() -> None:
    """As with Megatron's fused accumulation: what autograd is given has nothing in it and is not read."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (x,), weight = ctx.saved_tensors, ctx.weight
            weight.main_grad.add_(gradient.t() @ x)
            weight.grad_added_to_main_grad = True
            return gradient @ weight, torch.rand_like(weight)

    class Linear(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Fused.apply(x, self.weight)

    def run() -> list[Call]:
        torch.manual_seed(0)
        module = Linear(2, 2, bias=False)
        module.weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
        module.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        calls: list[Call] = []
        module_calls.install([module], calls.append, lambda: 1)
        torch.manual_seed(seed)
        for _ in range(2):
            module(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return [call for call in calls if call.phase != "forward"]

    seed = 1
    one = run()
    seed = 2
    assert run() == one
    assert [call.phase for call in one] == ["backward", "backward"]
    assert one[0].outputs[1] in one[1].inputs
