"""What a plain PyTorch loop holds between two steps, as items that can be read and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ckptguard.core.watching import Group, LiveItem
from ckptguard.megatron.live_generators import default_generators
from ckptguard.megatron.live_values import always, entry_item, state_dict_item, tensor_items


class PlainState:
    """The parts of a loop. Each is one object, or several in a sequence or by name; None is none.

    Args:
        model: Modules.
        optimizer: Of torch's form: ``state`` by parameter and ``param_groups``.
        scheduler: Anything with ``state_dict`` and ``load_state_dict``.
        scaler: Likewise, such as ``torch.amp.GradScaler``.
    """

    def __init__(self, *, model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None) -> None:
        self.modules: list[torch.nn.Module] = list(by_name(model).values())
        self.optimizers: dict[str, Any] = by_name(optimizer)
        self._holders: tuple[tuple[Group, dict[str, Any]], ...] = (
            ("scaler", by_name(scaler)),
            ("scheduler", by_name(scheduler)),
        )
        self._params = {
            f"chunk {number} {name}": param
            for number, module in enumerate(self.modules)
            for name, param in module.named_parameters()
        }

    def items(self) -> tuple[list[LiveItem], list[str]]:
        """All state there is now but gradients, and what cannot be observed, in words."""
        unobserved: list[str] = []
        items = [*self._model_items(unobserved)]
        names = {id(param): name for name, param in self._params.items()}
        for where, optimizer in self.optimizers.items():
            items += _optimizer_items(optimizer, where, names, unobserved)
        for group, holders in self._holders:
            for where, holder in holders.items():
                items += [state_dict_item(f"{group} {where}{key}", group, holder, key) for key in holder.state_dict()]
        return [*items, *generators("rng")], unobserved

    def gradients(self) -> list[LiveItem]:
        """Gradients that are there now."""
        items: list[LiveItem] = []
        for name, param in self._params.items():
            if param.grad is not None:
                items += tensor_items(f"gradient {name}", "gradient", partial(getattr, param, "grad"), [])
        return items

    def _model_items(self, unobserved: list[str]) -> Iterator[LiveItem]:
        for name, param in self._params.items():
            yield from tensor_items(f"parameter {name}", "parameter", always(param), unobserved)
        for number, module in enumerate(self.modules):
            for where, part in module.named_modules():
                for key, buffer in part._buffers.items():
                    if buffer is not None:
                        kind: Group = "unsaved buffer" if key in part._non_persistent_buffers_set else "buffer"
                        name = f"{kind} chunk {number} {where + '.' if where else ''}{key}"
                        yield from tensor_items(name, kind, partial(part._buffers.get, key), unobserved)


def by_name(value: Any) -> dict[str, Any]:
    """One object under ``""``; several under their name or number and a space."""
    if value is None:
        return {}
    if isinstance(value, torch.nn.Module) or not isinstance(value, Mapping | list | tuple):
        return {"": value}
    if isinstance(value, Mapping):
        return {f"{name} ": part for name, part in value.items()}
    return {f"{number} " if len(value) > 1 else "": part for number, part in enumerate(value)}


def generators(group: Group) -> tuple[LiveItem, ...]:
    """The random number generators of a process without Megatron; names begin with the group."""
    return default_generators(group, cuda=torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _optimizer_items(optimizer: Any, where: str, names: Mapping[int, str], unobserved: list[str]) -> Iterator[LiveItem]:
    if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        unobserved.append(f"optimizer {where}({kind}): it has no state and param_groups of torch's form")
        return
    for number, group in enumerate(optimizer.param_groups):
        for order, param in enumerate(group["params"]):
            name = names.get(id(param), f"param group {number} parameter {order}")
            for key, value in optimizer.state.get(param, {}).items():
                said, entries = f"optimizer {where}{key} {name}", optimizer.state[param]
                if isinstance(value, torch.Tensor):
                    yield from tensor_items(said, "optimizer", partial(entries.get, key), unobserved)
                else:
                    yield entry_item(said, "optimizer", partial(entries.get, key), partial(entries.__setitem__, key))
        for key in group:
            if key != "params":
                said = f"param group {where}{number} {key}"
                yield entry_item(said, "param group", partial(group.get, key), partial(group.__setitem__, key))
