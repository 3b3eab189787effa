"""The tensors that Bridge would export of a model: names and shapes, found by running its way back on the meta device.

Asking process only. Source: megatron/bridge/models/conversion/model_bridge.py ``stream_weights_megatron_to_hf`` and
``_accumulate_grouped_export`` (megatron-bridge 0.6.2).
"""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import chain
from typing import Any

import torch

Exported = dict[str, tuple[str, list[int]]]
_NUMBER = re.compile(r"\d+")


def exported(bridge: Any, model: Any, vocabulary: int) -> Exported:
    """Dtype and shape by name, in the order in which Bridge exports them.

    Args:
        bridge: Bridge's class for the family.
        model: The unsplit model, on the meta device.
        vocabulary: Rows of the embedding without padding.
    """
    from megatron.bridge.models.conversion.utils import persistent_buffers

    out: Exported = {}
    registry, modules = bridge.mapping_registry(), dict(model.named_modules())
    groups: dict[str, dict[int, torch.Tensor]] = {}
    known: dict[Any, dict[str, Any]] = {}  # layers and experts of one kind give the same shapes
    for name, tensor in chain(model.named_parameters(), persistent_buffers(model)):
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            continue
        roles = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        grouped = bool(getattr(mapping, "is_grouped_export", False))
        kind = (_NUMBER.sub("*", name), type(mapping), tuple(tensor.shape))
        if kind in known and not grouped:
            out |= {str(roles[role]): found for role, found in known[kind].items()}
            continue
        back = _back(bridge, mapping, model, modules[name.rpartition(".")[0]], name, tensor)
        if grouped:
            task = Namespace(param_name=name, mapping=mapping)
            back = bridge._accumulate_grouped_export(task, back, model.config, groups, {}) or {}
        found = {
            hf: (str(part.dtype).removeprefix("torch."), _shape(part, name, vocabulary)) for hf, part in back.items()
        }
        out |= found
        role_of = {str(hf): role for role, hf in roles.items()}
        if found.keys() <= role_of.keys():
            known[kind] = {role_of[hf]: item for hf, item in found.items()}
    return out


def _back(bridge: Any, mapping: Any, model: Any, module: Any, name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Bridge's way back for one parameter."""
    if not hasattr(module, "config"):
        module.config = model.config
    with torch.no_grad():
        back: dict[str, Any] = mapping.megatron_to_hf(tensor.detach(), module)
        task = Namespace(param_name=name, global_param_name=name, mapping=mapping, vp_stage=None)
        if getattr(mapping, "is_grouped_export", False):
            return back
        out: dict[str, Any] = bridge.maybe_modify_converted_hf_weight(task, back, {})
        return out


def _shape(part: torch.Tensor, name: str, vocabulary: int) -> list[int]:
    """Bridge exports padding rows too; a snapshot has none."""
    shape = list(part.shape)
    if name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")):
        shape[0] = min(shape[0], vocabulary)
    return shape
