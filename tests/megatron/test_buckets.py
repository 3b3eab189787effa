"""Buckets of dp_reshardable checkpoints taken apart: each master found in them is its weight, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import TensorEntry
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.buckets import bucket_layouts, bucket_of, layouts_in, unused_ranges
from ckptguard.megatron.structure import Bucket, Structures, structures_of

Frozen = Callable[[str], Path]
Asked = Callable[[str], Structures]
Made = Callable[[str], Path]
Read = Callable[[Checkpoint, TensorEntry], torch.Tensor]
DENSE = "dense_tp2pp2_dp_reshardable"


def _masters(checkpoint: Checkpoint, layouts: dict[str, Bucket], read: Read) -> int:
    """Assert that each parameter's master is the weight that is stored for it; return how many there are."""
    weights = {name: read(checkpoint, e) for name, e in checkpoint.index.tensors.items() if bucket_of(name) is None}
    count = 0
    for key, bucket in layouts.items():
        state = read(checkpoint, checkpoint.index.tensors[f"{key}.param"])
        for place in bucket.places:
            master = state[place.begin : place.end].reshape(place.tensor.shape)
            for part in place.tensor.parts:
                inside = tuple(slice(b, e) for b, e in zip(part.local.offset, part.local.end, strict=True))
                where = tuple(slice(b, e) for b, e in zip(part.box.offset, part.box.end, strict=True))
                weight = weights[part.key][where].reshape(part.local.size)
                assert torch.equal(master[inside].to(weight.dtype).view(torch.int16), weight.view(torch.int16)), (
                    key,
                    part,
                )
            count += 1
    return count


def test_frozen_buckets(frozen: Frozen, read: Read) -> None:
    with open_checkpoint(frozen(DENSE)) as checkpoint:
        facts = checkpoint.index.facts
        layouts = bucket_layouts(facts.args, content_metadata=facts.content_metadata)
        assert {f"{key}.{state}" for key in layouts for state in ("param", "exp_avg", "exp_avg_sq")} == {
            name for name in checkpoint.index.tensors if bucket_of(name)
        }
        assert _masters(checkpoint, layouts, read) == 58


def test_padded_buckets_can_be_cut_among_the_data_parallel_ranks(frozen: Frozen, asked: Asked) -> None:
    with open_checkpoint(frozen(DENSE)) as checkpoint:
        facts = checkpoint.index.facts
    layouts = bucket_layouts({**facts.args, "world_size": 4 * 192}, content_metadata=facts.content_metadata)
    as_stored = layouts_in(asked(DENSE))
    assert {key: bucket.numel for key, bucket in layouts.items()} == {k: b.numel for k, b in as_stored.items()}
    for bucket in layouts.values():
        assert bucket.padded % 384 == 0  # lcm(192, 128)
        assert 0 <= bucket.padded - bucket.numel < 384


def test_unused_ranges_are_outside_all_parameters(frozen: Frozen, asked: Asked) -> None:
    """Parameters and unused ranges together are each bucket, once."""
    with open_checkpoint(frozen(DENSE)) as checkpoint:
        unused = unused_ranges(checkpoint.index, structures=asked(DENSE))
        shapes = {name: entry.shape for name, entry in checkpoint.index.tensors.items()}
    layouts = layouts_in(asked(DENSE))
    for name, ranges in unused.items():
        bucket = bucket_of(name)
        assert bucket is not None
        taken = [(place.begin, place.end) for place in layouts[bucket].places]
        spans = sorted([*taken, *ranges])
        assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]]
        assert (spans[0][0], spans[-1][1]) == (0, shapes[name][0])
    assert len(unused) == 12  # a QKV bias of 96 elements is followed by 32 of padding, on every rank, in each state
    assert {end - begin for ranges in unused.values() for begin, end in ranges} == {32}


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "buckets", "parameters"),
    [("moe_ep2_pp2", 6, 4 * 5 + 3 + 4 * 4 * 2), ("dense_pp2_vpp2", 4, 4 * 6 + 3), ("overlap_tp1_pp1", None, 4 * 6 + 3)],
)
def test_real_buckets(real_checkpoint: Made, read: Read, name: str, buckets: int | None, parameters: int) -> None:
    """Two optimizers (dense and expert parameters), two model chunks a rank, and several buckets a buffer."""
    with open_checkpoint(real_checkpoint(name)) as checkpoint:
        structures = structures_of(checkpoint.index)
        layouts = layouts_in(structures)
        assert len(layouts) > 4 if buckets is None else len(layouts) == buckets
        assert _masters(checkpoint, layouts, read) == parameters
        assert unused_ranges(checkpoint.index, structures=structures) == {}  # hidden sizes are multiples of 64 here


def test_no_buckets_no_question(frozen: Frozen) -> None:
    """Asked of other formats it answers at once, without args too."""
    with open_checkpoint(frozen("moe_pp2ep2_fully_reshardable")) as checkpoint:
        facts = replace(checkpoint.index.facts, args={})
        assert unused_ranges(replace(checkpoint.index, facts=facts)) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "muon"}, "'muon' is not adam or sgd"),
        ({"overlap_param_gather_with_optimizer_step": True}, "overlap_param_gather_with_optimizer_step"),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 10_000}, "lays optimizer buckets out otherwise"),
    ],
)
def test_layouts_that_are_not_those_of_the_files_are_refused(
    frozen: Frozen, changes: dict[str, object], words: str
) -> None:
    with open_checkpoint(frozen(DENSE)) as checkpoint:
        facts = replace(checkpoint.index.facts, args={**checkpoint.index.facts.args, **changes})
        with pytest.raises(UnsupportedError, match=words):
            unused_ranges(replace(checkpoint.index, facts=facts))
