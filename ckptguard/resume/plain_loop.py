"""Any PyTorch loop as a watched one: what ``ckptguard.record`` and its siblings do in a process that is recorded.

The loop says when a step is over. When one begins and when gradients are final is told by hooks: the first forward pass of a
model after the last step, and the optimizer's ``step``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from ckptguard.core.watching import LiveItem, Watcher
from ckptguard.resume.plain_state import PlainState, by_name, generators


class PlainLoop:
    """One process's loop, of which a watcher is told."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._state: PlainState | None = None
        self._next: int | None = None  # the step that begins with the next forward pass
        self._gradients_told = False

    def loaded(self, step: int, parts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """As ``ckptguard.record_loaded``."""
        first, state = self._state is None, self._take(parts)
        if first:
            self._hook(state)
        items, unobserved = state.items()
        self._watcher.loaded(step, [*items, *_others(values)], unobserved)
        self._next = step + 1

    def step(self, step: int, losses: Any, batch: Any, parts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """As ``ckptguard.record``."""
        state = self._take(parts)
        self._begins()
        if not self._gradients_told:
            self._watcher.gradients(state.gradients())
        if batch is not None:
            self._watcher.batch(batch)
        told = {f"loss {name}".rstrip(): value for name, value in by_name(losses).items()}
        told |= {f"metric {name}": value for name, value in values.items()}
        self._watcher.step_ended(step, told, state.items()[0])
        self._next, self._gradients_told = step + 1, False

    def saved(self, step: int, parts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """As ``ckptguard.record_saved``."""
        self._watcher.saved(step, [*self._take(parts).items()[0], *_others(values)])

    def _take(self, parts: Mapping[str, Any]) -> PlainState:
        state, first = PlainState(**parts), self._state is None
        self._state = state
        if first:
            facts = {"framework": "PyTorch loop", "versions": {"torch": torch.__version__}, "argv": list(sys.argv)}
            self._watcher.started(facts)
            self._watcher.built(state.modules, next(iter(state.optimizers.values()), None))
        return state

    def _hook(self, state: PlainState) -> None:
        for module in state.modules:
            module.register_forward_pre_hook(self._begins, prepend=True)
        for optimizer in state.optimizers.values():
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._steps)

    def _begins(self, *_: Any) -> None:
        if self._next is not None:
            step, self._next = self._next, None
            self._watcher.step_begins(step, generators("rng at begin"))

    def _steps(self, *_: Any) -> None:
        self._begins()
        if self._state is not None:
            self._watcher.gradients(self._state.gradients())
            self._gradients_told = True


def _others(values: Mapping[str, Any]) -> Sequence[LiveItem]:
    return [LiveItem(f"other {name}", "other", partial(_same, value)) for name, value in values.items()]


def _same(value: Any) -> Any:
    return value


_loop: PlainLoop | None = None


def tell(moment: Literal["loaded", "step", "saved"], *what: Any) -> None:
    """Tells this process's recorder of a moment of its loop. What goes wrong is recorded, not raised."""
    global _loop
    from ckptguard.resume import injected

    try:
        if _loop is None:
            _loop = PlainLoop(injected.watcher())
        getattr(_loop, moment)(*what)
    except Exception as error:  # noqa: BLE001 - training goes on; the arm is told to be failed
        injected.recorder().failed(error)
