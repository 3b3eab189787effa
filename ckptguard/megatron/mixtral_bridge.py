"""Mixtral, which Megatron-Bridge 0.6.2 does not register. Runs in the asking process only.

Names are those of transformers' MixtralForCausalLM snapshots (``block_sparse_moe.experts.N.w1`` is the gate, ``w3`` up, ``w2``
down), the model is Megatron Core's own MoE GPT: softmax over the chosen experts only, no shared expert.
"""

from __future__ import annotations

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider

_HF = "model.layers.*."
_MEGATRON = "decoder.layers.*."
_SAME = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    _MEGATRON + "self_attention.linear_qkv.layer_norm_weight": _HF + "input_layernorm.weight",
    _MEGATRON + "self_attention.linear_proj.weight": _HF + "self_attn.o_proj.weight",
    _MEGATRON + "pre_mlp_layernorm.weight": _HF + "post_attention_layernorm.weight",
    _MEGATRON + "mlp.router.weight": _HF + "block_sparse_moe.gate.weight",
    _MEGATRON + "mlp.experts.linear_fc2.weight*": _HF + "block_sparse_moe.experts.*.w2.weight",
}


class MixtralBridge(MegatronModelBridge):  # type: ignore[misc]
    """In the form of Bridge's own."""

    def provider_bridge(self, hf_pretrained: object) -> GPTModelProvider:
        """The model that a Mixtral configuration describes."""
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config  # type: ignore[attr-defined]
        provider.normalization, provider.gated_linear_unit = "RMSNorm", True
        provider.add_bias_linear, provider.hidden_dropout = False, 0.0
        provider.num_moe_experts = config.num_local_experts
        provider.moe_ffn_hidden_size = config.intermediate_size
        provider.moe_router_topk = config.num_experts_per_tok
        provider.moe_router_pre_softmax, provider.moe_router_load_balancing_type = False, "aux_loss"
        provider.moe_aux_loss_coeff = config.router_aux_loss_coef
        provider.moe_grouped_gemm, provider.moe_token_dispatcher_type = True, "alltoall"
        provider.autocast_dtype = torch.bfloat16
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Names and transforms."""
        attention, experts = _HF + "self_attn.", _HF + "block_sparse_moe.experts.*."
        return MegatronMappingRegistry(
            *(AutoMapping(megatron_param=megatron, hf_param=hf) for megatron, hf in _SAME.items()),
            QKVMapping(
                megatron_param=_MEGATRON + "self_attention.linear_qkv.weight",
                q=attention + "q_proj.weight", k=attention + "k_proj.weight", v=attention + "v_proj.weight",
            ),
            GatedMLPMapping(
                megatron_param=_MEGATRON + "mlp.experts.linear_fc1.weight*",
                gate=experts + "w1.weight", up=experts + "w3.weight",
            ),
        )  # fmt: skip


BRIDGE = MixtralBridge
