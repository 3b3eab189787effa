"""Layouts that a model fits in, for a number of GPUs, and what the largest rank of each holds. Pure.

Estimates: layers count as equal, so that models whose layers differ (dense and expert layers, Mamba and attention) have
ranks that hold more and less than is said. Padding is not counted, nor anything that is not stored: gradients, activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptguard.layout.fits import Dimensions, expert_ranks, wrong
from ckptguard.layout.layouts import Layout
from ckptguard.layout.stages import divisors


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a part of a model, by what cuts them.

    Attributes:
        cut: TP cuts these.
        copied: Each TP rank holds these: norms, routers, biases of row-parallel linears.
        experts: Of all experts: EP and ETP cut these.
    """

    cut: int = 0
    copied: int = 0
    experts: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.cut + other.cut, self.copied + other.copied, self.experts + other.experts)

    def share(self, part: int, of: int) -> Elements:
        """``part / of`` of each, rounded up."""
        return Elements(*(-(-n * part // of) for n in (self.cut, self.copied, self.experts)))


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of a model.

    Attributes:
        dimensions: What a layout has to fit.
        vocabulary: Rows of the embedding as stored, padded.
        layers: Of all layers of the decoder.
        first: What stands before the first layer: embeddings.
        last: What stands behind the last layer: final norm, output layer, MTP layers.
        again: The word embedding, if the last stage holds a copy of it: it is the output layer too, or MTP needs it.
        weight_bytes: Bytes per element of weights.
        optimizer_bytes: Bytes per element of optimizer state, masters included; 0 if there is none.
        distributed: Whether data parallel ranks share optimizer state.
    """

    dimensions: Dimensions
    vocabulary: int
    layers: Elements
    first: Elements
    last: Elements
    again: Elements
    weight_bytes: int
    optimizer_bytes: int
    distributed: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, and what the rank that holds most will hold.

    Attributes:
        layout: Its DP is given, its CP is 1. ``last_pp_layers`` is given where PP does not divide the layers.
        weight_bytes: Of weights.
        optimizer_bytes: Of optimizer state.
    """

    layout: Layout
    weight_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of both."""
        return self.weight_bytes + self.optimizer_bytes


def possible(counts: Counts, gpus: int) -> tuple[Candidate, ...]:
    """Layouts of a model without CP and virtual stages, those with the smallest ranks first, then the simpler ones.

    Args:
        counts: The model.
        gpus: Ranks, all of which are used.
    """
    out = [estimate(counts, layout, gpus) for layout in _layouts(counts.dimensions, gpus)]
    return tuple(sorted(out, key=lambda candidate: (candidate.total_bytes, _complexity(candidate.layout))))


def estimate(counts: Counts, layout: Layout, gpus: int) -> Candidate:
    """What the largest rank holds of a layout that fits, and whose first stages are alike."""
    return max((_rank(counts, layout, gpus, stage) for stage in _stages(counts, layout)), key=lambda c: c.total_bytes)


def _layouts(dims: Dimensions, gpus: int) -> Iterator[Layout]:
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            for ep in divisors(dims.experts) if dims.experts else [1]:
                for etp in (None, 1) if dims.expert_width and tp > 1 else (None,):
                    size = Layout(tp=tp, pp=pp, ep=ep, etp=etp, dp=gpus // (tp * pp))
                    for layout in (size, _uneven(dims.layers, size)):
                        if layout is not None and not any(wrong(dims, layout)):
                            yield layout
                            break


def _uneven(layers: int, layout: Layout) -> Layout | None:
    """As few layers as need be on the last stage, where they cannot be cut evenly; None if none would be left for it."""
    last = layers - (layout.pp - 1) * -(-layers // layout.pp)
    if last < 1 or layout.pp == 1:
        return None
    return Layout(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp, dp=layout.dp, last_pp_layers=last)


def _stages(counts: Counts, layout: Layout) -> Iterator[Elements]:
    """The first, a middle and the last stage."""
    layers = counts.dimensions.layers
    if layout.pp == 1:
        yield counts.first + counts.layers + counts.last
        return
    last = layers // layout.pp if layout.last_pp_layers is None else layout.last_pp_layers
    usual = (layers - last) // (layout.pp - 1)
    middle = counts.layers.share(usual, layers)
    yield counts.first + middle
    if layout.pp > 2:
        yield middle
    yield counts.layers.share(last, layers) + counts.last + counts.again


def _rank(counts: Counts, layout: Layout, gpus: int, stage: Elements) -> Candidate:
    dense = -(-stage.cut // layout.tp) + stage.copied
    expert = -(-stage.experts // (layout.ep * (layout.etp or layout.tp)))
    dense_dp, expert_dp = (
        (gpus // (layout.tp * layout.pp), gpus // expert_ranks(layout)) if counts.distributed else (1, 1)
    )
    state = -(-dense // dense_dp) + -(-expert // expert_dp)
    return Candidate(layout, (dense + expert) * counts.weight_bytes, state * counts.optimizer_bytes)


def _complexity(layout: Layout) -> tuple[int, ...]:
    """Fewer axes, then smaller ones, then even ones."""
    etp = layout.etp or layout.tp
    axes = (layout.tp, layout.pp, layout.ep)
    return (sum(n > 1 for n in axes), etp != layout.tp, layout.last_pp_layers is not None, *axes)
