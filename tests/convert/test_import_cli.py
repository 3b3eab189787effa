"""``ckptguard import`` as a user runs it: what it says, what it refuses, what it leaves on the disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptguard.cli.main import run
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.families import FAMILIES, Layout
from ckptguard.testing.hub_server import serve_hub
from ckptguard.testing.megatron_loads import Megatron

pytestmark = pytest.mark.usefixtures("quick")
LLAMA = ("--tp", 2, "--pp", 2)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``ckptguard import`` in this process: exit code, stdout, stderr."""

    def imports(*words: object, command: str = "import") -> tuple[int, str, str]:
        code = run([command, *(str(word) for word in words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return imports


@pytest.fixture
def own(snapshot: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that gives a copy of a family's snapshot, to be changed."""
    return lambda name: shutil.copytree(snapshot(name), tmp_path / "source" / name)


def _refused(result: tuple[int, str, str], code: int, target: Path, *texts: str) -> None:
    """One clear message, that exit code, and nothing beside the target's place."""
    assert result[0] == code, result
    assert "Traceback" not in result[2]
    assert result[2].count("error:") <= 1
    for text in texts:
        assert re.search(text, result[2]), (text, result[2])
    assert not list(target.parent.glob(f"{target.name}*"))


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: int = 1) -> None:
    """Changes the tensors of one file of a snapshot, and its index with them."""
    path = sorted(folder.glob("*.safetensors"))[file]
    tensors = load_file(path)
    before = set(tensors)
    change(tensors)
    save_file(tensors, path)
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    for name in before - tensors.keys():
        del body["weight_map"][name]
    body["weight_map"] |= dict.fromkeys(tensors, path.name)
    index.write_text(json.dumps(body))


def _config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_process_of_its_own_from_snapshot_to_verified_checkpoint(
    snapshot: Callable[[str], Path], tmp_path: Path
) -> None:
    """The one import here that starts all processes itself, as a user does."""
    command = [sys.executable, "-m", "ckptguard", "import", snapshot("llama"), tmp_path / "out", "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=140)
    assert done.returncode == 0, done.stderr
    assert "proved" in done.stdout
    assert "39 tensors" in done.stdout
    assert run(["verify", str(tmp_path / "out" / "release")]) == 0


def test_the_result(snapshot: Callable[[str], Path], call, tmp_path: Path) -> None:
    out, source = tmp_path / "out", snapshot("llama")
    code, text, err = call(source, out, *LLAMA, "--vpp", 2, "--json")
    assert code == 0, err
    value = json.loads(text)
    assert value["plan"]["layout"]["vpp"] == 2
    assert value["plan"]["disk_bytes"] > sum(value["plan"]["bytes_by_file"].values())
    assert value["result"]["proved_tensors"] == 39
    assert value["result"]["path"] == str(out)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    carried = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (out / "release" / "tokenizer").iterdir()} == carried
    for name in carried:
        assert (out / "release" / "tokenizer" / name).read_bytes() == (source / name).read_bytes()
    code, text, _ = call(out, command="verify")
    assert code == 0, text
    code, text, _ = call(out, "--against", value["result"]["seal"], command="verify")
    assert code == 0, text
    assert not list(tmp_path.glob("out.*"))


def test_a_dry_run_says_all_and_writes_nothing(snapshot: Callable[[str], Path], call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, _ = call(snapshot("qwen3"), out, "--tp", 2, "--dry-run")
    assert code == 0
    for part in (
        "Qwen3ForCausalLM", "TP2", "decoder.layers.self_attention.q_layernorm.weight bfloat16 [5, 32]",
        "release/__0_0.distcp", "release/__1_0.distcp",
    ):  # fmt: skip
        assert part in text
    assert "proved" not in text
    code, text, _ = call(snapshot("qwen3"), out, "--dry-run", "--json")
    assert json.loads(text)["result"] is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words", "texts"),
    [
        ("llama", ("--tp", 3), ("4 .*heads", "1, 2, 4")),
        ("llama", ("--pp", 3), ("4 layers over 3 stages", "2, 4")),
        ("llama", ("--ep", 2), ("no experts",)),
        ("llama", ("--vpp", 2), ("--pp above 1",)),
        ("llama", ("--pp", 2, "--first-pp-layers", 4), ("0 layers over 1 stages",)),
        ("qwen3_moe", ("--ep", 3), ("8 experts", "1, 2, 4, 8")),
        ("qwen3_moe", ("--etp", 5), ("48 wide", "--etp 5")),
        ("qwen3_moe", ("--tp", 3, "--pp", 3, "--ep", 3), ("heads", "layers", "experts")),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit(
    name: str, words: tuple[object, ...], texts: tuple[str, ...], snapshot: Callable[[str], Path], call, tmp_path: Path
) -> None:
    _refused(call(snapshot(name), tmp_path / "out", *words), 5, tmp_path / "out", *texts)


def test_query_groups_that_do_not_fit(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder = own("llama")
    _config(folder, num_attention_heads=12, num_key_value_heads=3, hidden_size=96)
    result = call(folder, tmp_path / "out", "--tp", 2)
    _refused(result, 5, tmp_path / "out", "12 .*heads", "3 .*groups", "1, 3, 6, 12")


def test_an_architecture_that_nobody_knows(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder = own("llama")
    _config(folder, architectures=["LlamaForCasualLM"])
    _refused(call(folder, tmp_path / "out"), 5, tmp_path / "out", "LlamaForCasualLM", "Nearest.*LlamaForCausalLM")
    _config(folder, architectures=None)
    _refused(call(folder, tmp_path / "out"), 5, tmp_path / "out", "no architecture")


def test_a_config_that_is_not_there_or_not_json(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder = own("llama")
    (folder / "config.json").write_text("{")
    _refused(call(folder, tmp_path / "out"), 4, tmp_path / "out", r"config\.json")
    (folder / "config.json").unlink()
    _refused(call(folder, tmp_path / "out"), 4, tmp_path / "out", r"config\.json")


def test_a_file_that_the_index_names_is_missing(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder = own("llama")
    (folder / "model-00002-of-00003.safetensors").unlink()
    _refused(call(folder, tmp_path / "out"), 4, tmp_path / "out", r"model-00002-of-00003\.safetensors")


def test_a_tensor_in_two_files(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder = own("llama")
    first = load_file(folder / "model-00001-of-00003.safetensors")
    name = sorted(first)[0]
    _changed(folder, lambda tensors: tensors.update({name: first[name]}))
    _refused(
        call(folder, tmp_path / "out"), 4, tmp_path / "out", re.escape(name), r"model-0000[12]-of-00003\.safetensors"
    )


def test_a_tensor_without_a_place(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder, out = own("llama"), tmp_path / "out"
    _changed(folder, lambda tensors: tensors.update({"model.layers.0.mystery.weight": torch.ones(3)}))
    _refused(call(folder, out), 5, out, r"model\.layers\.0\.mystery\.weight float32 \[3\]", "--drop")
    code, text, _ = call(folder, out, "--drop", "*.mystery.*")
    assert code == 0
    assert "left out model.layers.0.mystery.weight" in text


def test_a_tensor_that_is_missing(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder, out = own("llama"), tmp_path / "out"
    _changed(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight", None), 1)
    _changed(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight", None), 0)
    _refused(call(folder, out), 5, out, r"model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_tied_output_layer_must_be_the_embedding(own: Callable[[str], Path], call, tmp_path: Path) -> None:
    folder, out = own("llama31"), tmp_path / "out"
    (path,) = (p for p in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(p))
    number = sorted(folder.glob("*.safetensors")).index(path)
    _changed(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), number)
    code, text, _ = call(folder, out, "--dry-run")
    assert code == 0
    assert "repeats lm_head.weight" in text
    _changed(folder, lambda t: t["lm_head.weight"][7, 3].add_(1), number)
    _refused(call(folder, out), 5, out, r"lm_head\.weight differs from model\.embed_tokens\.weight")


def test_a_target_that_is_there(snapshot: Callable[[str], Path], call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    code, _, err = call(snapshot("llama"), out)
    assert code == 2
    assert "is there already" in err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_disk_without_room(snapshot: Callable[[str], Path], call, tmp_path: Path, monkeypatch) -> None:
    out, real = tmp_path / "out", os.statvfs

    def full(path: Any) -> Any:
        values = list(real(path))
        return os.statvfs_result([1, 1, 100, 10, 10, *values[5:]])

    monkeypatch.setattr(os, "statvfs", full)
    code, _, err = call(snapshot("llama"), out)
    assert code == 6
    assert re.search(r"\d+ bytes are needed, 10 are free", err)
    assert not out.exists()
    assert not list(tmp_path.rglob("*.distcp"))


def test_too_little_memory(snapshot: Callable[[str], Path], call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _, err = call(snapshot("llama"), out, "--memory", "4KiB")
    assert code == 2
    assert "at least" in err
    assert not out.exists()
    code, _, err = call(snapshot("llama"), out, "--memory", "1MiB")
    assert code == 0, err


@pytest.mark.parametrize("words", [("--dtype", "int8"), ("--iteration", "0"), ("--iteration", "last"), ("--tp", "0")])
def test_words_that_mean_nothing(words: tuple[str, ...], snapshot: Callable[[str], Path], call, tmp_path: Path) -> None:
    _refused(call(snapshot("llama"), tmp_path / "out", *words), 2, tmp_path / "out", words[0])


def test_a_megatron_checkpoint_is_no_snapshot(imported, call, tmp_path: Path) -> None:
    _refused(call(imported("llama").root, tmp_path / "out"), 2, tmp_path / "out", "ckptguard export")


def test_a_hub_id(snapshot: Callable[[str], Path], call, tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    out = tmp_path / "out"
    with serve_hub({"org/tiny": {"main": snapshot("qwen2"), "v1": snapshot("llama")}}) as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.chdir(tmp_path)
        huggingface_hub.close_session()  # so that the proxy settings are read again
        code, text, err = call("org/tiny@v1", out, "--json")
        huggingface_hub.close_session()
    assert code == 0, err
    assert json.loads(text)["plan"]["architecture"] == "LlamaForCausalLM"
    with open_checkpoint(out) as checkpoint:
        assert checkpoint.index.facts.run_config["model"]["hf_model_id"] == "org/tiny"


def _tensors(root: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with open_checkpoint(root) as checkpoint:
        return {name: (entry.dtype.name, entry.shape) for name, entry in checkpoint.index.tensors.items()}


@pytest.mark.megatron
def test_choices_arrive_in_megatron(
    snapshot: Callable[[str], Path], call, megatron_te: Megatron, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, _, err = call(
        snapshot("qwen3"), out, "--tp", 2, "--pp", 3, "--first-pp-layers", 1, "--last-pp-layers", 2, "--iteration", 100,
        "--vocab-multiple", 8, "--dtype", "bf16", "--dtype", "*layernorm*=fp32",
    )  # fmt: skip
    assert code == 0, err
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert (out / "latest_train_state.pt").is_file()
    tensors = _tensors(out)
    assert tensors["embedding.word_embeddings.weight"] == ("bfloat16", (512, 64))  # 500 to a multiple of 16
    assert {dtype for name, (dtype, _) in tensors.items() if "layernorm" in name} == {"float32"}
    assert {dtype for name, (dtype, _) in tensors.items() if "layernorm" not in name} == {"bfloat16"}
    layout = FAMILIES["qwen3"].layout
    loaded = megatron_te.loads_strictly(out, layout)
    assert loaded.iteration == 0  # the loader's --finetune sets it back; Bridge says what is stored
    trained = megatron_te.bridge_loads(out, layout)
    assert trained.iteration == 100
    expected = megatron_te.bridge_imports(snapshot("qwen3"), layout, vocab_multiple=8)
    assert loaded.ranks == trained.ranks == expected.ranks


@pytest.mark.megatron
def test_a_pipeline_in_megatrons_own_notation(
    snapshot: Callable[[str], Path], call, megatron_te: Megatron, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, _, err = call(snapshot("qwen3"), out, "--pp", 2, "--pp-layout", "Ettt|ttL", "--vocab-multiple", 4)
    assert code == 0, err
    layout = Layout(pp=2, first_stage_layers=3)
    expected = megatron_te.bridge_imports(snapshot("qwen3"), layout)  # Bridge itself cannot pad the vocabulary at TP 1
    assert megatron_te.loads_strictly(out, layout).ranks == expected.ranks


def test_the_fingerprint_does_not_depend_on_the_layout(snapshot: Callable[[str], Path], call, tmp_path: Path) -> None:
    roots = []
    for name, words in {"one": ("--vocab-multiple", 128), "four": (*LLAMA, "--vpp", 2, "--vocab-multiple", 64)}.items():
        code, _, err = call(snapshot("llama"), tmp_path / name, *words)
        assert code == 0, err
        code, text, _ = call(tmp_path / name, "--json", command="fingerprint")
        assert code == 0
        roots.append({k: v for k, v in json.loads(text).items() if "root" in k})
    assert roots[0]
    assert roots[0] == roots[1]
    assert call(tmp_path / "one", tmp_path / "four", command="diff")[0] == 0
