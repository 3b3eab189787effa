"""Numbers of a stored model that say which layouts it fits in and what a rank of each holds. Pure.

Sources (megatron-core 0.19.2): megatron/training/argument_utils.py ``core_transformer_config_from_args``,
megatron/core/transformer/transformer_config.py ``__post_init__`` for defaults, megatron/core/models/gpt/gpt_layer_specs.py
for ``moe_layer_freq``, megatron/core/ssm/mamba_mixer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.layout.fits import Dimensions
from ckptguard.layout.possible import Counts, Elements

# Every TP rank holds these whole. (The gated norm of a Mamba mixer is cut.)
_COPIED = re.compile(
    r"(?<!mixer\.)norm|router|position_embeddings|(linear_proj|linear_fc2|out_proj)\.bias|_down_proj\.|gate_weight|latent_proj"
)
_STATES = {"param", "fp32_param", "master_param", "exp_avg", "exp_avg_sq", "momentum_buffer"}
_MAMBA_EXPANSION = 2


def number(args: Mapping[str, object], name: str, default: int = 0) -> int:
    """An argument that is a number; the default where it is not stored, or None."""
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def pattern_of(args: Mapping[str, object]) -> str | None:
    """A hybrid model's layer pattern as 0.19 stores it, with its MTP part; None for any other model.

    Until 0.16 it was ``hybrid_override_pattern``, and ``mtp_hybrid_override_pattern`` stood beside it.
    """
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return None
    mtp = args.get("mtp_hybrid_override_pattern")
    if isinstance(mtp, str) and "/" not in pattern:
        pattern += f"/{mtp}" * number(args, "mtp_num_layers")
    return pattern


def dimensions_of(args: Mapping[str, object]) -> Dimensions:
    """What a layout has to fit, from training args as plain values."""
    pattern = pattern_of(args)
    heads = number(args, "num_attention_heads", 1)
    groups = number(args, "num_query_groups") or heads
    groups = groups if args.get("group_query_attention", True) else heads
    mla = bool(args.get("multi_latent_attention")) or bool(set(pattern or "") & set("+D"))
    width = number(args, "kv_channels") or number(args, "hidden_size") // heads
    experts = number(args, "num_experts")
    expert_width = number(args, "moe_ffn_hidden_size") or number(args, "ffn_hidden_size")
    return Dimensions(
        layers=_layers(args, pattern),
        heads=heads,
        groups=groups,
        head_width=0 if mla else width,
        over_tp=tuple(_over_tp(args, pattern)),
        experts=experts,
        expert_width=expert_width if _has_experts(experts, pattern) else 0,
        expert_bias=bool(args.get("add_bias_linear", False)),
        mtp=pattern.count("/") if pattern is not None else number(args, "mtp_num_layers"),
        pattern=pattern,
    )


def _layers(args: Mapping[str, object], pattern: str | None) -> int:
    return number(args, "num_layers") if pattern is None else len(pattern.partition("/")[0].replace("|", ""))


def _has_experts(experts: int, pattern: str | None) -> bool:
    return experts > 0 and (pattern is None or "E" in pattern)


def _over_tp(args: Mapping[str, object], pattern: str | None) -> Iterator[tuple[str, int]]:
    kinds = pattern or ""
    if _has_dense_mlp(args, pattern):
        yield "the MLP's width", number(args, "ffn_hidden_size")
    shared = number(args, "moe_shared_expert_intermediate_size")
    if shared and _has_experts(number(args, "num_experts"), pattern):
        yield "the shared experts' width", shared
    if "M" in kinds:
        inner = _MAMBA_EXPANSION * number(args, "hidden_size")
        yield "Mamba heads", number(args, "mamba_num_heads") or inner // number(args, "mamba_head_dim", 64)
        yield "Mamba groups", number(args, "mamba_num_groups", 8)
    if "G" in kinds or args.get("experimental_attention_variant") == "gated_delta_net":
        yield "key heads of linear attention", number(args, "linear_num_key_heads")
        yield "value heads of linear attention", number(args, "linear_num_value_heads")


def _has_dense_mlp(args: Mapping[str, object], pattern: str | None) -> bool:
    """Whether any layer has an MLP that is no expert."""
    if pattern is not None:
        return "-" in pattern
    if not number(args, "num_experts"):
        return True
    every = args.get("moe_layer_freq", 1)
    return 0 in every if isinstance(every, list | tuple) else every != 1 and number(args, "num_layers") > 1


def counts_of(index: Index) -> Counts:
    """Numbers of a checkpoint, from its args and its table of tensors.

    Args:
        index: With Megatron's global names: ``torch_dist``, or legacy files through ``legacy_names.to_global``.

    Raises:
        UnsupportedError: It has no word embedding under that name, or no args.
    """
    args = index.facts.args
    weights = [entry for name, entry in index.tensors.items() if not _is_state(name)]
    words = next((e for e in weights if e.name.endswith("embedding.word_embeddings.weight")), None)
    if words is None or not number(args, "num_attention_heads"):
        raise UnsupportedError(
            f"{index.location}: its {'word embedding' if words is None else 'training args'} cannot be found, so its"
            " layouts cannot be listed",
        )
    dims = dimensions_of(args)
    layers, first, last = Elements(), Elements(), Elements()
    for entry in weights:
        part = _elements(entry)
        if entry.name.startswith("decoder.layers."):
            layers += part
        elif entry.name.startswith("embedding."):
            first += part
        else:
            last += part
    tied = not args.get("untie_embeddings_and_output_weights", True)
    numel = sum(entry.numel for entry in weights)
    return Counts(
        dimensions=dims,
        vocabulary=words.shape[0],
        layers=layers,
        first=first,
        last=last,
        again=Elements(words.numel if tied or dims.mtp else 0),
        weight_bytes=round(sum(entry.size_bytes for entry in weights) / max(1, numel)),
        optimizer_bytes=sum(_state_sizes(index).values()),
        distributed=bool(args.get("use_distributed_optimizer", False)),
    )


def _elements(entry: TensorEntry) -> Elements:
    if ".experts." in entry.name:
        return Elements(experts=entry.numel)
    return Elements(copied=entry.numel) if _COPIED.search(entry.name) else Elements(cut=entry.numel)


def _state_sizes(index: Index) -> dict[str, int]:
    """Bytes per element of each state of the optimizer."""
    out: dict[str, int] = {}
    for name, entry in index.tensors.items():
        if _is_state(name):
            state = next((part for part in name.split(".") if part in _STATES), None)
            out |= {state: entry.dtype.itemsize} if state else {}
    return out


def _is_state(name: str) -> bool:
    """Whether a tensor is the optimizer's; legacy files name theirs by file, ``mp_rank_00/distrib_optim.pt:...``."""
    return name.startswith(("optimizer.", "chained_")) or ":" in name
