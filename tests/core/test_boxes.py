"""Box arithmetic against marking elements of a small array one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptguard.core.boxes import Box, bounding_box, meetings, missing_part, overlaps, split_rows, unravel, whole

shapes = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset, size = [], []
    for extent in shape:
        begin = draw(st.integers(0, extent))
        offset.append(begin)
        size.append(draw(st.integers(0, extent - begin)))
    return Box(tuple(offset), tuple(size))


def marks(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape, bool)
    out[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))] = True
    return out


@st.composite
def several(draw: st.DrawFn, count: int = 6) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), max_size=count))


def cut(box: Box, draw: st.DrawFn, depth: int) -> list[Box]:
    """Cuts a box into parts at random places."""
    long = [d for d, n in enumerate(box.size) if n > 1]
    if not long or not depth or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(long))
    at = draw(st.integers(1, box.size[dim] - 1))
    sizes = list(box.size), list(box.size)
    sizes[0][dim], sizes[1][dim] = at, box.size[dim] - at
    offset = list(box.offset)
    offset[dim] += at
    return [
        *cut(Box(box.offset, tuple(sizes[0])), draw, depth - 1),
        *cut(Box(tuple(offset), tuple(sizes[1])), draw, depth - 1),
    ]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    parts = cut(whole(shape), draw, 4)
    return shape, draw(st.permutations(parts))


@given(several())
def test_overlaps_are_those_of_the_elements(case) -> None:
    shape, boxes = case
    expected = {
        (i, j)
        for i, j in itertools.combinations(range(len(boxes)), 2)
        if (marks(boxes[i], shape) & marks(boxes[j], shape)).any()
    }
    found = set(overlaps(boxes))
    if shape:
        assert found == expected
    else:
        assert bool(found) == bool(expected)


@given(partitions())
def test_a_partition_covers_and_does_not_overlap(case) -> None:
    shape, boxes = case
    assert not list(overlaps(boxes))
    assert missing_part(boxes, shape) is None


@given(partitions(), st.randoms())
def test_a_missing_part_is_found_and_is_really_missing(case, random) -> None:
    shape, boxes = case
    filled = [b for b in boxes if b.numel]
    if not filled:
        return
    gone = random.choice(filled)
    rest = [b for b in boxes if b != gone]
    gap = missing_part(rest, shape)
    assert gap is not None
    assert gap.numel
    assert not (marks(gap, shape) & ~marks(gone, shape)).any()


@given(several(), several())
def test_meetings_are_all_common_parts(first, second) -> None:
    shape, boxes = first
    others = [b for b in second[1] if len(b.size) == len(shape)]
    assume(not list(overlaps(others)))
    found = {(i, j): common for i, j, common in meetings(boxes, others)}
    for i, j in itertools.product(range(len(boxes)), range(len(others))):
        common = boxes[i].intersect(others[j])
        assert found.get((i, j)) == (common if common and boxes[i].numel and others[j].numel else None)


@given(shapes.flatmap(boxes_in), st.integers(1, 40))
def test_split_rows_keeps_order_and_elements(box: Box, most: int) -> None:
    parts = list(split_rows(box, most))
    assert sum(p.numel for p in parts) == box.numel
    assert not list(overlaps(parts)) or not box.size
    assert all(p.numel <= most for p in parts) or not box.size
    if box.size and box.numel:
        numbers = np.arange(math.prod(box.end)).reshape(box.end)
        order = [numbers[tuple(slice(o, e) for o, e in zip(p.offset, p.end, strict=True))].reshape(-1) for p in parts]
        assert (np.diff(np.concatenate(order)) > 0).all()


@settings(max_examples=200)
@given(shapes.flatmap(boxes_in), st.data())
def test_bounding_box(box: Box, data: st.DataObject) -> None:
    if not box.numel:
        return
    begin = data.draw(st.integers(0, box.numel - 1))
    end = data.draw(st.integers(begin + 1, box.numel))
    found = bounding_box(box, begin, end)
    points = [tuple(o + i for o, i in zip(box.offset, unravel(n, box.size), strict=True)) for n in range(begin, end)]
    inside = {tuple(p) for p in itertools.product(*(range(o, e) for o, e in zip(found.offset, found.end, strict=True)))}
    assert set(points) <= inside
    assert found.intersect(box) == found


def test_a_hundred_thousand_chunks_are_quick() -> None:
    """Coverage of a large grid, whole and with a hole, takes no quadratic time."""
    boxes = [Box((i, j), (1, 8)) for i in range(1000) for j in range(0, 800, 8)]
    assert not list(overlaps(boxes))
    assert missing_part(boxes, (1000, 800)) is None
    gone = boxes.pop(54_321)
    assert missing_part(boxes, (1000, 800)) == gone
    assert len(list(meetings(boxes, boxes))) == len(boxes)
