"""Optimizer buckets of the current rank: which parameter stands where. Part of the asking process.

Sources (megatron-core 0.19.2): megatron/training/models/dist_utils.py ``_ddp_wrap`` decides bucket sizes,
megatron/core/optimizer/distrib_optimizer.py ``compute_full_param_layout`` places the parameters,
megatron/core/optimizer/__init__.py ``get_megatron_optimizer`` makes one optimizer for dense and one for expert
parameters, megatron/core/distributed/distributed_data_parallel.py orders the buffers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_REFUSED = {
    "overlap_param_gather_with_optimizer_step": "the first model chunk then has an optimizer of its own",
    "use_layer_wise_distributed_optimizer": "the layer-wise optimizer places whole parameters on ranks",
    "fp8_param_gather": "parameters stored in fp8 have buffers of their own",
    "fp4_param_gather": "parameters stored in fp4 have buffers of their own",
    "optimizer_cpu_offload": "offloaded parameters have optimizers of their own",
    "nccl_ub": "buffers are padded for user buffer registration",
}


def refusal(args: Namespace, stored: Mapping[str, Any]) -> str | None:
    """Why the bucket layout cannot be derived, or None. ``stored`` are the args before anything was neutralised."""
    if not stored.get("use_distributed_optimizer"):
        return "the run did not use the distributed optimizer"
    if args.optimizer not in ("adam", "sgd"):
        return f"optimizer {args.optimizer!r} is not adam or sgd"
    for name, reason in _REFUSED.items():
        if stored.get(name):
            return f"the stored args have {name}: {reason}"
    if args.overlap_grad_reduce and not stored.get("world_size") and not args.ddp_bucket_size:
        return (
            "gradient reduction was overlapped, and bucket sizes then depend on world_size, which the args do not say"
        )
    return None


def describe(args: Namespace, chunks: list[Any]) -> list[list[dict[str, Any]]]:
    """Buffers of the dense and of the expert parameters of the current rank, each in the order of their ``gbuf_idx``."""
    dense: list[dict[str, Any]] = []
    expert: list[dict[str, Any]] = []
    sizes = _sizes(args)
    for number, chunk in enumerate(chunks):
        for key, buffer in _layouts(args, chunk, _bucket_size(args, chunks, number, sizes[0]), sizes).items():
            (expert if key.is_expert_parallel else dense).append(_buffer(number, chunk, key, buffer))
    return [dense, expert]


def _sizes(args: Namespace) -> tuple[int, int]:
    """Ranks over which dense and expert optimizer state is sharded; they pad the ends of buckets."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    expert = args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    world = args.world_size or model
    instances = args.num_distributed_optimizer_instances or 1
    return max(1, world // model // instances), max(1, world // expert // instances)


def _bucket_size(args: Namespace, chunks: list[Any], number: int, dp_size: int) -> int | None:
    """As ``_ddp_wrap``: one bucket, unless reduction is overlapped, and then only for the first stage's first chunk."""
    from megatron.core import parallel_state

    if not args.overlap_grad_reduce or number > 0 or parallel_state.get_pipeline_model_parallel_rank() > 0:
        return None
    if args.ddp_num_buckets is not None:
        return int(sum(p.nelement() for chunk in chunks for p in chunk.parameters()) // args.ddp_num_buckets)
    size = args.ddp_bucket_size
    return int(size) if size is not None else max(40_000_000, 1_000_000 * dp_size)


def _layouts(args: Namespace, chunk: Any, bucket_size: int | None, sizes: tuple[int, int]) -> dict[Any, Any]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # The two settings that placing reads from DistributedDataParallelConfig; names differ among the arguments.
    ddp = SimpleNamespace(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    layout = DistributedOptimizer.compute_full_param_layout(
        parameters, bucket_size, sizes[0], ddp, expert_data_parallel_world_size=sizes[1]
    )
    return dict(layout.layouts)


def _buffer(number: int, chunk: Any, key: Any, layout: Any) -> dict[str, Any]:
    """One ``gbuf``: per bucket its stored and padded lengths, and (name, begin, end) of its parameters from its start."""
    names = {id(tensor): name for name, tensor in chunk.state_dict_for_save_checkpoint(keep_vars=True).items()}
    buckets: list[dict[str, Any]] = [
        {"numel": n, "padded": end - begin, "params": []}
        for n, (begin, end) in zip(layout.per_bucket_numel_unpadded, layout.bucket_indices, strict=True)
    ]
    for parameter, (begin, end, bucket) in layout.param_index_map.items():
        start = layout.bucket_indices[bucket][0]
        buckets[bucket]["params"].append([names[id(parameter)], begin - start, end - start])
    return {"chunk": number, "dtype": f"({key.param_dtype}, {key.grad_dtype})", "buckets": buckets}
