"""A pretraining script for tiny models, for Megatron-LM's own ``pretrain`` on a CPU.

It is what ``pretrain_gpt.py`` and ``pretrain_hybrid.py`` are in the Megatron-LM repository, which the wheels do not
carry: it takes Megatron-LM's command line, unchanged, and hands Megatron a model, a data set and a loss. Arguments,
training loop, checkpoints and resume are Megatron's. Start it with torchrun, or through ``recipes.make_checkpoint``:

    torchrun --nproc_per_node 4 -m ckptguard.testing.tiny_trainer --tensor-model-parallel-size 2 ... --save DIR

Two switches are its own and are taken away before Megatron sees the command line, so that they are not in the ``args``
that a checkpoint stores: ``--load-only`` loads ``--load`` and exits, for checks that Megatron accepts a checkpoint;
``--resave=FORMAT`` also writes what was loaded to ``--save``, in that ``--ckpt-format``, with no step in between.

Nothing heavy is imported at the top: saving starts a helper process that imports this file again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SWITCHES = ("--resave=", "--load-only")
_DATASET_LENGTH = 1 << 20  # far more samples than any test consumes; they are computed, not stored


class MockTokens:
    """A map-style data set: sample ``i`` depends on the seed and ``i`` alone, so a resume sees the same data."""

    def __init__(self, seed: int, sequence_length: int, vocab_size: int) -> None:
        self.seed, self.sequence_length, self.vocab_size = seed, sequence_length, vocab_size

    def __len__(self) -> int:
        return _DATASET_LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return tokens, labels, positions (int64) and loss mask (float32), each of shape [sequence_length]."""
        import torch

        generator = torch.Generator().manual_seed(self.seed * _DATASET_LENGTH + int(index))
        text = torch.randint(0, self.vocab_size, (self.sequence_length + 1,), generator=generator)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.sequence_length),
            "position_ids": torch.arange(self.sequence_length),
        }


def datasets_provider(sample_counts: Any, vp_stage: int | None = None) -> tuple[MockTokens, MockTokens, MockTokens]:
    """Give Megatron its train, validation and test sets; every rank builds its own, so nothing is broadcast."""
    from megatron.training import get_args

    args = get_args()
    train, valid, test = (MockTokens(args.seed + part, args.seq_length, args.vocab_size) for part in range(3))
    return train, valid, test


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One forward pass over the next micro-batch: the model's output and the function that makes a loss of it."""
    from functools import partial

    import torch

    batch = next(data_iterator)
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5  # True where attention is not allowed
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _config(args: Any) -> Any:
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )

    if args.hybrid_layer_pattern:
        from ckptguard.testing.hybrid_cpu import hybrid_stack_spec

        model = hybrid_config_from_args(args)
        if args.spec is None and args.transformer_impl == "local":  # Megatron has no local spec for it
            model.hybrid_stack_spec = hybrid_stack_spec()
    else:
        model = gpt_config_from_args(args)
    return pretrain_cfg_container_from_args(args, model)


def _load(config: Any, resave_format: str | None) -> None:
    """Build model and optimizer and load ``--load``; unless the format is None, write the state to ``--save``."""
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.arguments import update_use_dist_ckpt
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import preprocess_common_state_dict, setup_model_and_optimizer

    initialize_megatron()
    args = get_args()
    model, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=config,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    if resave_format is None:
        return
    args.ckpt_format = resave_format
    update_use_dist_ckpt(args)
    save_checkpoint(
        args.iteration,
        model,
        optimizer,
        scheduler,
        args.num_floating_point_operations_so_far,
        preprocess_common_state_dict_fn=preprocess_common_state_dict,
    )


def main() -> None:
    """Run Megatron-LM's ``pretrain``, or one of this script's own switches."""
    switches = [a for a in sys.argv if a.startswith(SWITCHES)]
    sys.argv = [a for a in sys.argv if not a.startswith(SWITCHES)]

    from ckptguard.testing import cpu_stand_in

    cpu_stand_in.install()
    if any(a.startswith("--hybrid-layer-pattern") for a in sys.argv):
        from ckptguard.testing import hybrid_cpu

        hybrid_cpu.install_kernels()

    import torch.distributed
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = _config(args)
    if switches:
        formats = [s.removeprefix("--resave=") for s in switches if s.startswith("--resave=")]
        _load(config, resave_format=formats[0] if formats else None)
    else:
        datasets_provider.is_distributed = True  # type: ignore[attr-defined]
        pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
