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

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ckptguard.core.after_import import after_import
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.watching import LiveItem, Watcher
from ckptguard.megatron.live_generators import generator_items
from ckptguard.megatron.live_state import LiveState
from ckptguard.megatron.live_values import attribute_item
from ckptguard.megatron.placed_state import placed_items
from ckptguard.megatron.run_facts import facts_of_run

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
_BATCHES = ("num_microbatches", "current_global_batch_size", "current_running_global_batch_size")
_OPERATIONS = "num_floating_point_operations_so_far"


def watch(watcher: Watcher) -> None:
    """Tells a watcher about Megatron-LM's loop as soon as that is imported, or from now on if it is.

    A watcher that has a function ``placed_sum`` (``placed_state.Summed``) is also given the parts of whole tensors when state
    was loaded and is saved.

    Raises:
        UnsupportedError: The installed Megatron-LM has another loop; names what is missing.
    """
    after_import("megatron.training.training", lambda module: _Watched(watcher, module).install())


def check_loop(module: ModuleType) -> None:
    """Raises if functions or parameters that are relied on are not there.

    Raises:
        UnsupportedError: Names each.
    """
    missing = []
    for name, wanted in WRAPPED.items():
        function = getattr(module, name, None)
        if not callable(function):
            missing.append(f"function {name}")
            continue
        known = inspect.signature(function).parameters
        missing += [f"parameter {parameter} of {name}" for parameter in wanted if parameter not in known]
    if missing:
        raise UnsupportedError(
            f"{module.__name__} has no {', no '.join(missing)}: its loop is not one that can be watched",
            next_step="Use Megatron-LM of megatron-core 0.16 to 0.19, or record by ckptguard.record in your own loop.",
        )


class _Watched:
    """One process's loop."""

    def __init__(self, watcher: Watcher, module: ModuleType) -> None:
        self.watcher, self.module = watcher, module
        self.state: LiveState | None = None
        self.built: tuple[Any, Any] = ((), None)
        self.step = 0
        self.operations: Any = None  # None where it is not known
        self.in_step = self.in_pretrain = False

    def install(self) -> None:
        """Replaces the functions."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        check_loop(self.module)
        for name in WRAPPED:
            original = getattr(self.module, name)
            replacement = functools.wraps(original)(functools.partial(getattr(self, f"_{name}"), original))
            setattr(self.module, name, replacement)
        self._watch_batches(RerunDataIterator)

    def _watch_batches(self, iterator: Any) -> None:
        original = iterator.__next__

        @functools.wraps(original)
        def give(this: Any) -> Any:
            again = this.replaying
            batch = original(this)
            if self.in_step and not again:
                self.watcher.batch(batch)
            return batch

        iterator.__next__ = give

    def _setup_model_and_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if self.state is not None:  # another model beside the one that is trained
            return original(*args, **kwargs)
        options = get_args()
        self.watcher.started(facts_of_run(options))
        model, optimizer, scheduler = built = original(*args, **kwargs)
        self.step, self.operations = options.iteration, options.num_floating_point_operations_so_far
        self.built = model, optimizer
        self.state = LiveState(model, optimizer, scheduler, self._counters(options))
        self.watcher.built(model, optimizer)
        items = self._items()
        placed, unplaced = self._placed()
        unobserved = [*self.state.unobserved, *_unobserved(options), *unplaced]
        self.watcher.loaded(self.step, (*items, *placed), unobserved)
        return built

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        given = inspect.signature(original).bind(*args, **kwargs).arguments
        before = given.get("iteration")
        before = get_args().curr_iteration if before is None else before  # older ones are not given it
        self.watcher.step_begins(before + 1, generator_items("rng at begin"))
        self.in_step = True
        try:
            with self._gradients_are_told(given["optimizer"]):
                return original(*args, **kwargs)
        finally:
            self.in_step = False

    @contextmanager
    def _gradients_are_told(self, optimizer: Any) -> Iterator[None]:
        own, original = "step" in vars(optimizer), optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self.state is not None:
                self.watcher.gradients(self.state.gradients())
            return original(*args, **kwargs)

        optimizer.step = step
        try:
            yield
        finally:
            if own:
                optimizer.step = original
            else:
                del optimizer.step

    def _training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self.step, self.operations = given["iteration"], None
        self.watcher.step_ended(self.step, _results(given), self._items())
        return original(*args, **kwargs)

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if self.state is not None:
            self.step, self.operations = given["iteration"], given[_OPERATIONS]
            self.watcher.saved(self.step, (*self._items(), *self._placed()[0]))
        return original(*args, **kwargs)

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self.in_pretrain else self._to_the_end(original, args, kwargs)

    def _pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.in_pretrain = True
        return self._to_the_end(original, args, kwargs)

    def _to_the_end(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except SystemExit:
            self.watcher.ended()
            raise
        self.watcher.ended()
        return result

    def _items(self) -> tuple[LiveItem, ...]:
        if self.state is None:
            return ()
        items = self.state.items()
        return items if self.operations is not None else tuple(i for i in items if i.name != f"counter {_OPERATIONS}")

    def _placed(self) -> tuple[tuple[LiveItem, ...], tuple[str, ...]]:
        """Parts of whole tensors, for a watcher that says how to sum them."""
        summed = getattr(self.watcher, "placed_sum", None)
        return ((), ()) if summed is None else placed_items(*self.built, summed)

    def _counters(self, options: Any) -> list[LiveItem]:
        """Counters of Megatron-LM; ``iteration`` and the operations are put back where ``train`` takes them up."""
        from megatron.core import num_microbatches_calculator as calculator

        items = [
            LiveItem("counter iteration", "counter", lambda: self.step, lambda v: setattr(options, "iteration", v)),
            LiveItem(
                f"counter {_OPERATIONS}",
                "counter",
                lambda: self.operations,
                lambda value: setattr(options, _OPERATIONS, value),
            ),
        ]
        items += [attribute_item(f"counter {n}", "counter", options, n) for n in _SAMPLES if hasattr(options, n)]
        readers = {name: getattr(calculator, f"get_{name}", None) for name in _BATCHES}
        return items + [LiveItem(f"counter {name}", "counter", read) for name, read in readers.items() if read]


def _results(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a step gave: losses (last pipeline stage only) and metrics, as ``train_step`` returned them."""
    values = {f"loss {name}": value for name, value in given["loss_dict"].items()}
    values["metric grad norm"] = given["grad_norm"]
    values["metric zeros in gradient"] = given["num_zeros_in_grad"]
    values["metric skipped"] = given["skipped_iter"]
    return values


def _unobserved(options: Any) -> list[str]:
    if getattr(options, "dataloader_type", None) == "external":
        return ["position of the external data loader: the batches that it gives are observed, its own state is not"]
    return []
