"""Mamba without CUDA kernels, and a hybrid layer spec of Megatron Core's own local modules.

Megatron's hybrid specs name Transformer Engine's modules, and its Mamba mixer calls ``mamba_ssm``'s Triton kernels.
Here the two kernels that training needs are written out in plain torch, and :func:`hybrid_stack_spec` gives the same
layers with local modules, mapped to the names on disk that the Transformer Engine spec writes
(``mixer.in_proj.layer_norm_weight``, ...). It is for tiny models: the scan is one step after the other.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional

from ckptguard.core.after_import import after_import


class RMSNormGated(torch.nn.Module):
    """The gated norm of ``mamba_ssm``, over groups of channels."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise ``x`` of shape [..., hidden_size], gated by ``z`` of the same shape."""
        values = x.float()
        if z is not None and not self.norm_before_gate:
            values = values * functional.silu(z.float())
        groups = values.view(*values.shape[:-1], -1, self.group_size)
        normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).view_as(values)
        normed = normed * self.weight.float()
        if z is not None and self.norm_before_gate:
            normed = normed * functional.silu(z.float())
        return normed.to(x.dtype)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Mamba-2's state-space scan, with the names and the shapes of ``mamba_ssm``.

    Args:
        x: Inputs, [batch, length, heads, head_dim].
        dt: Step sizes before bias and softplus, [batch, length, heads].
        A: Decay per head, [heads].
        B: Input projections, [batch, length, groups, state].
        C: Output projections, [batch, length, groups, state].
        chunk_size: Ignored: there are no chunks.
        D: Skip connection, [heads] or [heads, head_dim].
        z: Gate, shaped as ``x``.
        dt_bias: Added to ``dt``, [heads].
        dt_softplus: Whether to put ``dt`` through softplus.

    Returns:
        [batch, length, heads, head_dim], in the dtype of ``x``.
    """
    batch, length, heads, head_dim = x.shape
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = functional.softplus(step) if dt_softplus else step
    inputs = x.float() * step[..., None]
    into, out = (p.float().repeat_interleave(heads // p.shape[2], dim=2) for p in (B, C))
    decay = torch.exp(step * A.float())
    state = x.new_zeros(batch, heads, head_dim, B.shape[-1], dtype=torch.float32)
    outputs = []
    for t in range(length):
        state = state * decay[:, t, :, None, None] + inputs[:, t, :, :, None] * into[:, t, :, None, :]
        outputs.append((state * out[:, t, :, None, :]).sum(-1))
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + x.float() * (D if D.dim() == 2 else D[:, None]).float()
    if z is not None:
        y = y * functional.silu(z.float())
    return y.to(x.dtype)


def _no_fused_path(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the fused Mamba path needs its CUDA kernel: pass --disable-mamba-mem-eff-path")


def _local_norms(module: Any) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    module.TENorm = WrappedTorchNorm  # the stack's final norm is not part of the spec


def install_kernels() -> None:
    """Serve the two kernels as ``mamba_ssm``, unless that is installed. Call it before megatron is imported."""
    if importlib.util.find_spec("mamba_ssm") is None:
        for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
            sys.modules[name] = ModuleType(name)
        norms: Any = ModuleType("mamba_ssm.ops.triton.layernorm_gated")
        norms.RMSNorm = RMSNormGated
        scans: Any = ModuleType("mamba_ssm.ops.triton.ssd_combined")
        scans.mamba_chunk_scan_combined = mamba_chunk_scan_combined
        scans.mamba_split_conv1d_scan_combined = _no_fused_path
        for module in (norms, scans):
            sys.modules[module.__name__] = module
    after_import("megatron.core.models.hybrid.hybrid_block", _local_norms)


def _mamba_layer() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    submodules = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    return ModuleSpec(module=MambaLayer, submodules=submodules)


def _transformer_layers() -> tuple[Any, Any]:
    """Return the attention layer and the MLP layer, taken from Megatron's local GPT spec."""
    from dataclasses import replace

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    both = get_gpt_layer_local_submodules(normalization="RMSNorm")
    attention = replace(both, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    mlp = replace(both, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    return ModuleSpec(module=TransformerLayer, submodules=attention), ModuleSpec(module=MLPLayer, submodules=mlp)


def hybrid_stack_spec() -> Any:
    """Return the spec of a stack of Mamba (M), attention (*) and MLP (-) layers, for ``HybridModel``."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    attention, mlp = _transformer_layers()
    submodules = HybridStackSubmodules(mamba_layer=_mamba_layer(), attention_layer=attention, mlp_layer=mlp)
    return ModuleSpec(module=HybridStack, submodules=submodules)
