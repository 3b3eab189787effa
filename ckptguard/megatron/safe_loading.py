"""Loads files of torch.save as Megatron does, with ``weights_only=True``, and goes on where Megatron would stop.

What an allow-list lacks is replaced by stand-ins that do nothing, and left out with a note: args of old releases hold
classes that are gone or were never listed. No code of a pickle runs. Part of an asking process.

Source: torch/_weights_only_unpickler.py and torch/serialization.py (2.14.1), megatron/core/safe_globals.py (megatron-core
0.19.2), which is what Megatron Core registers when it is imported.
"""

from __future__ import annotations

import enum
import io
import pickle
from importlib.metadata import version
from typing import Any

import torch


class UnreadableError(Exception):
    """Not a whole file of torch.save, or one that cannot be read safely."""


class _StandIn:
    """An instance of a class that may not be loaded, or the result of a function that may not be called."""

    origin = ""

    def __new__(cls, *_: object, **__: object) -> _StandIn:
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def register() -> None:
    """Allows what Megatron Core allows. Raises ImportError where it cannot be imported."""
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()


def load(source: io.BytesIO | str, *, where: str) -> Any:
    """What torch.save wrote, with tensors on the CPU and stand-ins in it; the tensors of a path are mapped, not read.

    Args:
        source: The bytes, or a file's path.
        where: What is read, for messages.

    Raises:
        UnreadableError: It is not whole, or names what no stand-in can stand for.
    """
    try:
        strange = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
        stand_ins: list[Any] = [(type("_StandIn", (_StandIn,), {"origin": name}), name) for name in strange]
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
    except _BROKEN as error:
        raise UnreadableError(f"{where}: cannot be loaded with weights_only: {error}") from error


def without_stand_ins(value: Any, *, where: str, notes: list[str]) -> Any:
    """The value itself, with everything taken out that holds a stand-in; ``notes`` gets a sentence that names it all."""
    gone: list[str] = []
    value = _pruned(value, "", gone, set())
    if gone:
        loader = f"Megatron Core {version('megatron-core')}"
        notes.append(f"Left out of {where}, as {loader} does not load it: {', '.join(dict.fromkeys(gone))}.")
    return {} if value is _GONE else value


_BROKEN = (
    pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError, AttributeError, KeyError, IndexError,
    AssertionError,
)  # fmt: skip
_GONE = object()


def _pruned(value: Any, name: str, gone: list[str], seen: set[int]) -> Any:
    """The value with every attribute and item taken out that holds a stand-in; a list that holds one goes whole."""
    if isinstance(value, _StandIn) or (isinstance(value, type) and issubclass(value, _StandIn)):
        gone.append(f"{name} ({value.origin})")
        return _GONE
    if isinstance(value, torch.Tensor | enum.Enum | type | str | int | float | None) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset):
        inner = [_pruned(item, name, gone, seen) for item in value]
        return _GONE if any(item is _GONE for item in inner) else value
    items = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    for key in list(items or ()):
        assert items is not None
        if _pruned(items[key], f"{name}.{key}" if name else str(key), gone, seen) is _GONE:
            del items[key]
    return value
