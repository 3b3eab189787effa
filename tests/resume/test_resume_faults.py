"""The table of faults is whole, its page is what its runs said, and a sample of it is found for real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptguard.testing.resume_faults import FAULT_RECIPES, FAULTS, PREPARED, file_edits

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "stress"
SAMPLE = ("paired-bits", "skipped-batch", "wrong-bit", "other-files")


def test_every_fault_can_be_planted_and_has_an_answer() -> None:
    from ckptguard.testing.resume_plants import PLANTS

    planted = {name for name, fault in FAULTS.items() if fault.where == "process"}
    assert planted == PLANTS.keys() - {PREPARED, "hash_tensor"}
    edited = {name for name, fault in FAULTS.items() if fault.where == "files"}
    assert edited - {"saved-again"} == file_edits().keys()
    for name, fault in FAULTS.items():
        assert re.fullmatch(r"[a-z0-9_-]+", name)
        assert fault.recipe in FAULT_RECIPES
        assert bool(fault.expected.item) == (fault.expected.answer in ("loaded", "step", "explained"))
        assert bool(fault.flags or fault.variables) == (fault.where == "launch")


def test_the_page_is_what_the_kept_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import resume_faults as tool

    rows = tool.read_rows()
    assert rows.keys() == FAULTS.keys()
    assert tool.PAGE.read_text() == tool.page(rows)
    assert not [row for row in rows.values() if row.problem]


@pytest.mark.slow
@pytest.mark.megatron
def test_a_sample_of_the_faults_is_found(tmp_path: Path) -> None:
    from ckptguard.testing.resume_matrix import bench_for

    faults = [FAULTS[name] for name in SAMPLE]
    bench = bench_for(faults[0], faults, tmp_path)
    rows = [bench.row(fault) for fault in faults]
    assert [row.problem for row in rows] == [""] * len(rows)
    pair, _, wrong, _ = rows
    assert pair.loss is None  # what Megatron's own tests compare does not show it
    assert pair.hashes is None or not pair.hashes.startswith("loaded")  # the bits cancel under XOR
    assert "linear_fc1" in wrong.module
