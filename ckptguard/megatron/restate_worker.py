"""The process that ``restate`` asks: ``python -m ckptguard.megatron.restate_worker`` with JSON on both ends.

Sources (megatron-core 0.19.2): megatron/training/checkpointing.py ``generate_state_dict``, ``load_checkpoint`` (what is loaded
and what is passed over), ``_build_sharded_state_dict_metadata``; megatron/core/dist_checkpointing/serialization.py
``load_common_state_dict``; megatron/core/safe_globals.py; (megatron-bridge 0.6.2): checkpointing.py
``_load_checkpoint_from_path``. Why each thing is kept or left out stands in ``restate_common``.
"""

from __future__ import annotations

import io
import pickle
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import torch

from ckptguard.megatron import (
    process,
    restate_common,
    restate_groups,
    restate_objects,
    restate_run_config,
    safe_loading,
)


def main() -> None:
    """Answers one question."""
    process.serve(_answer, safe_loading.register)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        return answered(question)
    except restate_common.TooOldError as error:
        return {"unsupported": str(error), "next_step": restate_common.TooOldError.next_step}
    except (
        safe_loading.UnreadableError,
        restate_groups.BadGroupsError,
        restate_run_config.NotUnderstoodError,
    ) as error:
        return {"damaged": str(error)}


def answered(question: Mapping[str, Any]) -> dict[str, Any]:
    """The plain form of ``restate.Restated``, with bytes in base 64."""
    notes: list[str] = []
    loaded = _loaded(question, notes)
    states = {name: _state(name, data, notes) for name, data in question["group_states"].items()}
    asked = restate_common.Asked(
        iteration=question["iteration"],
        args_changes=question["args_changes"],
        has_optimizer=question["optimizer_format"] is not None,
        groups=tuple((prefix, is_expert) for prefix, is_expert in question["groups"]),
        layout_changed=question["layout_changed"],
        world_changed=question["world_changed"],
        has_rng=question["has_rng"],
        run_config=question["run_config"],
        group_decays={restate_groups.place_of(p): decays for p, decays in question["group_decays"].items()},
    )
    if question["legacy"]:
        common = restate_common.common_of_legacy(loaded, states, asked, notes)
        answer = {"common_state": _encoded([common]), "common_file": "", "objects": {}, "keep_rerun": False}
        keep_rng = asked.has_rng and not common["args"].no_save_rng
        return answer | {"run_config": question["run_config"], "keep_rng": keep_rng, "notes": notes}
    made = restate_common.of_torch_dist(loaded, states, asked, question["optimizer_format"], notes)
    objects = _objects(question, made.optimizers) if question["optimizer_format"] == "dp_reshardable" else {}
    if question["decays"] is not None:
        groups = [group for optimizer in made.optimizers.values() for group in optimizer.groups]
        entries = restate_objects.flat(made.common, groups, question["decays"])
        objects = {name: _encoded(value) for name, value in entries.items()}
    answer = {
        "common_state": _encoded([made.common]),
        "common_file": _encoded(made.common),
        "objects": objects,
        "keep_rng": made.keep_rng,
        "keep_rerun": made.keep_rerun,
    }
    if question["run_config"] is not None:
        answer["run_config"] = restate_run_config.edited(
            question["run_config"], asked.args_changes, save_rng=made.keep_rng, save_optim=asked.has_optimizer
        )
    return answer | {"notes": notes}


def _loaded(question: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Common state, or a legacy file's entries without what holds tensors, or the objects of torch DCP put together."""
    if isinstance(question["common"], dict):
        return _of_objects(question, notes)
    is_file = question["is_file"]
    where = question["common"] if is_file else "common state"
    value = safe_loading.load(question["common"] if is_file else _stream(question["common"]), where=where)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, dict):
        raise safe_loading.UnreadableError(f"{where}: holds a {type(value).__name__}, not a dictionary")
    if is_file:
        value = restate_common.without_tensors(value, notes)
    out: dict[str, Any] = safe_loading.without_stand_ins(value, where=where, notes=notes)
    return out


def _of_objects(question: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    values = {}
    for name, data in question["common"].items():
        value = safe_loading.load(_stream(data), where=name)
        values[name] = safe_loading.without_stand_ins(value, where=name, notes=notes)
    return restate_objects.nested(values, question["args_changes"])


def _state(name: str, data: str, notes: list[str]) -> Any:
    """The value of an object."""
    value = safe_loading.load(_stream(data), where=name)
    if not isinstance(value, list) or len(value) != 1:
        raise safe_loading.UnreadableError(f"{name}: holds a {type(value).__name__}, not a list of one value")
    return safe_loading.without_stand_ins(value[0], where=name, notes=notes)


def _stream(data: str) -> io.BytesIO:
    return io.BytesIO(b64decode(data))


def _objects(question: Mapping[str, Any], optimizers: Mapping[Any, restate_groups.Optimizer]) -> dict[str, str]:
    """What each rank's optimizer stores beside its buckets, by storage name."""
    out = {}
    for prefix, _ in question["groups"]:
        optimizer = optimizers[restate_groups.place_of(prefix)]
        out[f"{prefix}.optimizer/shard_0_1"] = _encoded([{"param_groups": list(optimizer.groups)}])
        if optimizer.grad_scaler is not None:
            out[f"{prefix}.grad_scaler/shard_0_1"] = _encoded([optimizer.grad_scaler])
        for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):
            numels = [{_dtypes(b["dtype"]): b[name]} for b in question["buffers"][prefix]]
            out[f"{prefix}.{name}/shard_0_1"] = _encoded([numels])
    return out


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    """``(torch.bfloat16, torch.float32)``, as keys on disk have it."""
    return tuple(getattr(torch, name) for name in re.findall(r"torch\.(\w+)", text))


def _encoded(value: Any) -> str:
    """The bytes of torch.save in base 64. Megatron is made to read them once, so that no answer is one that it refuses."""
    out = io.BytesIO()
    torch.save(value, out)
    try:
        torch.load(io.BytesIO(out.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise safe_loading.UnreadableError(f"Megatron would not load its own values back: {error}") from error
    return b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    main()
