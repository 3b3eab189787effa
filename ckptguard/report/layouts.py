"""Layouts that a model fits in: as lines and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptguard.report import units
from ckptguard.report.lines import title

if TYPE_CHECKING:
    from ckptguard.layout.possible import Candidate

_SHOWN = 40
_COLUMNS = ("TP", "PP", "EP", "ETP", "DP", "last stage", "weights", "optimizer", "largest rank")


def layout_lines(candidates: Sequence[Candidate], gpus: int) -> Iterator[str]:
    """A table for people: the layouts in the order they have, the first few of them."""
    if not candidates:
        yield f"no layout without context parallelism and virtual stages fits {gpus} GPUs"
        return
    yield title(f"{len(candidates)} layouts fit {gpus} GPUs; bytes are estimates, of the rank that holds most")
    rows = [_COLUMNS, *(_row(candidate) for candidate in candidates[:_SHOWN])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
    if len(candidates) > _SHOWN:
        yield f"  and {len(candidates) - _SHOWN} more; --json lists all"


def layouts_dict(candidates: Sequence[Candidate], gpus: int) -> dict[str, Any]:
    """All of them, ready for JSON."""
    return {
        "gpus": gpus,
        "layouts": [
            {
                "layout": candidate.layout.as_dict(),
                "weight_bytes": candidate.weight_bytes,
                "optimizer_bytes": candidate.optimizer_bytes,
            }
            for candidate in candidates
        ],
    }


def _row(candidate: Candidate) -> tuple[str, ...]:
    layout = candidate.layout
    last = "" if layout.last_pp_layers is None else f"{layout.last_pp_layers} layers"
    sizes = (layout.tp, layout.pp, layout.ep, layout.etp or layout.tp, layout.dp or 1)
    room = (candidate.weight_bytes, candidate.optimizer_bytes, candidate.total_bytes)
    return (*map(str, sizes), last, *map(units.size, room))
