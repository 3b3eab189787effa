"""What one rank does with Megatron-LM: build the model of a checkpoint's args, load it, and tell what it holds.

The path is Megatron-LM's own (megatron-core 0.19.2): ``load_args_from_checkpoint``, ``validate_args``,
``initialize_megatron``, the model builder, ``load_checkpoint``. It departs from it in two places: args that Megatron-LM
leaves to the command line are taken from the checkpoint all the same, and listed; and a module that refuses its state
is an error, where Megatron-LM would load what fits.
"""

from __future__ import annotations

import hashlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ckptguard.testing.recipes import CPU_FLAGS

_FILL = float("nan")
_NO_KEY_LEFT = ("--dist-ckpt-strictness", "raise_all")  # the default lets keys be that nobody asks for
# Arguments that say what the model is and are no field of Megatron Core's configs under the same name.
_MODEL = frozenset({
    "num_experts", "group_query_attention", "swiglu", "squared_relu", "quick_geglu", "position_embedding_type",
    "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "padded_vocab_size",
    "untie_embeddings_and_output_weights", "multi_latent_attention", "mtp_num_layers", "hybrid_layer_pattern",
    "yarn_correction_range_round_to_int", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
})  # fmt: skip
# Fields that are this run's own: its sizes, its dtypes, and what chooses between kernels.
_OWN = frozenset({
    "transformer_impl", "attention_backend", "bf16", "fp16", "params_dtype", "use_cpu_initialization",
    "perform_initialization", "sequence_parallel", "moe_token_dispatcher_type", "moe_grouped_gemm",
    "moe_permute_fusion", "moe_shared_expert_overlap", "apply_rope_fusion", "masked_softmax_fusion",
    "bias_dropout_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "persist_layer_norm", "deallocate_pipeline_outputs", "barrier_with_L1_time", "cp_comm_type",
    "microbatch_group_size_per_vp_stage", "variable_seq_lengths", "batch_p2p_comm", "recompute_modules",
    "moe_aux_loss_coeff", "init_method_std", "embedding_init_method_std", "overlap_p2p_comm",
    "inference_cuda_graph_scope", "async_tensor_model_parallel_allreduce",
})  # fmt: skip


def prepare() -> None:
    """Nothing more to import."""


def logits(question: dict[str, Any], file: Path) -> dict[str, Any]:
    """Load in fp32 with the local spec, run the prompt, and leave the last stage's logits in ``<file>.npy``."""
    import numpy as np

    from ckptguard.testing import loads_forward

    loads_forward.leave_moe_norms_alone()
    args, _ = _arguments(question, ["--transformer-impl", "local"])
    chunks = _build(args)
    _load(chunks)
    prompt = question["tokens"]
    first, tokens = None, list(prompt)
    for _ in range(question["new_tokens"] + 1):
        out = loads_forward.logits(chunks, tokens, args)[:, : question["vocab_size"]]
        first = out if first is None else first
        tokens.append(int(out[-1].argmax()))
    assert first is not None
    np.save(file.with_suffix(".npy"), first.numpy())
    return {"new_tokens": tokens[len(prompt) : -1]}


def loads_strictly(question: dict[str, Any], file: Path) -> dict[str, Any]:
    """Load with the Transformer Engine specs and describe every parameter."""
    args, by_hand = _arguments(question, ["--transformer-impl", "transformer_engine", "--bf16", *_NO_KEY_LEFT])
    chunks = _build(args)
    fill(chunks)
    iteration = _load(chunks)
    return {"held": held(chunks), "by_hand": by_hand, "iteration": iteration}


def _arguments(question: dict[str, Any], flags: list[str]) -> tuple[Namespace, dict[str, Any]]:
    """Megatron-LM's global arguments, set up as ``--use-checkpoint-args`` does, and those it leaves out."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    sys.argv = ["loads", *CPU_FLAGS, *_layout_flags(question["layout"]), "--load", question["source"]]
    sys.argv += ["--use-checkpoint-args", "--micro-batch-size", "1", "--no-load-optim", "--no-load-rng", "--finetune"]
    sys.argv += ["--exit-on-missing-checkpoint", *flags]
    args = parse_args()
    args, stored = load_args_from_checkpoint(args)
    by_hand = {
        name: value for name, value in vars(stored).items()
        if _says_what_the_model_is(name) and value is not None and getattr(args, name, value) != value
    }  # fmt: skip
    vars(args).update(by_hand)
    if args.num_experts:
        args.sequence_parallel = args.tensor_model_parallel_size > 1
        args.moe_token_dispatcher_type = "alltoall"
        args.moe_grouped_gemm = args.transformer_impl == "transformer_engine"
    if args.hybrid_layer_pattern:
        args.num_layers = None  # the pattern says it, and Megatron wants it said once
    validate_args(args, {})
    set_global_variables(args, build_tokenizer=False)
    initialize_megatron()
    return args, by_hand


def _says_what_the_model_is(name: str) -> bool:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    if name in _OWN or name.endswith(("_parallel_size", "_num_weight_shards")) or "pipeline" in name:
        return False
    return name in _MODEL or name in MLATransformerConfig.__dataclass_fields__


def _layout_flags(layout: dict[str, Any]) -> list[str]:
    flags = {
        "--tensor-model-parallel-size": layout["tp"], "--pipeline-model-parallel-size": layout["pp"],
        "--expert-model-parallel-size": layout["ep"], "--expert-tensor-parallel-size": layout["etp"],
        "--num-virtual-stages-per-pipeline-rank": layout["vpp"] if layout["vpp"] > 1 else None,
        "--decoder-first-pipeline-num-layers": layout["first_stage_layers"],
        "--decoder-last-pipeline-num-layers": layout["last_stage_layers"],
    }  # fmt: skip
    return [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]


def _build(args: Namespace) -> list[Any]:
    """The model chunks of this rank, wrapped as for training but without gradients' buffers."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
    from megatron.training.models.dist_utils import (
        build_virtual_pipeline_stages,
        prepare_existing_model_chunks_for_distributed_training,
    )

    config = hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    virtual = config.transformer.virtual_pipeline_model_parallel_size
    stages = build_virtual_pipeline_stages(config.get_builder_cls()(config).build_model, groups, virtual)
    return list(
        prepare_existing_model_chunks_for_distributed_training(stages, config.transformer, groups, wrap_with_ddp=False)
    )


def _load(chunks: list[Any]) -> int:
    """Megatron-LM's ``load_checkpoint``, strictly; returns the iteration."""
    from megatron.training.checkpointing import load_checkpoint

    refuse_partial_states()
    iteration, _ = load_checkpoint(chunks, None, None, strict=True)
    return int(iteration)


def refuse_partial_states() -> None:
    """Let no module load only a part of its state.

    Megatron-LM and Bridge answer any error of ``load_state_dict`` with a second call that is not strict.
    """
    module: Any = torch.nn.Module
    original = module.load_state_dict

    def strictly(self: torch.nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if not strict:
            raise LookupError(f"{type(self).__name__} did not take its whole state")
        return original(self, state, strict=True, assign=assign)

    module.load_state_dict = strictly


def tensors(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and every buffer that is saved, by its name in the rank's own model."""
    from megatron.core.utils import unwrap_model

    models = unwrap_model(chunks)
    for number, model in enumerate(models):
        prefix = f"model{number}." if len(models) > 1 else ""
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                yield prefix + name, value.detach()


def fill(chunks: list[Any]) -> None:
    """Put NaN (or -1) into every element, so that one that is not loaded shows."""
    for _, value in tensors(chunks):
        value.fill_(_FILL if value.is_floating_point() else -1)


def held(chunks: list[Any]) -> dict[str, list[Any]]:
    """For each tensor the fields of ``megatron_loads.Held``."""
    out: dict[str, list[Any]] = {}
    for name, value in tensors(chunks):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        untouched = value.isnan().any() if value.is_floating_point() else (value == -1).any()
        dtype = str(value.dtype).removeprefix("torch.")
        out[name] = [dtype, list(value.shape), hashlib.sha256(data).hexdigest(), not bool(untouched)]
    return out
