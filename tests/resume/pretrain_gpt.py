"""Pretrains a GPT model with Megatron-LM's ``pretrain``: what a user of Megatron-LM has, and nothing of ckptguard.

    torchrun --nproc-per-node 4 tests/resume/pretrain_gpt.py --tensor-model-parallel-size 2 ... --mock-data

Takes Megatron-LM's command line. Data are Megatron's own ``GPTDataset`` (``--data-path``) or ``MockGPTDataset``
(``--mock-data``), built on the first rank of every tensor parallel group and sent to the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def get_batch(data_iterator: Any, vp_stage: int | None) -> list[Any]:
    """The next micro-batch as this rank needs it: tensors of shape [micro batch, sequence], or None, for each of FIELDS."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(FIELDS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch.get(key) for key in FIELDS]


def loss_of(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of all tokens that count, how many those are, and both together for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Output of the model for the next micro-batch, and the function that makes a loss of it."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, position_ids, attention_mask = get_batch(data_iterator, vp_stage)
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_of, loss_mask)


def _builds_data(vp_stage: int | None = None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def datasets_provider(sample_counts: Any, vp_stage: int | None = None) -> Any:
    """Train, validation and test set with as many samples as the run takes."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, sample_counts, partial(_builds_data, vp_stage), config).build()


def main() -> None:
    """Hands Megatron the model, the data and the loss."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
