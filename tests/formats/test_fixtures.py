"""Frozen checkpoints of real Megatron Core releases, against what their own torch read from them when they were made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.conformance import read_whole

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ALL = sorted(p.parent for p in FIXTURES.rglob("expected.json"))
SAID = {
    "megatron-0.12/dense_tp2pp2_model_space": ("torch_dist", "fully_sharded_model_space", "0.8 to 0.12"),
    "megatron-0.12/dense_tp2dp2_model_space": ("torch_dist", "fully_sharded_model_space", "0.8 to 0.12"),
    "megatron-0.15/dense_tp2pp2_dp_reshardable": ("torch_dist", "dp_reshardable", "0.15"),
    "megatron-0.15/dense_tp2pp2_fully_reshardable": ("torch_dist", "fully_reshardable", "0.15"),
    "megatron-0.19/dense_tp2pp2_dp_reshardable": ("torch_dist", "dp_reshardable", "0.19"),
    "megatron-0.19/dense_tp2pp2_integrity": ("torch_dist", "fully_reshardable", "0.19"),
    "megatron-0.19/moe_pp2ep2_fully_reshardable": ("torch_dist", "fully_reshardable", "0.19"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(FIXTURES))


def test_the_corpus_is_there() -> None:
    names = {name_of(p) for p in ALL}
    assert set(SAID) <= names
    assert {"megatron-0.12", "megatron-0.15", "megatron-0.19"} <= {n.partition("/")[0] for n in names}
    assert all((p / "PROVENANCE.md").exists() for p in ALL)
    sizes = [p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file()]
    assert max(sizes) < 2 << 20
    assert sum(sizes) < 20 << 20


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_every_element(path: Path) -> None:
    expected = json.loads((path / "expected.json").read_text())
    with open_checkpoint(path) as checkpoint:
        found = {n: (e.dtype.name, list(e.shape)) for n, e in checkpoint.index.tensors.items()}
        assert found == {n: (t["dtype"], t["shape"]) for n, t in expected["tensors"].items()}
        for name, tensor in expected["tensors"].items():
            data = read_whole(checkpoint, name)
            assert hashlib.sha256(data.tobytes()).hexdigest() == tensor["sha256"], name
        assert set(expected.get("objects", [])) <= set(checkpoint.index.objects)


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_no_false_alarm(path: Path) -> None:
    report = verify(path)
    assert not report.damaged, report.problems
    assert report.bytes_checked > 0  # CRCs were there to be checked


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_it(name: str) -> None:
    with open_checkpoint(FIXTURES / name) as checkpoint:
        facts = checkpoint.index.facts
        form, optimizer, version = SAID[name]
        assert (checkpoint.index.format, facts.optimizer_format) == (form, optimizer)
        assert str(facts.version).startswith(version)
        assert facts.layout["tp"] == (1 if name.endswith("moe_pp2ep2_fully_reshardable") else 2)
        assert facts.iteration in (2, 4)


def test_integrity_json_is_checked(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "c"
    shutil.copytree(FIXTURES / "megatron-0.19" / "dense_tp2pp2_integrity", path)
    report = verify(path)
    assert any("integrity.json" in text for text in report.proved)
    integrity = next(path.rglob("integrity.json"))
    table = json.loads(integrity.read_text())
    integrity.write_text(json.dumps({**table, "files": {}}))  # passes in Megatron itself
    assert {p.kind for p in verify(path).problems if p.is_damage} == {"manifest"}
