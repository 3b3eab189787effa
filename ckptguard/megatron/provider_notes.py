"""What a Megatron-Bridge provider says that Megatron-LM's arguments cannot: told to the user, never left out in silence.

Sources: as for ``provider_args``; ``exclude`` of ``_add_network_size_args`` in megatron/training/arguments.py lists the
config fields without an argument (megatron-core 0.19.2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptguard.megatron.provider_args import Provider, activation_of, general_provider, own_modules

# Config fields that change what a model computes or how it is stored, and have no argument.
_NO_ARGUMENT = (
    "softmax_scale", "original_max_position_embeddings", "beta_fast", "beta_slow", "moe_router_topk_limited_devices",
    "heterogeneous_block_specs", "quant_recipe", "use_kitchen",
)  # fmt: skip

# Fields beside the config's: the value that Megatron-LM's own builders use.
_FIXED: dict[str, Any] = {
    "parallel_output": True, "scatter_embedding_sequence_parallel": True, "mamba_chunk_size": 128,
    "use_transformer_engine_full_layer_spec": False,
}  # fmt: skip

_LLAMA3_FACTOR = 8.0


def notes_of(provider: Provider) -> tuple[str, ...]:
    """What a model built from ``args_of`` would not have, each in a few words; empty if it is the same model."""
    fields = {f.name: getattr(provider, f.name) for f in dataclasses.fields(provider)}
    defaults = {f.name: f.default for f in dataclasses.fields(provider)}
    modules = own_modules(provider)
    said = [
        f"modules of its own, made by {modules}" if modules else "", _activation(fields), _rope(fields),
        _names(provider, fields),
    ]  # fmt: skip
    said += [
        f"{name}={fields[name]!r}: there is no argument for it"
        for name in _NO_ARGUMENT
        if name in fields and fields[name] != defaults[name]
    ]
    said += [
        f"{name}={fields[name]!r}: Megatron-LM always uses {usual!r}"
        for name, usual in _FIXED.items()
        if fields.get(name, usual) != usual
    ]
    return tuple(what for what in said if what)


def _activation(fields: dict[str, Any]) -> str:
    if activation_of(fields) is not None:
        return ""
    name = getattr(fields["activation_func"], "__name__", repr(fields["activation_func"]))
    return f"the activation {name}{' with' if fields['gated_linear_unit'] else ' without'} a gate has no argument"


def _rope(fields: dict[str, Any]) -> str:
    """``gpt_config_from_args`` of 0.19.2 and ``gpt_builder`` before it do not pass ``--rope-scaling-factor`` on."""
    factor = fields.get("rope_scaling_factor", _LLAMA3_FACTOR)
    if fields.get("rope_scaling") and factor != _LLAMA3_FACTOR:
        return f"rope_scaling_factor={factor:g}: Megatron-LM always scales by {_LLAMA3_FACTOR:g}"
    base = fields["rotary_base"]
    whole = isinstance(base, int) or (isinstance(base, float) and base.is_integer())
    return "" if whole else f"rotary_base={base!r}: the argument takes one whole number"


def _names(provider: Provider, fields: dict[str, Any]) -> str:
    """Fields and attributes of a family, beside those of the general providers."""
    base = general_provider(provider)
    general = {f.name for f in dataclasses.fields(base)} if base is not None else set()
    own = {name for name in {*fields, *vars(provider)} - general if not name.startswith("_")}
    return f"settings that only Megatron-Bridge knows: {', '.join(sorted(own))}" if own else ""
