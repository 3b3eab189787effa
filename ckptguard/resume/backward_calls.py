"""Backward passes of modules, seen at the nodes of autograd's graph.

The gradient of a module's input is a sum to which others may add, such as a residual connection. What the module itself adds is
what its own nodes hand over at the edges that lead out of it. These nodes are found when the forward pass is over, by going
from the outputs back to the edges that were there before; a hook on each of them reads what it hands over. The gradients that
come in are read by ``Tensor.register_hook`` on the outputs. Neither puts a node into the graph or holds a tensor, so pipelines
may free outputs (megatron-core 0.19.2, megatron/core/pipeline_parallel/schedules.py ``deallocate_output_tensor``), which full
backward hooks do not allow.

What a module's own code hands to the modules inside it is among its outputs too, as one hash: so it can be blamed for that even
where no gradient leaves it, as none leaves a model that is given tokens.

Nodes are also marked with the module that made them, by ``Node.metadata``, which lives as long as the node: so an operation
that autograd runs, on whatever thread, can be told to its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ckptguard.resume.call_values import Calls, tensors_of, together
from ckptguard.resume.digests import recorded
from ckptguard.resume.records import Value
from ckptguard.resume.weight_gradients import accumulation_scope, is_added_by_kernel, main_gradient

_MARK = "ckptguard scope"
_Edge = tuple[Any, int]  # a node, and which of its inputs


def scope_of_node(node: Any) -> tuple[str, str] | None:
    """Scope and phase of the module that a node belongs to, if it was marked; a parameter's is the one that owns it."""
    parameter = getattr(node, "variable", None)
    if parameter is not None:
        return accumulation_scope(parameter)
    scope = node.metadata.get(_MARK)
    return None if scope is None else (scope, "backward")


def edges_into(*arguments: Any) -> list[_Edge]:
    """The edges by which gradients leave a module that gets these arguments."""
    if not torch.is_grad_enabled():
        return []
    return [_edge(tensor) for tensor in tensors_of(arguments) if tensor.requires_grad]


def watch(call: BackwardCall, module: Any, edges: Sequence[_Edge], first: int, result: Any) -> None:
    """Puts hooks where gradients enter and leave a module.

    Args:
        call: What they tell of it.
        module: The module.
        edges: What ``edges_into`` gave before it ran.
        first: Lowest sequence number that a node made by the module can have.
        result: What it returned.
    """
    outputs = [t for t in tensors_of(result) if t.requires_grad and t.grad_fn is not None]
    outputs = [t for t in outputs if _edge(t) not in edges]  # an input that is handed on is not the module's doing
    owned = {_edge(p): p for p in module._parameters.values() if p is not None and p.requires_grad}
    consumers = _consumers((t.grad_fn for t in outputs), {*edges, *owned}, first, call.scope)
    call.expect(len(outputs), tuple(owned.values()), ends_by_itself=bool(consumers))
    for number, tensor in enumerate(outputs):
        tensor.register_hook(call.enters(number))  # type: ignore[no-untyped-call]
    for node, places in consumers:
        node.register_hook(call.leaves(places, [owned.get(node.next_functions[place]) for place in places]))


class BackwardCall:
    """The backward pass that belongs to one forward call; holds what was recorded of it so far, and no tensor.

    Every node that hands gradients out is a call of its own in the stream, where it has run: what it leads to comes after it. A
    module that hands none out has one call, when autograd is over.

    Args:
        calls: Takes the calls.
        step: Of the call.
        scope: The module's name.
        forward: Hash of all that its forward pass depends on.
        inside: What the modules inside it are given; they put it there.
        around: The same of the module around it.
    """

    def __init__(
        self,
        calls: Calls,
        step: int,
        scope: str,
        forward: Value,
        inside: list[Value],
        around: list[Value],
    ) -> None:
        self.scope = scope
        self._calls, self._step, self._inside, self._around = calls, step, inside, around
        self._forward = f"forward {forward}"
        self._waits_for_end = False

    def expect(self, outputs: int, parameters: Sequence[Any], *, ends_by_itself: bool) -> None:
        """Says how many outputs can be given gradients, and whether some leave the module."""
        self._entered: list[Value] = [None] * outputs
        self._parameters, self._ends_by_itself = parameters, ends_by_itself
        self._sums: list[Value] | None = None  # of gradients that kernels add to, before they do

    def enters(self, number: int) -> Callable[[torch.Tensor], None]:
        """A hook for the gradient of an output."""

        def hook(gradient: torch.Tensor) -> None:
            if self._calls.active() is None:
                return
            with self._calls.reading():
                self._entered[number] = recorded(gradient.detach())
                self._around.append(self._entered[number])
                if self._sums is None:
                    self._sums = [main_gradient(p) for p in self._parameters if is_added_by_kernel(p)]
                if not self._ends_by_itself and not self._waits_for_end:
                    self._waits_for_end = True
                    torch.autograd.Variable._execution_engine.queue_callback(self._ends)

        return hook

    def _ends(self) -> None:
        self._waits_for_end = False
        if self._inside and self._calls.active() is not None:
            with self._calls.reading():
                self._put([])

    def _put(self, outputs: Sequence[Value]) -> None:
        inputs = [self._forward, *(self._sums or ()), *self._entered]
        inside = [f"inside {together(self._inside)}"] if self._inside else []
        self._calls.put(self._step, self.scope, "backward", "", inputs, [*outputs, *inside])

    def leaves(self, places: Sequence[int], parameters: Sequence[Any]) -> Callable[[Any, Any], None]:
        """A hook for a node that hands gradients out.

        Args:
            places: Which of the node's edges lead out of the module.
            parameters: For each of them the parameter of the module that it leads to, or None.
        """

        def left(place: int, parameter: Any, gradients: Any) -> Value:
            if parameter is not None and is_added_by_kernel(parameter):
                return main_gradient(parameter)
            return None if gradients[place] is None else recorded(gradients[place].detach())

        def hook(gradients: Any, _: Any) -> None:
            if self._calls.active() is not None:
                with self._calls.reading():
                    self._put([left(place, p, gradients) for place, p in zip(places, parameters, strict=True)])

        return hook


def _edge(tensor: torch.Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _consumers(start: Iterable[Any], targets: Set[_Edge], first: int, scope: str) -> list[tuple[Any, list[int]]]:
    """Nodes made since ``first`` that hand gradients to the targets, with the places of those edges; marks what it passes.

    The order is that of a walk from the outputs and is the same for equal graphs.
    """
    found, seen = [], set()
    waiting = list(dict.fromkeys(start))
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        node.metadata.setdefault(_MARK, scope)  # the modules inside were there before
        places = [place for place, edge in enumerate(node.next_functions) if edge in targets]
        if places:
            found.append((node, places))
        waiting += [
            following
            for place, (following, _) in enumerate(node.next_functions)
            if following is not None and place not in places and first <= following._sequence_nr()
        ]
    return found
