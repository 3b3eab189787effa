"""What the product relies on inside Megatron-Bridge 0.6.2 and Megatron Core 0.19.2: a release that changes it shows here."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from ckptguard.core.errors import UnsupportedError
from ckptguard.megatron import bridges
from ckptguard.testing.families import FAMILIES


@pytest.fixture(scope="module")
def models() -> Path:
    place = bridges.root()
    assert place is not None
    return place / "models"


def test_every_family_is_registered() -> None:
    known = bridges.architectures()
    for family in FAMILIES.values():
        assert family.config["architectures"][0] in known
    assert known["LlamaForCausalLM"] == "megatron.bridge.models.llama.llama_bridge"
    assert known["MixtralForCausalLM"] == "ckptguard.megatron.mixtral_bridge"
    assert len(known) > 50


def test_registrations_are_read_from_the_source_without_a_gap(models: Path) -> None:
    """Each decorator names its architecture in a form that is understood, and only in ``*_bridge.py``."""
    for file in models.rglob("*.py"):
        if file.parent.name == "conversion":
            continue
        decorators = re.findall(r"^[^#\n]*MegatronModelBridge\.register_bridge\(", file.read_text(), re.MULTILINE)
        found = bridges._REGISTRATION.findall(file.read_text())
        assert len(found) == len(decorators), file
        assert not decorators or file.name.endswith("_bridge.py")
        for literal, name in found:
            assert (literal or bridges._constant(file.read_text(), name))[0].isupper(), file


def test_bridge_has_no_mixtral(models: Path) -> None:
    """As soon as it has one, ours goes."""
    assert not any("MixtralForCausalLM" in file.read_text() for file in models.rglob("*_bridge.py"))


@pytest.mark.parametrize(
    ("config", "message", "next_step"),
    [
        ({"architectures": ["Qwen3ForCausalML"]}, "Qwen3ForCausalML", "Qwen3ForCausalLM"),
        ({"architectures": ["Zzz"]}, "Zzz", "LlamaForCausalLM"),
        ({"architectures": []}, "no architecture", "architectures"),
        ({}, "no architecture", "architectures"),
        ({"architectures": [3]}, "no architecture", "architectures"),
    ],
)
def test_what_is_unknown_is_said_with_what_is_near(config: dict[str, object], message: str, next_step: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        bridges.load(config)
    assert next_step in caught.value.next_step


def test_without_bridge_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "root", lambda: None)
    with pytest.raises(UnsupportedError, match="megatron-bridge is not installed") as caught:
        bridges.load({"architectures": ["LlamaForCausalLM"]})
    assert "pip install" in caught.value.next_step


def test_versions_that_the_facts_are_from() -> None:
    assert version("megatron-core").startswith("0.19.")
    assert version("megatron-bridge").startswith("0.6.")


def test_conversion_is_called_as_it_is_written(models: Path) -> None:
    """Names that are called or replaced by the asking process, read from the source: importing them takes seconds."""
    text = (models / "conversion" / "model_bridge.py").read_text()
    for name in ("def create_bridge_decorator(", "def mapping_registry(", "def maybe_modify_loaded_hf_weight(",
                 "def provider_bridge(", "def build_conversion_tasks("):  # fmt: skip
        assert name in text
    mappings = (models / "conversion" / "param_mapping.py").read_text()
    assert "def hf_to_megatron(" in mappings
    quantised = (models / "conversion" / "quantization_utils.py").read_text()
    assert "def dequantize_mxfp4(" in quantised


def test_what_megatron_core_lacks() -> None:
    """DeepSeek-V4's attention, and an MLA query projection without LoRA that has no norm of its own."""
    place = bridges.root()
    assert place is not None
    core = place.parent / "core"
    variants = core / "models" / "gpt" / "experimental_attention_variant_module_specs.py"
    assert "dsv4_hybrid" not in variants.read_text()
    assert (core / "transformer" / "mla_qk_norm_config.py").is_file()
