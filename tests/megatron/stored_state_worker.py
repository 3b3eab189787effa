"""Run by test_stored_state: for each family, what is stored of a Bridge provider, and what its readers make of that.

``python stored_state_worker.py OUT FAMILY...`` makes a checkpoint root without tensors OUT/FAMILY and OUT/FAMILY.json.
"""

# ruff: noqa: E402 - Transformer Engine's skeleton is served before Megatron is imported

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0"}

from ckptguard.megatron import te_skeleton
from ckptguard.testing import family_configs, loads_bridge

te_skeleton.install()
loads_bridge.prepare()

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.checkpointing import _resolve_checkpoint_iteration
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.model_load_save import load_model_config
from megatron.bridge.training.utils import checkpoint_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import add_megatron_arguments
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.models.dist_utils import build_virtual_pipeline_stages

from ckptguard.core.errors import UnsupportedError
from ckptguard.formats.pickles import as_plain
from ckptguard.formats.torch_zips import read_torch_zip
from ckptguard.megatron import worker, worlds
from ckptguard.megatron.model_args import NEUTRAL, to_namespace
from ckptguard.megatron.stored_state import StoredFiles, stored_files

LAYOUTS: dict[str, dict[str, Any]] = {
    "LLAMA": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
    },
    "LLAMA31": {"tensor_model_parallel_size": 2, "should_pad_vocab": True, "make_vocab_size_divisible_by": 128},
    "QWEN3_MOE": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "GPT_OSS": {"expert_model_parallel_size": 2},
    "DEEPSEEK_V2_LITE": {
        "pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3,
        "num_layers_in_last_pipeline_stage": 2,
    },
    "DEEPSEEK_V3": {
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [
            ["embedding", "decoder"], ["decoder", "decoder", "decoder", "mtp", "loss"]
        ],
    },
    "NEMOTRON_H": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}  # fmt: skip

CONFIGS = {
    # Llama 3.2 scales by 32, and Kimi K2's YaRN has another beta.
    "LLAMA32": family_configs.LLAMA31 | {"rope_scaling": {**family_configs.LLAMA31["rope_scaling"], "factor": 32.0}},
    "KIMI_K2": {k: v for k, v in family_configs.KIMI_K2.items() if k != "auto_map"} | {"model_type": "deepseek_v3"},
}


def provider_of(name: str, out: Path) -> Any:
    """A finalized provider of a small family, made from its config.json as Bridge makes it."""
    snapshot = out / f"{name}-snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text(json.dumps(CONFIGS.get(name) or getattr(family_configs, name)))
    provider = AutoBridge.from_hf_pretrained(snapshot).to_megatron_provider(load_weights=False)
    for field, value in LAYOUTS.get(name, {}).items():
        setattr(provider, field, value)
    provider.bf16, provider.params_dtype, provider.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
    provider.use_cpu_initialization, provider.perform_initialization = True, False
    provider.finalize()
    return provider


def structure_of(provider: Any, args: argparse.Namespace) -> list[Any]:
    """As ``worker.describe``, of the provider's own model, with the same settings that need no kernels."""
    provider = copy.copy(provider)
    for name in vars(provider).keys() & NEUTRAL.keys() - {"cp_comm_type"}:
        setattr(provider, name, NEUTRAL[name])
    provider.attention_backend = AttnBackend.auto

    def provide(_groups: Any, **stage: Any) -> Any:
        return provider.provide(**stage)

    out = []
    for rank in worlds.ranks(args):
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        with torch.device("meta"):
            chunks = build_virtual_pipeline_stages(
                provide, provider._pg_collection, provider.virtual_pipeline_model_parallel_size
            )
        out.append([worker.describe_chunk(chunk.bfloat16(), {}, rank) for chunk in chunks])
    return out


def plain_args(stored: StoredFiles) -> Mapping[str, Any]:
    """The args as ckptguard's own reader gives them."""
    data = stored.common_state
    value = read_torch_zip(lambda at, count: data[at : at + count], len(data), where="common state", file="")
    plain: Any = as_plain(value.value)
    args: Mapping[str, Any] = plain[0]["args"]
    return args


def written(stored: StoredFiles, root: Path, directory: str) -> Path:
    """A root with everything but tensors; returns the iteration's directory."""
    place = root / directory
    place.mkdir(parents=True)
    files = {place / name: data for name, data in stored.iteration_files.items()}
    files |= {root / name: data for name, data in stored.root_files.items()}
    for path, data in files.items():
        path.write_bytes(data)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return place


def bridge_reads(root: Path, place: Path, provider: Any) -> dict[str, Any]:
    """What Megatron-Bridge finds, and the settings in which the provider that it makes differs from the given one."""
    made, _ = load_model_config(str(place))
    made.finalize()
    assert type(made) is type(provider)
    values = {f.name: (getattr(made, f.name), getattr(provider, f.name)) for f in dataclasses.fields(provider)}
    container = ConfigContainer.from_yaml(str(place / "run_config.yaml"))
    return {
        "differ": {name: [str(a), str(b)] for name, (a, b) in values.items() if str(a) != str(b)},
        "resolved": _resolve_checkpoint_iteration(str(root), None),
        "step": checkpoint_utils.read_train_state(str(place / "train_state.pt")).step,
        "hf_model_id": checkpoint_utils.get_hf_model_id_from_checkpoint(place),
        "tokenizer": [container.tokenizer.tokenizer_type, container.tokenizer.tokenizer_model],
        "saved": [container.checkpoint.save_optim, container.checkpoint.save_rng],
    }


def megatron_lm_reads(root: Path) -> dict[str, Any]:
    """What ``--use-checkpoint-args`` sets, in the words of our own reader."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--load", str(root), "--use-mp-args-from-checkpoint-args"])
    args.use_dist_ckpt, args.rank, args.params_dtype = True, 0, None
    before = dict(vars(args))
    load_args_from_checkpoint(args)
    changed = {name: value for name, value in vars(args).items() if before.get(name) != value}
    return {name: value for name, value in changed.items() if not isinstance(value, torch.dtype)}


def examine(name: str, out: Path) -> dict[str, Any]:
    """Everything that the test compares for one family."""
    provider = provider_of(name, out)
    before = dict(vars(provider))
    stored = stored_files(provider, hf_model_id="org/model", iteration=7, dtype=torch.bfloat16)
    assert vars(provider) == before
    assert stored == stored_files(provider, hf_model_id="org/model", iteration=7, dtype=torch.bfloat16)
    (common,) = torch.load(io.BytesIO(stored.common_state), weights_only=True)
    assert common == torch.load(io.BytesIO(stored.iteration_files["common.pt"]), weights_only=True)
    place = written(stored, out / name, "iter_0000007")
    released = stored_files(provider, hf_model_id="org/model", iteration="release", dtype=torch.bfloat16)
    written(released, out / f"{name}-release", "release")
    found: dict[str, Any] = {
        "notes": stored.notes,
        "args": plain_args(stored),
        "bridge": bridge_reads(out / name, place, provider),
        "release": _resolve_checkpoint_iteration(str(out / f"{name}-release"), None),
        "megatron_lm": megatron_lm_reads(out / name),
        "released_lm": megatron_lm_reads(out / f"{name}-release"),
    }
    worlds.forget_devices()
    try:
        described = worker.describe(found["args"], {}, None)
    except UnsupportedError as error:
        return found | {"refused": error.message}
    own = structure_of(provider, to_namespace(found["args"]))
    return found | {
        "described": [rank["chunks"] for stage in described["stages"] for rank in stage["each"]],
        "own": own,
    }


def main(out: Path, names: list[str]) -> None:
    """Writes what is found about each family."""
    for name in names:
        (out / f"{name}.json").write_text(json.dumps(examine(name, out), default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
