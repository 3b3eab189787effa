"""A forward pass over real pipeline and tensor parallel ranks, on the CPU, and one repair of Megatron's local spec."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch


def leave_moe_norms_alone() -> None:
    """Let a MoE layer of the local spec look for ``pre_mlp_layernorm`` under the name that Transformer Engine writes.

    The local spec (``get_gpt_layer_local_submodules``, megatron-core 0.19.2) stores this norm as
    ``mlp.linear_fc1.layer_norm_weight`` in every layer, which is right for a dense MLP, whose first linear layer has
    the norm fused into it with Transformer Engine. A MoE layer's norm is a module of its own there.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    original = gpt_layer_specs.get_gpt_layer_local_submodules

    def repaired(num_experts: int | None = None, *args: Any, **kwargs: Any) -> Any:
        submodules = original(num_experts, *args, **kwargs)
        if num_experts:
            submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        return submodules

    gpt_layer_specs.get_gpt_layer_local_submodules = repaired


def _collect(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
    """The logits of all tensor parallel ranks side by side, [sequence, padded vocabulary]."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(output) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[0]


def _step(tokens: torch.Tensor, _iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5  # True where attention is not allowed
    return model(tokens, torch.arange(length)[None], mask), _collect


def logits(chunks: list[Any], tokens: list[int], args: Namespace) -> torch.Tensor:
    """Run one sequence through all stages; every rank gets the logits, [tokens, padded vocabulary].

    Args:
        chunks: This rank's model chunks.
        tokens: The sequence. Zeros are added behind it where sequence parallelism needs a multiple of TP; nothing
            before them sees them.
        args: Megatron's arguments.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    length = len(tokens) + -len(tokens) % args.tensor_model_parallel_size
    padded = torch.tensor([tokens + [0] * (length - len(tokens))])
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        out = get_forward_backward_func()(
            forward_step_func=partial(_step, padded), data_iterator=[None] * len(chunks), model=chunks,
            num_microbatches=args.pipeline_model_parallel_size if len(chunks) > 1 else 1, seq_length=length,
            micro_batch_size=1, forward_only=True, collect_non_loss_data=True,
        )  # fmt: skip
    result = out[0] if out else torch.empty(length, args.padded_vocab_size)
    torch.distributed.broadcast(result, torch.distributed.get_world_size() - 1)
    return result[: len(tokens)]
