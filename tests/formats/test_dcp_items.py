"""What an index says is stored, read without making entries, is what its entries say; and so is what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.index import Span
from ckptguard.formats import dcp
from ckptguard.formats.torch_dist_index import IndexPickle

INDEXES = sorted((Path(__file__).parents[2] / "fixtures").rglob(".metadata"))
FLOAT = BY_NAME["float32"]
BOXES = (Box((0, 0), (1, 4)), Box((1, 0), (1, 4)))


def _of_table(data: bytes) -> tuple[list[dcp.StoredItem], list[str]]:
    table = dcp.parse_table(data, "here")
    spans = [(key, chunk.span) for key, entry in table.tensors.items() for chunk in entry.chunks]
    spans += [(key, blob.span) for key, blob in table.objects.items()]
    items = [(key, span.file, span.offset_bytes, span.length_bytes) for key, span in spans]
    return sorted(items), [problem.message for problem in table.problems]


@pytest.mark.parametrize("path", INDEXES, ids=lambda path: path.parent.parent.name)
def test_items_are_those_of_the_entries(path: Path) -> None:
    items, problems = dcp.stored_items(path.read_bytes(), "here")
    assert items
    assert (sorted(items), [problem.message for problem in problems]) == _of_table(path.read_bytes())


@pytest.mark.parametrize(
    ("declared", "stored", "told"),
    [
        (BOXES, BOXES, 0),
        (BOXES, BOXES[:1], 1),
        (BOXES[:1], BOXES, 1),
        ((*BOXES, BOXES[0]), BOXES, 1),
        (BOXES, (*BOXES, BOXES[0]), 0),
    ],
)
def test_contradictions_are_told_as_with_entries(declared: tuple[Box, ...], stored: tuple[Box, ...], told: int) -> None:
    out = IndexPickle()
    out.tensor("w", FLOAT, (2, 4), declared)
    out.blob("common_state/shard_0_1")
    for number, box in enumerate(stored):
        out.stored("w", box.offset, Span("__0_0.distcp", 1000 * number, 900))
    out.stored("common_state/shard_0_1", None, Span("__1_0.distcp", 0, 50))
    items, problems = dcp.stored_items(out.whole(), "here")
    assert (sorted(items), [problem.message for problem in problems]) == _of_table(out.whole())
    assert len(problems) == told
