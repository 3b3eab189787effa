"""Values of single items, kept by one arm and put back by another: is this the item that the difference comes from?

One file per rank that ``torch.load(weights_only=True)`` accepts. numpy arrays stand in it as tensors under a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptguard.core.watching import LiveItem

_ARRAY = "ckptguard: numpy array"


def keep(path: Path, items: Sequence[LiveItem]) -> list[str]:
    """Writes the values of items as they are now; returns what could not be kept, in words."""
    values, problems = {}, []
    for item in items:
        try:
            values[item.name] = _stored(item.read())
        except TypeError as error:
            problems.append(f"{item.name}: cannot be kept ({error})")
    torch.save(values, path)
    return problems


def restore(path: Path, names: Sequence[str], items: Mapping[str, LiveItem]) -> list[str]:
    """Puts kept values back; returns what could not be put back, in words.

    Raises:
        OSError: The file cannot be read.
    """
    values, problems = torch.load(path, map_location="cpu", weights_only=True), []
    for name in names:
        item = items.get(name)
        if item is None or item.write is None:
            problems.append(
                f"{name} cannot be put back: " + ("there is none here" if item is None else "it can only be read")
            )
        elif name not in values:
            problems.append(f"{name} cannot be put back: {path} does not hold it")
        else:
            with torch.no_grad():
                item.write(_live(values[name]))
    return problems


def _stored(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, dict):
        return {key: _stored(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return (
            type(value)(_stored(part) for part in value) if type(value) in (tuple, list) else list(map(_stored, value))
        )
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _live(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _live(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_live(part) for part in value)
    return value
