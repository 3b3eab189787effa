"""How a live value is read and written: plain tensors, tensors made of others, plain values; the parts of ``LiveItem``."""

from __future__ import annotations

import enum
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptguard.core.watching import Group, LiveItem

_DERIVED = "transpose"  # Transformer Engine's Float8Tensor keeps a transposed copy of its data where it needs one


def is_plain(tensor: Any) -> bool:
    """Whether a tensor keeps its elements itself, and is no wrapper around others."""
    import torch

    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def always(value: Any) -> Callable[[], Any]:
    """A function that gives the value."""
    return lambda: value


def tensor_parts(tensor: Any) -> dict[str, Any] | None:
    """The plain tensors that a tensor is made of, by suffix; itself under ``""`` if it is one.

    A DTensor is its local part. A quantised tensor of Transformer Engine (2.x) tells codes and block scales by
    ``get_metadata``, as ``rowwise_data``, ``rowwise_scale_inv`` and so on. None is a wrapper that is not known.
    """
    import torch

    if is_plain(tensor):
        return {"": tensor.detach()}
    if isinstance(local := getattr(tensor, "_local_tensor", None), torch.Tensor):
        return tensor_parts(local)
    if not hasattr(tensor, "get_metadata"):
        return None
    metadata: Mapping[str, Any] = tensor.get_metadata()
    return {
        f".{key}": part.detach()
        for key, part in metadata.items()
        if isinstance(part, torch.Tensor) and _DERIVED not in key
    }


def tensor_items(name: str, group: Group, get: Callable[[], Any], unobserved: list[str]) -> list[LiveItem]:
    """Items of a tensor: one, or one for each tensor that it is made of.

    Args:
        name: Of the item.
        group: Of the item.
        get: Gives the tensor now; may be another object each time.
        unobserved: Told if the tensor is of a type that cannot be read.
    """
    tensor = get()
    if is_plain(tensor):
        return [LiveItem(name, group, lambda: get().detach(), lambda value: copy_into(get(), value))]
    parts = tensor_parts(tensor)
    if parts is None:
        unobserved.append(f"{name}: a {type(tensor).__name__} keeps its elements in tensors that are not known here")
        return []

    def part(suffix: str) -> LiveItem:
        def now() -> Any:
            return (tensor_parts(get()) or {}).get(suffix)

        return LiveItem(f"{name}{suffix}", group, now, lambda value: copy_into(now(), value))

    return [part(suffix) for suffix in parts]


def copy_into(target: Any, value: Any) -> None:
    """In place, whether or not a gradient is wanted for the target."""
    import torch

    with torch.no_grad():
        target.detach().copy_(value)


def plain(value: Any) -> Any:
    """A value as a recorder can hold it: JSON, bytes or a tensor. What has no such form is told by its type."""
    import torch

    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [_json(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    named = value if isinstance(value, type) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _json(value: Any) -> Any:
    """A value inside a container, where no tensor can stand."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    return value.hex() if isinstance(value, bytes) else plain(value)


def can_be_put_back(value: Any) -> bool:
    """Whether what ``plain`` makes of a value can be made the value again."""
    import torch

    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and can_be_put_back(list(value.values()))
    if isinstance(value, tuple | list):
        return all(isinstance(item, bool | int | float | str | None) for item in value)
    return isinstance(value, bool | int | float | str | None | torch.Tensor) and not isinstance(value, enum.Enum)


def put_back(value: Any, old: Any, put: Callable[[Any], None]) -> None:
    """Puts a value that was read: tensors in place, sequences as the type that stands there now."""
    import torch

    if isinstance(old, torch.Tensor):
        copy_into(old, value)
    else:
        put(tuple(value) if isinstance(old, tuple) else value)


def entry_item(name: str, group: Group, get: Callable[[], Any], put: Callable[[Any], None]) -> LiveItem:
    """An item of a plain value or tensor that stands somewhere and can be replaced there."""
    item = LiveItem(name, group, lambda: plain(get()), lambda value: put_back(value, get(), put))
    return item if can_be_put_back(get()) else LiveItem(name, group, item.read)


def state_dict_item(name: str, group: Group, holder: Any, key: str) -> LiveItem:
    """An item of an entry of a ``state_dict``."""

    def write(value: Any) -> None:
        holder.load_state_dict(holder.state_dict() | {key: value})

    return LiveItem(name, group, lambda: holder.state_dict()[key], write)


def attribute_item(name: str, group: Group, holder: Any, attribute: str) -> LiveItem:
    """An item of an attribute."""
    return entry_item(name, group, lambda: getattr(holder, attribute), lambda value: setattr(holder, attribute, value))
