"""What a resharding will do, and what it did: as lines and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptguard.report import units
from ckptguard.report.conversions import disk_line, result_dict, result_lines
from ckptguard.report.lines import facts, title

if TYPE_CHECKING:
    from ckptguard.convert.estimates import Estimate
    from ckptguard.convert.resharding import Resharded, ReshardOptions, ReshardPrepared


def reshard_plan_dict(prepared: ReshardPrepared, chosen: ReshardOptions, needs: Estimate) -> dict[str, Any]:
    """The plan, ready for JSON."""
    index = prepared.source.index
    return {
        "source": {
            "location": index.location, "format": index.format, "layout": prepared.source.layout.as_dict(),
            "optimizer": index.facts.optimizer_format, "version": index.facts.version,
        },
        "format": chosen.to,
        "layout": prepared.layout.as_dict(),
        "optimizer": prepared.target.optimizer,
        "megatron_core": prepared.target.structures.megatron,
        "folder": prepared.folder,
        "ranks": prepared.target.grid.world,
        "tensors": {c.name: {"dtype": c.dtype.name, "shape": list(c.shape)} for c in prepared.output.chunks},
        "chunks": len(prepared.output.chunks),
        "chunks_uncut": _uncut(prepared),
        "bytes_by_file": {file.path: file.size_bytes for file in prepared.write_plan.files},
        "vocabulary_rows_left_out": dict(prepared.output.rows),
        "disk_bytes": needs.disk_bytes,
        "free_bytes": needs.free_bytes,
        "seconds_guessed": round(needs.seconds, 1),
        "memory_bytes": chosen.memory_bytes,
        "notes": list(prepared.notes),
    }  # fmt: skip


def _uncut(prepared: ReshardPrepared) -> int:
    """Chunks that are one chunk of the source as it stands."""
    return sum(prepared.source.state.uncut(chunk) is not None for chunk in prepared.output.chunks)


def reshard_plan_lines(
    prepared: ReshardPrepared, chosen: ReshardOptions, needs: Estimate, *, detailed: bool
) -> Iterator[str]:
    """The plan for people; all tensors and files if it is detailed."""
    source, output, target = prepared.source, prepared.output, prepared.target
    sizes = [file.size_bytes for file in prepared.write_plan.files]
    names = {chunk.name for chunk in output.chunks}
    yield title(f"{source.index.format} {source.layout} -> {chosen.to} {prepared.layout}")
    yield from facts(
        [
            ("step", str(source.iteration)),
            ("optimizer", f"{source.index.facts.optimizer_format or 'none'} -> {target.optimizer or 'none'}"),
            (
                "tensors",
                f"{len(names)} in {len(output.chunks)} chunks and {len(sizes)} files; {_uncut(prepared)} chunks uncut",
            ),
            ("bytes", f"{units.size(sum(sizes))}; {units.size(min(sizes))} to {units.size(max(sizes))} a file"),
            ("disk", disk_line(needs)),
            ("time", f"about {needs.seconds:.0f} s" if detailed else None),
            ("memory", f"at most {units.size(chosen.memory_bytes)} of buffers"),
            ("layout", f"as Megatron Core {target.structures.megatron} has it"),
        ]
    )
    for name, rows in output.rows.items():
        said = f"{rows} rows of padding are left out" if rows > 0 else f"{-rows} rows of padding, zeros, are added"
        yield f"  {click.style('vocabulary', fg='yellow')} {name}: {said}"
    for note in prepared.notes:
        yield f"  {click.style('note', fg='yellow')} {note}"
    if detailed:
        for file in prepared.write_plan.files:
            yield f"    {file.path} {units.size(file.size_bytes)}"
        shown = {chunk.name: f"    {chunk.name} {chunk.dtype} {list(chunk.shape)}" for chunk in output.chunks}
        yield from (shown[name] for name in sorted(shown))


def reshard_result_dict(result: Resharded | None) -> dict[str, Any] | None:
    """What was done, ready for JSON; None for a dry run."""
    plain = result_dict(result)
    return plain | {"notes": list(result.notes)} if plain is not None and result is not None else None


def reshard_result_lines(result: Resharded) -> Iterator[str]:
    """What was done, for people."""
    for note in result.notes:
        yield f"  {click.style('note', fg='yellow')} {note}"
    yield from result_lines(
        result, f"{result.proved} tensors, read back from the written files, have the fingerprints they had"
    )
