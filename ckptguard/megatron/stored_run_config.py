"""Megatron-Bridge's ``run_config.yaml`` of a checkpoint that holds weights only.

The form is that of ``ConfigContainer.to_yaml`` (megatron/training/config/container.py and yaml_utils.py of megatron-core
0.19.2): a dataclass is a mapping with its class under ``_target_``; a function, a class or a dtype is
``{_target_: its path, _call_: false}``; a ``functools.partial`` has ``_partial_: true``, its ``_args_`` and keywords; an
enum member is ``{_target_: its class, _call_: true, _args_: [value], _name_: name}``; tuples are lists.

What is read: megatron/bridge/training/model_load_save.py ``load_model_config`` instantiates ``model`` and
``load_tokenizer`` instantiates ``tokenizer``; checkpointing.py ``_load_checkpoint_from_path`` takes the parallel sizes from
``model`` and ``save_rng``, ``save_optim``, ``fully_parallel_save`` from ``checkpoint`` (megatron-bridge 0.6.2). The other
sections are as ``save_megatron_model`` leaves them. Settings not named have their class's defaults.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from functools import partial
from typing import Any

import torch
import yaml

from ckptguard.megatron.provider_args import NOT_OF_THE_HOST, Provider

_CONFIG = "megatron.bridge.training.config"


def run_config_bytes(provider: Provider, *, dtype: torch.dtype, hf_model_id: str) -> tuple[bytes, tuple[str, ...]]:
    """The file, and a sentence for every model setting that YAML cannot hold, which is left at its class's default.

    Args:
        provider: Finalized, with its parallel sizes set.
        dtype: Of the stored weights.
        hf_model_id: As the user gave it: where Bridge finds the Hugging Face config and tokenizer when it exports.
    """
    model, unsaid = _model(provider, dtype, hf_model_id)
    config = {
        "_target_": f"{_CONFIG}.ConfigContainer",
        "model": model,
        "checkpoint": {
            "_target_": f"{_CONFIG}.CheckpointConfig", "ckpt_format": "torch_dist", "save_optim": False,
            "save_rng": False, "fully_parallel_save": False,
        },
        "tokenizer": {
            "_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig",
            "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": hf_model_id,
        },
        "optimizer": {"_target_": f"{_CONFIG}.OptimizerConfig", "use_distributed_optimizer": False},
        "logger": {"_target_": f"{_CONFIG}.LoggerConfig"},
        "train": None, "scheduler": None, "dataset": None, "ddp": None, "dist": None,
    }  # fmt: skip
    notes = tuple(f"run_config.yaml cannot hold model.{name} of {type(provider).__name__}" for name in unsaid)
    return yaml.safe_dump(config, default_flow_style=False).encode(), notes


def _model(provider: Provider, dtype: torch.dtype, hf_model_id: str) -> tuple[dict[str, Any], list[str]]:
    fixed = NOT_OF_THE_HOST | {
        "hf_model_id": hf_model_id, "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }  # fmt: skip
    out: dict[str, Any] = {"_target_": _path(type(provider))}
    unsaid = sorted(name for name in vars(provider).keys() - _field_names(provider) if not name.startswith("_"))
    for name in _field_names(provider):
        try:
            out[name] = _plain(fixed.get(name, getattr(provider, name)))
        except _NoFormError:
            unsaid.append(name)
    return out, unsaid


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")]


class _NoFormError(Exception):
    """A value that no other process can make again from YAML."""


def _plain(value: Any) -> Any:
    """The value as Bridge's dumper would give it to YAML."""
    if isinstance(value, enum.Enum):
        return {"_target_": _path(type(value)), "_call_": True, "_args_": [value.value], "_name_": value.name}
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, partial):
        keywords = {key: _plain(item) for key, item in value.keywords.items()}
        return {"_target_": _path(value.func), "_partial_": True, "_args_": _plain(value.args), **keywords}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"_target_": _path(type(value))} | {name: _plain(getattr(value, name)) for name in _field_names(value)}
    if type(value).__name__ == "PipelineParallelLayerLayout":
        return _plain(value.input_data)
    return {"_target_": _path(value), "_call_": False}


def _path(value: Any) -> str:
    """Where a class or function is imported from."""
    module, name = inspect.getmodule(value), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise _NoFormError
    return f"{module.__name__}.{name}"
