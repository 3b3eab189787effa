"""All that a rank of a Megatron run holds between two steps, as items that can be read and, mostly, written.

Sources (megatron-core 0.19.2): megatron/training/checkpointing.py says what is saved; what is not saved and still decides what
is computed next is listed beside it here: buffers with ``persistent=False``, ``RandomSTEShared._cache`` of
megatron/core/transformer/moe/moe_utils.py, fields of megatron/core/rerun_state_machine.py, whether the forward pre-hooks of
megatron/core/distributed/distributed_data_parallel.py are on. torch's ``Module._non_persistent_buffers_set`` tells the buffers
apart, as it does for torch's own ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ckptguard.core.watching import GROUPS, LiveItem
from ckptguard.megatron.live_generators import generator_items, tracker_names
from ckptguard.megatron.live_optimizer import LiveOptimizer
from ckptguard.megatron.live_values import always, attribute_item, plain, tensor_items

_RERUN_FIELDS = (  # of ``RerunStateMachine.state_dict``, and whether results are looked at yet
    "mode", "state", "current_iteration", "first_iteration_complete", "rerun_requested", "checkpoint_requested",
    "restart_again_requested", "continue_requested", "failed_validation_call", "initial_result", "suspicious_node",
    "suspicious_device", "large_value_counts", "max_values",
)  # fmt: skip
_FP8_META = ("scaling_fwd", "scaling_bwd")  # Transformer Engine 1.x and 2.x: module.fp8_meta, delayed scaling
_FP8_TENSORS = ("scale", "scale_inv", "amax_history")


def live_state(
    model_chunks: Sequence[Any], optimizer: Any, scheduler: Any, counters: Sequence[LiveItem] = ()
) -> tuple[tuple[LiveItem, ...], tuple[str, ...]]:
    """Items of the current state, in the order of ``GROUPS``, and what could not be observed, in words.

    For more than one look make a ``LiveState`` and keep it.

    Args:
        model_chunks: As ``setup_model_and_optimizer`` returns them, wrapped or not.
        optimizer: Megatron's, torch's, or None.
        scheduler: ``OptimizerParamScheduler`` or None.
        counters: Items of the framework's own, which stand elsewhere in each.
    """
    state = LiveState(model_chunks, optimizer, scheduler, counters)
    return state.items(), state.unobserved


class LiveState:
    """Items of one model, made once and again only when state has appeared or gone.

    Attributes:
        chunks: The model's chunks, as given.
        optimizer: As given.
    """

    def __init__(
        self, model_chunks: Sequence[Any], optimizer: Any, scheduler: Any, counters: Sequence[LiveItem] = ()
    ) -> None:
        """Takes what ``live_state`` takes."""
        self.chunks, self.optimizer = list(model_chunks), optimizer
        self._scheduler, self._counters = scheduler, tuple(counters)
        self._params = named_parameters(self.chunks)
        self._optimizer = LiveOptimizer(optimizer, {id(p): name for name, p in self._params.items()}, self._params)
        self._modules = [
            (f"chunk {number} {plain_name(name)}".rstrip(), module)
            for number, chunk in enumerate(self.chunks)
            for name, module in chunk.named_modules()
            if module._buffers or hasattr(module, "fp8_meta") or _has_extra_state(module)
        ]
        self._biased_layers = sorted({layer for chunk in self.chunks for layer in _biased_layers(chunk)})
        self._form: object = None
        self._items: tuple[LiveItem, ...] = ()
        self._gradients: tuple[LiveItem, ...] | None = None
        self._unobserved: list[str] = []

    @property
    def unobserved(self) -> tuple[str, ...]:
        """What could not be observed when ``items`` was last called."""
        return tuple(self._unobserved)

    def items(self) -> tuple[LiveItem, ...]:
        """Everything but gradients, in the order of ``GROUPS``."""
        form = self._current_form()
        if form != self._form:
            self._form, self._unobserved = form, []
            found = [*self._counters, *self._optimizer.items(), *self._model_items(), *self._other_items()]
            self._unobserved += self._optimizer.unobserved
            self._items = tuple(sorted(found, key=lambda item: GROUPS.index(item.group)))
        return self._items

    def gradients(self) -> tuple[LiveItem, ...]:
        """Gradients as the optimizer is about to read them."""
        if self._gradients is None:
            self._gradients = tuple(self._optimizer.gradients())
        return self._gradients

    def _current_form(self) -> object:
        """What decides which items there are, cheap enough for every step."""
        buffers = sum(buffer is not None for _, module in self._modules for buffer in module._buffers.values())
        fp8 = sum(1 for _, module in self._modules for _ in _fp8_tensors(module))
        return self._optimizer.form(), buffers, fp8, tracker_names()

    def _model_items(self) -> Iterator[LiveItem]:
        for name, param in self._params.items():
            yield from tensor_items(f"parameter {name}", "parameter", always(param), self._unobserved)
        for name, module in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                kept = key not in module._non_persistent_buffers_set
                yield from tensor_items(
                    f"{'buffer' if kept else 'unsaved buffer'} {name}.{key}",
                    "buffer" if kept else "unsaved buffer",
                    partial(_buffer, module, key),
                    self._unobserved,
                )
            yield from self._extra_items(name, module)

    def _extra_items(self, name: str, module: Any) -> Iterator[LiveItem]:
        """What a module stores as ``_extra_state``: of Transformer Engine the tensors, not their pickle."""
        for where, key in _fp8_tensors(module):
            yield from tensor_items(
                f"extra state {name} {where} {key}",
                "extra state",
                partial(_fp8_tensor, module, where, key),
                self._unobserved,
            )
        if hasattr(module, "fp8_meta") or not _has_extra_state(module):
            return
        value = _extra_state(module)
        if value is not None and not (hasattr(value, "__len__") and not len(value)):
            yield LiveItem(
                f"extra state {name}",
                "extra state",
                partial(_extra_state, module),
                module.set_extra_state,
            )

    def _other_items(self) -> Iterator[LiveItem]:
        if self._scheduler is not None:
            for key in self._scheduler.state_dict():
                yield attribute_item(f"scheduler {key}", "scheduler", self._scheduler, key)
        yield from generator_items()
        yield from _rerun_items()
        yield from map(_router_bias_item, self._biased_layers)
        for number, chunk in enumerate(self.chunks):
            if (handles := getattr(chunk, "remove_forward_pre_hook_handles", None)) is not None:
                yield LiveItem(f"other forward pre-hooks chunk {number}", "other", partial(bool, handles))


def plain_name(name: str) -> str:
    """A name of a parameter or module without the ``module`` of the wrappers around it."""
    return ".".join(part for part in name.split(".") if part != "module")


def named_parameters(chunks: Sequence[Any]) -> dict[str, Any]:
    """Parameters of all chunks, such as ``chunk 0 decoder.final_layernorm.weight``."""
    return {
        f"chunk {number} {plain_name(name)}": param
        for number, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


def _has_extra_state(module: Any) -> bool:
    import torch

    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _extra_state(module: Any) -> Any:
    return plain(module.get_extra_state())


def _buffer(module: Any, key: str) -> Any:
    return module._buffers[key]


def _fp8_tensor(module: Any, where: str, key: str) -> Any:
    return getattr(module.fp8_meta[where], key)


def _fp8_tensors(module: Any) -> Iterator[tuple[str, str]]:
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return
    for where in _FP8_META:
        for key in _FP8_TENSORS:
            if getattr(meta.get(where), key, None) is not None:
                yield where, key


def _biased_layers(chunk: Any) -> Iterator[int]:
    """Layers whose router draws a bias once per process and keeps it (``--moe-router-force-biased`` below zero)."""
    for module in chunk.modules():
        std = getattr(getattr(module, "config", None), "moe_router_force_biased", None)
        if std is not None and std < 0 and hasattr(module, "routing") and module.layer_number is not None:
            yield module.layer_number


def _router_bias_item(layer: int) -> LiveItem:
    """The bias, None before it is drawn."""
    from megatron.core.transformer.moe.moe_utils import RandomSTEShared

    kept = RandomSTEShared._cache
    return LiveItem(
        f"other router bias of layer {layer}",
        "other",
        lambda: kept.get(layer),
        lambda value: kept.update({layer: value.clone()}) if value is not None else kept.pop(layer, None),
    )


def _rerun_items() -> Iterator[LiveItem]:
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        return
    for field in _RERUN_FIELDS:
        yield attribute_item(f"other rerun {field}", "other", machine, field)
