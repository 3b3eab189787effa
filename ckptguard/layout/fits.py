"""Which layouts Megatron can cut a model into, by its numbers. Pure.

Sources (megatron-core 0.19.2): megatron/core/transformer/transformer_config.py ``__post_init__``, attention.py, mlp.py,
moe/moe_layer.py, megatron/core/ssm/mamba_mixer.py, megatron/core/parallel_state.py ``initialize_model_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm

from ckptguard.layout.layouts import Layout
from ckptguard.layout.stages import divisors, words, wrong_stages


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Numbers of a model that a layout has to fit. The vocabulary is none of them: it is padded.

    Attributes:
        layers: Layers of the decoder, without MTP layers.
        heads: Attention heads.
        groups: Query groups (KV heads); ``heads`` where each head has its own.
        head_width: Of keys and values, where they are rows of one projection with the queries; 0 where they are not (MLA).
        over_tp: What else TP must divide, with its name: ``("the MLP's width", 14336)``.
        experts: Experts of a layer; 0 if none.
        expert_width: Hidden size of an expert, which ETP must divide; 0 if no layer has experts.
        expert_bias: Whether experts have biases, which Megatron allows without ETP only.
        mtp: MTP layers.
        pattern: A hybrid model's layer pattern, with its ``|`` and its MTP part; None for any other.
    """

    layers: int
    heads: int
    groups: int
    head_width: int = 0
    over_tp: tuple[tuple[str, int], ...] = ()
    experts: int = 0
    expert_width: int = 0
    expert_bias: bool = False
    mtp: int = 0
    pattern: str | None = None


def wrong(dims: Dimensions, layout: Layout) -> Iterator[str]:
    """Why Megatron refuses a layout, a reason each: what does not fit, its number, and values that would.

    DP is looked at only if it is given. CP cuts no tensor and fits always, by itself.
    """
    if not _heads_fit(dims, layout.tp):
        many = f"{dims.heads} attention heads" + (f" in {dims.groups} query groups" if dims.groups < dims.heads else "")
        yield f"{many} over --tp {layout.tp} (these work: {words([n for n in divisors(dims.heads) if _heads_fit(dims, n)])})"
    for name, number in dims.over_tp:
        if number % layout.tp:
            yield f"{name}, {number}, over --tp {layout.tp} (these work: {words(divisors(number))})"
    yield from _wrong_experts(dims, layout)
    yield from wrong_stages(dims.layers, dims.mtp, dims.pattern, layout)
    if layout.dp is not None:
        yield from _wrong_world(layout, layout.dp)


def dense_ranks(layout: Layout) -> int:
    """TP x PP x CP: the world size is a multiple of it."""
    return layout.tp * layout.pp * layout.cp


def expert_ranks(layout: Layout) -> int:
    """ETP x EP x PP: the world size is a multiple of it too, with and without experts."""
    return (layout.etp or layout.tp) * layout.ep * layout.pp


def smallest_world(layout: Layout) -> int:
    """Ranks of the smallest world that a layout fits in."""
    return lcm(dense_ranks(layout), expert_ranks(layout))


def _heads_fit(dims: Dimensions, tp: int) -> bool:
    """TP divides the heads; it divides the query groups or is a multiple of them, and then it divides their rows."""
    shared = tp % dims.groups == 0 and 2 * dims.groups * dims.head_width % tp == 0
    return dims.heads % tp == 0 and (dims.groups % tp == 0 or shared)


def _wrong_experts(dims: Dimensions, layout: Layout) -> Iterator[str]:
    etp = layout.etp or layout.tp
    if layout.ep > 1 and not dims.experts:
        yield f"--ep {layout.ep}, but the model has no experts (1 works)"
    if not dims.expert_width:
        return
    if dims.experts % layout.ep:
        yield f"{dims.experts} experts over --ep {layout.ep} (these work: {words(divisors(dims.experts))})"
    default = "" if layout.etp else ", which is --tp unless given"
    if dims.expert_width % etp:
        fit = words(divisors(dims.expert_width))
        yield f"an expert's width, {dims.expert_width}, over --etp {etp}{default} (these work: {fit})"
    if dims.expert_bias and etp > 1:
        yield f"experts with biases over --etp {etp}{default} (1 works)"


def _wrong_world(layout: Layout, dp: int) -> Iterator[str]:
    dense, expert = dense_ranks(layout), expert_ranks(layout)
    if dense * dp % expert:
        step = expert // gcd(dense, expert)
        yield (
            f"{dense * dp} ranks, TP x PP x CP x DP, over ETP x EP x PP, {expert}"
            f" (these --dp work: {words([step * n for n in range(1, 5)])}, ...)"
        )
