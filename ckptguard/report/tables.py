"""Result values as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckptguard.report import lines, units

if TYPE_CHECKING:  # types only: what verify prints must not import what diff computes with
    from ckptguard.core.index import TensorEntry
    from ckptguard.engine.diff import TensorDiff
    from ckptguard.engine.summary import Group, Summary

_MAX_PATTERNS = 60


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut or wrapped in a file."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=200)


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    return table


def print_summary(summary: Summary, out: Console) -> None:
    """``inspect``."""
    index, facts = summary.index, summary.index.facts
    layout = "  ".join(f"{axis.upper()} {n}" for axis, n in facts.layout.items())
    extra = ", ".join(f"{k} {v}" for k, v in facts.extra.items() if v not in ({}, [], None))
    say = [
        lines.title(index.location),
        *lines.facts(
            [
                ("format", index.format + (f", Megatron Core {facts.version}" if facts.version else "")),
                ("iteration", None if facts.iteration is None else str(facts.iteration)),
                ("saved under", layout or None),
                ("optimizer", facts.optimizer_format),
                ("parameters", units.count(summary.parameters)),
                (
                    "stored",
                    f"{len(index.tensors)} tensors and {len(index.objects)} objects in {summary.data_files} files",
                ),
                ("sealed", "yes" if summary.sealed else "no (`ckptguard seal` writes a manifest)"),
                ("also says", extra or None),
            ]
        ),
    ]
    click.echo("\n".join(say))
    _group_table(out, "Use", summary.kinds)
    _group_table(out, "Dtype", summary.dtypes)
    _group_table(out, "Tensors by pattern", summary.patterns, shapes=True)
    if summary.other_files:
        table = _table("Other files", "Role")
        for path, role in summary.other_files.items():
            table.add_row(escape(path), role or "not part of the format")
        out.print(table)
    if summary.problems:
        head = click.style(f"{len(summary.problems)} problems", fg="red", bold=True)
        click.echo("\n".join([f"{head} (`ckptguard verify` looks closer)", *lines.of_problems(summary.problems)]))


def _group_table(out: Console, title: str, groups: Sequence[Group], *, shapes: bool = False) -> None:
    head = (title, "Tensors", "Chunks", "Elements", "Bytes") + (("Dtype", "Shape") if shapes else ())
    table = _table(*head, right=(1, 2, 3, 4))
    for group in groups[:_MAX_PATTERNS]:
        row = [
            escape(group.name),
            str(group.tensors),
            str(group.chunks),
            f"{group.elements:,}",
            units.size(group.size_bytes),
        ]
        table.add_row(*row, *((group.dtype, units.shape(group.shape)) if shapes else ()))
    out.print(table)
    if len(groups) > _MAX_PATTERNS:
        out.print(f"  and {len(groups) - _MAX_PATTERNS} more; --json lists all")


def print_tensors(entries: Sequence[TensorEntry], out: Console) -> None:
    """``inspect --tensors``: every chunk's place."""
    table = _table("Tensor", "Dtype", "Shape", "Chunk", "File", "Byte", "Bytes", right=(5, 6))
    for entry in entries:
        head = (escape(entry.name), entry.dtype.name, units.shape(entry.shape))
        for chunk in entry.chunks or (None,):
            place = (escape(str(chunk.box)), escape(chunk.span.file)) if chunk else ("-", "-")
            numbers = (str(chunk.span.offset_bytes), str(chunk.span.length_bytes)) if chunk else ("-", "-")
            table.add_row(*head, *place, *numbers)
            head = ("", "", "")
    out.print(table)


def print_diff(diffs: Sequence[TensorDiff], out: Console, *, everything: bool) -> None:
    """``diff``: what is not the same, then one line of counts."""
    shown = [d for d in diffs if everything or d.status != "same"]
    if shown:
        table = _table("Tensor", "", "Elements", "First", "Largest", "Bits", "What", right=(2, 4, 5))
        for item in shown:
            table.add_row(escape(item.name), _status(item), *_numbers(item), escape(_what(item)))
        out.print(table)
    counts: dict[str, int] = {}
    for item in diffs:
        counts[item.status] = counts.get(item.status, 0) + 1
    differs = any(d.differs for d in diffs)
    verdict = click.style("DIFFERENT" if differs else "equal", fg="red" if differs else "green", bold=True)
    click.echo(f"{verdict}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))


def _status(item: TensorDiff) -> str:
    style = "red" if item.differs else "green" if item.status == "same" else "yellow"
    return f"[{style}]{item.status}[/{style}]"


def _numbers(item: TensorDiff) -> tuple[str, str, str, str]:
    found = next((c for c in (item.used, item.padding, item.unused) if c.elements), item.used)
    largest = "-" if found.largest is None else f"{found.largest:.6g}"
    return (
        str(found.elements or ""),
        units.shape(found.first) if found.first is not None else "",
        largest,
        str(found.bits or ""),
    )


def _what(item: TensorDiff) -> str:
    if item.status == "dtype":
        return f"{item.dtypes[0]} against {item.dtypes[1]}"
    if item.shapes[0] != item.shapes[1]:
        return f"{units.shape(item.shapes[0])} against {units.shape(item.shapes[1])}"
    if item.status == "padding":
        return "vocabulary padding rows only"
    if item.status == "unused":
        return "elements that belong to no parameter only"
    parts = [
        f"{c.elements} more in {what}"
        for c, what in ((item.padding, "padding rows"), (item.unused, "unused elements"))
        if c.elements
    ]
    return ", ".join(parts)
