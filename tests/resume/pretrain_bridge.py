"""Pretrains a small GPT model with Megatron-Bridge's own ``pretrain``, on a CPU.

    PYTHONPATH=ckptguard/testing/cpu_site torchrun --nproc-per-node 2 tests/resume/pretrain_bridge.py \\
        model.tensor_model_parallel_size=2 checkpoint.save=DIR

Takes overrides as Bridge's own scripts do. The loop, the checkpoints and the data are Bridge's. Packages that it imports and
that a CPU has no use for are stood in for: Transformer Engine by ``te_skeleton`` (after Megatron Core was imported without
it, so that layers are Core's local ones), ModelOpt, NVIDIA's resiliency extension, TensorBoard and readers of other data by
empty modules.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_EMPTY = frozenset({"tensorboard", "datasets", "pyarrow", "PIL", "webdataset", "megatron.energon"})


def _stand_in() -> None:
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model

    from ckptguard.megatron import te_skeleton

    te_skeleton.install()
    resiliency = types.ModuleType("nvidia_resiliency_ext")
    resiliency.__path__ = []  # nothing but what follows can be imported from it
    sys.modules[resiliency.__name__] = resiliency
    name = "nvidia_resiliency_ext.inprocess"
    sys.modules[name] = te_skeleton.empty_package(name)
    import megatron.bridge.models  # noqa: F401 - transformers looks here which packages there are

    sys.meta_path.append(te_skeleton._Finder(_EMPTY))
    _answer_for_absent_packages()


def _answer_for_absent_packages() -> None:
    """Gives the few functions that the loop calls in any case an answer."""
    import modelopt.torch.distill.plugins.megatron as distillation
    import modelopt.torch.opt.plugins as saving
    import tensorboard

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    distillation.get_tensor_shapes_adjust_fn_for_distillation = nothing
    saving.save_sharded_modelopt_state = nothing
    tensorboard.__version__ = "2.19.0"  # torch asks for it


def _model() -> Any:
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec

    return GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        seq_length=32,
        vocab_size=512,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        transformer_layer_spec=local_layer_spec,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )


def _config() -> Any:
    import torch
    from megatron.bridge.training import config
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    return config.ConfigContainer(
        model=_model(),
        train=config.TrainingConfig(train_iters=8, micro_batch_size=1, global_batch_size=4),
        validation=config.ValidationConfig(eval_iters=0, eval_interval=1000),
        optimizer=config.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_iters=100,
            start_weight_decay=0.033,
            end_weight_decay=0.033,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        dataset=config.MockGPTDatasetConfig(
            seq_length=32,
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=511),
        checkpoint=config.CheckpointConfig(ckpt_format="torch_dist"),
        dist=config.DistributedInitConfig(distributed_backend="gloo", disable_jit_fuser=True),
        rng=config.RNGConfig(seed=1234),
    )


def main() -> None:
    """Runs Bridge's ``pretrain``."""
    _stand_in()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    pretrain(process_config_with_overrides(_config(), cli_overrides=sys.argv[1:]), forward_step)


if __name__ == "__main__":
    main()
