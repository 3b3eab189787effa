"""What the small models need that no rule gives: fields of single architectures, and configs that transformers lacks."""

from __future__ import annotations

import re
from typing import Any

from ckptguard.testing.family_configs import NEMOTRON_H

Config = dict[str, Any]

FIELDS: dict[str, Config] = {
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {
            "moe_intermediate_size": [48, 48],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
        },
    },
    "Exaone4ForCausalLM": {"tie_word_embeddings": True},
    "FalconH1ForCausalLM": {"mamba_norm_before_gate": False},
    "Gemma3ForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Gemma4ForConditionalGeneration": {"vision_config": {}},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 16, "use_qk_norm": False}},
    "GlmMoeDsaForCausalLM": {"indexer_rope_interleave": True},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1},
    "Mistral3ForConditionalGeneration": {
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    },
    "NemotronForCausalLM": {"head_dim": 16, "num_key_value_heads": 2},
    "OlmoeForCausalLM": {"num_key_value_heads": 4},
    "Qwen2_5OmniForConditionalGeneration": {
        "enable_audio_output": False,
        "tie_word_embeddings": False,
        "thinker_config": {"text_config": {"tie_word_embeddings": False}},
    },
    "Qwen3OmniMoeForConditionalGeneration": {"enable_audio_output": False},
}
"""Fields of a config class's instance, by architecture: as released models have them where transformers' defaults differ."""

OTHER_NAMES = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}
"""What transformers calls an architecture that releases call otherwise."""

RENAMES: dict[str, tuple[str, str]] = {
    "Qwen2AudioForConditionalGeneration": ("language_model.model.model.", "language_model.model."),
}
"""Begins of names that transformers 5.12 saves otherwise than releases have them, by architecture: (saved, released)."""

NOTES: dict[str, str] = {
    "deepseek_v2_lite": "Megatron Core 0.19.2 has one norm more, before the query projection: it is ones, outputs differ",
    "NemotronH_Nano_Omni_Reasoning_V3": "without the part that hears",
    "OlmoeForCausalLM": "as many KV heads as heads, as released: Bridge's norm of the keys has no other size",
    "Mistral3ForConditionalGeneration": "Ministral 3 only: Bridge reads a rope field that Mistral Small does not have",
    "Exaone4ForCausalLM": "tied embeddings only: Bridge maps no output layer, which the untied releases have",
    "Qwen2_5OmniForConditionalGeneration": "without the parts that speak (talker, token2wav)",
    "Qwen3OmniMoeForConditionalGeneration": "without the parts that speak (talker, code2wav)",
}
"""What is to be known, by case: what the small model leaves out, or where Megatron's model is another one."""

CAUSES: dict[str, str] = {
    "KimiK25ForConditionalGeneration": "Bridge makes the vision tower with code out of the snapshot, which is never run",
    "Step3p7ForConditionalGeneration": "Bridge expects a gate per head that Megatron Core 0.19.2 does not have",
}
"""What is behind an error that does not say it itself."""

_COMMON: Config = {
    "torch_dtype": "bfloat16", "initializer_range": 0.02, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "attention_dropout": 0.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: Config = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
_LATENT: Config = {
    "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


def _block(groups: int, width: float) -> Config:
    """One layer of a Llama-Nemotron found by architecture search."""
    return {
        "attention": {"n_heads_in_group": 4 // groups, "no_op": False, "replace_with_linear": False},
        "ffn": {"ffn_mult": width, "no_op": False, "replace_with_linear": False},
    }


_KIMI: Config = _COMMON | _EXPERTS | _LATENT | {
    "model_type": "kimi_k2", "n_routed_experts": 4, "n_shared_experts": 1, "scoring_func": "sigmoid",
    "aux_loss_alpha": 0.001, "num_key_value_heads": 4,
}  # fmt: skip
_STEP: Config = _COMMON | {
    "model_type": "step3p5", "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 48,
    "moe_intermediate_size": 48, "moe_layers_enum": "1,2,3", "use_head_wise_attn_gate": True, "use_qk_norm": True,
    "use_moe_router_bias": True, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
    "need_fp32_gate": True, "zero_centered": True, "sliding_window": 64, "num_nextn_predict_layers": 1,
    "layer_types": ["full_attention", *["sliding_attention"] * 3], "mtp_layer_types": ["sliding_attention"],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0], "rope_theta": [50000.0, *[10000.0] * 4],
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 32,
    },
}  # fmt: skip
_OF_EXPERTS = re.compile(r"expert|moe|^n_group$|topk")
_DENSE_HYBRID: Config = {name: value for name, value in NEMOTRON_H.items() if not _OF_EXPERTS.search(name)} | {
    "hybrid_override_pattern": "M-M*-M*-",
}  # fmt: skip
# A Whisper-like encoder, and a perception encoder.
_AUDIO: Config = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 160, "d_model": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "activation_function": "gelu",
    "scale_embedding": False, "initializer_range": 0.02, "max_source_positions": 100, "n_window": 10,
    "n_window_infer": 20, "conv_chunksize": 16, "output_dim": 64, "downsample_hidden_size": 64,
}  # fmt: skip
_PERCEPTION: Config = {
    "width": 64, "layers": 2, "heads": 4, "num_channels": 3, "image_size": 56, "mlp_ratio": 2.0, "patch_size": 14,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "use_cls_token": False, "use_ln_pre": True, "use_ln_post": False,
    "use_abs_posemb": True, "use_rope2d": True, "ls_init_value": 0.1,
}  # fmt: skip


CONFIGS: dict[str, Config] = {
    "BailingMoeV2ForCausalLM": _COMMON | _EXPERTS | {"model_type": "bailing_moe_v2", "num_nextn_predict_layers": 0},
    "DeciLMForCausalLM": _COMMON | {
        "model_type": "nemotron-nas", "num_hidden_layers": 2, "num_key_value_heads": None,
        "block_configs": [_block(2, 2.5), _block(2, 1.5)],
    },
    "KimiK2ForCausalLM": _KIMI,
    "KimiK25ForConditionalGeneration": {"model_type": "kimi_k25", "text_config": _KIMI, "vision_config": {"hidden_size": 64}},
    "MiMoForCausalLM": _COMMON | {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1},
    "MiMoV2FlashForCausalLM": _COMMON | _EXPERTS | {
        "model_type": "mimo_v2_flash", "n_routed_experts": 4, "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1], "swa_rope_theta": 10000.0, "sliding_window_size": 64, "v_head_dim": 16,
        "layernorm_epsilon": 1e-5, "swa_num_key_value_heads": 4, "attention_value_scale": 0.7,
        "partial_rotary_factor": 0.5, "scoring_func": "sigmoid",
    },
    "SarvamMLAForCausalLM": _COMMON | _EXPERTS | _LATENT | {"model_type": "sarvam_mla"},
    "SarvamMoEForCausalLM": _COMMON | _EXPERTS | {"model_type": "sarvam_moe"},
    "NemotronH_Nano_Omni_Reasoning_V3": {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", "llm_config": NEMOTRON_H},
    "NemotronH_Nano_VL_V2": {"model_type": "NemotronH_Nano_VL_V2", "llm_config": _DENSE_HYBRID},
    "Qwen3ASRForConditionalGeneration": {"model_type": "qwen3_asr", "thinker_config": {
        "dtype": "bfloat16", "audio_config": _AUDIO, "text_config": _COMMON | {
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
        },
    }},
    "Step3p5ForCausalLM": _STEP,
    "Step3p7ForConditionalGeneration": {
        "model_type": "step3p7", "text_config": _STEP | {"num_nextn_predict_layers": 0}, "vision_config": _PERCEPTION,
    },
}  # fmt: skip
"""Content of config.json, for architectures that transformers 5.12 has no class of: the fields that Bridge reads."""
