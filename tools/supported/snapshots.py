"""A small snapshot of each architecture: names and shapes as transformers saves them, or as Bridge would export them."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from supported.own_configs import CONFIGS, FIELDS, OTHER_NAMES, RENAMES
from supported.tiny_configs import small

from ckptguard.testing.families import FAMILIES, make_snapshot
from ckptguard.testing.family_tensors import Shapes, Tensors, released_name


def make(case: str, out: Path) -> str:
    """Writes the snapshot of a case.

    Args:
        case: A family of ``ckptguard.testing.families``, or an architecture.
        out: The directory to fill.

    Returns:
        Where its tensors' names come from.

    Raises:
        LookupError: There is no such small model to be had; says why.
    """
    if case in FAMILIES:
        make_snapshot(case, out)
        return "suite"
    out.mkdir(parents=True, exist_ok=True)
    if case in CONFIGS:
        config: dict[str, Any] = {"architectures": [case], **CONFIGS[case]}
        _write(out, config, _as_exported(out, config))
        return "Bridge"
    config, shapes = _as_saved(case)
    _write(out, config, shapes)
    return "transformers"


def _as_saved(architecture: str) -> tuple[dict[str, Any], Shapes]:
    """Config, names and shapes of transformers' own class."""
    import transformers

    cls = getattr(transformers, OTHER_NAMES.get(architecture, architecture), None)
    if cls is None:
        raise LookupError(f"transformers {transformers.__version__} has no {architecture}, and its code is not run")
    model = cls(small(cls.config_class, FIELDS.get(architecture)))
    with tempfile.TemporaryDirectory() as scratch:
        from safetensors import safe_open

        model.save_pretrained(scratch)
        with safe_open(Path(scratch) / "model.safetensors", framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        config = json.loads((Path(scratch) / "config.json").read_text()) | {"architectures": [architecture]}
    saved, released = RENAMES.get(architecture, ("", ""))
    named = {re.sub(f"^{saved}", released, name): shape for name, shape in shapes.items()}
    return config, {released_name(config["model_type"], name): shape for name, shape in named.items()}


def _as_exported(folder: Path, config: dict[str, Any]) -> Shapes:
    """Names and shapes that Bridge would export of the model that it makes of the config."""
    from ckptguard.layout.layouts import Layout
    from ckptguard.megatron.hf_structure import ask_structure

    (folder / "config.json").write_text(json.dumps(config))
    return {
        name: shape
        for name, (_, shape) in ask_structure(folder, config, None, Layout(), dtype="bfloat16").exported.items()
    }


def _write(out: Path, config: dict[str, Any], shapes: Shapes) -> None:
    from safetensors.torch import save_file

    from ckptguard.testing.family_tensors import fill

    tensors: Tensors = fill(shapes)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "generation_config.json").write_text("{}\n")
