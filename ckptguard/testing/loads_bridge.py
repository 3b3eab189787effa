"""What one rank does with Megatron-Bridge 0.6.2: import a snapshot, save it, load a checkpoint for training.

Bridge's training package imports packages for data, images and logs that loading never calls. Where they are not
installed, empty ones are served, in these processes only, and ModelOpt's functions, which do nothing for a model that
ModelOpt has not changed, are replaced by ones that do nothing.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ckptguard.megatron import te_skeleton
from ckptguard.testing.loads_rank import fill, held, refuse_partial_states

_ABSENT = ("megatron.energon", "datasets", "PIL", "torch.utils.tensorboard")
_MODELOPT = (
    "save_sharded_modelopt_state", "restore_sharded_modelopt_state", "save_modelopt_state", "restore_modelopt_state",
    "restore_sharded_modelopt_state",
)  # fmt: skip


def prepare() -> None:
    """Import Bridge with its training package, once in the helper process."""
    if "megatron.bridge" in sys.modules:
        return
    te_skeleton.stand_in_for(*_ABSENT)
    if importlib.util.find_spec("tensorboard") is None:  # torch's own module is found, and refuses
        for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
            stub: Any = ModuleType(name)
            stub.SummaryWriter, stub.__path__ = object, []
            sys.modules[name] = stub
    plugins = importlib.import_module("modelopt.torch.opt.plugins")
    for name in _MODELOPT:
        setattr(plugins, name, lambda *_args, **_kwargs: None)
    importlib.import_module("megatron.bridge")
    importlib.import_module("megatron.bridge.training.model_load_save")


def bridge_imports(question: dict[str, Any], file: Path) -> dict[str, Any]:
    """Fill the model of a layout from a snapshot and describe it."""
    return {"held": held(_import(question)), "iteration": 0}


def bridge_saves(question: dict[str, Any], file: Path) -> dict[str, Any]:
    """Import a snapshot and save it with Bridge's own function."""
    from megatron.bridge.training.model_load_save import save_megatron_model

    save_megatron_model(_import(question), question["out"])
    return {}


def bridge_loads(question: dict[str, Any], file: Path) -> dict[str, Any]:
    """Build the model of ``run_config.yaml`` for a layout, and load it as Bridge's training does."""
    from megatron.bridge.training.checkpointing import load_checkpoint
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig, RNGConfig
    from megatron.bridge.training.model_load_save import load_model_config
    from megatron.bridge.training.state import GlobalState
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.optimizer import OptimizerConfig

    _processes(question["layout"])
    (iteration,) = [path for path in Path(question["source"]).iterdir() if path.is_dir()]
    provider, _ = load_model_config(str(iteration))
    chunks = _provide(provider, question["layout"])
    fill(chunks)
    refuse_partial_states()
    init_num_microbatches_calculator(int(os.environ["RANK"]), None, 1, 1, 1)
    state: Any = GlobalState()
    state.cfg = ConfigContainer(
        model=provider, train=None, optimizer=OptimizerConfig(use_distributed_optimizer=False), ddp=None,
        scheduler=None, dataset=None, logger=LoggerConfig(), tokenizer=None, dist=None, rng=RNGConfig(),
        checkpoint=CheckpointConfig(load=question["source"], dist_ckpt_strictness="raise_all", async_save=False),
    )  # fmt: skip
    step, _ = load_checkpoint(state, chunks, None, None, strict=True)
    return {"held": held(chunks), "iteration": step}


def _import(question: dict[str, Any]) -> list[Any]:
    from megatron.bridge import AutoBridge

    _processes(question["layout"])
    bridge = AutoBridge.from_hf_pretrained(question["source"], dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=False)
    if question["vocab_multiple"]:
        provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, question["vocab_multiple"]
    chunks = _provide(provider, question["layout"])
    fill(chunks)
    _leave_unmapped(type(bridge._model_bridge))
    bridge.load_hf_weights(chunks)
    return chunks


def _leave_unmapped(kind: Any) -> None:
    """Let a parameter that Bridge maps nothing to stay as it was filled, so that the others can be compared.

    Bridge warns that it skips such a one, and then stops at the ``None`` among its tasks.
    """
    original = kind.build_conversion_tasks

    def mapped(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [task for task in original(self, *args, **kwargs) if task is not None]

    kind.build_conversion_tasks = mapped


def _processes(layout: dict[str, Any]) -> None:
    """Process groups of the layout."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        layout["tp"], layout["pp"], layout["vpp"] if layout["vpp"] > 1 else None,
        expert_model_parallel_size=layout["ep"], expert_tensor_parallel_size=layout["etp"],
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)


def _provide(provider: Any, layout: dict[str, Any]) -> list[Any]:
    """The rank's model chunks from a provider of Bridge's, for a layout and without kernels."""
    settings = {
        "tensor_model_parallel_size": layout["tp"], "pipeline_model_parallel_size": layout["pp"],
        "expert_model_parallel_size": layout["ep"], "expert_tensor_parallel_size": layout["etp"] or layout["tp"],
        "virtual_pipeline_model_parallel_size": layout["vpp"] if layout["vpp"] > 1 else None,
        "num_layers_in_first_pipeline_stage": layout["first_stage_layers"],
        "num_layers_in_last_pipeline_stage": layout["last_stage_layers"], "context_parallel_size": 1,
        "sequence_parallel": layout["tp"] > 1, "pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16,
        "bf16": True, "use_cpu_initialization": True, "perform_initialization": False,
        "gradient_accumulation_fusion": False,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    return list(provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True))
