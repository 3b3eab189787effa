"""A hybrid layer spec that trains on a CPU and has its parameters where Transformer Engine's modules have them.

Megatron has no other hybrid spec than that with Transformer Engine's modules, whose column-parallel linears hold the norm
before them: ``layer_norm_weight`` and then ``weight``, in one module. ``hybrid_cpu`` has norms that stand alone, so it has the
names on disk but not the order, and the order of a model's parameters is that of optimizer state in a bucket, and of tensors
in a file. Layers: Mamba (M), attention (*) and MLP (-), with RMSNorm and without biases.
"""

from __future__ import annotations

from typing import Any

import torch


def _linear() -> Any:
    """Return the class of a column-parallel linear with the RMSNorm before it."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, **kwargs)
            linear = dict(self._parameters)
            self._parameters.clear()  # the norm comes first
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
            self._parameters.update(linear)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            normed = torch.nn.functional.rms_norm(
                x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon
            )
            return super().forward(normed, *args, **kwargs)

    return NormColumnParallelLinear


class _Norm(torch.nn.RMSNorm):
    """The stack's final norm; Transformer Engine's has extra state."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)

    def get_extra_state(self) -> None:
        """Nothing, as of any module without fp8."""

    def set_extra_state(self, state: Any) -> None:
        """There is none."""


def final_norm(module: Any) -> None:
    """A patch of ``megatron.core.models.hybrid.hybrid_block``: the stack's final norm is not part of the spec."""
    module.TENorm = _Norm


def hybrid_stack_spec() -> Any:
    """Return the spec of a stack for ``HybridModel``; see megatron/core/models/hybrid/hybrid_layer_specs.py (0.19.2)."""
    from functools import partial

    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    column, add = _linear(), get_bias_dropout_add
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=RowParallelLinear))
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=RowParallelLinear))
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add)),
        attention_layer=ModuleSpec(
            module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=add)
        ),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=add)),
    )
    return ModuleSpec(module=HybridStack, submodules=layers)
