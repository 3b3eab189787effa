"""Calls of modules: what goes into each and what comes out, forward and backward, seen by hooks that change nothing.

A call stands in the stream when it is over, so the modules inside it come before it, and the first call whose inputs agree and
whose outputs differ is the narrowest module to blame. For that, inputs are all that a module's result depends on:

* forward: tensors and plain values among the arguments, read before the module runs, because it may change them; likewise its
  own buffers, and what it was handed past its arguments, as stages of a pipeline are; its own parameters; what the modules
  inside it have of these three, as one hash; and the state of a random number generator if it drew from it. Outputs are what it
  returns and its buffers afterwards.
* backward: a hash of the forward call's inputs, and the gradients of the outputs. Outputs are what one of the module's own
  operations adds to the gradients of its inputs and parameters, and what the modules inside it are given (``backward_calls``).
* weight gradient: one parameter's gradient is accumulated. Inputs are what is added and what was there.

Parameters are read after the forward pass: hooks that gather them run before it, in an order that changes. A module that draws
from another generator than the default one does so while that stands in its place (``CudaRNGStatesTracker.fork`` of
Megatron), and the module around it, whose own generator is untouched, has drawn what the one inside has.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ckptguard.megatron.live_state import plain_name
from ckptguard.resume.backward_calls import BackwardCall, edges_into, scope_of_node, watch
from ckptguard.resume.call_values import LIMIT, Calls, Emit, ignored, raised, together, values_of
from ckptguard.resume.digests import recorded
from ckptguard.resume.records import Value
from ckptguard.resume.weight_gradients import WeightGradients

OUTSIDE = "outside modules"
_HANDED = "input_tensor"  # megatron-core 0.19.2, megatron/core/transformer/transformer_block.py, models/hybrid/hybrid_block.py


class _Running(threading.local):
    """What runs on this thread, from the outermost to the innermost."""

    def __init__(self) -> None:
        self.stack: list[_Frame | _Scope] = []


class _Scope:
    """A part of a step that is no module."""

    __slots__ = ("phase", "scope")

    def __init__(self, scope: str) -> None:
        self.scope, self.phase = scope, "step"


class _Frame:
    """A module that is running its forward pass. Holds no tensor but the graph's edges into the module, until it ends."""

    __slots__ = (
        "arguments", "drawn", "edges", "error", "generators", "given", "held", "inside", "phase", "scope", "sequence", "step",
    )  # fmt: skip

    def __init__(self, step: int, scope: str) -> None:
        self.step, self.scope, self.phase = step, scope, "forward"
        self.arguments: list[Value] = []
        self.held: list[Value] = []  # what else its result depends on: buffers, what it was handed
        self.inside: list[Value] = []  # the same of the modules inside, with their parameters
        self.drawn: list[Value] = []  # generators that the modules inside drew from
        self.given: list[Value] = []  # gradients that the modules inside get, in the backward pass
        self.generators = generator_states()
        self.edges: list[Any] = []
        self.sequence = torch._C._autograd._get_sequence_nr()
        self.error = sys.exception()


_RUNNING = _Running()


def current() -> tuple[str, str]:
    """Scope and phase of what runs on this thread now.

    While autograd runs, this is the module whose forward pass made the node that is evaluated, unless that node itself runs a
    module's forward pass again.
    """
    if _RUNNING.stack:
        return _RUNNING.stack[-1].scope, _RUNNING.stack[-1].phase
    node = torch._C._current_autograd_node()
    found = None if node is None else scope_of_node(node)
    return found or (OUTSIDE, "step" if node is None else "backward")


@contextlib.contextmanager
def within(scope: str) -> Iterator[None]:
    """Calls made here that are in no module belong to this scope, such as ``optimizer``."""
    entry = _Scope(scope)
    _RUNNING.stack.append(entry)
    try:
        yield
    finally:
        _leave(entry)


def install(
    modules: Sequence[torch.nn.Module],
    emit: Emit,
    active: Callable[[], int | None],
    *,
    tell: Callable[[str], None] = ignored,
    failed: Callable[[Exception], None] = raised,
    limit: int = LIMIT,
) -> None:
    """Hooks every module of a model, for good.

    Args:
        modules: The model's chunks, wrapped or not.
        emit: Takes the calls in the order in which they end, on the thread that makes them.
        active: Gives the number of the step whose calls are wanted now, or None: hooks then do nothing.
        tell: Takes words about what is not recorded.
        failed: Takes errors of the recording itself, so that they need not reach the training loop.
        limit: How many calls are recorded.
    """
    calls = Calls(emit, active, tell, failed, limit)
    gradients = WeightGradients(calls)
    for number, chunk in enumerate(modules):
        scopes = named_scopes(number, chunk)
        for scope, module in scopes:
            _Hooks(scope, calls).attach(module)
        if not gradients.watch(chunk, scopes):
            tell(f"accumulation of weight gradients of chunk {number}: they are reduced while they are accumulated")


def named_scopes(number: int, chunk: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module of a chunk with its name; wrappers, which are called ``module``, give theirs to what they wrap."""
    found = {}
    for name, module in chunk.named_modules():
        found[f"chunk {number} {plain_name(name)}".rstrip()] = module  # the innermost of equal names
    return list(found.items())


def generator_states() -> dict[str, torch.Tensor]:
    """States of torch's default generators, copied; nothing is drawn and no device is waited for."""
    states = {"cpu": torch.default_generator.get_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


class _Hooks:
    """Of one module."""

    def __init__(self, scope: str, calls: Calls) -> None:
        self._scope, self._calls = scope, calls

    def attach(self, module: torch.nn.Module) -> None:
        """Both run last among the module's hooks of now: what others change there is seen."""
        module.register_forward_pre_hook(self.begins, with_kwargs=True)
        # Also when it raises: recomputation of activations leaves modules by an exception once it has what it needs.
        module.register_forward_hook(self.ends, with_kwargs=True, always_call=True)

    def begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward pass."""
        step = self._calls.active()
        if step is None or _is_captured():
            return
        frame = _Frame(step, self._scope)
        _RUNNING.stack.append(frame)
        with self._calls.reading():
            handed = getattr(module, _HANDED, None)
            frame.arguments, frame.held = (
                values_of((args, kwargs)),
                [*_buffers(module), *values_of([] if handed is None else handed)],
            )
            frame.edges = edges_into(args, kwargs, handed)

    def ends(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """After the forward pass, or the exception that ended it."""
        frame = next((f for f in reversed(_RUNNING.stack) if isinstance(f, _Frame) and f.scope == self._scope), None)
        if frame is None:
            return
        outer = _leave(frame)
        if sys.exception() is frame.error:
            with self._calls.reading():
                self._record(frame, outer, module, result)

    def _record(self, frame: _Frame, outer: _Frame | None, module: torch.nn.Module, result: Any) -> None:
        parameters = [recorded(param.detach()) for param in module._parameters.values() if param is not None]
        inside = [together(frame.inside)] if frame.inside else []
        drawn, held = _drawn(frame), [*frame.held, *parameters, *inside]
        if outer is not None:
            outer.inside += held
            outer.drawn += drawn
        inputs = [*frame.arguments, *frame.held, *parameters, *(f"inside {hashed}" for hashed in inside), *drawn]
        self._calls.put(frame.step, frame.scope, "forward", "", inputs, [*values_of(result), *_buffers(module)])
        if torch.is_grad_enabled():
            given = [] if outer is None else outer.given
            call = BackwardCall(self._calls, frame.step, frame.scope, together(inputs), frame.given, given)
            watch(call, module, frame.edges, frame.sequence, result)


def _leave(entry: _Frame | _Scope) -> _Frame | None:
    """Takes an entry off the stack, with those inside it that never ended; gives the module around it."""
    stack = _RUNNING.stack
    if entry in stack:
        del stack[stack.index(entry) :]
    return stack[-1] if stack and isinstance(stack[-1], _Frame) else None


def _drawn(frame: _Frame) -> list[Value]:
    """The generators that a module drew from, as they were before."""
    now = generator_states()
    changed = [name for name, state in frame.generators.items() if not torch.equal(now[name], state)]
    return [f"generator {name} {recorded(frame.generators[name])}" for name in changed] or list(frame.drawn)


def _buffers(module: torch.nn.Module) -> list[Value]:
    return [recorded(buffer.detach()) for buffer in module._buffers.values() if buffer is not None]


def _is_captured() -> bool:
    """Whether kernels go into a CUDA graph now, where nothing can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
