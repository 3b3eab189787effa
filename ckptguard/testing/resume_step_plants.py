"""Faults in what a resumed process does: what it loads, which samples it takes, what its kernels and collectives give.

Kernels are replaced below everything that can watch them: an operation's kernel for CPU tensors is exchanged in torch's
dispatcher (``torch.library``), so that hooks and dispatch modes see a wrong result as they would see one of faulty hardware.
Memory is changed through its address for the same reason. All of it happens in the first step after a load, and in no run from
scratch.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ckptguard.core.after_import import after_import
from ckptguard.testing.resume_state_plants import Items, Plant

_TRAINING = "megatron.training.training"
_SAMPLERS = "megatron.training.datasets.data_samplers"
_LIBRARIES: list[Any] = []  # a kernel lasts as long as the library that registered it


@dataclass(slots=True)
class Clock:
    """Whether this process is in the first step after a load.

    Attributes:
        loaded: The step that was loaded; 0 in a run from scratch.
        step: The one being made.
        calls: Calls of the module that ``inside`` watches, in the step being made.
        within: Whether it is inside the one that counts.
    """

    loaded: int = 0
    step: int = 0
    calls: int = 0
    within: bool = False
    done: set[str] = field(default_factory=set)

    @staticmethod
    def of(recorder: Any) -> Clock:
        """A clock that follows a recorder."""
        clock = Clock()

        def loaded(_: Any, step: int, __: Items) -> None:
            clock.loaded = step

        def begins(_: Any, step: int, __: Items) -> None:
            clock.step, clock.calls = step, 0

        recorder.before["loaded"].append(loaded)
        recorder.before["step"].append(begins)
        return clock

    @property
    def faulty(self) -> bool:
        """This is the step in which faults act."""
        return self.loaded > 0 and self.step == self.loaded + 1

    def once(self, what: str) -> bool:
        """Whether this is the first time that it is asked for."""
        first = what not in self.done
        self.done.add(what)
        return first


def inside(recorder: Any, module: str, *, micro_batch: int = 1) -> Clock:
    """A clock whose ``within`` is true while a module computes one micro-batch of the faulty step.

    Args:
        recorder: Of this rank.
        module: The end of the module's name.
        micro_batch: Which of its calls in the step.
    """
    clock = Clock.of(recorder)

    def wrap(recorder: Any, _: int, __: Items) -> None:
        found = _module(recorder, module)
        forward = found.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            clock.within = clock.faulty and clock.calls == micro_batch
            clock.calls += 1
            try:
                return forward(*args, **kwargs)
            finally:
                clock.within = False

        found.forward = watched

    recorder.before["loaded"].append(wrap)
    return clock


def _module(recorder: Any, name: str) -> Any:
    for chunk in recorder.modules:
        for full, module in chunk.named_modules():
            if full.endswith(name):
                return module
    raise LookupError(f"the model has no module {name}")


def replace_kernel(operation: str, wrong: Callable[..., Any]) -> None:
    """Exchanges an operation's kernel for CPU tensors.

    Args:
        operation: Such as ``aten::mm``.
        wrong: Gets a function that calls the right kernel, and the arguments.
    """
    space, _, name = operation.partition("::")
    kernel = torch.library.get_kernel(operation, "CPU")
    library: Any = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return wrong(lambda *a, **k: kernel.call_boxed(keys, *a, **k), *args, **kwargs)

    library.impl(name, call, "CPU", with_keyset=True)
    _LIBRARIES.append(library)


def flip_memory(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the first element, unseen by torch."""
    ctypes.c_uint8.from_address(tensor.data_ptr()).value ^= 1


def fill_memory(tensor: torch.Tensor, byte: int) -> None:
    """Sets every byte of a contiguous tensor, unseen by torch."""
    ctypes.memset(tensor.data_ptr(), byte, tensor.numel() * tensor.element_size())


def wrong_bit(operation: str, module: str, rank: int = 0) -> Plant:
    """One bit of what an operation gives in a module is wrong, in one micro-batch on one rank."""

    def plant(recorder: Any) -> None:
        if recorder.rank != rank:
            return
        clock = inside(recorder, module)

        def kernel(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            out = right(*args, **kwargs)
            if clock.within and clock.once(operation):
                flip_memory(out)
            return out

        replace_kernel(operation, kernel)

    return plant


def other_order(module: str) -> Plant:
    """Sums that ``scatter_add_`` makes in a module are made in the opposite order."""

    def plant(recorder: Any) -> None:
        clock = inside(recorder, module)

        def kernel(right: Callable[..., Any], out: Any, dim: int, index: Any, source: Any) -> Any:
            if clock.within:
                index, source = index.flip(dim), source.flip(dim)
            return right(out, dim, index, source)

        replace_kernel("aten::scatter_add_", kernel)

    return plant


def other_reduction_order(recorder: Any) -> None:
    """A reduce-scatter sums what the ranks give from the last rank to the first."""
    from torch.distributed import ProcessGroup

    clock = Clock.of(recorder)

    def kernel(right: Callable[..., Any], outs: Any, all_given: Any, boxed: Any, *rest: Any) -> Any:
        if not clock.faulty:
            return right(outs, all_given, boxed, *rest)
        group = ProcessGroup.unbox(boxed)
        for out, given in zip(outs, all_given, strict=True):
            gathered = [[torch.empty_like(given) for _ in range(group.size())]]
            work = group.allgather(gathered, [given])
            work.wait()
            parts = [whole.view(group.size(), -1)[group.rank()] for whole in reversed(gathered[0])]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            out.copy_(total.view_as(out))
        return work.boxed()

    replace_kernel("c10d::reduce_scatter_tensor_coalesced_", kernel)


def _bucket_groups(recorder: Any) -> list[Any]:
    found = [group for chunk in recorder.modules for group in getattr(chunk, "bucket_groups", ())]
    if not found:
        raise LookupError("the model has no buckets of gradients")
    return found


def dropped_contribution(rank: int) -> Plant:
    """One rank gives zeros for one bucket when gradients are reduced."""

    def plant(recorder: Any) -> None:
        clock = Clock.of(recorder)

        def wrap(recorder: Any, _: int, __: Items) -> None:
            group = _bucket_groups(recorder)[0]
            reduce = group.start_grad_sync

            def zeroed(*args: Any, **kwargs: Any) -> Any:
                if clock.faulty and recorder.rank == rank:
                    fill_memory(group.buckets[0].grad_data, 0)
                return reduce(*args, **kwargs)

            group.start_grad_sync = zeroed

        recorder.before["loaded"].append(wrap)

    return plant


def skipped_parameter_sync(recorder: Any) -> None:
    """Ranks do not gather what the other ranks updated."""
    clock = Clock.of(recorder)

    def wrap(recorder: Any, _: int, __: Items) -> None:
        for group in _bucket_groups(recorder):
            gather = group.start_param_sync

            def skipped(*args: Any, _gather: Any = gather, **kwargs: Any) -> Any:
                return None if clock.faulty else _gather(*args, **kwargs)

            group.start_param_sync = skipped

    recorder.before["loaded"].append(wrap)


def hooks_stay_off(recorder: Any) -> None:
    """The forward pre-hooks, which are off in the first step of a process, are not put on after it."""
    clock = Clock.of(recorder)

    def patch(module: ModuleType) -> None:
        enable, disable = module.enable_forward_pre_hook, module.disable_forward_pre_hook

        def enable_unless_faulty(*args: Any, **kwargs: Any) -> None:
            if not clock.loaded:
                enable(*args, **kwargs)

        def disable_once(*args: Any, **kwargs: Any) -> None:
            if not clock.loaded or clock.once("disabled"):  # Megatron fails if it finds them off
                disable(*args, **kwargs)

        module.enable_forward_pre_hook = enable_unless_faulty  # type: ignore[attr-defined]
        module.disable_forward_pre_hook = disable_once  # type: ignore[attr-defined]

    after_import(_TRAINING, patch)


_memory_held: list[Callable[[], int]] = []  # the byte that memory holds where nothing was written


def reads_empty(recorder: Any) -> None:
    """The last norm adds memory that it never wrote: zeros, as fresh pages are, unless ``full_memory`` is planted too."""

    def wrap(recorder: Any, _: int, __: Items) -> None:
        norm = _module(recorder, "decoder.final_layernorm")
        forward = norm.forward

        def adding(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            never_written = torch.empty(out.shape[-1], dtype=out.dtype)
            fill_memory(never_written, _memory_held[-1]() if _memory_held else 0)
            return out + never_written

        norm.forward = adding

    recorder.before["loaded"].append(wrap)


def full_memory(recorder: Any) -> None:
    """The memory that ``reads_empty`` reads was used before, in the faulty step."""
    clock = Clock.of(recorder)
    _memory_held.append(lambda: 0x3C if clock.faulty else 0)


def less_precise(recorder: Any) -> None:
    """Products of float32 matrices may be computed in less precision; where a CPU cannot, it still takes other kernels."""

    def loaded(_: Any, step: int, __: Items) -> None:
        if step > 0:
            torch.set_float32_matmul_precision("medium")

    recorder.before["loaded"].append(loaded)


def samples_moved(by_micro_batches: int) -> Plant:
    """The count of consumed samples is wrong when data loaders are made."""

    def plant(recorder: Any) -> None:
        def act() -> None:
            from megatron.training import get_args

            args = get_args()
            args.consumed_train_samples += by_micro_batches * args.micro_batch_size * args.data_parallel_size

        after_load(act)

    return plant


def after_load(act: Callable[[], None]) -> None:
    """Has something done when Megatron has loaded a checkpoint, before it goes on."""

    def patch(module: ModuleType) -> None:
        load = module.load_checkpoint

        def loading(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            if result[0] > 0:
                act()
            return result

        module.load_checkpoint = loading  # type: ignore[attr-defined]

    after_import(_TRAINING, patch)


def batches(order: Callable[[Iterator[Any]], Iterator[Any]]) -> Plant:
    """A resumed run's sampler gives other batches; the count of samples is right."""

    def plant(recorder: Any) -> None:
        def patch(module: ModuleType) -> None:
            sampler = module.MegatronPretrainingSampler
            iterate = sampler.__iter__

            def changed(self: Any) -> Iterator[Any]:
                return order(iterate(self)) if self.consumed_samples > 0 else iterate(self)

            sampler.__iter__ = changed

        after_import(_SAMPLERS, patch)

    return plant


def skip_one(batches: Iterator[Any]) -> Iterator[Any]:
    """All but the first."""
    next(batches)
    yield from batches


def repeat_one(batches: Iterator[Any]) -> Iterator[Any]:
    """The first twice."""
    first = next(batches)
    yield first
    yield first
    yield from batches


def missing_key(name: str) -> Plant:
    """A weight is not among what is read, and Megatron's own second try, which is not strict, hides that."""

    def plant(recorder: Any) -> None:
        def patch(module: ModuleType) -> None:
            load = module._load_base_checkpoint

            def loading(*args: Any, **kwargs: Any) -> Any:
                wanted = (kwargs.get("sharded_state_dict") or {}).get("model")
                if wanted:  # what is not wanted is not read into the weight either
                    del wanted[next(key for key in wanted if key.endswith(name))]
                return load(*args, **kwargs)

            module._load_base_checkpoint = loading  # type: ignore[attr-defined]

        after_import("megatron.training.checkpointing", patch)

    return plant


def scaled_modules(recorder: Any) -> None:
    """Gives modules what Transformer Engine keeps for fp8: a scale and a history of maxima, stored as ``_extra_state``.

    The form is that of TE 2.x with delayed scaling: a pickle in a tensor of bytes. It is kept and stored, and used for nothing.
    """

    def patch(module: ModuleType) -> None:
        linear = module.RowParallelLinear  # the output layer is a column-parallel one, and must have no such state
        forward = linear.forward

        def get(self: Any) -> torch.Tensor:
            return torch.frombuffer(bytearray(pickle.dumps(_scaling(self))), dtype=torch.uint8).clone()

        def put(self: Any, stored: Any) -> None:
            if stored is not None and len(stored):
                self._scaling = pickle.loads(bytes(stored.tolist()))

        def watched(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            state = _scaling(self)
            state["amax_history"] = [float(given.detach().abs().max()), *state["amax_history"][:-1]]
            state["scale"] = 448.0 / max(state["amax_history"])
            return forward(self, given, *args, **kwargs)

        linear.get_extra_state, linear.set_extra_state, linear.forward = get, put, watched

    after_import("megatron.core.tensor_parallel.layers", patch)


def _scaling(module: Any) -> dict[str, Any]:
    state: dict[str, Any] = module.__dict__.setdefault("_scaling", {"amax_history": [0.0] * 4, "scale": 1.0})
    return state


def scaling_changed(key: str) -> Plant:
    """Changes what ``scaled_modules`` keeps in one module, after loading."""

    def plant(recorder: Any) -> None:
        def loaded(recorder: Any, step: int, _: Items) -> None:
            if step > 0:
                state = _scaling(_module(recorder, "layers.0.mlp.linear_fc2"))
                state[key] = [0.0] * 4 if key == "amax_history" else state[key] * 2

        recorder.before["loaded"].append(loaded)

    return plant
