"""What calls of modules and of operations have in common: their values, their numbers, and a limit."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from ckptguard.resume.digests import recorded
from ckptguard.resume.records import Call, Value

LIMIT = 2_000_000  # calls; about 50 bytes each in the file, about a kilobyte when read again
Emit = Callable[[Call], None]
_LEAVES = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Generator)


def ignored(_: str) -> None:
    """For who does not ask what could not be observed."""


def raised(error: Exception) -> None:
    """For who wants errors of the recording itself as they are."""
    raise error


class Calls:
    """Numbers calls and passes them on, up to a limit. Calls may come from several threads: autograd has its own.

    Args:
        emit: Takes the calls.
        active: Gives the step whose calls are wanted now, or None.
        tell: Takes words about what is not recorded.
        failed: Takes errors of the recording itself.
        limit: How many calls are passed on.
    """

    def __init__(
        self,
        emit: Emit,
        active: Callable[[], int | None],
        tell: Callable[[str], None],
        failed: Callable[[Exception], None],
        limit: int,
    ) -> None:
        self.active = active
        self._emit, self._tell, self._failed, self._limit = emit, tell, failed, limit
        self._lock = threading.Lock()
        self._step: int | None = None
        self._made: Counter[tuple[str, str, str]] = Counter()
        self._left = limit

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Surrounds what the recording itself does: no call of it is recorded, and its errors do not reach the run."""
        try:
            with torch._C._DisableTorchDispatch():
                yield
        except Exception as error:  # noqa: BLE001 - the run goes on; who asked for the calls decides what it is worth
            self._failed(error)

    def put(
        self, step: int, scope: str, phase: str, op: str, inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> None:
        """Passes one call on."""
        with self._lock:
            if step != self._step:
                self._step, self._made = step, Counter()
            key = (scope, phase, op)
            occurrence = self._made[key]
            self._made[key] += 1
            if self._left > 0:
                self._emit(Call(step, scope, phase, op, occurrence, tuple(inputs), tuple(outputs)))
            elif self._left == 0:
                self._tell(f"calls of step {step} after the first {self._limit:,}, from {op or phase} of {scope} on")
            self._left -= 1


def values_of(value: Any) -> list[Value]:
    """Tensors, generators and plain values in nested arguments, in order, as they are recorded; other things are left out."""
    return [recorded(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves(value)]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the leaves, as they are."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def leaves(value: Any) -> Iterator[Any]:
    """Tensors, generators and plain values in lists, tuples, mappings and dataclasses."""
    if value is None or isinstance(value, _LEAVES):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))


def together(values: Sequence[Value]) -> str:
    """Many values as one hash."""
    return f"#b3:{blake3(repr(values).encode()).hexdigest(length=16)}"
