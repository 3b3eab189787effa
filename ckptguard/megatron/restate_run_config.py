"""Megatron-Bridge's ``run_config.yaml`` with another layout, and not one other byte changed.

The text itself is edited, at the places that YAML's parser names: a file that Bridge wrote need not come out of another
writer the same.

Source (megatron-bridge 0.6.2): megatron/bridge/training/checkpointing.py ``_load_checkpoint_from_path`` takes the parallel
sizes from ``model`` and ``save_rng``, ``save_optim`` from ``checkpoint``; ``get_rng_state`` keys RNG states by data parallel
rank too with expert parallelism. Names of a provider's fields: megatron/core/transformer/transformer_config.py,
megatron/core/model_parallel_config.py (megatron-core 0.19.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

# Field of the model's config <- argument of Megatron-LM.
_FIELDS = {
    **{name: name for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "hierarchical_context_parallel_sizes", "tp_comm_overlap",
        "overlap_p2p_comm", "hybrid_layer_pattern",
    )},
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}  # fmt: skip


class NotUnderstoodError(Exception):
    """The file is not what Bridge writes; says how."""


def read(text: str) -> dict[str, Any]:
    """The file as plain values. Raises NotUnderstoodError where it is not YAML, or has no model and checkpoint mapping."""
    try:
        out = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise NotUnderstoodError(f"run_config.yaml: not YAML: {error}") from error
    if not isinstance(out, dict) or not all(isinstance(out.get(name), dict) for name in ("model", "checkpoint")):
        raise NotUnderstoodError("run_config.yaml: no mappings 'model' and 'checkpoint' in it")
    return out


def loses_rng(text: str, args_changes: Mapping[str, object], *, world_changed: bool) -> bool:
    """Whether Bridge names RNG states otherwise in the new layout: with expert parallelism each DP rank has its own."""
    before = read(text)["model"].get("expert_model_parallel_size") or 1
    after: Any = args_changes.get("expert_model_parallel_size") or before
    return (before > 1) != (after > 1) or (after > 1 and world_changed)


def edited(text: str, args_changes: Mapping[str, object], *, save_rng: bool, save_optim: bool) -> str:
    """The text with the model's layout and what is stored as said.

    Args:
        text: Of the source.
        args_changes: New values of Megatron-LM's arguments; those that a provider has no field for are left alone.
        save_rng: Whether the checkpoint holds RNG states.
        save_optim: Whether it holds optimizer state.

    Raises:
        NotUnderstoodError: As ``read``, or a value stands where it cannot be replaced alone.
    """
    before = read(text)
    path: tuple[str, ...] = ("model",)
    if "tensor_model_parallel_size" not in before["model"] and isinstance(before["model"].get("transformer"), dict):
        path = ("model", "transformer")
    layout = {field: args_changes[name] for field, name in _FIELDS.items() if name in args_changes}
    layout |= _vocabulary(before["model"], args_changes)
    wanted = {(*path, field): value for field, value in layout.items()}
    wanted |= {("checkpoint", "save_rng"): save_rng, ("checkpoint", "save_optim"): save_optim}
    alone = True
    for keys, value in wanted.items():
        if alone and _at(before, keys[:-1]).get(keys[-1]) != value:
            text = _replaced(text, keys, value)
            _at(before, keys[:-1])[keys[-1]] = value
            alone = _reads_as(text, before)
    if not alone:
        raise NotUnderstoodError("run_config.yaml: one of its values cannot be changed without changing others")
    return text


def _reads_as(text: str, value: dict[str, Any]) -> bool:
    try:
        return bool(yaml.safe_load(text) == value)
    except yaml.YAMLError:
        return False


def _vocabulary(model: Mapping[str, Any], args_changes: Mapping[str, object]) -> dict[str, object]:
    """A provider that does not pad its vocabulary itself says the padded size."""
    padded = args_changes.get("padded_vocab_size")
    return {"vocab_size": padded} if padded and model.get("should_pad_vocab") is False else {}


def _at(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        value = value[key]
    return value


def _replaced(text: str, keys: tuple[str, ...], value: object) -> str:
    """The text with one value replaced or, as the first of its mapping, added."""
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in keys[:-1]:
        node = next(child for name, child in node.value if name.value == key)
    written = yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n").removesuffix("\n...")
    old = next((child for name, child in node.value if name.value == keys[-1]), None)
    if old is None:
        begin = node.value[0][0].start_mark
        separator = ", " if node.flow_style else "\n" + " " * begin.column
        return f"{text[: begin.index]}{keys[-1]}: {written}{separator}{text[begin.index :]}"
    begin, end = old.start_mark.index, old.end_mark.index
    if isinstance(old, yaml.CollectionNode) and not old.flow_style:  # ends where the next key begins
        kept = text[begin:end].rstrip()
        end = begin + len(kept)
        begin = text.rindex(":", 0, begin) + 1
        written = f" {written}"
    elif begin == end:  # nothing stands for null
        written = f" {written}"
    return text[:begin] + written + text[end:]
