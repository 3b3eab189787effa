"""The ``args`` that a checkpoint stores, as the namespace that Megatron-LM's own model provider reads.

Runs in the asking process only (``ckptguard.megatron.ask``): it imports megatron. What has no bearing on which tensors
exist is set to what needs no kernels; what has, and cannot be taken from data alone, is refused.
"""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from ckptguard.megatron.refusals import refuse

# Megatron-LM checks these against each other or against installed kernels; none adds, removes or shapes a tensor.
NEUTRAL: dict[str, Any] = {
    "no_persist_layer_norm": True, "masked_softmax_fusion": False, "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False, "cross_entropy_loss_fusion": False, "moe_permute_fusion": False,
    "moe_router_fusion": False, "fused_residual_rmsnorm": False, "memory_efficient_layer_norm": False,
    "layernorm_zero_centered_gamma": False, "use_te_activation_func": False, "use_fused_weighted_squared_relu": False,
    "sequence_parallel": False, "tp_comm_overlap": False, "overlap_p2p_comm": False, "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False, "moe_shared_expert_overlap": False, "moe_enable_deepep": False,
    "moe_token_dispatcher_type": "alltoall", "moe_router_padding_for_fp8": False,
    "moe_router_padding_for_quantization": False, "moe_pad_expert_input_to_capacity": False,
    "fp8": None, "fp4": None, "fp8_param_gather": False, "fp4_param_gather": False, "first_last_layers_bf16": False,
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "recompute_modules": None,
    "cuda_graph_impl": "none", "cuda_graph_modules": [], "cpu_offloading_num_layers": 0,
    "fine_grained_activation_offloading": False, "offload_modules": [], "defer_embedding_wgrad_compute": False,
    "context_parallel_size": 1, "cp_comm_type": ["p2p"], "hierarchical_context_parallel_sizes": None,
    "hybrid_context_parallel": False, "config_logger_dir": "", "symmetric_ar_type": None, "batch_invariant_mode": False,
    "tensor_parallel_num_weight_shards": None, "expert_tensor_parallel_num_weight_shards": None,
    "use_cpu_initialization": True, "perform_initialization": False, "init_model_with_meta_device": False,
}  # fmt: skip

# Classes of the values that stand as "Name(number)" among plain args, by where Megatron keeps them.
_ENUM = re.compile(r"(\w+)\((\d+)\)")


# Flags that ``validate_args`` turns from these words into dtypes (megatron/training/arguments.py, 0.19.2).
_DTYPE_FLAGS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FLAG_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def to_namespace(args: Mapping[str, Any], transformer_impl: str | None = None) -> Namespace:
    """Training arguments for Megatron's config builders.

    Arguments that the checkpoint's Megatron did not have yet get the default of the installed one, as
    ``load_args_from_checkpoint`` (megatron/training/checkpointing.py, 0.19.2) leaves them.

    Args:
        args: ``Facts.args``: plain values, with dtypes by name and enums as ``AttnBackend(3)``.
        transformer_impl: Takes the place of the stored one, for a checkpoint whose names say otherwise.

    Raises:
        UnsupportedError: Arguments are missing, or ask for what cannot be built from them; names each.
    """
    from megatron.training.arguments import add_megatron_arguments

    given = {name: _typed(name, value) for name, value in args.items()}
    if transformer_impl is not None:
        given["transformer_impl"] = transformer_impl
    refuse(given)
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    out: dict[str, Any] = vars(parser.parse_args([])) | given
    out |= NEUTRAL
    out.setdefault("virtual_pipeline_model_parallel_size", None)  # no flag has this name: it is computed from others
    out |= {name: _FLAG_DTYPES[out[name]] for name in _DTYPE_FLAGS if isinstance(out.get(name), str)}
    out["attention_backend"] = _no_kernels(out)
    out["mamba_training_ssm_states_dtype"] = None
    out["expert_tensor_parallel_size"] = out.get("expert_tensor_parallel_size") or out["tensor_model_parallel_size"]
    if out["cp_comm_type"] is None:
        out["cp_comm_type"] = ["p2p"]
    return Namespace(**out)


def _typed(name: str, value: Any) -> Any:
    """Dtypes and enums from their names; everything else stays."""
    if name.endswith("_dtype") and isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    if isinstance(value, str) and (match := _ENUM.fullmatch(value)):
        return _enum(match[1], int(match[2]), value)
    return value


def _enum(kind: str, number: int, value: str) -> Any:
    from megatron.core.transformer import enums

    return getattr(enums, kind)(number) if hasattr(enums, kind) else value


def _no_kernels(out: Mapping[str, Any]) -> Any:
    """The attention backend: Megatron's own, which has no parameters, unless the sinks of TE's must be counted."""
    from megatron.core.transformer.enums import AttnBackend

    te = out.get("transformer_impl") == "transformer_engine"
    return AttnBackend.auto if te else AttnBackend.unfused
