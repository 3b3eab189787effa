"""What one rank does with Megatron-LM: build the model of a checkpoint's args, load it, and tell what it holds.

The path is Megatron-LM's own (megatron-core 0.19.2): ``load_args_from_checkpoint``, ``validate_args``,
``initialize_megatron``, the model builder, ``load_checkpoint``. It departs from it in three places, each to be told
more: args that Megatron-LM leaves to the command line are taken from the checkpoint all the same, and listed;
``dist_ckpt_strictness`` is ``raise_all``; and a module that refuses its state is an error, where Megatron-LM would load
what fits.
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
# Sizes and places of the run, which are this run's own.
_OWN = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout", "context_parallel_size", "sequence_parallel", "data_parallel_size", "rank",
    "local_rank", "world_size", "load", "save", "iteration", "consumed_train_samples", "consumed_valid_samples",
    "skipped_train_samples", "transformer_impl", "attention_backend", "finetune", "no_load_optim", "no_load_rng",
    "use_checkpoint_args", "dist_ckpt_strictness", "distributed_backend", "use_cpu_initialization", "bf16", "fp16",
    "params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "micro_batch_size",
    "global_batch_size", "tokenizer_type", "tokenizer_model", "vocab_size", "use_distributed_optimizer",
    "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_permute_fusion", "moe_shared_expert_overlap", "num_workers",
    "no_save_optim", "no_save_rng", "overlap_p2p_comm", "align_param_gather", "variable_seq_lengths", "ckpt_format",
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
    args, by_hand = _arguments(question, ["--transformer-impl", "transformer_engine", "--bf16"])
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
    sys.argv += ["--dist-ckpt-strictness", "raise_all", "--exit-on-missing-checkpoint", *flags]
    args = parse_args()
    own = {name for name, value in vars(args).items() if value != _default(name)} | _OWN
    args, stored = load_args_from_checkpoint(args)
    by_hand: dict[str, Any] = {}
    for name, value in vars(stored).items():
        if name in vars(args) and name not in own and getattr(args, name) != value:
            by_hand[name] = value
            setattr(args, name, value)
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


def _default(name: str) -> Any:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    global _defaults
    if _defaults is None:
        _defaults = vars(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([]))
    return _defaults.get(name)


_defaults: dict[str, Any] | None = None


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
