"""Values cross between nodes and files unchanged, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest

from ckptguard.view.messages import from_plain, packed, to_plain, unpacked
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
