"""Facts about a Megatron run for reports: versions, sizes of the axes and this rank's place on each, arguments that matter.

Sources (megatron-core 0.19.2): megatron/core/parallel_state.py, megatron/training/arguments.py.
"""

from __future__ import annotations

import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ckptguard.megatron.live_values import plain

_AXES = {  # by the names of the functions in parallel_state
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "vp": "virtual_pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
    "edp": "expert_data_parallel",
}
_PACKAGES = ("megatron-core", "megatron-bridge", "torch", "transformer-engine", "triton", "numpy")
_ARGUMENTS = (
    "train_iters", "train_samples", "micro_batch_size", "global_batch_size", "seq_length", "seed", "optimizer",
    "load", "save", "pretrained_checkpoint", "save_interval", "exit_interval", "exit_duration_in_mins", "eval_interval",
    "eval_iters", "ckpt_format", "async_save", "ckpt_fully_parallel_save", "ckpt_assume_constant_structure",
    "dist_ckpt_optim_fully_reshardable", "finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng",
    "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler", "data_parallel_random_init",
    "params_dtype", "bf16", "fp16", "fp8", "fp8_recipe", "fp4", "num_experts", "moe_router_force_biased",
    "hidden_dropout", "attention_dropout", "transformer_impl", "attention_backend", "recompute_granularity",
    "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_megatron_fsdp",
    "use_torch_fsdp2", "overlap_grad_reduce", "overlap_param_gather", "sequence_parallel", "cuda_graph_impl",
    "optimizer_cuda_graph", "deterministic_mode", "gradient_accumulation_fusion", "cross_entropy_loss_fusion",
    "tp_comm_overlap", "te_rng_tracker", "rerun_mode", "dataloader_type", "num_workers", "lr_decay_style",
    "lr_decay_iters", "use_layer_wise_distributed_optimizer",
)  # fmt: skip


def facts_of_run(options: Any) -> dict[str, Any]:
    """JSON facts of this rank, when the process groups are there.

    Args:
        options: Megatron-LM's parsed arguments; those that a version does not have are left out.
    """
    import torch

    return {
        "framework": "Megatron-LM",
        "versions": installed_versions(),
        **parallel_facts(),
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "argv": list(sys.argv),
        "arguments": {name: plain(getattr(options, name)) for name in _ARGUMENTS if hasattr(options, name)},
    }


def installed_versions() -> dict[str, str]:
    """Versions of what decides the numbers, by package; those not installed are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def parallel_facts() -> dict[str, dict[str, int]]:
    """``sizes`` and ``ranks`` by axis; an axis that a version does not have, or that is not in use, is left out."""
    from megatron.core import parallel_state

    sizes: dict[str, int] = {}
    ranks: dict[str, int] = {}
    for axis, name in _AXES.items():
        for kind, out in (("world_size", sizes), ("rank", ranks)):
            ask = getattr(parallel_state, f"get_{name}_{kind}", None)
            value = ask() if ask is not None else None
            if value is not None:
                out[axis] = value
    return {"sizes": sizes, "ranks": ranks}
