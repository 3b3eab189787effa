"""Calls of operations: what each gets and gives, which are recorded, and which module they belong to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from call_models import Trained, train

from ckptguard.resume import module_calls, op_calls
from ckptguard.resume.call_compare import first_fault
from ckptguard.resume.digests import recorded
from ckptguard.resume.records import Call

WRONG = False


@torch.library.custom_op("ckptguard_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice its input, or nearly."""
    return x * 2 if not WRONG else x * 2.0000002


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.fixture(autouse=True)
def doubles_are_right() -> Iterator[None]:
    global WRONG
    yield
    WRONG = False


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def recorded_ops(run: Any, scope: str | None = None, **options: Any) -> list[Call]:
    calls: list[Call] = []
    with op_calls.recording(3, scope, calls.append, **options):
        run()
    return calls


def test_inputs_are_read_before_an_operation_changes_them_and_outputs_after() -> None:
    x, y = torch.ones(2), torch.full((2,), 3.0)
    before, added = recorded(x), recorded(y)
    (call,) = recorded_ops(lambda: x.add_(y, alpha=2))
    assert (call.step, call.scope, call.phase, call.op) == (3, module_calls.OUTSIDE, "step", "aten.add_.Tensor")
    assert call.inputs == (before, added, 2)
    assert call.outputs == (recorded(x),)


def test_what_an_operation_only_writes_to_is_no_input() -> None:
    out, x = torch.ones(2), torch.full((2,), 3.0)
    calls = recorded_ops(lambda: (torch.mul(x, x, out=out), out.copy_(x), out.zero_()))
    assert [call.op for call in calls] == ["aten.mul.out", "aten.copy_.default", "aten.zero_.default"]
    assert [call.inputs for call in calls] == [(recorded(x), recorded(x)), (recorded(x),), ()]
    assert calls[0].outputs == (recorded(x * x),)


def test_what_is_multiplied_by_zero_is_no_input() -> None:
    x, a = torch.ones(2, 2), torch.eye(2)
    none, half = recorded_ops(lambda: (torch.addmm(x, a, a, beta=0.0), torch.addmm(x, a, a, beta=0.5)))
    assert none.inputs == (recorded(a), recorded(a), 0.0)
    assert half.inputs == (recorded(x), recorded(a), recorded(a), 0.5)


def test_lists_of_tensors_are_read_and_what_is_written_is_told() -> None:
    x, y = torch.ones(2), torch.zeros(1)
    (call,) = recorded_ops(lambda: torch._foreach_add_([x, y], 1))
    assert call.inputs[:2] == (recorded(x - 1), recorded(y - 1))
    assert call.outputs == (recorded(x), recorded(y))


def test_views_and_allocations_are_left_out() -> None:
    x = torch.ones(2, 3)
    assert recorded_ops(lambda: (x.t(), x.view(6), x[0], x.detach(), torch.empty(3), x.new_empty(2))) == []


def test_memory_that_nobody_wrote_is_told_in_words() -> None:
    def run() -> None:
        fresh, written, part = torch.empty(2), torch.empty(2), torch.empty(4)
        written.fill_(1.0)
        part[1:].zero_()
        fresh + written
        part + part
        fresh.view(2, 1) + 1

    adds = [call.inputs for call in recorded_ops(run) if call.op == "aten.add.Tensor"]
    assert adds[0][0] == "never written torch.float32[2]"
    assert adds[0][1] == recorded(torch.ones(2))
    assert adds[1][0].startswith("#")
    assert adds[2][0] == "never written torch.float32[2, 1]"


def test_random_operations_have_their_generator_as_an_input() -> None:
    torch.manual_seed(5)
    default = f"generator cpu {recorded(torch.get_rng_state())}"
    own = torch.Generator().manual_seed(8)
    calls = recorded_ops(lambda: (torch.empty(2).uniform_(), torch.rand(2), torch.rand(2, generator=own)))
    uniform, rand, private = calls
    assert uniform.inputs == (default,)
    assert rand.inputs[-1] != default
    assert rand.inputs[-1].startswith("generator cpu #")
    assert recorded(torch.Generator().manual_seed(8).get_state()) in private.inputs
    assert not any(str(value).startswith("generator") for value in private.inputs)


def test_operations_belong_to_modules_forward_and_backward() -> None:
    ops = train(ops=None, micro_batches=1).ops()
    where = {(call.scope, call.phase, call.op) for call in ops}
    for scope, phase, op in (
        ("embedding", "forward", "aten.embedding.default"), ("embedding", "backward", "aten.embedding_dense_backward.default"),
        ("norm", "forward", "aten.native_layer_norm.default"), ("norm", "backward", "aten.native_layer_norm_backward.default"),
        ("dropout", "forward", "aten.bernoulli_.float"), ("up", "forward", "aten.addmm.default"),
        ("up", "backward", "aten.mm.default"),
        ("", "forward", "aten.gelu.default"), ("", "backward", "aten.gelu_backward.default"),
    ):  # fmt: skip
        assert (f"chunk 0 {scope}".strip(), phase, op) in where
    assert (module_calls.OUTSIDE, "backward", "aten.nll_loss_backward.default") in where
    assert any(call.scope == "optimizer" and call.phase == "step" for call in ops)


@pytest.mark.parametrize("recompute", ["reentrant", "early"])
def test_operations_of_recomputation_are_forward_operations_of_their_modules(recompute: str) -> None:
    ops = train(ops=None, recompute=recompute, micro_batches=1).ops()
    norms = [call for call in ops if call.op == "aten.native_layer_norm.default"]
    assert [(call.scope, call.phase, call.occurrence) for call in norms] == [
        ("chunk 0 norm", "forward", 0), ("chunk 0 norm", "forward", 1),
    ]  # fmt: skip
    assert norms[0].inputs == norms[1].inputs
    assert [call.scope for call in ops if call.op == "aten.native_layer_norm_backward.default"] == ["chunk 0 norm"]


def test_a_scope_is_a_module_with_what_is_inside_or_a_part_of_the_step() -> None:
    everything = train(ops=None).ops()
    for scope in ("chunk 0 up", "chunk 0", "optimizer", "outside modules"):
        ops = train(ops=scope).ops()
        assert [_but_occurrence(call) for call in ops] == [
            _but_occurrence(call)
            for call in everything
            if call.scope == scope or (scope == "chunk 0" and call.scope.startswith(scope))
        ]
        assert ops
    assert train(ops="chunk 0 u").ops() == []


def _but_occurrence(call: Call) -> tuple[Any, ...]:
    return call.scope, call.phase, call.op, call.inputs, call.outputs


def test_digests_of_modules_are_no_operations() -> None:
    with_modules, without = train(ops=None), train(ops=None, hooks=False)
    assert [call.op for call in with_modules.ops()] == [call.op for call in without.ops()]


def test_a_wrong_operation_is_named_with_its_module() -> None:
    def plant(run: Trained) -> None:
        right = run.model.down.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            global WRONG
            WRONG = at_fault and run.step == 2 and run.micro_batch == 1
            return double(right(x))

        run.model.down.forward = forward  # type: ignore[method-assign]

    at_fault = False
    right = train(before=plant, ops=None)
    at_fault = True
    wrong = train(before=plant, ops=None)
    found = first_fault(right.record(), wrong.record())
    assert found is not None
    call = found.fault.call
    assert (call.step, call.scope, call.phase, call.op) == (
        2,
        "chunk 0 down",
        "forward",
        "ckptguard_test.double.default",
    )
    assert (call.occurrence, found.fault.sort) == (1, "compute")


def test_an_operation_that_reads_unwritten_memory_is_named() -> None:
    def plant(run: Trained) -> None:
        right = run.model.norm.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            never_written = torch.empty(x.shape[-1])
            never_written.numpy()[:] = rest if run.step == 2 else 0.0  # unseen by torch, as what memory held before
            return right(x) + never_written

        run.model.norm.forward = forward  # type: ignore[method-assign]

    rest = 0.0
    right = train(before=plant, ops=None)
    rest = 1e-3
    found = first_fault(right.record(), train(before=plant, ops=None).record())
    assert found is not None
    assert (found.fault.call.scope, found.fault.call.op) == ("chunk 0 norm", "aten.add.Tensor")
    assert "never written torch.float32[8]" in found.fault.call.inputs


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # Megatron Core calls them by these names
def test_collectives_are_waited_for_and_tell_their_group(alone: dist.ProcessGroup) -> None:
    x, gathered, part = torch.ones(2), torch.empty(2), torch.empty(2)

    def run() -> None:
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(part, x)
        dist.all_gather([gathered], x)
        dist.broadcast(x, src=0)
        dist.all_to_all_single(part, x)
        dist.barrier()
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))

    one = recorded(torch.ones(2))
    calls = recorded_ops(run, "collectives", current_scope=lambda: ("chunk 0", "forward"))
    assert [call.op.removesuffix(".default") for call in calls] == [
        "c10d.allreduce_", "c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allgather_", "c10d.broadcast_",
        "c10d.alltoall_base_", "c10d.barrier", "_c10d_functional.all_reduce",
    ]  # fmt: skip
    for call in calls:
        assert (call.scope, call.phase) == ("chunk 0", "forward")
        if call.op != "c10d.barrier.default":
            assert [value for value in call.inputs if str(value).startswith("#")] == [one], call.op
            assert call.outputs == (one,), call.op
        if not call.op.startswith("_"):
            assert call.inputs[-1] == "ranks 0"


def test_other_operations_are_no_collectives(alone: dist.ProcessGroup) -> None:
    assert recorded_ops(lambda: torch.ones(2) + 1, "collectives") == []


def test_other_threads_are_not_recorded() -> None:
    def run() -> None:
        thread = threading.Thread(target=lambda: torch.ones(2) + 1)
        thread.start()
        thread.join()

    assert recorded_ops(run) == []


def test_threads_of_a_backward_pass_are_recorded() -> None:
    """Backward passes nested deeper than 60 go on in the engine's own threads, by the loop that serves devices too."""
    threads: list[int] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            threads.append(threading.get_ident())
            if ctx.depth:
                with torch.enable_grad():
                    inner = Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1)
                inner.backward()
            else:
                gradient = torch.cos(gradient)
            return gradient, None

    calls = recorded_ops(lambda: Nested.apply(torch.ones(1, requires_grad=True), 70).backward())
    assert len(set(threads)) > 1
    (cosine,) = [call for call in calls if call.op == "aten.cos.default"]
    assert cosine.phase == "backward"


def test_a_limit_is_told_once() -> None:
    told: list[str] = []
    x = torch.ones(2)
    assert len(recorded_ops(lambda: [x + 1 for _ in range(5)], tell=told.append, limit=2)) == 2
    assert len(told) == 1


def test_an_error_of_the_recording_is_told_and_the_operation_made() -> None:
    failures: list[Exception] = []

    def emit(call: Call) -> None:
        raise OSError("disk full")

    with op_calls.recording(1, None, emit, failed=failures.append):
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
    assert failures
