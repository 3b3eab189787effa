"""Values cross between nodes and files unchanged, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ckptguard.view.messages import _read, _tight, from_plain, packed, to_plain, unpacked
from ckptguard.view.orders import Order
from ckptguard.view.values import Agreement, Copy, Delivery, Digest, FoundStep, NodeReport, Step

STEP = Step("global", "20", "ab")
COPY = Copy(1, 0, "iter_0000020/.metadata", "iter_0000020/.metadata", 12, "ff")
REPORT = NodeReport(
    1, "b", ("/ckpt",), "http://10.0.0.2:1", {"0:latest_checkpointed_iteration.txt": "20"},
    (FoundStep(STEP, 1, 0, (COPY,), {"iter_0000020/__0_0.distcp": 7}, ("iter_0000020/__0_0.distcp",), ("cut",)),),
)  # fmt: skip
AGREEMENT = Agreement(
    "1f", STEP, 2, ("a", "b"), "now", "all", (), {"x": Digest(1, "b3", 4, "00")}, {0: {"x": "linked"}}
)


@pytest.mark.parametrize("value", [STEP, COPY, REPORT, AGREEMENT, Delivery("x", 1, Digest(1, "b"), COPY, None)])
def test_values_come_back_equal(value: object) -> None:
    assert from_plain(type(value), json.loads(json.dumps(to_plain(value)))) == value
    assert unpacked(type(value), packed(value)) == value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "other"}, "Step.kind: 'other' is none of"),
        ({"number": 20}, "Step.number: int, expected str"),
        ({"more": 1}, "unknown more"),
    ],
)
def test_what_is_no_value_is_told_by_field(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_plain(Step, {**to_plain(STEP), **change})


def test_text_that_was_not_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpacked(Step, "0123456789")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="missing kind"):
        from_plain(Step, {"number": "1"})


def test_values_in_a_row_are_columns() -> None:
    other = replace(COPY, node=2, size_bytes=0)
    order = Order("deliver", STEP, copies=(COPY, other), deliveries=(Delivery("x", 1, Digest(1, "b"), COPY, None),) * 2)
    assert unpacked(Order, packed(order)) == order
    assert _tight((COPY, other))["size_bytes"] == [12, 0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"node": [1, "2"]}, "Found.copies.node: str, expected int"),
        ({"node": [1, True]}, "Found.copies.node: bool, expected int"),
        ({"node": [1]}, "Found.copies: columns of different lengths"),
        ({"more": [1, 2]}, "Found.copies: columns node, .*, more, expected node"),
        ({"node": 1}, "Found.copies.node: int, expected list"),
    ],
)
def test_columns_that_are_none_are_told_by_field(change: dict[str, object], told: str) -> None:
    columns = {**_tight((COPY, COPY)), **change}
    with pytest.raises(ValueError, match=told):
        _read(tuple[Copy, ...], columns, "Found.copies")
