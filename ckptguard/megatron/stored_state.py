"""What an imported checkpoint says about itself, beside its tensors: the bytes of each such file and object.

Sources (megatron-core 0.19.2): megatron/core/dist_checkpointing/serialization.py ``save`` and ``load_common_state_dict``,
megatron/training/checkpointing.py ``generate_state_dict``, ``_build_sharded_state_dict_metadata``, ``read_metadata``;
(megatron-bridge 0.6.2): megatron/bridge/training/state.py ``TrainState``, utils/checkpoint_utils.py,
checkpointing.py ``_resolve_checkpoint_iteration``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ckptguard.core.errors import UsageError
from ckptguard.megatron.provider_args import Provider, args_of
from ckptguard.megatron.provider_notes import notes_of
from ckptguard.megatron.stored_run_config import run_config_bytes

Iteration = int | Literal["release"]


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Bytes to be stored.

    Attributes:
        common_state: The object ``common_state/shard_0_1``, which Megatron Core 0.19 reads.
        iteration_files: By name, in the directory of the iteration: ``common.pt``, which readers until 0.18 need and 0.19
            prefers to the object; ``run_config.yaml`` and ``train_state.pt`` for Megatron-Bridge.
        root_files: By name, in the root: the trackers.
        notes: What a reader will not find in them; sentences for the user.
    """

    common_state: bytes
    iteration_files: Mapping[str, bytes]
    root_files: Mapping[str, bytes]
    notes: tuple[str, ...]


def stored_files(provider: Provider, *, hf_model_id: str, iteration: Iteration, dtype: torch.dtype) -> StoredFiles:
    """All that is stored of a model beside its tensors.

    Args:
        provider: A Bridge provider, finalized, with its parallel sizes set; nothing of it is changed.
        hf_model_id: The snapshot's name or path, as the user gave it: stored as it is.
        iteration: From 1 on, or "release", from which a run starts at iteration 0.
        dtype: Of the stored weights.

    Raises:
        UsageError: The iteration is 0: ``read_metadata`` takes no tracker that says so.
    """
    if iteration != "release" and iteration < 1:
        raise UsageError(f"iteration {iteration}: Megatron reads checkpoints from iteration 1 on, or 'release'")
    step = 0 if iteration == "release" else iteration
    common = {
        "args": args_of(provider, dtype=dtype, hf_model_id=hf_model_id),
        "checkpoint_version": 3.0,
        "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    run_config, unsaid = run_config_bytes(provider, dtype=dtype, hf_model_id=hf_model_id)
    train_state = _saved(_train_state(step))
    root_files = {"latest_checkpointed_iteration.txt": str(iteration).encode()}
    if iteration != "release":  # Bridge would look for iter_0000000; without this file it takes Megatron-LM's tracker
        root_files["latest_train_state.pt"] = train_state
    return StoredFiles(
        common_state=_saved([common]),
        iteration_files={
            "common.pt": _saved(common), "run_config.yaml": run_config, "train_state.pt": train_state
        },
        root_files=root_files,
        notes=(*_about_args(notes_of(provider)), *unsaid),
    )  # fmt: skip


def _about_args(missing: Sequence[str]) -> list[str]:
    if not missing:
        return []
    return [f"Megatron-LM's arguments cannot say {'; '.join(missing)}. Load this checkpoint with Megatron-Bridge."]


def _train_state(step: int) -> dict[str, torch.Tensor]:
    """``TrainState.state_dict`` of a run that has trained nothing: 0-dim tensors."""
    whole = {
        "step": step, "consumed_train_samples": 0, "skipped_train_samples": 0, "consumed_valid_samples": 0
    }  # fmt: skip
    out = {name: torch.tensor(value, dtype=torch.int64) for name, value in whole.items()}
    out["floating_point_operations_so_far"] = torch.tensor(0, dtype=torch.float64)
    return out | {name: torch.tensor(False, dtype=torch.bool) for name in ("do_train", "do_valid", "do_test")}


def _saved(value: Any) -> bytes:
    """As ``torch.save`` writes it; the same bytes for the same value."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
