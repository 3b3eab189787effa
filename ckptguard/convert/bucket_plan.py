"""Optimizer state of a ``dp_reshardable`` target: buckets, and each rank's share of them. Pure.

Source: megatron/core/optimizer/distrib_optimizer.py ``sharded_param_state_dp_reshardable`` (0.19.2): a bucket with its padding
is cut into equal shares, one per data parallel rank; what is stored ends where its last parameter does. Each parameter in a
share, and each gap before, between or after them, is a chunk of its own. What stands in a gap means nothing: it is zero here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptguard.convert.canonical import State
from ckptguard.convert.sources import into_local, state_name, states_in
from ckptguard.convert.target import Target, Wanted
from ckptguard.core.boxes import Box
from ckptguard.core.pieces import Assembly, of_source
from ckptguard.megatron.structure import Bucket, LocalTensor, Place, RankStructure


def of_buckets(state: State, target: Target, rank: RankStructure) -> Iterator[Wanted]:
    """Chunks of the buckets of a rank's optimizers, for all data parallel ranks that share them."""
    kinds = states_in(state)
    for prefix, buffers, ranks in target.optimizer_groups(rank):
        for at, buffer in enumerate(buffers):
            for number, bucket in enumerate(buffer.buckets):
                key = f"{prefix}.gbuf_idx_{at}.dtype_{buffer.dtype}.bucket_idx_{number}"
                yield from _of_bucket(state, key, bucket, ranks, kinds)


def _of_bucket(state: State, key: str, bucket: Bucket, ranks: Sequence[int], kinds: Sequence[str]) -> Iterator[Wanted]:
    share = bucket.padded // len(ranks)
    known: dict[tuple[str, int], Assembly] = {}
    for number, rank in enumerate(ranks):
        for place, begin, end in _shares(bucket, number * share, min((number + 1) * share, bucket.numel)):
            for kind in kinds:
                made, run = of_source("", (end - begin,)), 0
                if place is not None:
                    which = (kind, place.begin)
                    known[which] = known.get(which) or local_state(state, kind, place.tensor)
                    made, run = known[which], begin - place.begin
                yield Wanted(rank, f"{key}.{kind}", (bucket.numel,), Box((begin,), (end - begin,)), made, run)


def _shares(bucket: Bucket, low: int, high: int) -> Iterator[tuple[Place | None, int, int]]:
    """(place or None for a gap, begin, end) of all that stands in elements ``[low, high)`` of a bucket, in order."""
    at = low
    for place in bucket.places:
        begin, end = max(place.begin, low), min(place.end, high)
        if begin < end:
            if begin > at:
                yield None, at, begin
            yield place, begin, end
            at = end
    if at < high:
        yield None, at, high


def local_state(state: State, kind: str, tensor: LocalTensor) -> Assembly:
    """A state of a rank's own tensor, put together from its parts of global tensors."""
    pieces = [
        into_local(piece, part.local)
        for part in tensor.parts
        for piece in state.assembly(state_name(kind, part.key), part.box).pieces
    ]
    return Assembly(tensor.shape, tuple(pieces))


def names_in_buckets(state: State, target: Target) -> set[str]:
    """Names of the global states that the buckets of a target hold."""
    kinds = states_in(state)
    keys = {
        part.key
        for rank in target.structures.ranks
        for buffer in (*rank.dense, *rank.expert)
        for bucket in buffer.buckets
        for place in bucket.places
        for part in place.tensor.parts
    }
    return {state_name(kind, key) for key in keys for kind in kinds}
