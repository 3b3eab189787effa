"""One fault of every kind while a view is prepared; ``tools/stress/view_faults.py`` plants hundreds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ckptguard.testing import nodes
from ckptguard.testing.view_faults import KINDS
from ckptguard.testing.view_runs import Truth
from ckptguard.testing.view_trials import Row, trials

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
STEPS = {
    "20": FIXTURES / "moe_pp2ep2_fully_reshardable" / "iter_0000004",
    "10": FIXTURES / "dense_tp2pp2_integrity" / "iter_0000002",
}
pytestmark = [
    pytest.mark.skipif(nodes.reason_against() is not None, reason=str(nodes.reason_against())),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """All runs, several at a time: most of the time of a run is waiting."""
    scratch = tmp_path_factory.mktemp("faults")
    return list(trials(list(KINDS), Truth.of(STEPS), scratch, seed=6, jobs=4, nodes=3, timeout_seconds=9.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_a_fault_ends_with_a_verdict_and_whole_views(kind: str, rows: list[Row]) -> None:
    (row,) = [row for row in rows if row.kind == kind]
    assert not row.wrong, "\n".join([f"{row.variant}, node {row.victim} of {row.nodes}", *row.wrong, *row.messages])
    assert row.when, "the fault did not happen"
    assert row.seconds < 60


def test_shares_are_of_five_hundred() -> None:
    shares = Counter({name: kind.share for name, kind in KINDS.items()})
    assert shares.total() == 500
    assert shares["killed"] >= 50
