"""What hooks on training loops have in common: names that are looked for, batches, gradients, whole tensors, the end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.watching import LiveItem, Watcher
from ckptguard.megatron.live_state import LiveState
from ckptguard.megatron.placed_state import placed_items

_BATCHES = ("num_microbatches", "current_global_batch_size", "current_running_global_batch_size")


def check_names(module: ModuleType, wanted: Mapping[str, tuple[str, ...]], next_step: str) -> None:
    """Raises if functions or parameters that are relied on are not there.

    Args:
        module: Of the framework.
        wanted: Parameters by name of the function.
        next_step: What the user can do then.

    Raises:
        UnsupportedError: Names each that is missing.
    """
    missing = []
    for name, parameters in wanted.items():
        function = getattr(module, name, None)
        if not callable(function):
            missing.append(f"function {name}")
            continue
        known = inspect.signature(function).parameters
        missing += [f"parameter {parameter} of {name}" for parameter in parameters if parameter not in known]
    if missing:
        raise UnsupportedError(
            f"{module.__name__} has no {', no '.join(missing)}: its loop is not one that can be watched",
            next_step=next_step,
        )


def results_of_step(given: Mapping[str, Any]) -> dict[str, Any]:
    """Losses (last pipeline stage only) and metrics by the names that a watcher is told, from those of ``train_step``."""
    values = {f"loss {name}": value for name, value in given["loss_dict"].items()}
    values["metric grad norm"] = given["grad_norm"]
    values["metric zeros in gradient"] = given["num_zeros_in_grad"]
    values["metric skipped"] = given["skipped_iter"]
    return values


def batch_size_items() -> list[LiveItem]:
    """What the calculator of micro-batches says (megatron/core/num_microbatches_calculator.py)."""
    from megatron.core import num_microbatches_calculator as calculator

    readers = {name: getattr(calculator, f"get_{name}", None) for name in _BATCHES}
    return [LiveItem(f"counter {name}", "counter", read) for name, read in readers.items() if read]


def unobserved_loader(options: Any) -> list[str]:
    """What cannot be observed of the data loader that the options name, in words."""
    if getattr(options, "dataloader_type", None) == "external":
        return ["position of the external data loader: the batches that it gives are observed, its own state is not"]
    return []


class WatchedLoop:
    """One process's loop.

    Attributes:
        watcher: Who is told.
        state: What the rank holds; None before it is built.
        in_step: A step is being made.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.state: LiveState | None = None
        self.in_step = False

    def replace(self, module: ModuleType, name: str) -> None:
        """Puts the method ``_name`` in the place of a function; it is given the function and its arguments."""
        original = getattr(module, name)
        replacement = functools.wraps(original)(functools.partial(getattr(self, f"_{name}"), original))
        setattr(module, name, replacement)

    def watch_batches(self, iterator: Any) -> None:
        """Tells of batches that the iterator class gives in a step, but not of those that it gives again in a rerun."""
        original = iterator.__next__

        @functools.wraps(original)
        def give(this: Any) -> Any:
            again = this.replaying
            batch = original(this)
            if self.in_step and not again:
                self.watcher.batch(batch)
            return batch

        iterator.__next__ = give

    @contextmanager
    def gradients_are_told(self, optimizer: Any) -> Iterator[None]:
        """While a step is made: its ``optimizer.step`` is the first to use the gradients."""
        own, original = "step" in vars(optimizer), optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self.state is not None:
                self.watcher.gradients(self.state.gradients())
            return original(*args, **kwargs)

        optimizer.step = step
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            if own:
                optimizer.step = original
            else:
                del optimizer.step

    def placed(self) -> tuple[tuple[LiveItem, ...], tuple[str, ...]]:
        """Parts of whole tensors and what has no place in one, if the watcher has a ``placed_sum`` to sum them."""
        summed = getattr(self.watcher, "placed_sum", None)
        if summed is None or self.state is None:
            return (), ()
        return placed_items(self.state.chunks, self.state.optimizer, summed)

    def to_the_end(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the loop and tells of its end, unless it dies of an exception."""
        try:
            result = original(*args, **kwargs)
        except SystemExit:
            self.watcher.ended()
            raise
        self.watcher.ended()
        return result
