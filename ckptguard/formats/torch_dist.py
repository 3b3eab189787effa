"""Megatron Core's ``torch_dist``, and the DCP relatives without ``metadata.json``: torch_dcp, fsdp_dtensor, plain DCP.

Source: megatron/core/dist_checkpointing/{core,serialization}.py and strategies/torch.py (0.8 to 0.19.2),
megatron/training/checkpointing.py (``_get_checkpoint_format``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.index import Facts, Index, ObjectEntry, Span
from ckptguard.core.problems import Problem
from ckptguard.formats import dcp, facts
from ckptguard.formats.chunks import Reader
from ckptguard.formats.remote import directory
from ckptguard.formats.storage import Directory

CONFIG = "metadata.json"
COMMON = "common.pt"
INTEGRITY = "integrity.json"
COMMON_STATE = "common_state/"
_ROLES = {
    dcp.METADATA: "index",
    CONFIG: "completeness marker",
    COMMON: "common state (readers before 0.19)",
    INTEGRITY: "SHA-256 manifest of Megatron Core",
    "train_state.pt": "Bridge train state",
    facts.RUN_CONFIG: "Bridge run configuration",
}
_ROLE_FOLDERS = {
    "tokenizer": "tokenizer",
    "quantised": "scales of quantised weights",
    "modelopt_state": "ModelOpt state",
    "energon": "Energon loader state",
}


class TorchDist:
    """``metadata.json`` says torch_dist, ``.metadata`` is the index."""

    name = "torch_dist"

    def why_not(self, path: Path) -> str | None:
        """As ``Format.why_not``."""
        if not path.is_dir():
            return "not a directory"
        if not (path / CONFIG).is_file():
            return f"no {CONFIG}"
        try:
            config = json.loads((path / CONFIG).read_text())
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            return f"{CONFIG} is not JSON ({error})"
        if not isinstance(config, dict) or "sharded_backend" not in config:
            return f"{CONFIG} names no sharded_backend"
        return None

    def open_files(self, path: Path) -> Directory:
        """As ``Format.open_files``."""
        return directory(path)

    def read_index(self, files: Directory) -> Index:
        """As ``Format.read_index``."""
        config = json.loads(files.read(CONFIG))
        if config["sharded_backend"] != "torch_dist":
            raise UnsupportedError(
                f"{files.root / CONFIG}: sharded_backend is {config['sharded_backend']!r}, only torch_dist can be read",
                next_step="Load and save it once with Megatron Core 0.15 or older and --ckpt-format torch_dist.",
            )
        if dcp.METADATA not in files.listing:
            message = f"{files.root}: {CONFIG} says torch_dist, but the index {dcp.METADATA} is missing"
            problem = Problem("missing-file", message, file=dcp.METADATA)
            raise DamagedError(
                message, problems=[problem], next_step="Copy the whole directory again from where it was saved."
            )
        table, reader = dcp.read_table(files), Reader(files)
        problems: list[Problem] = []
        common = _common_state(reader, table, problems)
        run_config, more = facts.read_run_config(reader)
        extra = {k: v for k, v in config.items() if k != "sharded_backend"}
        if "checkpoint_version" in common:
            extra["checkpoint_version"] = common["checkpoint_version"]
        said = facts.gather(
            common,
            run_config,
            version=_version(table, files, common, config),
            optimizer=facts.optimizer_format([*table.tensors, *table.objects], table.mcore_data),
            extra=extra,
        )
        return _index(self.name, files, table, said, [*problems, *more])


class Dcp:
    """``.metadata`` without ``metadata.json``: told apart by what its keys look like."""

    name = "dcp"

    def why_not(self, path: Path) -> str | None:
        """As ``Format.why_not``."""
        if not path.is_dir():
            return "not a directory"
        if not (path / dcp.METADATA).is_file():
            return f"no {dcp.METADATA}"
        return f"has {CONFIG} too" if (path / CONFIG).is_file() else None

    def open_files(self, path: Path) -> Directory:
        """As ``Format.open_files``."""
        return directory(path)

    def read_index(self, files: Directory) -> Index:
        """As ``Format.read_index``."""
        table, reader = dcp.read_table(files), Reader(files)
        problems: list[Problem] = []
        common = _common_state(reader, table, problems)
        for key in ("args", "iteration", "checkpoint_version", "content_metadata"):
            if key in table.objects:
                common[key] = facts.read_value(reader, table.objects[key], problems)
        run_config, more = facts.read_run_config(reader)
        optimizer = facts.optimizer_format([*table.tensors, *table.objects], table.mcore_data)
        said = facts.gather(common, run_config, version=None, optimizer=optimizer, extra={})
        return _index(_flavour(table, common), files, table, said, [*problems, *more])


def _flavour(table: dcp.DcpTable, common: dict[str, Any]) -> str:
    if any(n.startswith(("model.module.", "optimizer.state.module.")) for n in table.tensors):
        return "fsdp_dtensor"
    if common and any(n.startswith("model.") for n in table.tensors):
        return "torch_dcp"
    return "dcp"


def _index(name: str, files: Directory, table: dcp.DcpTable, said: Facts, problems: list[Problem]) -> Index:
    roles = {}
    for path in files.listing:
        role = _ROLES.get(path) or _ROLE_FOLDERS.get(path.partition("/")[0])
        if role:
            roles[path] = role
    return Index(
        format=name,
        location=str(files.root),
        tensors=table.tensors,
        objects={**table.objects, **_side_files(files)},
        files=files.listing,
        roles=roles,
        facts=said,
        problems=(*table.problems, *problems),
    )


def _side_files(files: Directory) -> dict[str, ObjectEntry]:
    """Files of torch.save beside the shards (common.pt, train_state.pt, Energon's): objects too, their pickles are checked."""
    names = [name for name in files.listing if name.endswith(".pt") and files.listing[name].inside]
    return {name: ObjectEntry(name, Span(name, 0, files.size(name))) for name in names}


def _common_state(reader: Reader, table: dcp.DcpTable, problems: list[Problem]) -> dict[str, Any]:
    """Common state: ``common.pt`` if it is there (it wins in Megatron too), else the object of 0.19 and later."""
    if COMMON in reader.files.listing:
        entry = ObjectEntry(COMMON, Span(COMMON, 0, reader.files.size(COMMON)))
        value = facts.read_value(reader, entry, problems)
    else:
        entries = [o for n, o in table.objects.items() if n.startswith(COMMON_STATE)]
        if not entries:
            return {}
        value = facts.read_value(reader, entries[0], problems)
        value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else {}


def _version(table: dcp.DcpTable, files: Directory, common: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Megatron Core's version is not stored; the traces each release leaves bound it (FORMATS: version matrix)."""
    if any(n.startswith(COMMON_STATE) for n in table.objects):
        return "0.19 or newer (has the common_state object)"
    if INTEGRITY in files.listing:
        return "0.18 (has integrity.json and common.pt)"
    content = common.get("content_metadata")
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if table.megatron_classes:
        late = kind in ("dp_reshardable", "fully_reshardable")
        return (
            "0.15 (Megatron's metadata classes, new optimizer format)"
            if late
            else "0.14 or 0.15 (Megatron's metadata classes)"
        )
    if kind in ("dp_reshardable", "fully_reshardable"):
        return "0.15 to 0.18 (common.pt and a new optimizer format)"
    if table.mcore_data or "mcore_data" in config:
        return "0.12 to 0.14 (mcore_data)" if content else "0.8 to 0.12 (mcore_data, no content_metadata)"
    if content:
        return "0.13 to 0.18 (content_metadata and common.pt)"
    return "0.18 or older (common.pt)" if common else None
