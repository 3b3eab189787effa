"""Configs of transformers' classes, made small: every field that is a size gets a small value, nested configs too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

_LAYERS = 4
# Small sizes by the name of the field; they divide by two ranks, and neighbours differ so that a swapped dim shows.
_SIZES: Config = {
    "hidden_size": 64, "d_model": 64, "intermediate_size": 160, "vocab_size": 512, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "kv_lora_rank": 40, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "qk_head_dim": 48, "first_k_dense_replace": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_d_ssm": 128, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "index_n_heads": 4, "index_head_dim": 32,
    "index_topk": 16, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512, "global_head_dim": 32,
    "num_global_key_value_heads": 2, "expert_intermediate_size": 48, "top_k_experts": 2, "moe_layer_start_index": 1,
}  # fmt: skip
# The same for a vision or audio tower, whose fields have names of their own.
_TOWER: Config = _SIZES | {
    "num_hidden_layers": 2, "depth": 2, "num_heads": 4, "embed_dim": 64, "out_hidden_size": 64, "image_size": 56,
    "num_position_embeddings": 64, "num_key_value_heads": 4, "head_dim": 16, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 160, "output_dim": 64, "downsample_hidden_size": 64, "projector_hidden_size": 64,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "conv_chunksize": 16, "n_window": 10,
    "n_window_infer": 20, "num_mel_bins": 16, "text_hidden_size": 64, "position_embedding_size": 64,
}  # fmt: skip
_TEXTS = ("text_config", "thinker_config", "llm_config", "language_config")


def small(cls: type, own: Mapping[str, Any] | None = None, *, tower: bool = False) -> Any:
    """An instance of a config class with small sizes.

    Args:
        cls: A class of transformers' configs.
        own: Fields that this model needs otherwise; those of a nested config are a mapping under its name.
        tower: Whether it describes a vision or audio tower.
    """
    own = dict(own or {})
    default = cls().to_dict()
    nested = {
        name: sub for name, sub in getattr(cls, "sub_configs", {}).items()
        if isinstance(default.get(name), dict) or isinstance(own.get(name), dict)
    }  # fmt: skip
    sizes = _TOWER if tower else _SIZES
    given = {name: value for name, value in sizes.items() if default.get(name) is not None and name not in nested}
    for name, sub in nested.items():
        inner = dict(own.pop(name, {}))
        model_type = inner.pop("model_type", None) or (default.get(name) or {}).get("model_type")
        given[name] = small(_class_of(sub, model_type), inner, tower=name not in _TEXTS).to_dict()
    return cls(**(given | own))


def _class_of(sub: type, model_type: str | None) -> type:
    """The class of a nested config, which is AutoConfig where more than one will do."""
    from transformers import AutoConfig

    if sub is not AutoConfig:
        return sub
    found: type = type(AutoConfig.for_model(model_type))
    return found
