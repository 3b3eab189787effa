"""The table of faults is whole, its page is what its runs said, and a sample of it is found for real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptguard.testing.resume_faults import FAULT_RECIPES, FAULTS, PREPARED, file_edits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume-faults.md"
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


def test_the_page_has_a_row_for_every_fault() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {row[0].strip("| `"): row for row in rows}
    assert told.keys() == FAULTS.keys()
    assert [name for name, row in told.items() if row[1] != FAULTS[name].what] == []
    assert [name for name, row in told.items() if "not as expected" in row[-1]] == []


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
