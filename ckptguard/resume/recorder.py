"""The recorder inside a training process: a watcher that writes what it is told to its rank's stream.

It must not change the run: it adds no collective (but for the one barrier of an arm that stops after loading), draws no random
number, holds no tensor of the model's beyond the call, and never raises into the training loop. What goes wrong inside it is a
line of the stream that begins with ``FAILED``, by which the arm counts as failed, and training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import platform
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal

import torch

from ckptguard.core.watching import GROUPS, Group, LiveItem
from ckptguard.resume import kept
from ckptguard.resume.digests import Draft
from ckptguard.resume.leaving import leave
from ckptguard.resume.orders import FAILED, LEVELS, Order
from ckptguard.resume.placed_sums import placed_sum
from ckptguard.resume.records import Call, Kind, RankWriter, Value, file_name

Moment = Literal["loaded", "step", "gradients"]
Before = Callable[["Recorder", int, dict[str, LiveItem]], None]
Observer = Callable[[Kind, int, Sequence[LiveItem]], None]

_CHEAP: frozenset[Group] = frozenset({"counter", "batch", "loss", "metric", "param group", "scheduler"})
_ORDER = {group: number for number, group in enumerate(GROUPS)}


def _guarded[**P](method: Callable[Concatenate[Recorder, P], None]) -> Callable[Concatenate[Recorder, P], None]:
    """Nothing that goes wrong in a watcher's method reaches the training loop; in other processes it does nothing."""

    @functools.wraps(method)
    def call(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.over:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training goes on; the arm is told to be failed
            self.failed(error)

    return call


class Recorder:
    """Records one rank; a ``core.watching.Watcher``.

    Attributes:
        order: What to record.
        rank: Of this process, among all.
        facts: The first line of the stream.
        modules: The model's chunks, once ``built``.
        optimizer: The optimizer, once ``built``.
        placed_sum: Sums the parts of whole tensors, where the order asks for them; else None.
        before: By moment, what is called with the recorder, the step and all known items just before the state is observed
            there: ``loaded``, ``step`` (before a step begins), ``gradients`` (before the optimizer sees them). For plugins.
        observers: Called with every event's kind, step and items, after it was written. For plugins.
    """

    def __init__(self, order: Order, rank: int, world: int) -> None:
        self.order, self.rank = order, rank
        self.facts: dict[str, Any] = {"rank": rank, "world_size": world} | _process_facts()
        self.modules: tuple[Any, ...] = ()
        self.optimizer: Any = None
        self.placed_sum = placed_sum if order.placed else None
        self.before: dict[Moment, list[Before]] = {"loaded": [], "step": [], "gradients": []}
        self.observers: list[Observer] = []
        self._level = LEVELS.index(order.level)
        self._pid = os.getpid()
        self._writer: RankWriter | None = None
        self._lock = threading.RLock()  # of the stream: autograd's threads have calls to write
        self._told: set[str] = set()
        self._step: int | None = None  # the one being made
        self._items: dict[str, LiveItem] = {}  # of the last event, for plugins only
        self._draft, self._groups, self._batches = Draft(), dict[str, Group](), 0
        self._in_step = contextlib.ExitStack()
        atexit.register(self._at_exit)
        if order.plugin:
            self._plug(order.plugin)

    @property
    def over(self) -> bool:
        """Nothing more is written by this process: it ended its stream, or is a fork of the one that has it."""
        return os.getpid() != self._pid

    # What a watcher is told.

    @_guarded
    def started(self, facts: Mapping[str, Any]) -> None:
        """See ``Watcher``."""
        self.facts |= facts
        self._open()

    @_guarded
    def built(self, modules: Sequence[Any], optimizer: Any) -> None:
        """See ``Watcher``."""
        self.modules, self.optimizer = tuple(modules), optimizer
        if self._level >= LEVELS.index("module"):
            from ckptguard.resume import module_calls

            module_calls.install(self.modules, self._emit, self._called_step, tell=self._tell, failed=self.failed)

    def loaded(self, step: int, items: Sequence[LiveItem], unobserved: Sequence[str]) -> None:
        """See ``Watcher``; where the order is to stop, it does not return."""
        self._loaded(step, items, unobserved)
        if self.order.stop_when_loaded:
            self.ended()
            leave()

    @_guarded
    def _loaded(self, step: int, items: Sequence[LiveItem], unobserved: Sequence[str]) -> None:
        self._say(unobserved)
        named = {item.name: item for item in items}
        self._run_before("loaded", step, named)
        if self.order.restore:  # after planted faults: a trial puts right what came out of loading, whoever made it so
            self._restore(named)
        self._event("loaded", step, items)

    @_guarded
    def step_begins(self, step: int, items: Sequence[LiveItem]) -> None:
        """See ``Watcher``."""
        self._forget_step()
        self._run_before("step", step, self._items | {item.name: item for item in items})
        self._step = step
        for item in items:
            self._read(
                item, name=item.name if item.group == "rng at begin" else f"{item.name} at begin", group="rng at begin"
            )
        if self.order.level == "op" and self._called_step() is not None:
            from ckptguard.resume import op_calls

            self._in_step.enter_context(
                op_calls.recording(step, self.order.scope, self._emit, tell=self._tell, failed=self.failed)
            )

    @_guarded
    def batch(self, batch: Any) -> None:
        """See ``Watcher``."""
        with self._unseen():
            for name, value in _leaves(batch, f"batch {self._batches}"):
                self._add(name, "batch", value)
        self._batches += 1

    @_guarded
    def gradients(self, items: Sequence[LiveItem]) -> None:
        """See ``Watcher``."""
        self._run_before("gradients", self._step or 0, self._items | {item.name: item for item in items})
        with self._unseen():
            for item in items:
                self._read(item)
        if self._called_step() is not None:
            from ckptguard.resume import module_calls

            self._in_step.enter_context(module_calls.within("optimizer"))

    @_guarded
    def step_ended(self, step: int, values: Mapping[str, Any], items: Sequence[LiveItem]) -> None:
        """See ``Watcher``."""
        self._in_step.close()
        for name, value in values.items():
            word = name.split(" ", 1)[0]
            self._add(name, word if word in ("loss", "metric") else "other", value)  # type: ignore[arg-type]
        self._event("step", step, items)
        self._step = None

    @_guarded
    def saved(self, step: int, items: Sequence[LiveItem]) -> None:
        """See ``Watcher``."""
        with self._apart(), self._unseen():
            self._event("saved", step, items)
        if self.order.keep:
            named = {item.name: item for item in items}
            self._say(kept.keep(self._kept_in(self.order.folder), [named[n] for n in self.order.keep if n in named]))

    @_guarded
    def ended(self) -> None:
        """See ``Watcher``."""
        self._in_step.close()
        if self._writer is not None:
            self._writer.end()
        self._pid = -1

    def failed(self, error: Exception) -> None:
        """Writes that the recorder itself failed; if that cannot be written either, says so and is over."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{FAILED}: {type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        try:
            self._say([words])
        except Exception as second:  # noqa: BLE001 - the disk is full: nothing can be written any more
            self._pid = -1
            print(f"ckptguard: rank {self.rank}: {words}; then {second}", file=sys.stderr)  # noqa: T201

    # What is written.

    def _open(self) -> RankWriter:
        """The stream, which begins with the facts."""
        if self._writer is None:
            folder = Path(self.order.folder)
            if (folder / file_name(self.rank)).exists():
                raise FileExistsError(f"a second process of rank {self.rank} records into {folder}")
            self._writer = RankWriter(folder, self.rank)
            self._writer.facts(self.facts)
            self._writer.flush()
        return self._writer

    def _event(self, kind: Kind, step: int, items: Sequence[LiveItem]) -> None:
        with torch.no_grad():
            for item in items:
                self._read(item)
        values, groups, words = self._draft.values(), self._groups, self._draft.unobserved
        self._forget_step()
        self._say(words)
        event: list[tuple[str, Group, Value]] = [(name, groups[name], value) for name, value in values.items()]
        with self._lock:
            self._open().event(kind, step, sorted(event, key=lambda entry: _ORDER[entry[1]]))
        for observer in self.observers:
            observer(kind, step, items)
        if self.before["step"] or self.before["gradients"]:
            self._items = {item.name: item for item in items}

    def _read(self, item: LiveItem, *, name: str | None = None, group: Group | None = None) -> None:
        """Reads and digests an item, if the level has its group; one that cannot be read is said."""
        name, group = name or item.name, group or item.group
        if not self._level and group not in _CHEAP:
            return
        try:
            self._add(name, group, item.read())
        except Exception as error:  # noqa: BLE001 - any code of a framework may run there
            self._say([f"{name}: cannot be read ({type(error).__name__}: {error})"])

    def _add(self, name: str, group: Group, value: Any) -> None:
        self._draft.add(name, value)
        self._groups[name] = group

    def _forget_step(self) -> None:
        self._draft, self._groups, self._batches = Draft(), {}, 0

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """An event amid a step's: what was gathered of the step so far stays for its own event."""
        gathered = self._draft, self._groups, self._batches
        self._forget_step()
        try:
            yield
        finally:
            self._draft, self._groups, self._batches = gathered

    def _unseen(self) -> contextlib.AbstractContextManager[None]:
        """What is read amid a step is no operation of the step."""
        if self.order.level != "op":
            return contextlib.nullcontext()
        from torch.utils._python_dispatch import _disable_current_modes

        return _disable_current_modes()

    def _say(self, words: Sequence[str]) -> None:
        with self._lock:
            new = [word for word in dict.fromkeys(words) if word not in self._told]
            if new:
                self._told.update(new)
                self._open().unobserved(new)
                self._open().flush()

    def _tell(self, words: str) -> None:
        if not self.over:
            self._say([words])

    def _emit(self, call: Call) -> None:
        with self._lock:
            if not self.over:
                self._open().call(call)

    def _called_step(self) -> int | None:
        """The step being made, if its calls are to be recorded."""
        first, last = self.order.calls or (1, 0)
        return self._step if self._step is not None and first <= self._step <= last and not self.over else None

    # What plugins and orders do.

    def _plug(self, plugin: str) -> None:
        module, _, function = plugin.partition(":")
        try:
            getattr(importlib.import_module(module), function)(self, self.order.plugin_argument)
        except Exception as error:  # noqa: BLE001 - as in a watcher's method
            self.failed(error)

    def _run_before(self, moment: Moment, step: int, items: dict[str, LiveItem]) -> None:
        for call in self.before[moment]:
            call(self, step, items)

    def _restore(self, items: Mapping[str, LiveItem]) -> None:
        assert self.order.restore_from is not None
        problems = kept.restore(self._kept_in(self.order.restore_from), self.order.restore, items)
        self._say([f"{FAILED}: {problem}" for problem in problems])

    def _kept_in(self, folder: str) -> Path:
        return Path(folder) / f"kept_rank_{self.rank:05d}.pt"

    def _at_exit(self) -> None:
        if getattr(sys, "last_exc", None) is None:  # a process that dies of an exception leaves a torn stream
            self.ended()


def _process_facts() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
    }


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """Tensors and plain values of nested containers, named by their path."""
    if isinstance(value, Mapping):
        return [leaf for key, part in value.items() for leaf in _leaves(part, f"{name} {key}")]
    if isinstance(value, list | tuple):
        return [leaf for number, part in enumerate(value) for leaf in _leaves(part, f"{name} {number}")]
    return [(name, value)]
