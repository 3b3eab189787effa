"""Hooks on Megatron-Bridge's training loop: a ``Watcher`` is told what it does, and nothing that it does is changed.

Functions of megatron/bridge/training/{setup,train}.py (megatron-bridge 0.6.2) are replaced where the loop looks them up. Where
they differ from Megatron-LM's:

* ``setup`` builds, loads, and makes the data iterators, in this order: ``setup_optimizer`` is given the built model when ranks
  are known; the state is ready and no iterator has drawn a random number when ``setup_data_iterators`` is called.
* A step is over in ``training_log``, or, where the loop is told to log nothing (``skip_train_metrics_log``), in
  ``maybe_synchronize_training_step``, which comes after an evaluation.
* Counters stand in ``GlobalState.train_state``, which loading puts another in place of. It keeps the number of floating point
  operations as int and saves it as float64: a resumed run goes on with the rounded value. It decides nothing, and is in the
  states of ``loaded`` and ``saved`` as float64, not in those of steps.
* Saving is a checkpoint manager's, Bridge's own or the user's; its method is replaced in the one that ``setup`` returns.
* ``train`` saves once more before it returns and leaves by ``SystemExit`` at an exit interval.

The loop for MegatronMIMO (train_megatron_mimo.py) is another one and is not watched.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ckptguard.core.after_import import after_import
from ckptguard.core.watching import LiveItem, Watcher
from ckptguard.megatron.live_generators import generator_items
from ckptguard.megatron.live_state import LiveState
from ckptguard.megatron.run_facts import facts_of_run
from ckptguard.megatron.watched_loop import (
    WatchedLoop,
    batch_size_items,
    check_names,
    results_of_step,
    unobserved_loader,
)

WRAPPED: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron.bridge.training.setup": {
        "setup": ("state",),
        "setup_optimizer": ("model",),
        "setup_data_iterators": (),
    },
    "megatron.bridge.training.train": {
        "train": (),
        "train_step": ("optimizer", "global_state"),
        "training_log": ("loss_dict", "skipped_iter", "grad_norm", "num_zeros_in_grad", "global_state"),
        "maybe_synchronize_training_step": ("iteration",),
    },
}
"""What is replaced in which module, and the parameters by which it is understood."""

STEP_RETURNS = (
    "loss_dict", "skipped_iter", "should_checkpoint", "should_exit", "exit_code", "grad_norm", "num_zeros_in_grad",
    "log_max_attention_logit",
)  # fmt: skip
"""What ``train_step`` returns, by the names that ``train`` gives them."""

_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_OPERATIONS = "floating_point_operations_so_far"
_CONFIGS = (
    "validation", "train", "checkpoint", "model", "optimizer", "ddp", "scheduler", "dataset", "rng", "dist",
    "rerun_state_machine",
)  # fmt: skip
_NEGATED = ("load_optim", "load_rng", "save_optim", "save_rng")  # Megatron-LM's options are ``no_load_optim`` and so on
_OTHER_NAMES = {"num_experts": "num_moe_experts", "ckpt_fully_parallel_save": "fully_parallel_save"}
_NEXT_STEP = "Use megatron-bridge 0.6, or record by ckptguard.record in your own loop."


def watch(watcher: Watcher) -> None:
    """Tells a watcher about Megatron-Bridge's loop as soon as that is imported, or from now on if it is.

    Raises:
        UnsupportedError: The installed Megatron-Bridge has another loop; names what is missing.
    """
    watched = _Watched(watcher)
    for name in WRAPPED:
        after_import(name, watched.install)


class _Watched(WatchedLoop):
    """One process's loop."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(watcher)
        self.training: Any = None  # GlobalState
        self.given: Mapping[str, Any] | None = None  # what the step gave that is not told of yet
        self.again = False

    def install(self, module: ModuleType) -> None:
        """Replaces the functions of a module."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        check_names(module, WRAPPED[module.__name__], _NEXT_STEP)
        for name in WRAPPED[module.__name__]:
            self.replace(module, name)
        if module.__name__.endswith(".train"):
            self.watch_batches(RerunDataIterator)

    def _setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.again = self.training is not None  # restarted in the process: another run, of which nothing is told
        self.training = inspect.signature(original).bind(*args, **kwargs).arguments["state"]
        output = original(*args, **kwargs)
        if not self.again:
            self._watch_saves(output.checkpoint_manager)
        return output

    def _setup_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.training is None or self.again:
            return original(*args, **kwargs)
        self.watcher.started(facts_of_run(_options(self.training.cfg)) | {"framework": "Megatron-Bridge"})
        model = inspect.signature(original).bind(*args, **kwargs).arguments["model"]
        optimizer, scheduler = built = original(*args, **kwargs)
        self.state = LiveState(model, optimizer, scheduler, self._counters())
        self.watcher.built(model, optimizer)
        return built

    def _setup_data_iterators(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.state is not None and not self.again:
            items = self.state.items()
            placed, unplaced = self.placed()
            unobserved = [*self.state.unobserved, *unobserved_loader(self.training.cfg.dataset), *unplaced]
            self.watcher.loaded(self.training.train_state.step, (*items, self._operations(), *placed), unobserved)
        return original(*args, **kwargs)

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.state is None or self.again:
            return original(*args, **kwargs)
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        self.watcher.step_begins(
            arguments["global_state"].train_state.step + 1, generator_items("rng at begin")
        )  # the count is of finished ones until ``train`` has looked at what the step gave
        with self.gradients_are_told(arguments["optimizer"]):
            result = original(*args, **kwargs)
        self.given = dict(zip(STEP_RETURNS, result, strict=True))
        return result

    def _training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._step_is_over()
        return original(*args, **kwargs)

    def _maybe_synchronize_training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._step_is_over()
        return original(*args, **kwargs)

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self.again else self.to_the_end(original, args, kwargs)

    def _step_is_over(self) -> None:
        if self.state is None or self.given is None:
            return
        given, self.given = self.given, None
        self.watcher.step_ended(self.training.train_state.step, results_of_step(given), self.state.items())

    def _watch_saves(self, manager: Any) -> None:
        original = manager.save

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self.state is not None and not self.again:
                items = (*self.state.items(), self._operations(), *self.placed()[0])
                self.watcher.saved(self.training.train_state.step, items)
            return original(*args, **kwargs)

        manager.save = save

    def _counters(self) -> list[LiveItem]:
        """Counters of Megatron-Bridge, named as Megatron-LM's are."""

        def counter(name: str, attribute: str) -> LiveItem:
            return LiveItem(
                f"counter {name}",
                "counter",
                lambda: getattr(self.training.train_state, attribute),
                lambda value: setattr(self.training.train_state, attribute, value),
            )

        return [counter("iteration", "step"), *(counter(name, name) for name in _COUNTERS), *batch_size_items()]

    def _operations(self) -> LiveItem:
        name = f"counter num_{_OPERATIONS}"
        return LiveItem(
            name,
            "counter",
            lambda: float(getattr(self.training.train_state, _OPERATIONS)),
            lambda value: setattr(self.training.train_state, _OPERATIONS, value),
        )


def _options(cfg: Any) -> types.SimpleNamespace:
    """A ``ConfigContainer`` as if it were Megatron-LM's arguments: the first part that has a name gives its value."""
    options: dict[str, Any] = {}
    for part in reversed([getattr(cfg, name, None) for name in _CONFIGS]):
        options |= vars(getattr(part, "transformer", part)) | vars(part) if part is not None else {}
    options |= {f"no_{name}": not options[name] for name in _NEGATED if name in options}
    options |= {name: options[other] for name, other in _OTHER_NAMES.items() if other in options}
    return types.SimpleNamespace(**options)
