"""The small snapshots are what tests take them for, and the processes that load checkpoints notice what is wrong."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.families import FAMILIES, SHARDS, Layout, make_snapshot
from ckptguard.testing.megatron_loads import LoadError, Megatron

_REPEATED = re.compile(r"\.(embed_tokens|shared_head\.head)\.weight$")  # a release's MTP layer repeats both ends


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        loaded = load_file(file)
        assert loaded.keys().isdisjoint(out)
        out |= loaded
    return out


def _runs(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, bytes]]:
    for name, tensor in tensors.items():
        yield name, tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_tensor_is_constant_or_repeated(name: str, snapshot: Callable[[str], Path]) -> None:
    tensors = _tensors(snapshot(name))
    seen: dict[bytes, str] = {}
    for key, data in _runs(tensors):
        if tensors[key].numel() > 1:
            assert len(set(tensors[key].flatten().tolist())) > 1, key
        if not _REPEATED.search(key):
            assert data not in seen, (key, seen[data])
            seen[data] = key


@pytest.mark.parametrize("name", FAMILIES)
def test_the_index_names_every_tensor(name: str, snapshot: Callable[[str], Path]) -> None:
    path = snapshot(name)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == _tensors(path).keys()
    assert len(set(index["weight_map"].values())) == SHARDS
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.index.tensors.keys() == index["weight_map"].keys()


def test_a_snapshot_is_made_alike_each_time(tmp_path: Path, snapshot: Callable[[str], Path]) -> None:
    again = make_snapshot("qwen3", tmp_path / "again")
    for file in snapshot("qwen3").iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "deepseek_v3", "nemotron_h", "glm4_moe", "gpt_oss"])
def test_transformers_reads_every_tensor(name: str, snapshot: Callable[[str], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(snapshot(name), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    layers = FAMILIES[name].num_layers
    assert all(key.startswith(f"model.layers.{layers}.") for key in report["unexpected_keys"])  # MTP: it has no model
    assert not model.training


def test_the_tokenizer_can_be_read(snapshot: Callable[[str], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(snapshot("llama"))
    assert len(tokenizer) == FAMILIES["llama"].vocab_size
    assert tokenizer("t7 t499").input_ids == [7, 499]


@pytest.mark.megatron
def test_bridge_holds_what_it_saved_and_misses_what_is_gone(
    snapshot: Callable[[str], Path], megatron_te: Megatron, tmp_path: Path
) -> None:
    layout = FAMILIES["qwen3_moe"].layout
    expected = megatron_te.bridge_imports(snapshot("qwen3_moe"), layout)
    assert all(held.overwritten for rank in expected.ranks for held in rank.values())
    root = megatron_te.bridge_saves(snapshot("qwen3_moe"), Layout(), tmp_path / "saved")
    assert megatron_te.bridge_loads(root, layout).ranks == expected.ranks
    index = root / "iter_0000000" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    del metadata.state_dict_metadata["decoder.layers.mlp.router.weight"]
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(LoadError, match=r"decoder\.layers\.mlp\.router\.weight"):
        megatron_te.bridge_loads(root, layout)


@pytest.mark.megatron
def test_logits_do_not_depend_on_the_layout(real_checkpoint: Callable[[str], Path], megatron_local: Megatron) -> None:
    root, tokens = real_checkpoint("dense_tp1_pp1").parent, [5, 17, 300, 44, 9]
    alone, follow = megatron_local.logits(root, Layout(), tokens, vocab_size=511, new_tokens=3)
    many, same = megatron_local.logits(root, Layout(tp=2, pp=2), tokens, vocab_size=511, new_tokens=3)
    assert alone.shape == (5, 511)
    assert np.abs(alone - many).max() < 1e-4 < np.abs(alone).max()
    assert follow == same
    assert len(follow) == 3


@pytest.mark.megatron
def test_a_key_of_transformer_engine_is_missed(real_checkpoint: Callable[[str], Path], megatron_te: Megatron) -> None:
    with pytest.raises(LoadError, match="_extra_state"):
        megatron_te.loads_strictly(real_checkpoint("dense_tp1_pp1").parent, Layout())
