"""Legacy ``mp_rank_*`` files: made by torch.save as Megatron does, and the real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch_states import elements, every_kind

from ckptguard.core.errors import CkptguardError
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.conformance import Expected, FormatTests

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19" / "dense_tp2pp2_legacy_torch"


class TestLegacy(FormatTests):
    format_name = "torch"

    def make(self, path: Path) -> Expected:
        expected = {}
        for rank in ("mp_rank_00_000", "mp_rank_01_000"):
            (path / rank).mkdir(parents=True)
            state = every_kind()
            shared = torch.arange(20.0)
            state |= {"head": shared[:10], "tail": shared[10:]}
            torch.save({"model": state, "iteration": 5, "list": [torch.ones(2)]}, path / rank / "model_optim_rng.pt")
            prefix = f"{rank}/model_optim_rng.pt"
            expected |= {f"{prefix}:model.{name}": elements(tensor) for name, tensor in state.items()}
            expected[f"{prefix}:list.0"] = elements(torch.ones(2))
        return expected


def test_the_real_one() -> None:
    with open_checkpoint(FIXTURE) as checkpoint:
        facts = checkpoint.index.facts
        assert (facts.iteration, facts.layout["tp"], facts.layout["pp"]) == (4, 2, 2)
        assert "mp_rank_01_001/model_optim_rng.pt:model.decoder.final_layernorm.weight" in checkpoint.index.tensors


@pytest.mark.parametrize("gone", ["mp_rank_01_000", "mp_rank_00_001/distrib_optim.pt"])
def test_a_missing_rank_is_named(gone: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(FIXTURE / "iter_0000004", path)
    target = path / gone
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with open_checkpoint(path) as checkpoint:
        missing = [p.file for p in checkpoint.index.problems if p.kind == "missing-file"]
    assert any(str(m).startswith(gone) for m in missing)


def test_an_old_torch_save_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(
        {"w": torch.ones(2)}, tmp_path / "mp_rank_00" / "model_optim_rng.pt", _use_new_zipfile_serialization=False
    )
    with open_checkpoint(tmp_path) as checkpoint:
        (problem,) = checkpoint.index.problems
    assert "torch.save" in problem.message


def test_a_tracker_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(CkptguardError, match="says '5'"):
        open_checkpoint(tmp_path)
    with pytest.raises(CkptguardError, match="--step says 7"):
        open_checkpoint(tmp_path, step="7")
