"""What comes out of an export: bit for bit the snapshot that was imported, and what real training left in a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptguard.cli.main import run
from ckptguard.convert import exporting
from ckptguard.convert.exporting import Exported, ExportOptions
from ckptguard.core.errors import DamagedError, UnsupportedError, UsageError
from ckptguard.engine.filling import Filler
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron import ask
from ckptguard.testing.families import Layout
from ckptguard.testing.megatron_loads import Megatron

pytestmark = pytest.mark.megatron

Tensors = dict[str, torch.Tensor]
_ANSWERS: dict[str, dict[str, Any]] = {}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 511,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def remembered(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask each question once: equal ones have equal answers."""
    put = ask.put

    def answer(question: Mapping[str, object], **more: Any) -> dict[str, Any]:
        key = json.dumps(question, sort_keys=True, default=str)
        if key not in _ANSWERS:
            _ANSWERS[key] = put(question, **more)
        return _ANSWERS[key]

    monkeypatch.setattr(ask, "put", answer)


def tensors_of(snapshot: Path) -> Tensors:
    out: Tensors = {}
    for file in sorted(snapshot.glob("*.safetensors")):
        loaded = load_file(file)
        assert loaded.keys().isdisjoint(out)
        out |= loaded
    return out


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def export(root: Path, dst: Path, reference: Path | None = None, **chosen: Any) -> Exported:
    options = ExportOptions(**chosen)
    with open_checkpoint(root) as checkpoint:
        prepared = exporting.prepare_export(checkpoint, None if reference is None else str(reference), options)
        return exporting.run_export(checkpoint, prepared, dst, options, what=f"export of {root}")


def config_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_elements(root: Path, key: str, value: bytes) -> None:
    """Overwrites the first elements of a stored tensor."""
    with open_checkpoint(root) as checkpoint:
        entry = checkpoint.index.tensors[key]
        at = checkpoint.reader.locate(entry, entry.chunks[0])
        path, offset = checkpoint.files.root / at.span.file, at.span.offset_bytes
    with path.open("r+b") as file:
        file.seek(offset + at.first_element * at.dtype.itemsize)
        file.write(value)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_the_imported_snapshot_comes_back(name: str, imported: Callable[[str], Any], tmp_path: Path) -> None:
    made = imported(name)
    out = tmp_path / "out"
    result = export(made.root, out, made.snapshot, max_shard_bytes=200_000)
    expected = tensors_of(made.snapshot)
    assert_same(tensors_of(out), expected)
    assert result.proved == len(expected)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / file).read_bytes() == (made.snapshot / file).read_bytes()
    report = verify(out)
    assert not report.damaged
    assert report.seal == result.seal


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_names_come_from_bridge_without_a_reference(name: str, imported: Callable[[str], Any], tmp_path: Path) -> None:
    made = imported(name)
    export(made.root, tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(made.snapshot))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (made.snapshot / "tokenizer.json").read_bytes()


def test_a_file_is_what_safetensors_writes(imported: Callable[[str], Any], tmp_path: Path) -> None:
    made = imported("deepseek_v3")  # has float32 and bfloat16 tensors
    export(made.root, tmp_path / "out", made.snapshot)
    save_file(tensors_of(made.snapshot), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = tmp_path / "out" / "model.safetensors"
    assert ours.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_fp8_is_written_as_bfloat16(imported: Callable[[str], Any], tmp_path: Path) -> None:
    made = imported("deepseek_v3_fp8")
    export(made.root, tmp_path / "out", made.snapshot)
    stored = tensors_of(made.snapshot)
    expected = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    for name, tensor in expected.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected[name] = (tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
    assert_same(tensors_of(tmp_path / "out"), expected)
    assert "quantization_config" in json.loads((made.snapshot / "config.json").read_text())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_mxfp4_is_written_as_transformers_reads_it(imported: Callable[[str], Any], tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    made = imported("gpt_oss_mxfp4")
    export(made.root, tmp_path / "out", made.snapshot)
    stored = tensors_of(made.snapshot)
    expected = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in stored:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            expected[stem] = mxfp4.convert_moe_packed_tensors(stored[name], stored[f"{stem}_scales"]).contiguous()
    assert_same(tensors_of(tmp_path / "out"), expected)


def _trained(real: Callable[[str], Path], resaved: Callable[[str, str], Path]) -> Iterator[Path]:
    """One state in three formats, by Megatron itself."""
    yield real("dense_tp2_pp2_full")
    yield resaved("dense_tp2_pp2_full", "legacy_tp2_pp2")
    yield resaved("dense_tp2_pp2_full", "dense_tp1_pp1_full")


def test_training_comes_out_alike_from_every_format_and_layout(
    real_checkpoint: Callable[[str], Path], resaved_checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    reference = config_folder(tmp_path / "config", LLAMA)
    written = []
    for number, iteration in enumerate(_trained(real_checkpoint, resaved_checkpoint)):
        export(iteration, tmp_path / str(number), reference)
        written.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


def test_torch_dcp_and_experts_of_the_local_spec(
    real_checkpoint: Callable[[str], Path], resaved_checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    dense, moe = config_folder(tmp_path / "dense", LLAMA), config_folder(tmp_path / "moe", MIXTRAL)
    export(real_checkpoint("dense_tp1_pp1_full"), tmp_path / "dist", dense)
    export(resaved_checkpoint("dense_tp1_pp1_full", "dense_dcp"), tmp_path / "dcp", dense)
    assert_same(tensors_of(tmp_path / "dcp"), tensors_of(tmp_path / "dist"))
    assert export(real_checkpoint("moe_ep2_pp2"), tmp_path / "out", moe).proved == 79


def test_transformers_computes_what_megatron_does(
    real_checkpoint: Callable[[str], Path], megatron_local: Megatron, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    iteration, tokens = real_checkpoint("dense_tp2_pp2_full"), [5, 17, 300, 44, 9]
    export(iteration, tmp_path / "out", config_folder(tmp_path / "config", LLAMA))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0].numpy()
    expected, _ = megatron_local.logits(iteration.parent, Layout(), tokens, vocab_size=511)
    assert np.abs(found - expected).max() < 1e-3 < np.abs(expected).max()


def test_padding_rows_that_hold_values_are_told(real_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    reference = config_folder(tmp_path / "config", LLAMA)
    with open_checkpoint(real_checkpoint("dense_tp2_pp2")) as checkpoint:
        prepared = exporting.prepare_export(checkpoint, str(reference), ExportOptions())
    assert [note.split(":")[0] for note in prepared.notes] == [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    ]
    assert prepared.plan.left_behind["tensors of optimizer state"] == 12


def test_a_value_that_does_not_fit_is_never_rounded_unasked(
    imports: Callable[..., Any], snapshot: Callable[[str], Path], tmp_path: Path
) -> None:
    made = imports(snapshot("llama"), tmp_path / "wide", dtypes=(("*", "float32"),))
    export(made.root, tmp_path / "exact", made.snapshot)
    assert_same(tensors_of(tmp_path / "exact"), tensors_of(made.snapshot))
    write_elements(made.root, "decoder.layers.mlp.linear_fc2.weight", np.float32(1.0000001).tobytes())
    with pytest.raises(
        UnsupportedError, match=r"1 tensors would lose bits, such as model\.layers\.0\.mlp\.down_proj"
    ) as error:
        export(made.root, tmp_path / "out", made.snapshot)
    assert "--dtype bfloat16" in error.value.next_step
    assert not (tmp_path / "out").exists()
    export(made.root, tmp_path / "out", made.snapshot, dtypes=(("*", "bfloat16"),))
    assert float(tensors_of(tmp_path / "out")["model.layers.0.mlp.down_proj.weight"][0, 0]) == 1
    export(made.root, tmp_path / "kept", made.snapshot, dtypes=(("*", "bfloat16"), ("*.down_proj.weight", "float32")))
    assert tensors_of(tmp_path / "kept")["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32
    with pytest.raises(UsageError, match="keeps in one tensor"):
        export(made.root, tmp_path / "mixed", made.snapshot, dtypes=(("*.q_proj.weight", "float16"),))


def test_a_norm_without_a_place_must_be_ones(imported: Callable[[str], Any], tmp_path: Path) -> None:
    made = imported("deepseek_v2_lite")
    root = Path(shutil.copytree(made.root, tmp_path / "root"))
    with open_checkpoint(root) as checkpoint:
        key = next(k for k in checkpoint.index.tensors if k.endswith("linear_q_proj.layer_norm_weight"))
    export(root, tmp_path / "ones", made.snapshot)
    write_elements(root, key, b"\x00\x40")
    with pytest.raises(UnsupportedError, match="1 tensors hold values that the Hugging Face model has no place for"):
        export(root, tmp_path / "out", made.snapshot)
    export(root, tmp_path / "out", made.snapshot, drop=(key,))
    assert_same(tensors_of(tmp_path / "out"), tensors_of(made.snapshot))


def test_what_was_written_wrong_never_appears(
    imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = imported("llama")

    class Wrong(Filler):
        def __call__(self, key: int, begin_bytes: int, out: memoryview, /) -> None:
            super().__call__(key, begin_bytes, out)
            if self.chunks[key].name == "model.norm.weight":
                out[3] ^= 1

    monkeypatch.setattr(exporting, "Filler", Wrong)
    with pytest.raises(DamagedError, match="not given back") as error:
        export(made.root, tmp_path / "out", made.snapshot)
    assert [problem.tensor for problem in error.value.problems] == ["decoder.final_layernorm.weight[0:64]"]
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(imported: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"not the LlamaForCausalLM .*mlp\.router\.weight"):
        export(imported("qwen3_moe").root, tmp_path / "out", imported("llama").snapshot)
    other = json.loads((imported("llama").snapshot / "config.json").read_text()) | {"num_hidden_layers": 3}
    with pytest.raises(UnsupportedError, match="the model's"):
        export(imported("llama").root, tmp_path / "out", config_folder(tmp_path / "config", other))


def test_what_is_missing_is_named(imported: Callable[[str], Any], tmp_path: Path) -> None:
    made = imported("llama")
    root = Path(shutil.copytree(made.root, tmp_path / "root"))
    next(iter(sorted(root.rglob("__1_*.distcp")))).unlink()
    with pytest.raises(DamagedError, match="its model is damaged, so it is not exported") as error:
        export(root, tmp_path / "out", made.snapshot)
    assert any("__1_" in (problem.file or "") for problem in error.value.problems)


def test_the_command(imported: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported("llama")
    out = tmp_path / "out"
    command = ["export", str(made.root), str(out)]
    assert run([*command, "--dry-run", "--json", "--max-shard-size", "200KB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["result"] is None
    assert len(plan["plan"]["bytes_by_file"]) > 1
    assert not out.exists()
    assert run(command) == 0
    assert "proved" in capsys.readouterr().out
    assert run(command) == 2
    assert "is there already" in capsys.readouterr().err
    assert run(["export", str(made.snapshot), str(tmp_path / "more")]) == 2
    assert "a Hugging Face snapshot already" in capsys.readouterr().err
    bare = Path(shutil.copytree(made.root, tmp_path / "bare"))
    shutil.rmtree(bare / "release" / "tokenizer")
    assert run(["export", str(bare), str(tmp_path / "more")]) == 2
    assert "--reference" in capsys.readouterr().err
