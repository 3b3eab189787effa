"""``config.json`` of each small model: the fields and the values of a released model's file, with small sizes.

The fields are those of the released files (``torch_dtype``, ``rope_theta`` and ``rope_scaling`` at the top), as most
snapshots on the hub have them, not the ones that transformers 5 would write. Heads, experts and layers are few, and
odd where that makes a mistake show: vocabularies that no padding fits, layer counts that no pipeline cuts evenly.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True, "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "hidden_act": "silu",
}  # fmt: skip

LLAMA: Config = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "intermediate_size": 160,
    "vocab_size": 500, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "head_dim": 16,
}  # fmt: skip
# Megatron's rope scaling knows the three other numbers by heart (RotaryEmbedding of megatron-core 0.19.2).
LLAMA31: Config = LLAMA | {
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN2: Config = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4, "intermediate_size": 160,
    "vocab_size": 500, "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False,
    "sliding_window": 256, "max_window_layers": 4,
}  # fmt: skip
QWEN3: Config = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 5, "intermediate_size": 160,
    "vocab_size": 500, "rope_theta": 1000000, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 5, "head_dim": 32, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
QWEN3_MOE: Config = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False, "vocab_size": 512,
}  # fmt: skip
MIXTRAL: Config = _COMMON | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 4, "intermediate_size": 96,
    "vocab_size": 500, "rope_theta": 1000000.0, "tie_word_embeddings": False, "sliding_window": None,
    "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
# Experts are square, as the released ones are, so that no shape tells which way up they are.
GPT_OSS: Config = _COMMON | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 4, "intermediate_size": 64,
    "vocab_size": 512, "head_dim": 16, "attention_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2,
    "experts_per_token": 2, "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "initial_context_length": 4096, "max_position_embeddings": 131072, "output_router_logits": False,
    "router_aux_loss_coef": 0.9, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
GPT_OSS_MXFP4: Config = GPT_OSS | {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    },
}  # fmt: skip
GEMMA3: Config = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 7,
    "intermediate_size": 160, "vocab_size": 512, "head_dim": 32, "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64, "sliding_window_pattern": 6,
    "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "attention_bias": False,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid",
    "tie_word_embeddings": True,
}  # fmt: skip

_MLA: dict[str, Any] = _COMMON | {
    "num_key_value_heads": 4, "attention_bias": False, "first_k_dense_replace": 1, "intermediate_size": 160,
    "moe_intermediate_size": 48, "moe_layer_freq": 1, "ep_size": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "seq_aux": True,
    "aux_loss_alpha": 0.001, "tie_word_embeddings": False, "rope_theta": 10000, "pretraining_tp": 1,
    "vocab_size": 512,
}  # fmt: skip
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}

DEEPSEEK_V2_LITE: Config = _MLA | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 5,
    "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840, "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
DEEPSEEK_V3: Config = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 4,
    "q_lora_rank": 48, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
# Sizes beyond a quantisation block of 128 x 128, and no multiple of it.
DEEPSEEK_V3_FP8: Config = DEEPSEEK_V3 | {
    "hidden_size": 160, "intermediate_size": 288, "moe_intermediate_size": 144, "q_lora_rank": 144,
    "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    },
}  # fmt: skip
# The released file names a class of DeepSeek's and a model type of its own, with code beside it that reads it.
KIMI_K2: Config = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "vocab_size": 500, "max_position_embeddings": 131072,
    "rope_scaling": _YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
}  # fmt: skip
DEEPSEEK_V4: Config = _COMMON | {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 4,
    "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 48, "o_groups": 2,
    "o_lora_rank": 16, "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus", "num_hash_layers": 1, "num_nextn_predict_layers": 1, "swiglu_limit": 10.0,
    "compress_ratios": [0, 4, 128, 4, 0], "compress_rope_theta": 160000.0, "sliding_window": 128, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 16,
    "rope_theta": 10000.0, "vocab_size": 512, "tie_word_embeddings": False, "attention_bias": False,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn"
    },
}  # fmt: skip
GLM4_MOE: Config = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 4, "head_dim": 32,
    "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1,
    "intermediate_size": 160, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "rope_theta": 1000000, "rope_scaling": None, "vocab_size": 512,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
GLM4_MOE_AIR: Config = GLM4_MOE | {"use_qk_norm": False, "routed_scaling_factor": 1.0, "num_hidden_layers": 3}
NEMOTRON_H: Config = {name: value for name, value in _COMMON.items() if name != "rms_norm_eps"} | {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 8,
    "hybrid_override_pattern": "MEM*-EM*", "head_dim": 16, "intermediate_size": 160, "mlp_hidden_act": "relu2",
    "mlp_bias": False, "attention_bias": False, "use_bias": False, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "n_groups": 4, "conv_kernel": 4, "chunk_size": 128, "expand": 2, "use_conv_bias": True,
    "mamba_proj_bias": False, "mamba_hidden_act": "silu", "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 96, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5, "residual_in_fp32": False, "rescale_prenorm_residual": True, "vocab_size": 512,
    "tie_word_embeddings": False, "sliding_window": None, "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "num_logits_to_keep": 1,
}  # fmt: skip
