"""Hooks on Megatron-LM's training loop: a ``Watcher`` is told what it does, and nothing that it does is changed.

Functions of megatron/training/training.py (megatron-core 0.19.2) are replaced in that module, where ``train`` looks them up:

* ``setup_model_and_optimizer`` builds and loads; the state is ready when it returns. Ranks are known when it is called.
* ``train_step`` is one step; its ``iteration`` counts from 0 the step that begins. ``optimizer.step`` inside it is the first
  to use the gradients. It is wrapped during the call only: ``train`` itself puts a wrapper there, for CUDA graphs, and deletes
  it in the end.
* ``training_log`` is where a step is over. ``train`` counts ``iteration`` and consumed samples after ``train_step`` returned,
  and calls ``training_log`` right after that with all that ``train_step`` gave, every step and whatever the log interval is;
  evaluation, which draws samples, and saving come later.
* ``save_checkpoint`` is told the step and the number of floating point operations, which stands in a local variable of
  ``train`` else: so that counter is in the states of ``loaded`` and ``saved`` and not in those of steps.
* ``pretrain`` saves once more after ``train``, and leaves by ``SystemExit`` at an exit interval. A loop without it ends with
  ``train``.

Batches are what ``RerunDataIterator`` of megatron/core/rerun_state_machine.py gives inside ``train_step``: not those of an
evaluation, and not those that it gives again when a step is rerun.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ckptguard.core.after_import import after_import
from ckptguard.core.watching import LiveItem, Watcher
from ckptguard.megatron.live_generators import generator_items
from ckptguard.megatron.live_state import LiveState
from ckptguard.megatron.live_values import attribute_item
from ckptguard.megatron.run_facts import facts_of_run
from ckptguard.megatron.watched_loop import (
    WatchedLoop,
    batch_size_items,
    check_names,
    results_of_step,
    unobserved_loader,
)

WRAPPED: dict[str, tuple[str, ...]] = {
    "setup_model_and_optimizer": (),
    "train_step": ("optimizer",),
    "training_log": ("loss_dict", "iteration", "skipped_iter", "grad_norm", "num_zeros_in_grad"),
    "save_checkpoint": ("iteration", "num_floating_point_operations_so_far"),
    "train": (),
    "pretrain": (),
}
"""What is replaced, and the parameters by which it is understood."""

_SAMPLES = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "consumed_train_bins")
_OPERATIONS = "num_floating_point_operations_so_far"


def watch(watcher: Watcher) -> None:
    """Tells a watcher about Megatron-LM's loop as soon as that is imported, or from now on if it is.

    A watcher that has a function ``placed_sum`` (``placed_state.Summed``) is also given the parts of whole tensors when state
    was loaded and is saved.

    Raises:
        UnsupportedError: The installed Megatron-LM has another loop; names what is missing.
    """
    after_import("megatron.training.training", _Watched(watcher).install)


def check_loop(module: ModuleType) -> None:
    """Raises if functions or parameters that are relied on are not there.

    Raises:
        UnsupportedError: Names each.
    """
    check_names(
        module,
        WRAPPED,
        "Use Megatron-LM of megatron-core 0.16 to 0.19, or record by ckptguard.record in your own loop.",
    )


class _Watched(WatchedLoop):
    """One process's loop."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(watcher)
        self.step = 0
        self.operations: Any = None  # None where it is not known
        self.in_pretrain = False

    def install(self, module: ModuleType) -> None:
        """Replaces the functions."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        check_loop(module)
        for name in WRAPPED:
            self.replace(module, name)
        self.watch_batches(RerunDataIterator)

    def _setup_model_and_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if self.state is not None:  # another model beside the one that is trained
            return original(*args, **kwargs)
        options = get_args()
        self.watcher.started(facts_of_run(options))
        model, optimizer, scheduler = built = original(*args, **kwargs)
        self.step, self.operations = options.iteration, options.num_floating_point_operations_so_far
        self.state = LiveState(model, optimizer, scheduler, self._counters(options))
        self.watcher.built(model, optimizer)
        items = self._items()
        placed, unplaced = self.placed()
        unobserved = [*self.state.unobserved, *unobserved_loader(options), *unplaced]
        self.watcher.loaded(self.step, (*items, *placed), unobserved)
        return built

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        given = inspect.signature(original).bind(*args, **kwargs).arguments
        before = given.get("iteration")
        before = get_args().curr_iteration if before is None else before  # older ones are not given it
        self.watcher.step_begins(before + 1, generator_items("rng at begin"))
        with self.gradients_are_told(given["optimizer"]):
            return original(*args, **kwargs)

    def _training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self.step, self.operations = given["iteration"], None
        self.watcher.step_ended(self.step, results_of_step(given), self._items())
        return original(*args, **kwargs)

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if self.state is not None:
            self.step, self.operations = given["iteration"], given[_OPERATIONS]
            self.watcher.saved(self.step, (*self._items(), *self.placed()[0]))
        return original(*args, **kwargs)

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self.in_pretrain else self.to_the_end(original, args, kwargs)

    def _pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.in_pretrain = True
        return self.to_the_end(original, args, kwargs)

    def _items(self) -> tuple[LiveItem, ...]:
        if self.state is None:
            return ()
        items = self.state.items()
        return items if self.operations is not None else tuple(i for i in items if i.name != f"counter {_OPERATIONS}")

    def _counters(self, options: Any) -> list[LiveItem]:
        """Counters of Megatron-LM; ``iteration`` and the operations are put back where ``train`` takes them up."""

        def put_iteration(value: Any) -> None:
            self.step = options.iteration = value

        def put_operations(value: Any) -> None:
            self.operations = options.num_floating_point_operations_so_far = value

        items = [
            LiveItem("counter iteration", "counter", lambda: self.step, put_iteration),
            LiveItem(f"counter {_OPERATIONS}", "counter", lambda: self.operations, put_operations),
        ]
        items += [attribute_item(f"counter {n}", "counter", options, n) for n in _SAMPLES if hasattr(options, n)]
        return items + batch_size_items()
