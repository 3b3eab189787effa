"""Accumulation of weight gradients: what is added to each, what was there, and what it is then.

Where Megatron keeps gradients (megatron-core 0.19.2): ``DistributedDataParallel`` gives every parameter a ``main_grad``, adds
``grad`` to it in a hook of the parameter's accumulation node and deletes ``grad`` (megatron/core/distributed/
distributed_data_parallel.py ``_make_backward_post_hook``). Kernels with fused accumulation add to ``main_grad`` themselves, set
``grad_added_to_main_grad`` and hand autograd a tensor with nothing in it (megatron/core/tensor_parallel/layers.py); that is in
the module's backward call. With ``overlap_grad_reduce`` the same hook starts to reduce a bucket when its last gradient is
there, and what it holds then is not settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from ckptguard.resume.call_values import Calls
from ckptguard.resume.digests import recorded
from ckptguard.resume.records import Value

_SCOPES = WeakIdKeyDictionary()  # name of the module that owns a parameter
PHASE = "weight gradient"


def main_gradient(parameter: Any) -> Value:
    """Where its gradients are summed up, as it is now."""
    held = getattr(parameter, "main_grad", None)
    held = parameter.grad if held is None else held
    return None if held is None else recorded(held.detach())


def is_added_by_kernel(parameter: Any) -> bool:
    """Whether a kernel has added to ``main_grad``, so that what autograd is given is not the gradient."""
    added = getattr(parameter, "grad_added_to_main_grad", False)
    return added and not getattr(parameter, "zero_out_wgrad", False)  # of tied weights autograd adds one part


def accumulation_scope(parameter: Any) -> tuple[str, str] | None:
    """The module that owns a parameter, for what runs while its gradient is accumulated."""
    scope = _SCOPES.get(parameter)  # type: ignore[no-untyped-call]
    return None if scope is None else (scope, PHASE)


class WeightGradients:
    """Watches parameters of modules."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def watch(self, chunk: torch.nn.Module, scopes: Iterable[tuple[str, torch.nn.Module]]) -> bool:
        """Hooks the parameters of a model's chunk.

        Args:
            chunk: The chunk with its wrappers.
            scopes: Its modules with their names; one that is shared belongs to the first.

        Returns:
            False if accumulation cannot be watched, because reduction overlaps it.
        """
        settled = not getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False)
        for scope, module in scopes:
            for parameter in module._parameters.values():
                if parameter is None or not parameter.requires_grad or parameter in _SCOPES:
                    continue
                _SCOPES[parameter] = scope
                if settled:
                    _Accumulation(self._calls, scope, parameter).attach()
        return settled


class _Accumulation:
    """Of one parameter."""

    def __init__(self, calls: Calls, scope: str, parameter: Any) -> None:
        self._calls, self._scope, self._parameter = calls, scope, parameter
        self._added: Value = None
        self._before: Value = None
        self._node: Any = None
        self._last: tuple[int | None, Value] = (None, None)  # step, and what was there in the end

    def attach(self) -> None:
        """Reads what comes before autograd adds it, and the sum after Megatron's hook has run."""
        self._parameter.register_hook(self._comes)
        if hasattr(self._parameter, "main_grad"):
            self._node = get_gradient_edge(self._parameter).node  # lives as long as someone has it; Megatron does too
            self._node.register_hook(self._is_added)
        else:
            self._parameter.register_post_accumulate_grad_hook(self._is_added)

    def _comes(self, gradient: torch.Tensor) -> None:
        step = self._calls.active()
        if step is None or is_added_by_kernel(self._parameter):
            return
        with self._calls.reading():
            self._before = self._last[1] if self._last[0] == step else main_gradient(self._parameter)
            self._added = recorded(gradient.detach())

    def _is_added(self, *_: Any) -> None:
        step, added = self._calls.active(), self._added
        self._added = None
        if step is None or added is None:
            return
        with self._calls.reading():
            self._last = (step, main_gradient(self._parameter))
            self._calls.put(step, self._scope, PHASE, "", [added, self._before], [self._last[1]])
