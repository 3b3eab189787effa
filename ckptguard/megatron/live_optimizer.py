"""Optimizer of a Megatron process, as items: masters, states, groups, grad scaler; and the gradients it is about to use.

Sources (megatron-core 0.19.2), all in megatron/core/optimizer: ``get_megatron_optimizer`` returns a ``ChainedOptimizer``, which
may hold a ``LayerWiseDistributedOptimizer``, itself a chain. The links are ``DistributedOptimizer`` (flat shards of
parameters), ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer``, or torch's own. Each has the torch optimizer in
``optimizer``, a parameter its fp32 copy in ``main_param``. A ``HybridDeviceOptimizer`` steps copies that are in
``param_to_inner_param``; one that keeps masters itself (``use_precision_aware_optimizer``) has them in its state as
``master_param``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptguard.core.watching import LiveItem
from ckptguard.megatron.live_values import always, copy_into, entry_item, is_plain, plain, state_dict_item, tensor_items

_MASTER_KEY = "master_param"


@dataclass(frozen=True, slots=True, eq=False)
class OwnedTensor:
    """A tensor that an optimizer keeps for a parameter.

    Attributes:
        kind: ``master``, or ``optimizer`` and the key of the state.
        param: The model's parameter.
        owned: Its flat elements ``[owned.start, owned.end)`` that the tensor is for; None for all.
        tensor: Flat where ``owned`` is given.
    """

    kind: str
    param: Any
    owned: Any
    tensor: Any


class LiveOptimizer:
    """The optimizers of a rank and the names of what they hold.

    Attributes:
        links: Megatron's or torch's optimizers that make up the chain, flattened.
        unobserved: What cannot be read, in words.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str], params: Mapping[str, Any]) -> None:
        """Takes the optimizer, names of model parameters by ``id``, and the parameters by name."""
        self.links = list(_links(optimizer))
        self.unobserved: list[str] = []
        self._names, self._params = names, params
        self._inner = [self._inner_of(link) for link in self.links]
        self._owners = [self._owners_of(link, inner) for link, inner in zip(self.links, self._inner, strict=True)]

    def form(self) -> tuple[object, ...]:
        """Changes when state appears or goes: what items have been made for."""
        return tuple(
            (len(inner.state), sum(map(len, inner.state.values())), tuple(map(len, inner.param_groups)))
            for inner in self._inner
            if inner is not None
        )

    def items(self) -> list[LiveItem]:
        """Everything but gradients."""
        self.unobserved = [
            f"optimizer {number}: a {type(link).__name__} is not known here"
            for number, (link, inner) in enumerate(zip(self.links, self._inner, strict=True))
            if inner is None and not getattr(link, "is_stub_optimizer", False)
        ]
        items: list[LiveItem] = []
        for number, (link, inner) in enumerate(zip(self.links, self._inner, strict=True)):
            items += _scaler_items(number, getattr(link, "grad_scaler", None))
            if inner is not None:
                items += self._tensor_items(number, inner)
                items += self._group_items(number, inner)
        return items

    def gradients(self) -> list[LiveItem]:
        """What the optimizers of this rank read as gradients, and no more.

        The rest of a gradient buffer belongs to other ranks: it is not reduced over all of them, and nobody reads it.
        """
        items = []
        for number, link in enumerate(self.links):
            for name, _ in self._owned(number):
                if (param := self._params.get(name)) is not None:
                    items.append(_gradient_item(name, param, _own_range(link, param)))
        return items

    def tensors(self) -> Iterator[OwnedTensor]:
        """Masters and states of the model's parameters, as far as they are tensors."""
        import torch

        for number, (link, inner) in enumerate(zip(self.links, self._inner, strict=True)):
            for name, param in self._owned(number):
                if (model := self._params.get(name)) is None:
                    continue
                owned = _own_range(link, model)
                if not self._is_model_memory(name, param):
                    yield OwnedTensor("master", model, owned, param)
                for key, value in inner.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        kind = "master" if key == _MASTER_KEY else f"optimizer {key}"
                        yield OwnedTensor(kind, model, owned, value)

    def _inner_of(self, link: Any) -> Any:
        inner = link if not hasattr(link, "optimizer") else link.optimizer
        return inner if hasattr(inner, "param_groups") and hasattr(inner, "state") else None

    def _owners_of(self, link: Any, inner: Any) -> dict[int, str]:
        """Names of the inner optimizer's parameters by ``id``."""
        if inner is None:
            return {}
        owners = dict(self._names)
        for name, param in self._params.items():
            if (main := getattr(param, "main_param", None)) is not None:
                owners[id(main)] = name
        for param, (group, order) in getattr(link, "model_param_group_index_map", {}).items():
            owners[id(inner.param_groups[group]["params"][order])] = self._names[id(param)]
        return owners

    def _owned(self, number: int) -> Iterator[tuple[str, Any]]:
        """Parameters of an inner optimizer with names; where the model has no such parameter, its place is its name."""
        for at, group in enumerate(getattr(self._inner[number], "param_groups", ())):
            for order, param in enumerate(group["params"]):
                yield self._owners[number].get(id(param), f"group {number}.{at} parameter {order}"), param

    def _tensor_items(self, number: int, inner: Any) -> list[LiveItem]:
        items: list[LiveItem] = []
        moved = getattr(inner, "param_to_inner_param", {})
        for name, param in self._owned(number):
            if not self._is_model_memory(name, param):
                items += tensor_items(f"master {name}", "master", always(param), self.unobserved)
            if (copy := moved.get(param)) is not None and copy is not param:
                items += tensor_items(f"master stepped copy {name}", "master", always(copy), self.unobserved)
            items += self._state_items(name, inner, param)
        return items

    def _state_items(self, name: str, inner: Any, param: Any) -> list[LiveItem]:
        import torch

        items: list[LiveItem] = []
        scales = getattr(inner, "_scales", {}).get(param, {})  # Transformer Engine's FusedAdam, for states below fp32
        for where, state in (("", inner.state.get(param, {})), (" scale", scales)):
            for key in state:

                def get(key: Any = key, where: str = where) -> Any:
                    return (inner._scales if where else inner.state)[param][key]

                if key == _MASTER_KEY and not where:
                    items += tensor_items(f"master {name}", "master", get, self.unobserved)
                elif isinstance(get(), torch.Tensor):
                    items += tensor_items(f"optimizer {key}{where} {name}", "optimizer", get, self.unobserved)
                else:

                    def put(value: Any, key: Any = key, where: str = where) -> None:
                        (inner._scales if where else inner.state)[param][key] = value

                    items.append(entry_item(f"optimizer {key}{where} {name}", "optimizer", get, put))
        return items

    def _is_model_memory(self, name: str, param: Any) -> bool:
        """Whether an inner parameter is the model's own or a view of it: then it is no copy."""
        model = self._params.get(name)
        if model is None or model is param:
            return True
        if not is_plain(model) or not is_plain(param):
            return False
        return bool(model.untyped_storage().data_ptr() == param.untyped_storage().data_ptr())

    def _group_items(self, number: int, inner: Any) -> list[LiveItem]:
        """Every option of every group by its position, and which parameters are in it: a swap of groups shows in both."""
        items = []
        for at, group in enumerate(inner.param_groups):
            where = f"param group {number}.{at}"
            for key in group:
                if key == "params":
                    continue

                def get(at: int = at, key: str = key) -> Any:
                    return inner.param_groups[at].get(key)

                def put(value: Any, at: int = at, key: str = key) -> None:
                    inner.param_groups[at][key] = value

                items.append(entry_item(f"{where} {key}", "param group", get, put))

            def members(at: int = at) -> list[str]:
                owners = self._owners[number]
                return [owners.get(id(param), "?") for param in inner.param_groups[at]["params"]]

            items.append(LiveItem(f"{where} params", "param group", members))
        return items


def _links(optimizer: Any) -> Iterator[Any]:
    if optimizer is None:
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    else:
        for link in chained:
            yield from _links(link)


def _scaler_items(number: int, scaler: Any) -> list[LiveItem]:
    """Grad scaler (megatron/core/optimizer/grad_scaler.py): ``scale`` of all, and what the dynamic one counts."""
    if scaler is None:
        return []
    keys = list(scaler.state_dict())
    fixed = [] if "scale" in keys else [LiveItem(f"scaler {number} scale", "scaler", lambda: plain(scaler.scale))]
    return [*fixed, *(state_dict_item(f"scaler {number} {key}", "scaler", scaler, key) for key in keys)]


def _own_range(link: Any, param: Any) -> Any:
    """The flat elements ``[start, end)`` of a parameter that a distributed optimizer updates here; None of any other."""
    return link._get_model_param_range_map(param)["param"] if hasattr(link, "model_param_gbuf_map") else None


def _gradient_item(name: str, param: Any, owned: Any) -> LiveItem:
    """A gradient, or its flat elements ``[owned.start, owned.end)``; its value is None if there is none."""

    def read() -> Any:
        gradient = getattr(param, "main_grad", None)
        gradient = param.grad if gradient is None else gradient
        if gradient is None:
            return None
        gradient = getattr(gradient, "_local_tensor", gradient).detach()
        return gradient if owned is None else gradient.view(-1)[owned.start : owned.end]

    return LiveItem(f"gradient {name}", "gradient", read, lambda value: copy_into(read(), value))
