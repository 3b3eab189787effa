"""What an export will do, and what it did: as lines and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptguard.report import units
from ckptguard.report.conversions import listed, result_lines
from ckptguard.report.lines import facts, title

if TYPE_CHECKING:
    from ckptguard.convert.exporting import Exported, ExportOptions, PreparedExport


def export_plan_dict(prepared: PreparedExport, chosen: ExportOptions) -> dict[str, Any]:
    """The plan, ready for JSON."""
    structure, plan = prepared.structure, prepared.plan
    by_file = {file.path: file.size_bytes for file in prepared.write_plan.files}
    return {
        "architecture": structure.architecture,
        "megatron_core": structure.megatron,
        "megatron_bridge": structure.bridge,
        "reference": prepared.reference.location,
        "names_from": "reference" if prepared.reference.tensors is not None else "megatron-bridge",
        "tensors": {m.name: {"dtype": m.dtype.name, "shape": list(m.shape)} for m in plan.tensors},
        "bytes_by_file": by_file,
        "disk_bytes": sum(by_file.values()) + sum(len(data) for data in prepared.small.values()),
        "memory_bytes": chosen.memory_bytes,
        "other_files": sorted(prepared.small),
        "copies": dict(plan.copies),
        "rounded": list(plan.rounded),
        "unused": dict(plan.unused),
        "left_behind": dict(plan.left_behind),
        "notes": list(prepared.notes),
    }


def export_plan_lines(prepared: PreparedExport, chosen: ExportOptions, *, detailed: bool) -> Iterator[str]:
    """The plan for people; all tensors and files if it is detailed."""
    structure, plan, like = prepared.structure, prepared.plan, prepared.reference
    sizes = [file.size_bytes for file in prepared.write_plan.files]
    named = (
        "names and dtypes too"
        if like.tensors is not None
        else "names as Megatron-Bridge exports them, dtypes as stored"
    )
    files = "file" if len(sizes) == 1 else "files"
    yield title(f"Megatron Core -> {structure.architecture}")
    yield from facts(
        [
            ("tensors", f"{len(plan.tensors)} out of {len(plan.held)} stored chunks, {units.size(plan.total_bytes)}"),
            ("files", f"{len(sizes)} safetensors {files}, {len(prepared.small)} others"),
            ("config", f"{like.location} ({named})"),
            ("memory", f"at most {units.size(chosen.memory_bytes)} of buffers"),
            ("mapping", f"Megatron-Bridge {structure.bridge}, Megatron Core {structure.megatron}"),
        ]
    )
    if plan.left_behind:
        yield f"  not exported: {', '.join(f'{count} {what}' for what, count in plan.left_behind.items())}"
    yield from listed("repeats", plan.copies, "written again from {}")
    yield from listed("rounded", dict.fromkeys(plan.rounded, "--dtype"), "as asked ({})")
    yield from listed("left out", plan.unused, "{}")
    for note in prepared.notes:
        yield f"  {click.style('note', fg='yellow')} {note}"
    if detailed:
        for made in plan.tensors:
            yield f"    {made.name} {made.dtype} {list(made.shape)}"
        for file in prepared.write_plan.files:
            yield f"    {file.path} {units.size(file.size_bytes)}"


def export_result_lines(result: Exported) -> Iterator[str]:
    """What was done, for people."""
    return result_lines(
        result,
        f"{result.proved} tensors; every stored chunk of the model, put together again from the written files, has the "
        "fingerprint it had",
    )
