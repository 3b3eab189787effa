"""Legacy files under global names are the same tensors as Megatron's own torch_dist of the same state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptguard.core.boxes import missing_part, overlaps
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.fingerprint.tensors import BoxSum, fingerprint_array
from ckptguard.fingerprint.values import Fingerprint, add
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.legacy_names import to_global, to_global_view
from ckptguard.megatron.structure import Structures

Frozen = Callable[[str], Path]
Asked = Callable[[str], Structures]
Made = Callable[[str], Path]
Resaved = Callable[[str, str], Path]
Read = Callable[[Checkpoint, TensorEntry], torch.Tensor]
LEGACY = "dense_tp2pp2_legacy_torch"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _masters_match(checkpoint: Checkpoint, read: Read) -> int:
    """Assert that every fp32 master, cast to the weights' dtype, is the weight bit for bit; return how many."""
    count = 0
    for name, weight in checkpoint.index.tensors.items():
        master = checkpoint.index.tensors.get(f"optimizer.state.param.{name}")
        if master is not None:
            stored = read(checkpoint, weight)
            assert torch.equal(_bits(read(checkpoint, master).to(stored.dtype)), _bits(stored)), name
            count += 1
    return count


def _covered(checkpoint: Checkpoint) -> None:
    for entry in checkpoint.index.tensors.values():
        boxes = [chunk.box for chunk in entry.chunks]
        assert all(box.within(entry.shape) for box in boxes), entry.name
        assert not list(overlaps(boxes)), entry.name
        assert missing_part(boxes, entry.shape) is None, entry.name


def test_frozen_legacy_files(frozen: Frozen, read: Read) -> None:
    """Every element of every global tensor once; masters are the weights; what is left out is told."""
    with open_checkpoint(frozen(LEGACY)) as checkpoint:
        view = to_global_view(checkpoint.index)
        seen = replace(checkpoint, index=view.index)
        _covered(seen)
        assert len(view.index.tensors) == 4 * 16
        assert _masters_match(seen, read) == 16
    assert view.index.tensors["decoder.layers.self_attention.linear_qkv.weight"].shape == (4, 192, 64)
    notes = [problem for problem in view.index.problems if problem.kind == "note"]
    assert len(notes) == len(view.index.problems) == 1
    assert "rng_state" in notes[0].message


def test_replicas_are_told_and_equal(frozen: Frozen, asked: Asked) -> None:
    """Norms and biases on both tensor ranks, and the tied embedding on the last stage, each kept once."""
    with open_checkpoint(frozen(LEGACY)) as checkpoint:
        view = to_global_view(checkpoint.index, structures=asked(LEGACY))
        names = {group.name for group in view.replicas}
        assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= names
        assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in names
        assert "decoder.layers.mlp.linear_fc1.weight" not in names
        for group in view.replicas:
            entry = TensorEntry(group.name, group.dtype, group.shape, (group.kept, *group.others))
            kept, *others = (_sum(checkpoint, entry, chunk) for chunk in entry.chunks)
            assert others
            assert all(other == kept for other in others), group.name


def _sum(checkpoint: Checkpoint, entry: TensorEntry, chunk: Chunk) -> tuple[int, int]:
    at = checkpoint.reader.locate(entry, chunk)
    data = checkpoint.reader.read_box(at, (0,) * len(chunk.box.size), chunk.box.size)
    return BoxSum(entry.dtype, entry.shape, chunk.box).of(data)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "tensors"),
    [
        ("legacy_tp2_pp2", "dense_tp2_pp2_full", 36),
        ("legacy_moe_ep2", "moe_ep2_full", 40),
    ],
)
def test_fingerprints_equal_those_of_megatrons_own_resave(
    real_checkpoint: Made, resaved_checkpoint: Resaved, source: str, target: str, tensors: int
) -> None:
    """Megatron loads the legacy files and saves torch_dist: the same names, dtypes, shapes and content."""
    with open_checkpoint(real_checkpoint(source)) as old, open_checkpoint(resaved_checkpoint(source, target)) as new:
        seen = replace(old, index=to_global(old.index))
        _covered(seen)
        ours = fingerprint_checkpoint(seen)
        assert len(ours) == tensors
        assert ours == fingerprint_checkpoint(new)


@pytest.mark.megatron
@pytest.mark.slow
def test_virtual_stages(real_checkpoint: Made, resaved_checkpoint: Resaved, read: Read) -> None:
    """``model0`` and ``model1`` of each pipeline rank; from torch_dist this time, as Megatron resaves it."""
    source = "dense_pp2_vpp2_full"
    with (
        open_checkpoint(resaved_checkpoint(source, "legacy_pp2_vpp2")) as old,
        open_checkpoint(real_checkpoint(source)) as new,
    ):
        assert any(":model1." in name for name in old.index.tensors)
        seen = replace(old, index=to_global(old.index))
        assert fingerprint_checkpoint(seen) == fingerprint_checkpoint(new)
        assert _masters_match(seen, read) == 9


@pytest.mark.megatron
@pytest.mark.slow
def test_padding_between_buckets_is_not_stored(real_checkpoint: Made, resaved_checkpoint: Resaved, read: Read) -> None:
    """Several buckets whose ends are padded in memory: the file has them without padding, one after the other."""
    with open_checkpoint(resaved_checkpoint("overlap_tp1_pp1", "legacy_overlap_tp1_pp1")) as checkpoint:
        seen = replace(checkpoint, index=to_global(checkpoint.index))
        _covered(seen)
        assert _masters_match(seen, read) == 9


def test_fingerprint_of_a_view_is_that_of_the_array(frozen: Frozen, asked: Asked, read: Read) -> None:
    """Chunks at offsets inside other tensors add up to the fingerprint of the whole array."""
    with open_checkpoint(frozen(LEGACY)) as checkpoint:
        seen = replace(checkpoint, index=to_global_view(checkpoint.index, structures=asked(LEGACY)).index)
        for name in (
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight",
            "decoder.layers.mlp.linear_fc2.weight",
        ):
            entry = seen.index.tensors[name]
            total = (0, 0)
            for chunk in entry.chunks:
                total = add(total, _sum(seen, entry, chunk))
            array = _bits(read(seen, entry)).numpy()
            assert Fingerprint(entry.dtype.name, entry.shape, total) == fingerprint_array(array, entry.dtype)


def test_a_missing_file_leaves_its_boxes_open(frozen: Frozen, asked: Asked, tmp_path: Path) -> None:
    """No error of ours: the index says which file, and the boxes stay uncovered, so nothing can pass for whole."""
    shutil.copytree(frozen(LEGACY), tmp_path / "c")
    next((tmp_path / "c").glob("iter_*/mp_rank_01_000/model_optim_rng.pt")).unlink()
    with open_checkpoint(tmp_path / "c") as checkpoint:
        index = to_global_view(checkpoint.index, structures=asked(LEGACY)).index
    entry = index.tensors["decoder.layers.mlp.linear_fc1.weight"]
    gap = missing_part([chunk.box for chunk in entry.chunks], entry.shape)
    assert gap is not None
    assert gap.offset[1] == 128
    assert any(problem.kind == "missing-file" for problem in index.problems)


def test_args_of_another_model_are_refused(frozen: Frozen) -> None:
    with open_checkpoint(frozen(LEGACY)) as checkpoint:
        facts = replace(checkpoint.index.facts, args={**checkpoint.index.facts.args, "ffn_hidden_size": 128})
        with pytest.raises(UnsupportedError, match="is not the one in the files") as caught:
            to_global(replace(checkpoint.index, facts=facts))
    assert "mlp.linear_fc1.weight has shape [128, 64], Megatron's [64, 64]" in str(caught.value)


def test_optimizer_state_that_is_not_understood_keeps_its_names(frozen: Frozen) -> None:
    with open_checkpoint(frozen(LEGACY)) as checkpoint:
        facts = replace(checkpoint.index.facts, args={**checkpoint.index.facts.args, "optimizer": "muon"})
        index = to_global(replace(checkpoint.index, facts=facts))
    assert "decoder.layers.mlp.linear_fc1.weight" in index.tensors
    assert "mp_rank_00_000/distrib_optim.pt:0.(torch.bfloat16, torch.float32).exp_avg" in index.tensors
    assert not any(name.startswith("optimizer.state.") for name in index.tensors)
    assert any("'muon' is not adam or sgd" in problem.message for problem in index.problems)


def test_other_formats_are_refused(frozen: Frozen) -> None:
    with (
        open_checkpoint(frozen("dense_tp2pp2_dp_reshardable")) as checkpoint,
        pytest.raises(UnsupportedError, match="torch_dist"),
    ):
        to_global(checkpoint.index)
