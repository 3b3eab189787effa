"""Whole tensors put together from the parts of all ranks, and compared across layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import Arm, without

from ckptguard.core.boxes import Box, bounding_box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import EnvironmentFailedError
from ckptguard.fingerprint.tensors import fingerprint_array
from ckptguard.fingerprint.values import add
from ckptguard.resume.placed import compare_placed
from ckptguard.resume.records import Event, Kind, RankRecord
from ckptguard.resume.results import Comparison

SHAPE = (12, 5)
DATA = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
NAME = "global parameter decoder.layers.0.mlp.linear_fc1.weight"
Cut = Sequence[Sequence[Box]]  # by rank


def part(data: np.ndarray[Any, Any], boxes: Sequence[Box]) -> dict[str, Any]:
    sums = (0, 0)
    for box in boxes:
        cut = data[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
        found = fingerprint_array(np.ascontiguousarray(cut), BY_NAME["float32"], data.shape, box.offset)
        sums = add(sums, found.sums)
    return {
        "dtype": "float32",
        "shape": list(data.shape),
        "boxes": [[list(box.offset), list(box.size)] for box in boxes],
        "sum": f"{sums[0]:016x}{sums[1]:016x}",
    }


def rows(ranks: int, replicas: int = 1) -> Cut:
    """Tensor parallel over rows, data parallel outside."""
    height = SHAPE[0] // ranks
    return [[Box((rank * height, 0), (height, SHAPE[1]))] for _ in range(replicas) for rank in range(ranks)]


def flat(*ends: int) -> Cut:
    """Consecutive ranges of the flattened tensor, as boxes."""
    cut, begin = [], 0
    for end in (*ends, DATA.size):
        boxes = []
        while begin < end:
            row = begin // SHAPE[1]
            stop = min(end, (row + 1) * SHAPE[1])
            boxes.append(bounding_box(whole(SHAPE), begin, stop))
            begin = stop
        cut.append(boxes)
    return cut


def arm(kind: Kind, cut: Cut, data: Callable[[int], np.ndarray[Any, Any]] = lambda _: DATA) -> Arm:
    return {
        rank: RankRecord(
            {"world_size": len(cut)}, {NAME: "parameter"}, [Event(kind, 3, {NAME: part(data(rank), boxes)})]
        )
        for rank, boxes in enumerate(cut)
    }


def compared(one: Cut, other: Cut, data: Callable[[int], np.ndarray[Any, Any]] = lambda _: DATA) -> Comparison:
    return compare_placed("save", arm("saved", one), "resume", arm("loaded", other, data), 3, "the same tensors?")


@pytest.mark.parametrize("one", [rows(1), rows(2), rows(2, 3), flat(7, 31)])
@pytest.mark.parametrize("other", [rows(1), rows(4), rows(3, 2), flat(1, 2, 40), flat(60)])
def test_equal_however_it_is_cut(one: Cut, other: Cut) -> None:
    found = compared(one, other)
    assert (found.first, found.values, found.ranks) == (None, 1, len(other))
    assert found.agreeing == (("parameter", 1),)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 11), st.integers(0, 4))
def test_one_bit(row: int, column: int) -> None:
    wrong = DATA.copy()
    wrong.view(np.uint32)[row, column] ^= 1
    found = compared(rows(2), rows(4), lambda _: wrong)
    assert found.first is not None
    assert (found.first.item, found.first.rank, found.cells) == (NAME, 0, ((0, 3, 1, "parameter"),))
    assert str(found.first.one).endswith(" float32[12, 5]")
    assert found.agreeing == ()


def test_what_is_lost_or_held_twice_is_said() -> None:
    def told(cut: Cut, data: Callable[[int], np.ndarray[Any, Any]] = lambda _: DATA) -> str:
        found = compared(rows(2), cut, data)
        assert found.first is not None
        return str(found.first.other)

    assert told(rows(4)[:3]) == "no rank holds [9:12, 0:5] of float32[12, 5]"
    assert told([*rows(2), [Box((0, 0), (1, 5))]]) == "ranks 0 and 2 both hold [0:1, 0:5]"
    wrong = told(rows(2, 2), lambda rank: DATA + (rank == 2))
    assert wrong == "ranks 0 and 2 hold different values of [0:6, 0:5]"
    shapes = told([*rows(2)[:1], [Box((6, 0), (6, 4))]], lambda rank: DATA[:, : 5 - rank])
    assert shapes == "rank 0 has float32[12, 5] and rank 1 has float32[12, 4]"
    outside = arm("loaded", rows(1))
    outside[0].events[0].values[NAME]["boxes"] = [[[3, 0], [12, 5]]]
    found = compare_placed("save", arm("saved", rows(2)), "resume", outside, 3, "")
    assert found.at_first[0].other == "[3:15, 0:5] is not inside float32[12, 5]"


def test_boxes_that_were_not_recorded() -> None:
    loaded = arm("loaded", rows(1))
    loaded[0].events[0].values[NAME]["boxes"] = "#b3:" + 32 * "0"
    found = compare_placed("save", arm("saved", rows(2)), "resume", loaded, 3, "")
    assert found.at_first[0].other == "rank 0 holds it in so many boxes that they were not recorded"


def test_a_tensor_that_one_side_has_not() -> None:
    lacking = arm("loaded", rows(1))
    lacking[0].events[0] = Event("loaded", 3, {"global master other": part(DATA, [whole(SHAPE)])})
    found = compare_placed("save", arm("saved", rows(2)), "resume", lacking, 3, "the same tensors?")
    assert [(d.item, d.one is None, d.other is None) for d in found.at_first] == [
        (NAME, False, True),
        ("global master other", True, False),
    ]


def test_arms_that_cannot_be_compared() -> None:
    saved, loaded = arm("saved", rows(2)), arm("loaded", rows(3))
    with pytest.raises(EnvironmentFailedError, match=r"resume: 1 of 3 ranks.*rank 1 has no load of step 3"):
        compare_placed("save", saved, "resume", without(loaded, "loaded", 3, 1), 3, "")
    del loaded[1]
    with pytest.raises(EnvironmentFailedError, match=r"resume: 1 of 3 ranks recorded nothing"):
        compare_placed("save", saved, "resume", loaded, 3, "")
    bare = {0: RankRecord(events=[Event("loaded", 3, {"parameter x": "#0"})])}
    with pytest.raises(EnvironmentFailedError, match="no rank recorded parts of whole tensors"):
        compare_placed("save", saved, "resume", bare, 3, "")
