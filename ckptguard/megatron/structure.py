"""Which part of which global tensor each model-parallel rank owns, as Megatron Core itself says.

And where its optimizer state stands. Values only; ``ask`` gets them from a process that runs Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ckptguard.core.boxes import Box
from ckptguard.core.index import Index
from ckptguard.megatron.ask import Question, ask
from ckptguard.megatron.process import TIMEOUT_SECONDS
from ckptguard.megatron.sampled import at_place

At = Mapping[str, int]
Chunks = tuple[tuple["LocalTensor", ...], ...]

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
        groups: Its dense parameters as the groups of an optimizer that is not distributed hold them. State ``i`` of a
            ``model_optim_rng.pt`` is that of the i-th parameter, counted through all groups; ``fp32_from_fp16_params`` has a
            list per group, of its half precision parameters only. A group may be empty: all ranks have the same groups.
        expert_groups: The same of its expert parameters, which have an optimizer of their own.
        extra: Of each model chunk, the ``_extra_state`` entries of its state_dict: (name, whether it is a tensor; else None).
        held: Names of all objects that this rank has, and loads; other ranks save some of them.
    """

    rank: int
    at: At
    chunks: Chunks
    objects: tuple[str, ...]
    dense: tuple[Buffer, ...]
    expert: tuple[Buffer, ...]
    groups: tuple[tuple[LocalTensor, ...], ...] = ()
    expert_groups: tuple[tuple[LocalTensor, ...], ...] = ()
    extra: tuple[tuple[tuple[str, bool], ...], ...] = ()
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class Structures:
    """The ranks of a layout.

    Attributes:
        ranks: Every model-parallel rank.
        megatron: Version of the Megatron Core that was asked.
        no_buckets: Why the optimizer's buckets are not known; None if they are.
        no_groups: Why the optimizer's groups are not known; None if they are. They are if buckets are not used.
    """

    ranks: tuple[RankStructure, ...]
    megatron: str
    no_buckets: str | None
    no_groups: str | None = None

    @cached_property
    def has_expert_optimizer(self) -> bool:
        """Whether ranks have two optimizers: if any rank has expert parameters, all do.

        megatron/core/optimizer/__init__.py ``_get_param_groups`` aligns the parameter groups of all ranks (0.19.2).
        """
        return any(rank.expert or rank.expert_groups for rank in self.ranks)

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
    described = [one for stage in answer["stages"] for one in stage.get("each") or [stage["fitted"]]]
    groups = _group_order(group for one in described for group in one["groups"])
    ranks = [rank for stage in answer["stages"] for rank in _stage(stage, groups)]
    ranks.sort(key=lambda rank: rank.rank)
    return Structures(tuple(ranks), answer["megatron"], answer["no_buckets"], answer["no_groups"])


def _group_order(groups: Iterable[list[Any]]) -> list[list[Any]]:
    """(Is of experts, what it differs in) of all ranks' groups, in the order in which ``_get_param_groups`` aligns them."""
    known = {repr(group[:2]): group[:2] for group in groups}
    return sorted(known.values(), key=lambda group: (group[0], group[1] is not None, group[1]))


def _stage(plain: Mapping[str, Any], groups: Sequence[list[Any]]) -> Iterator[RankStructure]:
    places = zip(plain["ranks"], plain["at"], strict=True)
    if "fitted" in plain:
        make = _rank(plain["fitted"], groups)
        yield from (make(rank, at) for rank, at in places)
    else:
        yield from (_rank(each, groups)(rank, at) for each, (rank, at) in zip(plain["each"], places, strict=True))


# Each of these reads a description once and gives a function that makes the value of every rank it holds for: what the
# ranks have in common is then one object, and a thousand ranks take little time and memory.


def _rank(plain: Mapping[str, Any], groups: Sequence[list[Any]]) -> Callable[[int, At], RankStructure]:
    chunks = [[_tensor(tensor) for tensor in chunk] for chunk in plain["chunks"]]
    numbers = [{tensor["name"]: number for number, tensor in enumerate(chunk)} for chunk in plain["chunks"]]
    kinds = [[_buffer(buffer, numbers[buffer["chunk"]]) for buffer in kind] for kind in plain["buffers"]] or [[], []]
    objects = at_place(plain["objects"])
    extra = tuple(tuple((name, is_tensor) for name, is_tensor in chunk) for chunk in plain["extra"])
    held = {repr(group[:2]): group[2] for group in plain["groups"]}
    members = [(group[0], [(c, numbers[c][name]) for c, name in held.get(repr(group), [])]) for group in groups]

    def make(rank: int, at: At) -> RankStructure:
        made = tuple(tuple(tensor(at) for tensor in chunk) for chunk in chunks)
        named = objects(at)
        saved, held = tuple(name for name, main in named if main), tuple(name for name, _ in named)
        dense, expert = (tuple(buffer(made) for buffer in kind) for kind in kinds)
        grouped = [(is_expert, tuple(made[c][n] for c, n in group)) for is_expert, group in members]
        dense_groups, expert_groups = (
            tuple(g for is_expert, g in grouped if is_expert == kind) for kind in (False, True)
        )
        return RankStructure(rank, at, made, saved, dense, expert, dense_groups, expert_groups, extra, held)

    return make


def _tensor(plain: Mapping[str, Any]) -> Callable[[At], LocalTensor]:
    parts = [_part(part) for part in plain["parts"]]
    name, dtype, shape, trainable = plain["name"], plain["dtype"], tuple(plain["shape"]), plain["trainable"]
    return lambda at: LocalTensor(name, dtype, shape, trainable, tuple([part(at) for part in parts]))


def _part(plain: Mapping[str, Any]) -> Callable[[At], Part]:
    shape, local_size = tuple(plain["shape"]), tuple(plain["local_size"])
    size = (1,) * (len(shape) - len(local_size)) + local_size
    local = Box(tuple(plain["local_offset"]), local_size)
    key, offset, main = (at_place(plain[name]) for name in ("key", "offset", "main"))
    return lambda at: Part(key(at), shape, Box(tuple(offset(at)), size), local, main(at))


def _buffer(plain: Mapping[str, Any], numbers: Mapping[str, int]) -> Callable[[Chunks], Buffer]:
    chunk, dtype = plain["chunk"], plain["dtype"]
    buckets = [
        (
            bucket["numel"],
            bucket["padded"],
            sorted((begin, end, numbers[name]) for name, begin, end in bucket["params"]),
        )
        for bucket in plain["buckets"]
    ]

    def make(chunks: Chunks) -> Buffer:
        tensors = chunks[chunk]
        return Buffer(
            dtype,
            tuple(
                Bucket(numel, padded, tuple([Place(tensors[number], begin, end) for begin, end, number in places]))
                for numel, padded, places in buckets
            ),
        )

    return make
