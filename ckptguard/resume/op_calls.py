"""Calls of operations: what every ATen operation and collective of a part of a step gets and gives.

A ``TorchDispatchMode`` sees them below autograd. It is on for one step and one thread. On a CPU the backward pass runs in the
thread that asked for it; on other devices autograd's engine puts that thread's state, which modes are part of, in place in its
workers (torch 2.14.1, torch/csrc/autograd/graph_task.h ``thread_locals_``, ATen/ThreadLocalState.h). While an operation is
handled the mode is off, so digests are no calls.

What is not an operation of torch is not seen: kernels that extensions start themselves show in the next operation's inputs.

* Views give nothing new and are left out, as are allocations: what they give was never written. An operation that reads such
  memory before anyone has written it has a word in its inputs instead of a digest, the same in every run.
* Inputs are read before the operation, which may write to them; those that it only writes to are left out. What it wrote to is
  among its outputs.
* Operations that draw random numbers have the state of their generator as an input.
* Collectives are waited for where they are begun, so that what they give can be read. A receive is not: what it waits for may
  be sent only later. Their inputs end with the ranks of the group, because what one gives depends on what all of them gave it.
* Copies from a device that the host does not wait for are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ckptguard.resume import module_calls
from ckptguard.resume.call_values import LIMIT, Calls, Emit, ignored, raised, tensors_of, values_of
from ckptguard.resume.digests import recorded
from ckptguard.resume.records import Value, in_scope

COLLECTIVES = "collectives"
_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_OVERWRITES = frozenset(  # what was in the first argument does not matter
    ("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_",
     "log_normal_")
)  # fmt: skip
_LEFT_OUT = frozenset(  # a tensor is given other memory, or another shape; what it waits for was waited for before
    ("resize_", "set_", "_unsafe_view", "wait_tensor")
)
_POINT_TO_POINT = frozenset(("send", "recv_", "recv_any_source_"))


def recording(
    step: int,
    scope: str | None,
    emit: Emit,
    current_scope: Callable[[], tuple[str, str]] = module_calls.current,
    *,
    tell: Callable[[str], None] = ignored,
    failed: Callable[[Exception], None] = raised,
    limit: int = LIMIT,
) -> OpCalls:
    """A context in which calls of operations are recorded.

    Args:
        step: The step that is made in it.
        scope: A module's name: what it and the modules in it do; ``optimizer``, for what ``module_calls.within`` says is that;
            ``collectives``, wherever they are; None for everything.
        emit: Takes the calls, on the thread that makes them.
        current_scope: Scope and phase of what runs now.
        tell: Takes words about what is not recorded.
        failed: Takes errors of the recording itself, so that they need not reach the training loop.
        limit: How many calls are recorded.
    """
    return OpCalls(step, scope, Calls(emit, lambda: step, tell, failed, limit), current_scope)


class OpCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations while it is entered."""

    def __init__(
        self,
        step: int,
        scope: str | None,
        calls: Calls,
        current_scope: Callable[[], tuple[str, str]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._scope, self._calls, self._current = step, scope, calls, current_scope
        self._unwritten = _Unwritten()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _LEFT_OUT or func.namespace == "profiler":
            return func(*args, **kwargs)
        if name in _ALLOCATIONS and func.namespace == "aten":
            result = func(*args, **kwargs)
            self._unwritten.add(result)
            return result
        scope, phase = self._current()
        call = _OpCall(func, name, args, kwargs, self._unwritten)
        wanted = self._wants(scope, call)
        if wanted:
            with self._calls.reading():
                call.read_inputs()
        result = func(*args, **kwargs)
        self._unwritten.discard(call.written())
        if wanted:
            with self._calls.reading():
                call.read_outputs(result)
                self._calls.put(self._step, scope, phase, str(func), call.inputs, call.outputs)
        return result

    def _wants(self, scope: str, call: _OpCall) -> bool:
        if self._scope is None:
            return True
        if self._scope == COLLECTIVES:
            return call.is_collective
        return in_scope(scope, self._scope)


class _OpCall:
    """One operation with its arguments."""

    def __init__(
        self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], unwritten: _Unwritten
    ) -> None:
        self._func, self._name, self._kwargs, self._unwritten = func, name, kwargs, unwritten
        self.is_collective = func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        named = [(argument, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in func._schema.arguments[len(args) :] if a.name in kwargs]
        self._arguments = named
        # Megatron multiplies matrices with ``baddbmm`` into a buffer that it keeps, whose old content counts nothing.
        self._beta = next((value for argument, value in named if argument.name == "beta"), None)
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []

    def read_inputs(self) -> None:
        """Before the operation."""
        for argument, value in self._arguments:
            if self._reads(argument):
                self.inputs += self._values(value)
        if self.is_collective:
            self.inputs += self._ranks()
        elif torch.Tag.nondeterministic_seeded in self._func.tags:
            self.inputs += self._generator()

    def read_outputs(self, result: Any) -> None:
        """After the operation."""
        if self.is_collective:
            self._wait(result)
        if self._is_in_flight(result):
            return
        given = list(tensors_of(result))
        written = [t for t in self.written() if not any(t is other for other in given)]
        self.outputs += values_of([given if self.is_collective or result is None else result, written])

    def written(self) -> Iterator[torch.Tensor]:
        """Arguments that it writes to."""
        for argument, value in self._arguments:
            if self._writes(argument):
                yield from tensors_of(value)

    def _reads(self, argument: Any) -> bool:
        if self._func.namespace == "c10d":  # "output_tensors", "input_tensor", or "tensors" for both
            if "Tensor" not in str(argument.type):
                return True
            if argument.name.startswith("output") or self._name.startswith("recv"):
                return False
            return self._name != "broadcast_" or self._is_root()
        if argument.name == "self" and (self._name in _OVERWRITES or self._beta == 0):
            return False
        return not argument.is_out

    def _writes(self, argument: Any) -> bool:
        if self._func.namespace == "c10d":
            return argument.name.startswith("output") or (argument.name == "tensors" and self._name != "send")
        return argument.alias_info is not None and argument.alias_info.is_write

    def _values(self, value: Any) -> list[Value]:
        if isinstance(value, torch.Tensor) and self._unwritten.has(value):
            return [f"never written {value.dtype}{list(value.shape)}"]
        if isinstance(value, list | tuple):
            return [found for part in value for found in self._values(part)]
        return values_of(value)

    def _group(self) -> Any:
        boxed = next((value for argument, value in self._arguments if argument.name == "process_group"), None)
        return None if boxed is None else dist.ProcessGroup.unbox(boxed)

    def _ranks(self) -> list[Value]:
        group = self._group()
        return [] if group is None else [f"ranks {','.join(map(str, dist.get_process_group_ranks(group)))}"]

    def _is_root(self) -> bool:
        root = next(value for argument, value in self._arguments if argument.name == "root_rank")
        return bool(self._group().rank() == root)

    def _generator(self) -> list[Value]:
        if any(isinstance(value, torch.Generator) for _, value in self._arguments):
            return []  # it is an argument and was read as one
        tensor = next(tensors_of([value for _, value in self._arguments]), None)
        device = torch.device(self._kwargs.get("device") or ("cpu" if tensor is None else tensor.device))
        if device.type == "cuda":
            return [f"generator cuda {recorded(torch.cuda.get_rng_state(device))}"]
        return [f"generator cpu {recorded(torch.default_generator.get_state())}"]

    def _wait(self, result: Any) -> None:
        if self._name in _POINT_TO_POINT:
            return
        if self._func.namespace != "c10d":
            for tensor in tensors_of(result):
                torch.ops._c10d_functional.wait_tensor(tensor)
            return
        work = result[-1] if isinstance(result, tuple | list) else result
        dist.Work.unbox(work).wait()

    def _is_in_flight(self, result: Any) -> bool:
        if self._name in _POINT_TO_POINT:
            return True
        if not any(argument.name == "non_blocking" and value for argument, value in self._arguments):
            return False
        source = [t for _, value in self._arguments for t in tensors_of(value)]
        return any(t.is_cpu for t in tensors_of(result)) and not all(t.is_cpu for t in source)


class _Unwritten:
    """Memory that was allocated and not written since, as far as operations of torch tell. Holds no memory."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, allocated: Any) -> None:
        """Remembers a new tensor's memory."""
        if len(self._storages) > 4096:  # many are gone by now
            self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        for tensor in tensors_of(allocated):
            if tensor.numel():
                ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._storages[ref.cdata] = ref

    def discard(self, written: Iterator[torch.Tensor]) -> None:
        """Forgets what was written to."""
        if self._storages:
            for tensor in written:
                self._storages.pop(tensor.untyped_storage()._cdata, None)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether nobody has written to a tensor's memory."""
        if not self._storages or tensor.layout is not torch.strided:
            return False
        ref = self._storages.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()  # type: ignore[no-untyped-call]
