"""What a snapshot to be written shall look like: config, tensor names, dtypes and shapes, and the files that go along."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.errors import DamagedError, UsageError
from ckptguard.core.problems import Problem
from ckptguard.engine import structure as checks
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint, resolve
from ckptguard.formats.storage import Directory

CONFIG = "config.json"
BRIDGE_FOLDER = "tokenizer"  # where Megatron-Bridge, and `ckptguard import`, keep them beside the weights
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", "index.json", FILE_NAME)
_QUANTISED_ONLY = ("quantize_config.json", "hf_quant_config.json")
_BFLOAT16 = BY_NAME["bfloat16"]
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_PACKED = ("int8", "uint8")

Table = Mapping[str, tuple[DType, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Reference:
    """What to write a snapshot like.

    Attributes:
        location: Where that was read.
        folder: The directory that holds config.json.
        config: Its content, without a quantisation.
        tensors: (dtype, shape) by name, in the order of the reference's files; None if it has no tensors. Quantised ones
            stand under the names and shapes that they have in bf16.
        quantised: How many are quantised in the reference.
        files: Other files that go along, by path; config.json is among them.
    """

    location: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Table | None
    quantised: int
    files: Mapping[str, bytes]


def read_reference(text: str) -> Reference:
    """A reference that the user names: a snapshot, or a directory with its small files only.

    Args:
        text: A directory or a hub id.

    Raises:
        NotFoundError: Nothing is there, or no config.json.
        DamagedError: Its headers or its config cannot be read.
        UsageError: It is a Megatron checkpoint.
    """
    path = resolve(text)
    if (path / CONFIG).is_file() and not any(path.glob("*.safetensors")):
        with Directory(path) as files:
            return _read(files, "", None)
    with open_checkpoint(path) as snapshot:
        if snapshot.index.format != "huggingface":
            raise UsageError(
                f"--reference {text}: a {snapshot.index.format} checkpoint, not a Hugging Face snapshot",
                next_step="Give the snapshot that training started from, or a directory with its config.json.",
            )
        problems = [problem for problem in checks.check(snapshot.index) if problem.is_damage]
        if problems:
            raise DamagedError(
                f"--reference {text}: {len(problems)} problems; a damaged snapshot is no reference", problems=problems
            )
        table = {name: (entry.dtype, entry.shape) for name, entry in snapshot.index.tensors.items()}
        return _read(snapshot.files, "", table)


def own_reference(checkpoint: Checkpoint) -> Reference:
    """What a Megatron checkpoint holds itself: the files that Megatron-Bridge stores beside the weights.

    Raises:
        UsageError: It has no config.json.
    """
    if f"{BRIDGE_FOLDER}/{CONFIG}" not in checkpoint.files.listing:
        raise UsageError(
            f"{checkpoint.files.root}: no {BRIDGE_FOLDER}/{CONFIG}, so the Hugging Face model is not known",
            next_step="Name one with --reference: the snapshot that training started from, or its config.json's directory.",
        )
    return _read(checkpoint.files, f"{BRIDGE_FOLDER}/", None)


def _read(files: Directory, below: str, table: Table | None) -> Reference:
    config = _config(files, below + CONFIG)
    plain, quantised = (None, 0) if table is None else without_quantisation(table)
    along = {}
    for name in files.listing:
        inner = name.removeprefix(below)
        nested = "/" in inner and not inner.startswith("additional_chat_templates/")
        if name.startswith(below) and not nested and not inner.endswith(_WEIGHTS) and not inner.startswith("."):
            along[inner] = files.read(name)
    cleaned = _unquantised(config)
    if cleaned != config:
        along = {name: data for name, data in along.items() if name not in _QUANTISED_ONLY}
        along[CONFIG] = (json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n").encode()
    return Reference(str(files.root / below), files.root / below, cleaned, plain, quantised, along)


def _config(files: Directory, name: str) -> dict[str, Any]:
    message = f"{files.root}: no {name}"
    if name in files.listing:
        try:
            value = json.loads(files.read(name))
        except (ValueError, RecursionError) as error:
            message = f"{files.root / name}: not JSON ({error})"
        else:
            if isinstance(value, dict):
                return value
            message = f"{files.root / name}: holds a {type(value).__name__}, expected an object"
    raise DamagedError(message, problems=[Problem("unreadable", message, file=name)])


def _unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without ``quantization_config``, the language model's own part of a multimodal config included."""
    out = {name: value for name, value in config.items() if name != "quantization_config"}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = _unquantised(out["text_config"])
    return out


def without_quantisation(table: Table) -> tuple[Table, int]:
    """The tensors as a bf16 snapshot of the same model has them, and how many are changed.

    DeepSeek-V3: fp8 weights beside ``_scale_inv``; DeepSeek-V4: fp8, or fp4 two to a byte, beside ``.scale``; GPT-OSS:
    ``X_blocks`` of shape [experts, out, in / 32, 16] beside ``X_scales`` is ``X`` of shape [experts, in, out]
    (transformers/integrations/mxfp4.py ``convert_moe_packed_tensors``, 5.12).
    """
    out: dict[str, tuple[DType, tuple[int, ...]]] = {}
    changed = 0
    for name, (dtype, shape) in table.items():
        stem = name.removesuffix("_blocks")
        if _is_scale(name, table):
            continue
        if stem != name and f"{stem}_scales" in table and len(shape) == 4:
            out[stem] = _BFLOAT16, (shape[0], shape[2] * shape[3] * 2, shape[1])
        elif dtype.name in (*_FP8, *_PACKED) and {f"{name}_scale_inv", _beside(name)} & table.keys():
            packed = dtype.name in _PACKED
            out[name] = _BFLOAT16, (*shape[:-1], shape[-1] * (2 if packed else 1))
        else:
            out[name] = dtype, shape
            continue
        changed += 1
    return out, changed


def _beside(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.scale"


def _is_scale(name: str, table: Table) -> bool:
    """Whether a tensor only says how to read another one."""
    if name.endswith("_scales"):
        return f"{name.removesuffix('_scales')}_blocks" in table
    weight = name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else f"{name.removesuffix('.scale')}.weight"
    return weight != name and weight in table and table[weight][0].name in (*_FP8, *_PACKED)
