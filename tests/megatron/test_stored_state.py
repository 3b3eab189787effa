"""What an import stores beside tensors is what Megatron-LM and Megatron-Bridge need to build the same model again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptguard.core.errors import UsageError
from ckptguard.megatron.stored_state import stored_files

WORKER = Path(__file__).with_name("stored_state_worker.py")
SAID = ["LLAMA", "LLAMA31", "QWEN3_MOE", "GPT_OSS", "DEEPSEEK_V2_LITE", "DEEPSEEK_V3", "NEMOTRON_H"]
UNSAID = ["LLAMA32", "KIMI_K2", "GEMMA3"]
HOST = {"use_cpu_initialization", "perform_initialization", "hf_model_id"}

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where one process has left what it found about every family."""
    out = tmp_path_factory.mktemp("stored")
    command = [sys.executable, "-W", "ignore", str(WORKER), str(out), *SAID, *UNSAID]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def found(place: Path) -> Found:
    """Return what was found, by family."""
    return {name: json.loads((place / f"{name}.json").read_text()) for name in SAID + UNSAID}


@pytest.mark.parametrize("name", [*SAID, "LLAMA32", "KIMI_K2"])
def test_megatron_builds_the_provider_s_model_from_the_stored_args(found: Found, name: str) -> None:
    """Names, shapes, dtypes and places of every rank's tensors."""
    assert found[name]["described"] == found[name]["own"]


@pytest.mark.parametrize("name", SAID)
def test_what_the_args_say_needs_no_note(found: Found, name: str) -> None:
    assert found[name]["notes"] == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("LLAMA32", "rope_scaling_factor=32"),
        ("KIMI_K2", "beta_fast=1.0"),
        ("GEMMA3", "gemma3_layer_spec; rotary_base="),
        ("GEMMA3", "softmax_scale="),
    ],
)
def test_what_the_args_cannot_say_is_noted(found: Found, name: str, what: str) -> None:
    (note,) = found[name]["notes"]
    assert what in note
    assert "Load this checkpoint with Megatron-Bridge" in note


def test_a_model_of_other_modules_is_refused_not_built_differently(found: Found) -> None:
    assert "gemma3_layer_spec" in found["GEMMA3"]["refused"]


@pytest.mark.parametrize("name", SAID + UNSAID)
def test_bridge_makes_the_same_provider_of_run_config(found: Found, name: str) -> None:
    bridge = found[name]["bridge"]
    as_lists = {
        n: pair for n, pair in bridge["differ"].items() if pair[0] != pair[1].replace("(", "[").replace(")", "]")
    }
    assert as_lists.keys() <= HOST
    assert bridge["hf_model_id"] == "org/model"
    assert bridge["tokenizer"] == ["HuggingFaceTokenizer", "org/model"]
    assert bridge["saved"] == [False, False]


def test_bridge_finds_the_iteration(found: Found) -> None:
    for family in found.values():
        assert family["bridge"]["resolved"] == [7, False]
        assert family["bridge"]["step"] == 7
        assert family["release"] == [0, True]


@pytest.mark.parametrize("name", SAID)
def test_megatron_lm_takes_its_arguments_from_the_checkpoint(found: Found, name: str) -> None:
    """``--use-checkpoint-args``: found by the tracker, and every value that it sets is the stored one."""
    taken, stored = found[name]["megatron_lm"], found[name]["args"]
    assert taken.pop("iteration") == 7
    assert {"num_layers", "hidden_size", "padded_vocab_size", "tokenizer_model"} <= taken.keys()
    assert taken == {argument: stored[argument] for argument in taken}
    assert found[name]["released_lm"].get("iteration", 0) == 0


def test_vocabulary_and_stages_are_in_megatron_s_words(found: Found) -> None:
    args = {name: family["args"] for name, family in found.items()}
    assert args["LLAMA31"]["padded_vocab_size"] == 512
    assert args["LLAMA"]["num_layers_per_virtual_pipeline_stage"] == 1
    assert args["DEEPSEEK_V3"]["pipeline_model_parallel_layout"] == "Et|tttmL"
    assert args["DEEPSEEK_V2_LITE"]["decoder_first_pipeline_num_layers"] == 3
    assert args["GPT_OSS"]["quick_geglu"]
    assert not args["GPT_OSS"]["swiglu"]
    assert args["NEMOTRON_H"]["hybrid_override_pattern"] == "MEM*-EM*"
    assert all(a["no_save_optim"] and a["no_save_rng"] for a in args.values())


def test_nothing_stored_names_a_place_of_the_host(place: Path) -> None:
    for name in SAID + UNSAID:
        for file in (place / name).rglob("*.*"):
            assert not file.is_file() or str(place).encode() not in file.read_bytes(), file


def test_iteration_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="from iteration 1 on"):
        stored_files(None, hf_model_id="org/model", iteration=0, dtype=None)  # type: ignore[arg-type]
