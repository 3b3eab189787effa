"""Every family, imported: real ranks hold what Bridge itself puts there, compute what transformers does, and give all back."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckptguard.convert.exporting import ExportOptions, prepare_export, run_export
from ckptguard.core.errors import UnsupportedError
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout as ProductLayout
from ckptguard.testing.families import FAMILIES, Layout
from ckptguard.testing.megatron_loads import Held, Megatron, hf_logits

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS = [5, 17, 300, 44, 9, 101, 77]
NAMES = [name for name in FAMILIES if name != "deepseek_v4"]
RUN_ON_A_CPU = [name for name in NAMES if FAMILIES[name].forward_on_cpu and name != "glm4_moe_air"]  # as glm4_moe
# What Megatron Core has and the model does not: ones are put there, and said so.
MADE_UP = {"deepseek_v2_lite": "self_attention.linear_q_proj.layer_norm_weight"}
ONES = hashlib.sha256(torch.ones(64, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()).hexdigest()
# Where bytes differ from Bridge's own save: the stored args; what Megatron builds in fp32 and Bridge casts with all others;
# the state of Megatron's own ColumnParallelLinear, which is None and is ignored on load (only hybrid models store it).
MAY_DIFFER = re.compile(r"common_state/|softmax_offset$|mixer\.(A_log|D)$|^output_layer\._extra_state/")


def _oracle(name: str, imported: Any, megatron: Megatron, scratch: Path) -> tuple[dict[str, Held], ...] | None:
    """What Bridge's own import puts into the ranks; None for Mixtral, which it does not know."""
    source = imported.snapshot
    if name == "mixtral":
        return None
    if name == "kimi_k2":  # Bridge would run the release's code; the model is DeepSeek-V3's
        source = shutil.copytree(source, scratch / name)
        config = json.loads((source / "config.json").read_text()) | {"model_type": "deepseek_v3"}
        del config["auto_map"]
        (source / "config.json").write_text(json.dumps(config))
    loaded = megatron.bridge_imports(source, FAMILIES[name].layout, vocab_multiple=imported.vocab_multiple)
    return tuple(dict(rank) for rank in loaded.ranks)


@pytest.mark.megatron
@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_what_bridge_puts_there(
    name: str, imported: Callable[[str], Any], megatron_te: Megatron, tmp_path: Path
) -> None:
    family, done = FAMILIES[name], imported(name)
    trained = megatron_te.bridge_loads(done.root, family.layout)
    assert trained.iteration == 0
    assert all(held.overwritten for rank in trained.ranks for held in rank.values())
    if family.megatron_lm:
        strict = megatron_te.loads_strictly(done.root, family.layout)
        assert strict.ranks == trained.ranks
        assert strict.iteration == 0
    expected = _oracle(name, done, megatron_te, tmp_path)
    if expected is None:
        return
    for rank, ours in zip(expected, trained.ranks, strict=True):
        made_up = [key for key in ours if name in MADE_UP and key.endswith(MADE_UP[name])]
        assert all(ours[key].digest == ONES and not rank[key].overwritten for key in made_up)
        assert {**rank, **{key: ours[key] for key in made_up}} == ours
        assert bool(made_up) == (name in MADE_UP)


def test_what_is_made_up_is_said(imported: Callable[[str], Any]) -> None:
    for name in NAMES:
        notes = [note for note in imported(name).prepared.structure.notes if "filled with ones" in note]
        assert len(notes) == (name in MADE_UP)
        assert all(MADE_UP[name] in note for note in notes)


def test_a_model_that_megatron_core_lacks_is_refused(snapshot: Callable[[str], Path], imports, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="dsv4_hybrid"):
        imports(snapshot("deepseek_v4"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.megatron
@pytest.mark.parametrize("name", RUN_ON_A_CPU)
def test_it_computes_what_transformers_does(
    name: str, imported: Callable[[str], Any], megatron_local: Megatron
) -> None:
    family, done = FAMILIES[name], imported(name)
    expected, follow = hf_logits(done.snapshot, TOKENS, new_tokens=2)
    found, same = megatron_local.logits(
        done.root, family.layout, TOKENS, vocab_size=family.vocab_size, new_tokens=2
    )  # fmt: skip
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert same == follow


@pytest.mark.parametrize("name", NAMES)
def test_export_gives_every_bit_back(name: str, imported: Callable[[str], Any], quick: None, tmp_path: Path) -> None:
    done, options = imported(name), ExportOptions()
    with open_checkpoint(done.root) as checkpoint:
        prepared = prepare_export(checkpoint, str(done.snapshot), options)
        run_export(checkpoint, prepared, tmp_path / "back", options, what="export")
    expected, found = _tensors(done.snapshot), _tensors(tmp_path / "back")
    if FAMILIES[name].quantised != "none":  # those come back as what they stand for, under the name of that
        beside = ("_scale_inv", "_scales", "_blocks")
        values = {n for n in expected if any(n + end in expected for end in beside) or n.endswith(beside)}
        stems = {re.sub(f"({'|'.join(beside)})$", "", n) for n in values}
        assert stems
        assert all(found.pop(stem).dtype == torch.bfloat16 for stem in stems)
        expected = {n: tensor for n, tensor in expected.items() if n not in values}
    assert found.keys() == expected.keys()
    assert all(_bits(found[n]) == _bits(expected[n]) for n in expected)


@pytest.mark.megatron
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "nemotron_h"])
def test_files_are_those_that_megatron_saves(
    name: str, imported: Callable[[str], Any], megatron_te: Megatron, tmp_path: Path
) -> None:
    done = imported(name)
    saved = megatron_te.bridge_saves(
        done.snapshot, FAMILIES[name].layout, tmp_path / "saved", vocab_multiple=done.vocab_multiple
    )  # fmt: skip
    ours, theirs = _stored(done.root), _stored(saved)
    assert ours.keys() == theirs.keys()
    different = {key for key in ours if ours[key] != theirs[key]}
    assert all(MAY_DIFFER.search(name) for name, _ in different)
    for key in different:
        assert ours[key][0] == theirs[key][0]  # in the same file all the same
    assert list(ours) == list(theirs)  # and in the same order


def _stored(root: Path) -> dict[tuple[str, str], tuple[str, bytes]]:
    """File and encoded bytes of every chunk and object in the ranks' files, in the order in which they stand there."""
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    with open_checkpoint(root) as checkpoint:
        index = checkpoint.index
        spans = {(n, str(chunk.box)): chunk.span for n, entry in index.tensors.items() for chunk in entry.chunks}
        spans |= {(n, ""): entry.span for n, entry in index.objects.items() if entry.span.file.endswith(".distcp")}
    out = {}
    for key, span in sorted(spans.items(), key=lambda item: (item[1].file, item[1].offset_bytes)):
        out[key] = (span.file, (folder / span.file).read_bytes()[span.offset_bytes : span.end_bytes])
    return out


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="session")
def smollm2(real_cache: Path) -> Path:
    """Return the snapshot of SmolLM2-135M-Instruct, made once."""
    made = REPOSITORY / ".demo" / "smollm2"
    if not (made / "config.json").is_file():
        made = real_cache / "smollm2"
        subprocess.run([sys.executable, REPOSITORY / "tools" / "smollm2_snapshot.py", made], check=True)
    return made


@pytest.mark.slow
@pytest.mark.megatron
def test_a_trained_model_still_knows_the_capital_of_france(
    smollm2: Path, imports, megatron_local: Megatron, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is").input_ids
    done = imports(smollm2, tmp_path / "out", layout=ProductLayout(tp=3, pp=2))
    expected, follow = hf_logits(smollm2, prompt, new_tokens=1)
    found, same = megatron_local.logits(
        done.root, Layout(tp=3, pp=2), prompt, vocab_size=expected.shape[1], new_tokens=1
    )  # fmt: skip
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert same == follow
    assert tokenizer.decode(same) == " Paris"
