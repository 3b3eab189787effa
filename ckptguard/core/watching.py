"""What is watched of a running training process: items of its state, and the moments at which they are looked at.

Whoever knows a framework (``megatron/watch_lm.py``, ``resume/plain_loop.py``) lists items and calls a watcher; whoever records
(``resume/recorder.py``) is that watcher. Neither knows the other. Values of torch are ``Any`` here: this room is free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Group = Literal[
    "counter",  # iteration, consumed samples
    "rng at begin",  # random number generators when a step begins: separates a draw before the step from one inside
    "batch",  # what the data iterator gave, per micro-batch
    "loss",
    "gradient",  # as the optimizer is about to see them
    "metric",  # gradient norm, zero count, skipped
    "scaler",
    "master",  # fp32 copy of a weight
    "optimizer",  # exp_avg, exp_avg_sq, momentum, ...
    "parameter",
    "buffer",
    "unsaved buffer",  # persistent=False: no checkpoint holds it
    "extra state",
    "param group",
    "scheduler",
    "rng",
    "other",
]
GROUPS: tuple[Group, ...] = Group.__args__  # type: ignore[attr-defined]  # in the order in which a step touches them


@dataclass(frozen=True, slots=True, eq=False)
class LiveItem:
    """One thing a rank holds.

    Attributes:
        name: Unique on its rank and the same in every run of one layout, such as ``master chunk 0 decoder.layers.0.mlp...``.
        group: What sort of state it is.
        read: Gives the value now: a tensor (not copied), bytes, or something that JSON can hold.
        write: Puts a value back that ``read`` once gave; None if it cannot be done.
    """

    name: str
    group: Group
    read: Callable[[], Any]
    write: Callable[[Any], None] | None = None


class Watcher(Protocol):
    """Is told what a training process does, in order, on the thread that does it.

    ``items`` gives the state as it is when the call is made; a watcher reads what it wants before it returns.
    """

    def started(self, facts: Mapping[str, Any]) -> None:
        """Once, when ranks are known: JSON facts (framework and version, axes' sizes and ranks, arguments)."""

    def built(self, modules: Sequence[Any], optimizer: Any) -> None:
        """Once, before ``loaded``: the model's chunks, for watchers that hook modules."""

    def loaded(self, step: int, items: Sequence[LiveItem], unobserved: Sequence[str]) -> None:
        """State is ready and no step was made yet. ``step`` is the last finished one: 0 in a fresh run."""

    def step_begins(self, step: int, items: Sequence[LiveItem]) -> None:
        """Step number ``step`` (counted from 1) begins; ``items`` are the generators."""

    def batch(self, batch: Any) -> None:
        """A micro-batch was taken: nested dicts, lists and tuples of tensors and plain values."""

    def gradients(self, items: Sequence[LiveItem]) -> None:
        """Gradients are final and the optimizer has not used them."""

    def step_ended(self, step: int, values: Mapping[str, Any], items: Sequence[LiveItem]) -> None:
        """A step is done. ``values``: losses and metrics as ``"loss lm loss": tensor``, ``"metric grad norm": float``."""

    def saved(self, step: int, items: Sequence[LiveItem]) -> None:
        """A save of the state after ``step`` is about to be made."""

    def ended(self) -> None:
        """The loop was left; more may still be observed by nobody."""
