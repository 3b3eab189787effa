"""Training args of a target layout, as Megatron-LM would have stored them. Pure.

Source: megatron/training/arguments.py ``validate_args`` (megatron-core 0.19.2), which computes sizes and switches from the
flags; megatron/core/tokenizers/utils/build_tokenizer.py ``vocab_size_with_padding``. ``args`` on disk are the namespace after
both, with ``pipeline_model_parallel_layout`` as the text of the flag: only the config made from it holds an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptguard.core.errors import UsageError
from ckptguard.layout.fits import dense_ranks, expert_ranks, smallest_world, wrong
from ckptguard.layout.layouts import Layout
from ckptguard.layout.stages import cut_pattern, virtual_stages
from ckptguard.megatron.model_numbers import dimensions_of, number

# Nothing is stored for these where the source's release did not know them.
_ONLY_IF_KNOWN = (
    "transformer_pipeline_model_parallel_size", "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards", "overlap_p2p_comm", "align_param_gather", "tp_comm_overlap",
    "hierarchical_context_parallel_sizes", "inprocess_active_world_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TargetArgs:
    """Args of a target layout.

    Attributes:
        args: All of them, for asking Megatron about the target.
        changes: Those that are not as the source stores them, with their values in the target.
        notes: Sentences about what the layout brings with it.
    """

    args: Mapping[str, object]
    changes: Mapping[str, object]
    notes: tuple[str, ...]


def target_args(
    stored: Mapping[str, object],
    layout: Layout,
    *,
    optimizer: Literal["dp_reshardable", "fully_reshardable", "plain"] | None,
    vocabulary_rows: int | None,
    keep_rng: bool = False,
) -> TargetArgs:
    """Args that a run of this layout would have stored.

    Args:
        stored: Those of the source, as plain values (``Facts.args``).
        layout: The target's. DP None keeps the world size where the layout fits it, and is else as small as can be.
        optimizer: Form of the target's optimizer state; None if it has none, "plain" if the optimizer is not distributed.
        vocabulary_rows: Rows of the stored word embedding, padding included; None takes the args' word.
        keep_rng: Whether the target has RNG state.

    Raises:
        UsageError: Megatron cannot lay the model out so; all reasons at once.
    """
    dims = dimensions_of(stored)
    reasons = list(wrong(dims, layout))
    if reasons:
        raise UsageError(
            f"the model cannot be laid out as {layout}: {'; '.join(reasons)}",
            next_step="Choose among the values named, or list layouts with --list-layouts --gpus N.",
        )
    world = _world(stored, layout)
    rows = _vocabulary(stored, layout.tp, vocabulary_rows)
    values = {
        **_sizes(layout, world),
        **_stages(dims.layers, dims.pattern, layout),
        **_switches(stored, layout, dims.pattern, world),
        "padded_vocab_size": rows,
        "no_save_rng": bool(stored.get("no_save_rng")) if keep_rng else True,
        "no_save_optim": optimizer is None,
    }
    if optimizer in ("dp_reshardable", "fully_reshardable"):
        values["dist_ckpt_optim_fully_reshardable"] = optimizer == "fully_reshardable"
        values["use_distributed_optimizer"] = True
    values = {name: value for name, value in values.items() if name in stored or name not in _ONLY_IF_KNOWN}
    changes = {name: value for name, value in values.items() if _differs(stored, name, value)}
    notes = tuple(_notes(stored, layout, {**stored, **values}, vocabulary_rows))
    return TargetArgs({**stored, **values}, changes, notes)


def _differs(stored: Mapping[str, object], name: str, value: object) -> bool:
    """Whether a value says something else than what is stored, or than an argument that is not stored: off, or a size of 1."""
    if name in stored:
        return stored[name] != value and bool(stored[name] or value)
    default = stored.get("tensor_model_parallel_size") if name == "expert_tensor_parallel_size" else 1
    return bool(value) and (value is True or value != default)


def _world(stored: Mapping[str, object], layout: Layout) -> int:
    if layout.dp is not None:
        return dense_ranks(layout) * layout.dp
    world = number(stored, "world_size")
    fits = world and world % dense_ranks(layout) == 0 and world % expert_ranks(layout) == 0
    return world if fits else smallest_world(layout)


def _vocabulary(stored: Mapping[str, object], tp: int, rows: int | None) -> int | None:
    """Rows of the target's embedding: as a run with this TP pads the vocabulary, if the args say how large it is.

    ``vocab_size`` is a flag, which some tokenizers do not heed and others add to; it is the vocabulary's if padding it gives
    the rows that are stored. Otherwise stored rows stay where TP divides them.
    """
    rows = rows if rows is not None else (number(stored, "padded_vocab_size") or None)
    multiple, vocabulary = number(stored, "make_vocab_size_divisible_by", 1), number(stored, "vocab_size")
    if vocabulary and rows == _padded(vocabulary, multiple * number(stored, "tensor_model_parallel_size", 1)):
        return _padded(vocabulary, multiple * tp)
    return rows if rows is None or rows % tp == 0 else _padded(rows, multiple * tp)


def _padded(rows: int, step: int) -> int:
    return -(-rows // step) * step


def _sizes(layout: Layout, world: int) -> dict[str, object]:
    etp = layout.etp or layout.tp
    return {
        "world_size": world,
        "data_parallel_size": world // dense_ranks(layout),
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "transformer_pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": etp,
        "tensor_parallel_num_weight_shards": layout.tp,
        "expert_tensor_parallel_num_weight_shards": etp,
    }


def _stages(layers: int, pattern: str | None, layout: Layout) -> dict[str, object]:
    """One of three flags says the virtual stages: layers per stage of an even cut, their number, or a layout's text."""
    virtual = virtual_stages(layout, pattern)
    if pattern is not None:  # a pattern with its stages forbids all other words about them
        return _stage_args(virtual) | {"hybrid_layer_pattern": cut_pattern(pattern, layout)}
    if layout.pp_layout is not None:
        return _stage_args(virtual) | {"pipeline_model_parallel_layout": layout.pp_layout}
    first, last = layout.first_pp_layers, layout.last_pp_layers
    out = _stage_args(virtual) | {
        "decoder_first_pipeline_num_layers": first,
        "decoder_last_pipeline_num_layers": last,
        "account_for_embedding_in_pipeline_split": layout.count_embedding,
        "account_for_loss_in_pipeline_split": layout.count_loss,
    }
    if virtual > 1 and first is None and last is None:
        counted = layers + layout.count_embedding + layout.count_loss
        out["num_layers_per_virtual_pipeline_stage"] = counted // (layout.pp * virtual)
    elif virtual > 1:
        out["num_virtual_stages_per_pipeline_rank"] = virtual
    return out


def _stage_args(virtual: int) -> dict[str, object]:
    """Everything about stages but their number left out."""
    return {
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
    }


def _switches(stored: Mapping[str, object], layout: Layout, pattern: str | None, world: int) -> dict[str, object]:
    """What Megatron switches off, or cannot do without, in a layout; where a switch had no say before, its default.

    The MoE layer refuses to train with TP and without sequence parallelism (megatron/core/transformer/moe/moe_layer.py).
    """
    sequence = bool(stored.get("sequence_parallel"))
    if number(stored, "tensor_model_parallel_size", 1) == 1:
        sequence = bool(number(stored, "num_experts"))
    sequence = sequence and layout.tp > 1
    out: dict[str, object] = {
        "sequence_parallel": sequence,
        "tp_comm_overlap": bool(stored.get("tp_comm_overlap")) and sequence,
    }
    interleaved = virtual_stages(layout, pattern) > 1
    was = number(stored, "virtual_pipeline_model_parallel_size", 1) > 1
    for name in ("overlap_p2p_comm", "align_param_gather"):
        out[name] = interleaved and (bool(stored.get(name)) if was else True)
    if interleaved and layout.pp == 2:
        out["overlap_p2p_comm"] = True  # two ranks cannot interleave without it
    if stored.get("inprocess_active_world_size") == stored.get("world_size"):  # what it is unless given
        out["inprocess_active_world_size"] = world
    if number(stored, "context_parallel_size", 1) != layout.cp:
        out["hierarchical_context_parallel_sizes"] = None
    return out


def _notes(
    stored: Mapping[str, object], layout: Layout, target: Mapping[str, object], rows: int | None
) -> Iterator[str]:
    world, dp = number(target, "world_size"), number(target, "data_parallel_size", 1)
    before = number(stored, "world_size")
    if layout.dp is None and before and before != world:
        yield f"The source's world size, {before}, does not fit {layout}: the target says {world}, the smallest that does."
    if bool(stored.get("sequence_parallel")) != target["sequence_parallel"]:
        how = "on, as experts with TP need it" if target["sequence_parallel"] else "off, as TP is 1"
        yield f"Sequence parallelism is {how}; it cuts nothing that is stored."
    if number(stored, "context_parallel_size", 1) != layout.cp:
        yield f"Context parallelism is {layout.cp} instead of {number(stored, 'context_parallel_size', 1)}; it cuts no weights."
    rows = rows if rows is not None else number(stored, "padded_vocab_size")
    padded = number(target, "padded_vocab_size")
    if rows and padded != rows:
        yield f"The vocabulary is padded to {padded} rows instead of {rows}, as Megatron-LM pads it for TP {layout.tp}."
    if target.get("hybrid_layer_pattern") != stored.get("hybrid_layer_pattern"):
        yield f"A hybrid model's pattern says its stages: hybrid_layer_pattern is {target['hybrid_layer_pattern']} now."
    batch, micro = number(stored, "global_batch_size"), number(stored, "micro_batch_size")
    if batch and micro and batch % (micro * dp):
        yield (
            f"The global batch size, {batch}, is no multiple of micro batch size x DP, {micro} x {dp}: Megatron-LM will"
            " want other sizes."
        )
