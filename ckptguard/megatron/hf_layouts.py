"""Target layouts of a Hugging Face model: what Megatron can cut, and how to tell a provider. Asking process only."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from ckptguard.core.errors import UnsupportedError
from ckptguard.layout.layouts import Layout


def as_args(layout: Layout) -> Namespace:
    """What ``worlds.ranks`` reads."""
    return Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_tp_pp_dp_mapping=False,
    )


def apply(provider: Any, layout: Layout) -> None:
    """Sets a provider's parallel sizes."""
    provider.tensor_model_parallel_size = layout.tp
    provider.pipeline_model_parallel_size = layout.pp
    provider.virtual_pipeline_model_parallel_size = layout.vpp if layout.vpp > 1 else None
    provider.expert_model_parallel_size = layout.ep
    provider.expert_tensor_parallel_size = layout.etp or layout.tp
    provider.num_layers_in_first_pipeline_stage = layout.first_pp_layers
    provider.num_layers_in_last_pipeline_stage = layout.last_pp_layers
    provider.pipeline_model_parallel_layout = layout.pp_layout
    provider.context_parallel_size = 1


def padded_vocabulary(provider: Any, layout: Layout, multiple: int | None) -> int:
    """Rows of the embedding: the vocabulary, padded to a multiple of ``make_vocab_size_divisible_by`` x TP.

    megatron/training/global_vars or megatron.bridge.utils.vocab_utils ``calculate_padded_vocab_size``.
    """
    step = (multiple or int(provider.make_vocab_size_divisible_by)) * layout.tp
    return -(-int(provider.vocab_size) // step) * step


def refuse(provider: Any, layout: Layout, architecture: str) -> None:
    """Raises if Megatron cannot cut this model so; names the values that work.

    Raises:
        UnsupportedError: Heads, groups, experts or layers do not fit the sizes; all that is wrong at once.
    """
    wrong = list(_wrong(provider, layout))
    if wrong:
        raise UnsupportedError(
            f"{architecture} cannot be laid out so: {'; '.join(wrong)}",
            next_step="Choose among the values named.",
        )


def _wrong(provider: Any, layout: Layout) -> Iterator[str]:
    heads, layers = int(provider.num_attention_heads), _layers(provider)
    groups = int(getattr(provider, "num_query_groups", None) or heads)
    experts = int(getattr(provider, "num_moe_experts", None) or 0)
    mla = bool(getattr(provider, "multi_latent_attention", False))
    if not _tp_fits(layout.tp, heads, groups, mla):
        fit = [n for n in range(1, heads + 1) if _tp_fits(n, heads, groups, mla)]
        yield f"{heads} heads{'' if mla else f' and {groups} KV groups'} over --tp {layout.tp} (these work: {_words(fit)})"
    if layout.ep > 1 and not experts:
        yield f"--ep {layout.ep}, but the model has no experts (1 works)"
    elif experts and experts % layout.ep:
        yield f"{experts} experts over --ep {layout.ep} (these work: {_words(_divisors(experts))})"
    expert_width = int(getattr(provider, "moe_ffn_hidden_size", None) or provider.ffn_hidden_size or 0)
    etp = layout.etp or layout.tp
    if experts and expert_width % etp:
        yield f"experts {expert_width} wide over --etp {etp} (these work: {_words(_divisors(expert_width))})"
    width = int(provider.ffn_hidden_size or 0)
    if width % layout.tp:
        yield f"an MLP {width} wide over --tp {layout.tp}"
    if layout.pp_layout is None:
        yield from _wrong_stages(layers, layout)
    elif layout.first_pp_layers or layout.last_pp_layers:
        yield "--pp-layout says all; --first-pp-layers and --last-pp-layers cannot be given beside it"


def _layers(provider: Any) -> int:
    """Layers of the decoder; some hybrid models leave their number to the pattern, whose "|" and "/" are no layers."""
    if provider.num_layers is not None:
        return int(provider.num_layers)
    return len(provider.hybrid_layer_pattern.partition("/")[0].replace("|", ""))


def _tp_fits(tp: int, heads: int, groups: int, mla: bool) -> bool:
    """Query groups fewer than TP are repeated at run time (megatron/core/transformer/attention.py, 0.19.2)."""
    return heads % tp == 0 and (mla or groups % tp == 0 or tp % groups == 0)


def _wrong_stages(layers: int, layout: Layout) -> Iterator[str]:
    ends = [n for n in (layout.first_pp_layers, layout.last_pp_layers) if n is not None]
    if layout.pp == 1:
        if ends:
            yield "--first-pp-layers and --last-pp-layers cut stages; --pp is 1"
        if layout.vpp > 1:
            yield f"--vpp {layout.vpp} needs --pp above 1"
        return
    rest, stages = layers - sum(ends), layout.pp - len(ends)
    if rest < 0 or (not stages and rest):
        yield f"{' and '.join(map(str, ends))} layers at the ends, but the model has {layers} on {layout.pp} stages"
        return
    if stages and (rest % (stages * layout.vpp) or not rest):
        fit = [n for n in range(2, layers + 1) if layers % (n * layout.vpp) == 0]
        more = (
            "" if ends else f" (these --pp work evenly: {_words(fit)}; or give --first-pp-layers and --last-pp-layers)"
        )
        yield f"{rest} layers over {stages} stages{f' of {layout.vpp} parts' if layout.vpp > 1 else ''}{more}"
    for n in ends:
        if n % layout.vpp:
            yield f"{n} layers at an end over --vpp {layout.vpp}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _words(numbers: list[int]) -> str:
    shown = [str(n) for n in numbers[:16]]
    return ", ".join([*shown, "..."] if len(numbers) > 16 else shown) or "none"
