"""What a conversion will do, and what it did: as lines and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ckptguard.report import units
from ckptguard.report.lines import facts, title

if TYPE_CHECKING:
    from ckptguard.convert.estimates import Estimate
    from ckptguard.convert.exporting import Exported
    from ckptguard.convert.importing import Imported, ImportOptions, Prepared
    from ckptguard.convert.resharding import Resharded

_SHOWN = 12


def import_plan_dict(prepared: Prepared, chosen: ImportOptions, needs: Estimate) -> dict[str, Any]:
    """The plan, ready for JSON."""
    structure, plan = prepared.structure, prepared.plan
    by_rank = {file.path: file.size_bytes for file in prepared.write_plan.files}
    return {
        "architecture": structure.architecture,
        "megatron_core": structure.megatron,
        "megatron_bridge": structure.bridge,
        "layout": chosen.layout.as_dict(),
        "folder": prepared.folder,
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in sorted(_tensors(prepared).items())
        },
        "bytes_by_file": by_rank,
        "disk_bytes": needs.disk_bytes,
        "free_bytes": needs.free_bytes,
        "seconds_guessed": round(needs.seconds, 1),
        "memory_bytes": chosen.memory_bytes,
        "computed": sorted({item.kind for item in structure.derived.values()}),
        "copies": dict(plan.copies),
        "unused": dict(plan.unused),
        "notes": list(structure.notes),
    }


def _tensors(prepared: Prepared) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {chunk.name: (chunk.dtype.name, chunk.shape) for chunk in prepared.plan.chunks}


def import_plan_lines(prepared: Prepared, chosen: ImportOptions, needs: Estimate, *, detailed: bool) -> Iterator[str]:
    """The plan for people; all keys if it is detailed."""
    structure, plan = prepared.structure, prepared.plan
    sizes = [file.size_bytes for file in prepared.write_plan.files]
    yield title(f"{structure.architecture} -> Megatron Core, {chosen.layout}")
    yield from facts(
        [
            ("tensors", f"{len(_tensors(prepared))} in {len(plan.chunks)} chunks and {len(sizes)} files"),
            ("bytes", f"{units.size(sum(sizes))}; {units.size(min(sizes))} to {units.size(max(sizes))} a file"),
            ("disk", disk_line(needs)),
            ("time", f"about {needs.seconds:.0f} s" if detailed else None),
            ("memory", f"at most {units.size(chosen.memory_bytes)} of buffers"),
            ("mapping", f"Megatron-Bridge {structure.bridge}, Megatron Core {structure.megatron}"),
        ]
    )
    kinds = sorted({item.kind for item in structure.derived.values() if item.of})
    if kinds:
        count = sum(1 for item in structure.derived.values() if item.of)
        yield f"  {count} quantised tensors are stored as what they stand for ({', '.join(kinds)} -> bfloat16)"
    yield from listed("repeats", plan.copies, "kept once, as {}; found equal")
    yield from listed("left out", plan.unused, "{}")
    for note in structure.notes:
        yield f"  {click.style('note', fg='yellow')} {note}"
    if detailed:
        for name, (dtype, shape) in sorted(_tensors(prepared).items()):
            yield f"    {name} {dtype} {list(shape)}"
        for file in prepared.write_plan.files:
            yield f"    {file.path} {units.size(file.size_bytes)}"


def disk_line(needs: Estimate) -> str:
    """How much room is needed, and how much there is."""
    free = "" if needs.free_bytes is None else f", {units.size(needs.free_bytes)} free"
    return f"{units.size(needs.disk_bytes)} needed{free}"


def listed(label: str, items: Mapping[str, str], form: str) -> Iterator[str]:
    """One line an item, the first few of them."""
    for name, value in list(items.items())[:_SHOWN]:
        yield f"  {label} {name}: {form.format(value)}"
    if len(items) > _SHOWN:
        yield f"  {label} {len(items) - _SHOWN} more like these; --json lists all"


def import_result_lines(result: Imported) -> Iterator[str]:
    """What was done, for people."""
    return result_lines(
        result,
        f"{result.proved} tensors of the snapshot, put together again from the written files, have the fingerprints they had",
    )


def result_lines(result: Imported | Exported | Resharded, proof: str) -> Iterator[str]:
    """What a conversion did, for people; ``proof`` says what was proved, if it was."""
    yield from facts([("written", f"{result.path}, {units.size(result.written_bytes)}"), ("seal", result.seal)])
    if result.proved is None:
        yield f"{click.style('written', bold=True)}: not proved, as asked (--no-verify)"
    else:
        yield f"{click.style('proved', fg='green', bold=True)}: {proof}"


def result_dict(result: Imported | Exported | Resharded | None) -> dict[str, Any] | None:
    """What a conversion did, ready for JSON; None for a dry run."""
    if result is None:
        return None
    return {
        "path": str(result.path), "seal": result.seal, "proved_tensors": result.proved, "bytes": result.written_bytes,
    }  # fmt: skip
