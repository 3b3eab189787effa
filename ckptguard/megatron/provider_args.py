"""Megatron-LM's training arguments for the model that a Megatron-Bridge provider describes.

A provider is a ``TransformerConfig`` with a model's own fields beside it; Megatron-LM stores the namespace of its command
line and builds the config from that again. Most names are the same and are copied; the others are translated here.

Sources: megatron/training/argument_utils.py ``core_transformer_config_from_args``, ``gpt_config_from_args`` and
``hybrid_config_from_args``, megatron/training/checkpointing.py ``load_args_from_checkpoint`` and ``check_checkpoint_args``,
megatron/core/safe_globals.py (megatron-core 0.19.2, older names from its tags 0.15 to 0.18); megatron/bridge/models/
gpt_provider.py and hybrid/hybrid_provider.py (megatron-bridge 0.6.2).

Runs where a provider is, in a process that has imported Megatron already; imports nothing of it itself.
"""

from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from functools import partial
from typing import Any

import torch

Provider = Any
"""GPTModelProvider, MLAModelProvider or HybridModelProvider, finalized."""

# Needed until 0.18. The path of 0.15 to 0.17, which 0.18 and 0.19 keep as another name of models/hybrid/hybrid_layer_specs.py.
_HYBRID_SPEC = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]

# Functions that give the layers which megatron/training/models/gpt.py ``default_layer_spec`` chooses by itself.
_USUAL_LAYERS = frozenset(
    {
        "default_layer_spec",
        "get_gpt_decoder_block_spec",
        "get_transformer_block_with_experimental_attention_variant_spec",
    }
)

# Enums that Megatron's weights-only loading knows (SAFE_GLOBALS).
_SAFE_ENUMS = frozenset({"AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope"})

# Argument of Megatron-LM <- field of the provider, where only the name differs.
_RENAMED = {
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "max_position_embeddings": "seq_length",
    "te_rng_tracker": "use_te_rng_tracker",
    "fp8_param_gather": "fp8_param",
    "fp4_param_gather": "fp4_param",
    "transformer_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "norm_epsilon": "layernorm_epsilon",  # until 0.15
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",  # until 0.15
}

# Attention with YaRN outside MLA: argument <- the provider's field (``_apply_yarn_config_from_args``).
_YARN = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}

# What the importing host needed, and no training run is to take over.
NOT_OF_THE_HOST: dict[str, Any] = {
    "use_cpu_initialization": False, "perform_initialization": True, "init_model_with_meta_device": False,
}  # fmt: skip

_GENERAL = ("GPTModelProvider", "MLAModelProvider", "HybridModelProvider")
_LAYER_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def args_of(provider: Provider, *, dtype: torch.dtype, hf_model_id: str) -> Namespace:
    """The namespace that a Megatron-LM run of this model, with this layout, would have stored.

    It holds what is known of the model and its layout, nothing of a training run. Every value loads with
    ``weights_only=True``. What it cannot say is listed by ``provider_notes.notes_of``.

    Args:
        provider: Finalized, with its parallel sizes set.
        dtype: Of the stored weights.
        hf_model_id: Names the tokenizer, as the user gave it.
    """
    fields = {f.name: getattr(provider, f.name) for f in dataclasses.fields(provider) if not f.name.startswith("_")}
    values = {name: _inert(value) for name, value in fields.items() if _is_safe(value)}
    values |= {argument: fields[name] for argument, name in _RENAMED.items() if name in fields}
    values |= NOT_OF_THE_HOST | _dtypes(dtype) | _activation(fields) | _attention(fields) | _vocabulary(fields)
    values |= _pipeline(fields) | _hybrid(fields) | _state(hf_model_id)
    values["spec"] = _spec(provider, fields)
    values["no_persist_layer_norm"] = not fields["persist_layer_norm"]
    values["mtp_num_layers"] = fields["mtp_num_layers"] or None
    return Namespace(**values)


def activation_of(fields: dict[str, Any]) -> str | None:
    """Name of the argument that asks for the activation, "" for the default GELU, None where there is no argument."""
    function, gated = fields["activation_func"], fields["gated_linear_unit"]
    name = getattr(function, "__name__", "")
    if function is torch.nn.functional.gelu and not gated:
        return ""
    if function is torch.nn.functional.silu and gated:
        return "swiglu"
    return {("squared_relu", False): "squared_relu", ("quick_gelu", True): "quick_geglu"}.get((name, gated))


def own_modules(provider: Provider) -> str | None:
    """Path of what makes modules that Megatron-LM does not choose by itself: a function of layers, or the provider."""
    spec = getattr(provider, "transformer_layer_spec", None) or getattr(provider, "hybrid_stack_spec", None)
    function = spec.func if isinstance(spec, partial) else spec
    if function is not None and getattr(function, "__name__", "") not in _USUAL_LAYERS:
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    base = general_provider(provider)
    if base is not None and type(provider).provide is base.provide:  # type: ignore[attr-defined]
        return None
    return f"{type(provider).__module__}.{type(provider).__qualname__}"


def general_provider(provider: Provider) -> type | None:
    """The general provider class that this one is or extends, the most specific one."""
    return next((cls for cls in type(provider).__mro__ if cls.__name__ in _GENERAL), None)


def _spec(provider: Provider, fields: dict[str, Any]) -> list[str] | None:
    """Module and name. Where Megatron-LM would build other modules, its own word for that, so that it does not."""
    own = own_modules(provider)
    if own is not None:
        return own.rsplit(".", 1)
    return list(_HYBRID_SPEC) if fields.get("hybrid_layer_pattern") else None


def _is_safe(value: Any) -> bool:
    """Whether Megatron's weights-only loading gives the value back."""
    if isinstance(value, enum.Enum):
        return type(value).__name__ in _SAFE_ENUMS
    if isinstance(value, list | tuple | set):
        return all(_is_safe(item) for item in value)
    if isinstance(value, dict):
        return all(_is_safe(item) for pair in value.items() for item in pair)
    return isinstance(value, bool | int | float | str | torch.dtype | None)


def _inert(value: Any) -> Any:
    """A copy that shares nothing mutable with the provider."""
    return type(value)(value) if isinstance(value, list | set | dict) else value


def _dtypes(dtype: torch.dtype) -> dict[str, Any]:
    return {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}


def _activation(fields: dict[str, Any]) -> dict[str, Any]:
    asked = activation_of(fields)
    swiglu = asked == "swiglu"
    return {
        "swiglu": swiglu,
        "squared_relu": asked == "squared_relu",
        "quick_geglu": asked == "quick_geglu",
        "bias_swiglu_fusion": bool(fields["bias_activation_fusion"] and swiglu),
        "bias_gelu_fusion": bool(fields["bias_activation_fusion"] and not swiglu),
    }


def _attention(fields: dict[str, Any]) -> dict[str, Any]:
    groups, base = fields["num_query_groups"], fields["rotary_base"]
    out = {
        "group_query_attention": groups is not None and groups != fields["num_attention_heads"],
        "rotary_base": int(base) if isinstance(base, float) and base.is_integer() else base,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,  # position_embedding_type says it
    }
    if fields["position_embedding_type"] == "yarn" and not fields["multi_latent_attention"]:
        out |= {argument: fields[name] for argument, name in _YARN.items()}
    elif "rope_type" not in fields:
        out["rotary_scaling_factor"] = 1.0  # the argument of MLA, whose default it is
    return out


def _vocabulary(fields: dict[str, Any]) -> dict[str, Any]:
    padded = fields["vocab_size"]
    if fields["should_pad_vocab"]:
        multiple = fields["make_vocab_size_divisible_by"] * fields["tensor_model_parallel_size"]
        padded = -(-padded // multiple) * multiple
    return {
        "padded_vocab_size": padded,
        "untie_embeddings_and_output_weights": not fields["share_embeddings_and_output_weights"],
    }


def _pipeline(fields: dict[str, Any]) -> dict[str, Any]:
    """The stages; ``num_layers_per_virtual_pipeline_stage`` is what ``validate_args`` makes the virtual size from."""
    layout, virtual = fields["pipeline_model_parallel_layout"], fields["virtual_pipeline_model_parallel_size"]
    layout = getattr(layout, "input_data", layout)
    uneven = (
        fields["num_layers_in_first_pipeline_stage"] or fields["num_layers_in_last_pipeline_stage"]
        or fields["account_for_embedding_in_pipeline_split"] or fields["account_for_loss_in_pipeline_split"]
    )  # fmt: skip
    stages = fields["pipeline_model_parallel_size"] * (virtual or 1)
    even = virtual is not None and layout is None and not uneven
    return {
        "pipeline_model_parallel_layout": _layout_text(layout) if isinstance(layout, list) else layout,
        "virtual_pipeline_model_parallel_size": virtual if virtual != 1 else None,
        "num_layers_per_virtual_pipeline_stage": fields["num_layers"] // stages if even else None,
    }


def _layout_text(layout: list[list[Any]]) -> str:
    """As ``--pipeline-model-parallel-layout`` takes it: ``Ett|ttL``."""
    names = [[getattr(layer, "name", layer) for layer in stage] for stage in layout]
    return "|".join("".join(_LAYER_LETTERS[name.strip().lower()] for name in stage) for stage in names)


def _hybrid(fields: dict[str, Any]) -> dict[str, Any]:
    """``hybrid_override_pattern`` is the pattern's name until 0.16."""
    pattern = fields.get("hybrid_layer_pattern")
    if pattern is None:
        return {"hybrid_layer_pattern": None, "is_hybrid_model": False}
    return {
        "hybrid_layer_pattern": pattern,
        "hybrid_override_pattern": None if set(pattern) & set("/|") else pattern,
        "mtp_hybrid_override_pattern": None,  # finalize has put it into the pattern
        "is_hybrid_model": True,
    }


def _state(hf_model_id: str) -> dict[str, Any]:
    """How the checkpoint is stored, and that there is no training state in it."""
    return {
        "transformer_impl": "transformer_engine", "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": hf_model_id, "hf_model_id": hf_model_id, "ckpt_format": "torch_dist", "use_dist_ckpt": True,
        "no_save_optim": True, "no_save_rng": True, "ckpt_fully_parallel_save": False, "iteration": 0,
        "consumed_train_samples": 0, "skipped_train_samples": 0, "consumed_valid_samples": 0,
    }  # fmt: skip
