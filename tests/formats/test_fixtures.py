"""Frozen checkpoints of real Megatron Core releases, against what their own torch read from them when they were made."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from frozen import FIXTURES, NAMES, unpacked

from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.conformance import read_whole

SAID = {
    "megatron-0.8/dense_tp2pp2_model_space": ("torch_dist", "fully_sharded_model_space", "0.8 to 0.12"),
    "megatron-0.12/dense_tp2pp2_model_space": ("torch_dist", "fully_sharded_model_space", "0.8 to 0.12"),
    "megatron-0.12/dense_tp2dp2_model_space": ("torch_dist", "fully_sharded_model_space", "0.8 to 0.12"),
    "megatron-0.14/dense_tp2pp2_model_space": ("torch_dist", "fully_sharded_model_space", "0.12 to 0.14"),
    "megatron-0.14/moe_ep2dp4_model_space": ("torch_dist", "fully_sharded_model_space", "0.12 to 0.14"),
    "megatron-0.15/dense_tp2pp2_dp_reshardable": ("torch_dist", "dp_reshardable", "0.15"),
    "megatron-0.15/dense_tp2pp2_fully_reshardable": ("torch_dist", "fully_reshardable", "0.15"),
    "megatron-0.16/dense_tp2pp2_dp_reshardable": ("torch_dist", "dp_reshardable", "0.15 to 0.18"),
    "megatron-0.16/dense_tp2pp2_fully_reshardable": ("torch_dist", "fully_reshardable", "0.15 to 0.18"),
    "megatron-0.19/dense_tp2pp2_dp_reshardable": ("torch_dist", "dp_reshardable", "0.19"),
    "megatron-0.19/dense_tp2pp2_integrity": ("torch_dist", "fully_reshardable", "0.19"),
    "megatron-0.19/moe_pp2ep2_fully_reshardable": ("torch_dist", "fully_reshardable", "0.19"),
}

FLATTENED = [name for name, (_, optimizer, _) in SAID.items() if optimizer == "fully_sharded_model_space"]


@pytest.fixture(scope="session")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name to the root of the frozen checkpoint."""
    into = tmp_path_factory.mktemp("frozen")
    return lambda name: unpacked(name, into)


def test_the_corpus_is_there() -> None:
    assert set(SAID) <= set(NAMES)
    releases = {f"megatron-{r}" for r in ("0.8", "0.12", "0.14", "0.15", "0.16", "0.19")}
    assert releases <= {n.partition("/")[0] for n in NAMES}
    assert all((FIXTURES / n / "PROVENANCE.md").exists() for n in NAMES)
    sizes = [p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file()]
    assert max(sizes) < 2_000_000
    assert sum(sizes) < 20_000_000


@pytest.mark.parametrize("name", NAMES)
def test_every_element(name: str, frozen: Callable[[str], Path]) -> None:
    expected = json.loads((FIXTURES / name / "expected.json").read_text())
    with open_checkpoint(frozen(name)) as checkpoint:
        found = {n: (e.dtype.name, list(e.shape)) for n, e in checkpoint.index.tensors.items()}
        assert found == {n: (t["dtype"], t["shape"]) for n, t in expected["tensors"].items()}
        for tensor_name, tensor in expected["tensors"].items():
            data = read_whole(checkpoint, tensor_name)
            assert hashlib.sha256(data.tobytes()).hexdigest() == tensor["sha256"], tensor_name
        assert set(expected.get("objects", [])) <= set(checkpoint.index.objects)


@pytest.mark.parametrize("name", FLATTENED)
def test_the_official_way_started_from_this_checkpoint(name: str) -> None:
    expected = json.loads((FIXTURES / name / "expected.json").read_text())["tensors"]
    official = json.loads((FIXTURES / name / "official.json").read_text())
    stored = {key.replace("optimizer.state.fp32_param.", "optimizer.state.param."): t for key, t in expected.items()}
    assert stored.keys() == official["tensors"].keys()
    for key, tensor in official["tensors"].items():
        assert math.prod(tensor["shape"]) == math.prod(stored[key]["shape"]), key
        assert tensor["dtype"] == stored[key]["dtype"], key
        if not key.startswith("optimizer."):  # a weight is stored as ever
            assert tensor == stored[key]
    groups = [group for state in official["optimizers"] for group in state["optimizer"]["param_groups"]]
    assert len(groups) == (3 if "/moe_" in name else 2)
    assert {group["step"] for group in groups} == {2}


@pytest.mark.parametrize("name", NAMES)
def test_no_false_alarm(name: str, frozen: Callable[[str], Path]) -> None:
    report = verify(frozen(name))
    assert not report.damaged, report.problems
    assert report.bytes_checked > 0  # CRCs were there to be checked


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_it(name: str, frozen: Callable[[str], Path]) -> None:
    with open_checkpoint(frozen(name)) as checkpoint:
        facts = checkpoint.index.facts
        form, optimizer, version = SAID[name]
        assert (checkpoint.index.format, facts.optimizer_format) == (form, optimizer)
        assert str(facts.version).startswith(version)
        assert facts.layout["tp"] == (1 if "/moe_" in name else 2)
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
