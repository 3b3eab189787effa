"""One state in many layouts and formats, each written by Megatron itself: the same fingerprints, no difference, no alarm."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage_cases import DENSE

from ckptguard.cli.main import run
from ckptguard.cli.megatron_names import named
from ckptguard.engine.diff import diff_checkpoints
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.seal import seal
from ckptguard.engine.verify import verify
from ckptguard.fingerprint.roots import root
from ckptguard.formats.facts import kind_of_name
from ckptguard.formats.registry import open_checkpoint

pytestmark = [pytest.mark.megatron, pytest.mark.slow]
Real = Callable[[str], Path]
Resaved = Callable[[str, str], Path]
LAYOUTS = {
    "dense_tp2_pp2_full": ["dense_tp1_pp1_full", "dense_tp2_dp2_full", "dense_pp2_vpp2_full"],
    "moe_ep2_pp2_full": ["moe_ep2_full", "moe_tp2_ep2_full"],
    "hybrid_tp2_full": ["hybrid_tp1_full"],
}
PAIRS = [(source, target) for source, targets in LAYOUTS.items() for target in targets]


def roots(path: Path, *, global_names: bool = False) -> dict[str, str]:
    with open_checkpoint(path) as opened:
        checkpoint = named(opened, "global") if global_names else opened
        prints = fingerprint_checkpoint(checkpoint)
    kinds: dict[str, dict] = {}
    for name, value in prints.items():
        kinds.setdefault(kind_of_name(name), {})[name] = value
    return {kind: root(items) for kind, items in kinds.items()} | {"whole": root(prints)}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_roots_are_the_same_in_every_layout(real_checkpoint: Real, resaved_checkpoint: Resaved, source, target) -> None:
    a, b = real_checkpoint(source), resaved_checkpoint(source, target)
    assert roots(a) == roots(b)
    with open_checkpoint(a) as one, open_checkpoint(b) as other:
        assert {d.status for d in diff_checkpoints(one, other)} == {"same"}
        chunks = [sum(len(e.chunks) for e in c.index.tensors.values()) for c in (one, other)]
        assert one.index.facts.layout != other.index.facts.layout
    assert all(chunks)


@pytest.mark.parametrize("target", ["legacy_tp1_pp1", "legacy_tp2_pp2"])
def test_legacy_files_have_the_roots_of_torch_dist(
    real_checkpoint: Real, resaved_checkpoint: Resaved, target, capsys
) -> None:
    source = "dense_tp2_pp2_full"
    a, b = real_checkpoint(source), resaved_checkpoint(source, target)
    expected, found = roots(a), roots(b, global_names=True)
    assert found == expected
    assert run(["diff", str(a), str(b)]) == 0
    assert "equal" in capsys.readouterr().out


def test_weights_agree_between_optimizer_formats(real_checkpoint: Real, resaved_checkpoint: Resaved) -> None:
    a = real_checkpoint("dense_tp2_pp2_full")
    b = resaved_checkpoint("dense_tp2_pp2_full", "dense_tp2_pp2")
    assert roots(a)["weights"] == roots(b)["weights"]
    assert roots(a)["whole"] != roots(b)["whole"]


def test_another_state_has_other_roots(real_checkpoint: Real) -> None:
    assert (
        roots(real_checkpoint("dense_tp2_pp2_full"))["weights"]
        != roots(real_checkpoint("dense_tp1_pp1_full"))["weights"]
    )


@pytest.mark.parametrize(
    "name",
    ["dense_tp1_pp1", "dense_tp2_pp2", "dense_pp4_uneven_full", "dense_tp2_dp2", "moe_ep2_pp2", "legacy_tp2_pp2"],
)
def test_no_false_alarm_on_what_megatron_writes(real_checkpoint: Real, name: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(real_checkpoint(name), path)
    report = verify(path)
    assert not report.damaged, report.problems
    with open_checkpoint(path) as checkpoint:
        seal(checkpoint)
    for mode in ("full", "quick"):
        report = verify(path, mode=mode)
        assert not report.damaged, report.problems


def test_garbage_in_bucket_gaps_does_not_count(tmp_path: Path, capsys) -> None:
    """Only elements that no parameter owns are changed: told apart, exit 0. One that is owned: exit 3."""
    from ckptguard.megatron.buckets import unused_ranges

    source = DENSE
    changed = tmp_path / "c"
    shutil.copytree(source, changed)
    with open_checkpoint(changed) as checkpoint:
        gaps = unused_ranges(checkpoint.index)
        stored = [
            (entry, chunk, any(low <= chunk.box.offset[0] < high for low, high in gaps[entry.name]))
            for entry in checkpoint.index.tensors.values()
            for chunk in entry.chunks
            if entry.name in gaps
        ]
        spare = next((e, c) for e, c, is_gap in stored if is_gap)
        owned = next((e, c) for e, c, is_gap in stored if not is_gap)
        places = [checkpoint.reader.locate(*pair).span for pair in (spare, owned)]
    for span, code, word in ((places[0], 0, "unused"), (places[1], 3, "different")):
        with (changed / span.file).open("r+b") as file:
            file.seek(span.offset_bytes)
            file.write(b"\x12\x34\x56\x78")
        assert run(["diff", str(source), str(changed)]) == code
        assert word in capsys.readouterr().out


def test_a_shard_of_a_real_older_step(real_checkpoint: Real, real_cache: Path, tmp_path: Path) -> None:
    """Two saves of one run, a step apart: same names, sizes and layout; one rank's file is taken from the older."""
    from ckptguard.testing.recipes import RECIPES, make_checkpoint

    newer = tmp_path / "c"
    shutil.copytree(real_checkpoint("dense_pp2_vpp2_full"), newer)
    with open_checkpoint(newer) as checkpoint:
        seal(checkpoint)
    recipe = dataclasses.replace(RECIPES["dense_pp2_vpp2_full"], steps=1)
    older = make_checkpoint(recipe, tmp_path / "older")
    shutil.copy(older / "__1_0.distcp", newer / "__1_0.distcp")
    report = verify(newer)
    damage = [p for p in report.problems if p.is_damage]
    assert damage
    assert {p.file for p in damage} == {"__1_0.distcp"}
    assert {p.rank for p in damage} == {"1"}
    assert any(p.tensor and p.box for p in damage)
