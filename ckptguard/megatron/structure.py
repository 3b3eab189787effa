"""Which part of which global tensor each model-parallel rank owns, as Megatron Core itself says.

And where its optimizer state stands. Values only; ``ask`` gets them from a process that runs Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ckptguard.core.boxes import Box
from ckptguard.core.index import Index
from ckptguard.megatron.ask import TIMEOUT_SECONDS, Question, ask
from ckptguard.megatron.sampled import at_place

SAMPLE_ABOVE = 8
"""Ranks of a pipeline stage; stages with more are described by some of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a global tensor, and where a rank's own tensor holds it.

    Attributes:
        key: Global name, as ``torch_dist`` stores it.
        shape: Global shape, prepended layer and expert dims included.
        box: In the global tensor.
        local: In the rank's own tensor, which has no prepended dims.
        main: Whether Megatron saves this copy, where several ranks hold the same box.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    local: Box
    main: bool


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A parameter or buffer of one rank.

    Attributes:
        name: In the rank's ``state_dict``, as legacy files name it.
        dtype: torch's name.
        shape: Of the rank's own tensor.
        trainable: Whether the optimizer has state for it.
        parts: What it is of global tensors; two for a SwiGLU ``linear_fc1`` (gate and up), one for most.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter's state stands in a bucket: elements ``[begin, end)``, row-major, counted from its start."""

    tensor: LocalTensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of optimizer state as it is stored, without the padding at its end.

    ``fully_reshardable`` state, which is one tensor per parameter, is written in the order of ``places`` too: bucket after
    bucket, buffer after buffer (megatron/core/optimizer/distrib_optimizer.py, 0.19.2,
    ``sharded_param_state_fully_reshardable``).

    Attributes:
        numel: Elements stored of each state.
        padded: Elements with the padding at its end, which makes it divisible among the data parallel ranks of the args.
        places: Its parameters in order; between two of them there may be padding.
    """

    numel: int
    padded: int
    places: tuple[Place, ...]

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of elements that belong to no parameter."""
        out, at = [], 0
        for place in self.places:
            if place.begin > at:
                out.append((at, place.begin))
            at = place.end
        return (*out, (at, self.numel)) if at < self.numel else tuple(out)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A gradient buffer of the distributed optimizer, numbered ``gbuf_idx_N`` by its position.

    Attributes:
        dtype: As the keys on disk have it: ``(torch.bfloat16, torch.float32)``, of parameters and gradients.
        buckets: Its buckets in order.
    """

    dtype: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class RankStructure:
    """What one model-parallel rank owns.

    Attributes:
        rank: In the smallest world that has all model-parallel ranks.
        at: Its place per axis: ``tp``, ``pp``, ``ep``, ``etp``; ``dense_dp`` and ``expert_dp``, which are 0 for the rank
            that writes legacy files; ``dense_group`` and ``expert_group``, the ``dp_group_idx`` of its optimizers.
        chunks: Tensors of each model chunk (several with virtual pipeline stages).
        objects: Names on disk of the objects (``_extra_state``) that this rank saves for all, in Megatron's order.
        dense: Buffers of its dense parameters.
        expert: Buffers of its expert parameters, which are sharded over another group.
    """

    rank: int
    at: Mapping[str, int]
    chunks: tuple[tuple[LocalTensor, ...], ...]
    objects: tuple[str, ...]
    dense: tuple[Buffer, ...]
    expert: tuple[Buffer, ...]


@dataclass(frozen=True)
class Structures:
    """The ranks of a layout.

    Attributes:
        ranks: Every model-parallel rank.
        megatron: Version of the Megatron Core that was asked.
        no_buckets: Why the optimizer's buckets are not known; None if they are.
    """

    ranks: tuple[RankStructure, ...]
    megatron: str
    no_buckets: str | None

    @cached_property
    def has_expert_optimizer(self) -> bool:
        """Whether ranks have two optimizers: if any rank has expert parameters, all do.

        megatron/core/optimizer/__init__.py ``_get_param_groups`` aligns the parameter groups of all ranks (0.19.2).
        """
        return any(rank.expert for rank in self.ranks)

    @cached_property
    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every global tensor of the model, by key."""
        parts = (p for rank in self.ranks for chunk in rank.chunks for tensor in chunk for p in tensor.parts)
        return {part.key: part.shape for part in parts}


def rank_structures(
    args: Mapping[str, object],
    *,
    content_metadata: Mapping[str, object] | None = None,
    transformer_impl: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Structures:
    """Asks Megatron Core what each model-parallel rank owns of the model that the training args describe.

    Data and context parallel ranks hold the same tensors and are left out. One process is started, without a GPU; nothing
    of the caller's changes.

    Args:
        args: ``Facts.args``: plain values.
        content_metadata: ``Facts.content_metadata``, for what changes key names.
        transformer_impl: ``local`` or ``transformer_engine`` instead of what the args say.
        timeout_seconds: How long Megatron may take.

    Raises:
        UnsupportedError: The args do not lead to a model; names what is missing or refused.
        EnvironmentFailedError: The process failed or ran too long.
    """
    question = (args, content_metadata or {}, transformer_impl)
    return structures_for([question], timeout_seconds=timeout_seconds)[0]


def structures_for(
    questions: Sequence[Question], *, sample_above: int = SAMPLE_ABOVE, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Structures]:
    """As ``rank_structures``, for several layouts at once: starting the process that answers costs seconds.

    Args:
        questions: Of each its args, content metadata and transformer_impl (None: as the args say).
        sample_above: Pipeline stages of more ranks than this are described by some of them (``sampled``), if what all
            ranks save by that is each global tensor, once.
        timeout_seconds: How long Megatron may take for all of them.

    Raises:
        UnsupportedError: The args of one do not lead to a model; names what is missing or refused.
        EnvironmentFailedError: The process failed or ran too long.
    """
    answers = ask(questions, sample_above=sample_above, timeout_seconds=timeout_seconds)
    out = [from_plain(answer) for answer in answers]
    sampled = [n for n, answer in enumerate(answers) if any("fitted" in stage for stage in answer["stages"])]
    again = [n for n in sampled if not _is_whole(out[n])]
    if again:
        every_rank = ask([questions[n] for n in again], timeout_seconds=timeout_seconds)
        out = [from_plain(every_rank[again.index(n)]) if n in again else made for n, made in enumerate(out)]
    return out


def _is_whole(structures: Structures) -> bool:
    """Whether the copies that are saved have as many elements as the global tensors they lie in, and objects differ."""
    sizes = {key: prod(shape) for key, shape in structures.global_shapes.items()}
    for rank in structures.ranks:
        for part in (p for chunk in rank.chunks for tensor in chunk for p in tensor.parts):
            if not part.box.within(part.shape):
                return False
            sizes[part.key] -= part.box.numel if part.main else 0
    objects = [name for rank in structures.ranks for name in rank.objects]
    return not any(sizes.values()) and len(set(objects)) == len(objects)


def structures_of(index: Index, *, transformer_impl: str | None = None) -> Structures:
    """As ``rank_structures``, for an index's own args and content metadata."""
    facts = index.facts
    return rank_structures(facts.args, content_metadata=facts.content_metadata, transformer_impl=transformer_impl)


def from_plain(answer: Mapping[str, Any]) -> Structures:
    """Values from the plain form that crosses between the processes."""
    ranks = [rank for stage in answer["stages"] for rank in _stage(stage)]
    ranks.sort(key=lambda rank: rank.rank)
    return Structures(tuple(ranks), answer["megatron"], answer["no_buckets"])


def _stage(plain: Mapping[str, Any]) -> Iterator[RankStructure]:
    make = at_place(plain["fitted"]) if "fitted" in plain else None
    for number, (rank, at) in enumerate(zip(plain["ranks"], plain["at"], strict=True)):
        yield _rank(rank, at, make(at) if make else plain["each"][number])


def _rank(rank: int, at: Mapping[str, int], plain: Mapping[str, Any]) -> RankStructure:
    chunks = tuple(tuple(_tensor(tensor) for tensor in chunk) for chunk in plain["chunks"])
    by_name = [{tensor.name: tensor for tensor in chunk} for chunk in chunks]
    buffers = [tuple(_buffer(buffer, by_name) for buffer in kind) for kind in plain["buffers"]] or [(), ()]
    objects = tuple(name for name, main in plain["objects"] if main)
    return RankStructure(rank, at, chunks, objects, buffers[0], buffers[1])


def _tensor(plain: Mapping[str, Any]) -> LocalTensor:
    parts = tuple(_part(part) for part in plain["parts"])
    return LocalTensor(plain["name"], plain["dtype"], tuple(plain["shape"]), plain["trainable"], parts)


def _part(plain: Mapping[str, Any]) -> Part:
    size = tuple(plain["local_size"])
    prepended = (1,) * (len(plain["shape"]) - len(size))
    return Part(
        plain["key"],
        tuple(plain["shape"]),
        Box(tuple(plain["offset"]), prepended + size),
        Box(tuple(plain["local_offset"]), size),
        plain["main"],
    )


def _buffer(plain: Mapping[str, Any], by_name: list[dict[str, LocalTensor]]) -> Buffer:
    tensors = by_name[plain["chunk"]]
    buckets = []
    for bucket in plain["buckets"]:
        places = sorted((begin, end, name) for name, begin, end in bucket["params"])
        placed = tuple(Place(tensors[name], begin, end) for begin, end, name in places)
        buckets.append(Bucket(bucket["numel"], bucket["padded"], placed))
    return Buffer(plain["dtype"], tuple(buckets))
