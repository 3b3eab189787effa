"""The recipes give real checkpoints: Megatron's own loader takes them, under their own layout and others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ckptguard.testing.recipes import RECIPES, MegatronRunError, check_loads

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # torch reads in one process
]


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a torch_dist checkpoint with torch's own reader."""
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors


@pytest.mark.parametrize("name", ["dense_pp4_uneven_full", "moe_ep2_pp2_full"])
def test_megatron_loads_what_a_recipe_made(real_checkpoint: Callable[[str], Path], name: str) -> None:
    """Model, optimizer and RNG state load under the layout of the recipe."""
    printed = check_loads(real_checkpoint(name).parent, RECIPES[name])
    assert "successfully loaded checkpoint" in printed


def test_torch_dist_has_the_files_of_a_megatron_save(real_checkpoint: Callable[[str], Path]) -> None:
    """A 0.19 save: a marker, the plan, and a file of each rank; the tracker beside."""
    checkpoint = real_checkpoint("dense_tp2_pp2")
    ranks = {f"__{rank}_0.distcp" for rank in range(4)}
    assert {path.name for path in checkpoint.iterdir()} == {".metadata", "metadata.json", *ranks}
    assert (checkpoint.parent / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dense_tp2_pp2_full", "dense_tp1_pp1_full"),
        ("dense_tp2_pp2_full", "dense_pp2_vpp2_full"),
        ("moe_ep2_pp2_full", "moe_tp2_ep2_full"),
        ("hybrid_tp2_full", "hybrid_tp1_full"),
    ],
)
def test_resave_keeps_every_bit(
    real_checkpoint: Callable[[str], Path], resaved_checkpoint: Callable[[str, str], Path], source: str, target: str
) -> None:
    """The same state in another layout: equal names, dtypes, shapes and bytes, weights and optimizer state alike."""
    before = _tensors(real_checkpoint(source))
    after = _tensors(resaved_checkpoint(source, target))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense_tp2_pp2_full", "decoder.layers.mlp.linear_fc1.layer_norm_weight"),
        ("hybrid_tp2_full", "decoder.layers.0.mixer.in_proj.layer_norm_weight"),
    ],
)
def test_names_are_those_of_a_gpu_run(real_checkpoint: Callable[[str], Path], name: str, expected: str) -> None:
    """Norms have the names that Transformer Engine's specs give them, though local modules did the training."""
    assert expected in _tensors(real_checkpoint(name))


def test_training_moved_the_weights(real_checkpoint: Callable[[str], Path]) -> None:
    """Optimizer state is not left at zero, so that a test which drops it cannot pass by accident."""
    tensors = _tensors(real_checkpoint("dense_tp2_pp2_full"))
    states = [tensor for name, tensor in tensors.items() if name.startswith("optimizer.state.exp_avg.")]
    assert states
    assert all(state.any() for state in states)


def test_a_failure_shows_megatrons_own_words(real_checkpoint: Callable[[str], Path]) -> None:
    """dp_reshardable cannot change TP: Megatron says so, and its words reach the reader of the error."""
    with pytest.raises(MegatronRunError, match=r"\(TP, PP\) mismatch after resume"):
        check_loads(real_checkpoint("dense_tp2_pp2").parent, RECIPES["dense_tp1_pp1"])
