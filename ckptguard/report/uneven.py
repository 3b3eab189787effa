"""Replicas with another tensor parallel degree: what their ranks hold, as lines and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from ckptguard.report import units

if TYPE_CHECKING:
    from ckptguard.convert.resharding import ReshardPrepared
    from ckptguard.convert.uneven_target import Held, Uneven


def uneven_dict(prepared: ReshardPrepared) -> dict[str, Any]:
    """What is added to the plan, ready for JSON; empty if all of the target is cut evenly."""
    out: dict[str, Any] = {}
    if prepared.uneven is not None:
        out["parts"] = _parts(prepared.uneven)
    if prepared.replicas:
        out["replicas"] = {
            str(number): {
                "folder": one.folder,
                "layout": one.layout.as_dict(),
                "parts": _parts(one.uneven) if one.uneven is not None else [],
                "notes": list(one.notes),
            }
            for number, one in prepared.replicas
        }
    return out


def uneven_lines(prepared: ReshardPrepared) -> Iterator[str]:
    """The same for people; none if all of the target is cut evenly."""
    if prepared.uneven is not None:
        yield f"  {click.style('uneven', bold=True)}      {prepared.layout}, parts with a degree of their own"
        yield from _held(prepared.uneven)
    for number, one in prepared.replicas:
        yield f"  {click.style(f'replica {number}', bold=True)}   {one.layout} in {one.folder}"
        if one.uneven is not None:
            yield from _held(one.uneven)


def _parts(uneven: Uneven) -> list[dict[str, Any]]:
    return [
        {
            "part": held.part, "degree": held.degree, "weight_bytes": _by_rank(uneven, held.weight_bytes),
            "state_bytes": _by_rank(uneven, held.state_bytes), "crossing_bytes": _by_rank(uneven, held.crossing_bytes),
        }
        for held in uneven.held
    ]  # fmt: skip


def _by_rank(uneven: Uneven, counts: Sequence[int]) -> dict[str, int]:
    return {str(rank): count for rank, count in zip(uneven.ranks, counts, strict=True)}


def _held(uneven: Uneven) -> Iterator[str]:
    for held in uneven.held:
        crossing = units.size(sum(held.crossing_bytes))
        yield f"    {held.part}, degree {held.degree}: {crossing} of weights cross: a full replica has them at other places"
        for ranks, index in _alike(uneven.ranks, held):
            state = f" and {units.size(held.state_bytes[index])} of optimizer state" if held.state_bytes[index] else ""
            weights, crossing = units.size(held.weight_bytes[index]), units.size(held.crossing_bytes[index])
            yield f"      {ranks}: {weights} of weights{state}; {crossing} of the weights cross"


def _alike(ranks: Sequence[int], held: Held) -> Iterator[tuple[str, int]]:
    """Neighbouring ranks with the same numbers, and where in the row of ranks they begin."""
    rows = list(zip(held.weight_bytes, held.state_bytes, held.crossing_bytes, strict=True))
    for _, group in groupby(range(len(rows)), key=lambda index: rows[index]):
        first, *_ = same = list(group)
        yield f"rank {ranks[first]}" if len(same) == 1 else f"ranks {ranks[first]} to {ranks[same[-1]]}", first
