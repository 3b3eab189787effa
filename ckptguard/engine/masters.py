"""Do the weights follow from their fp32 masters? An optimizer state that was saved shifted or mixed up shows here at once.

After every optimizer step Megatron copies the masters into the weights (core/optimizer/distrib_optimizer.py
``_copy_main_params_to_model_params``, 0.19.2), so in a save each weight is its master rounded to the nearest, bit for bit.
Only ``fully_reshardable`` names masters after their weights in the weights' own shapes; other formats are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptguard.core.boxes import Box, meetings, split_rows
from ckptguard.core.index import Chunk, Index, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.engine.diff import first_of
from ckptguard.engine.workers import SILENT, Progress, run
from ckptguard.formats.base import Checkpoint

_PREFIX = "optimizer.state.param."
_COMPARABLE = ("bfloat16", "float16", "float32")
_PIECE_ELEMENTS = 1 << 20
Pair = tuple[TensorEntry, TensorEntry]


@dataclass(frozen=True, slots=True)
class _Part:
    weight: TensorEntry
    master: TensorEntry
    weight_chunk: Chunk
    master_chunk: Chunk
    box: Box


def pairs(index: Index) -> list[Pair]:
    """(weight, master) for every weight whose master is stored in the weight's own shape."""
    out = []
    for name, master in index.tensors.items():
        weight = index.tensors.get(name.partition(_PREFIX)[2]) if _PREFIX in name else None
        if (
            weight
            and weight.shape == master.shape
            and master.dtype.name == "float32"
            and weight.dtype.name in _COMPARABLE
        ):
            out.append((weight, master))
    return out


def check_masters(checkpoint: Checkpoint, progress: Progress = SILENT) -> tuple[list[Problem], int]:
    """Compares every weight with its rounded master.

    Returns:
        One problem per weight that does not follow from its master, and how many weights were compared.
    """
    chosen = pairs(checkpoint.index)
    progress.start("comparing masters with weights", sum(master.size_bytes for _, master in chosen))
    wrong: dict[str, tuple[int, tuple[int, ...]]] = {}

    def work(part: _Part) -> tuple[str, int, tuple[int, ...]]:
        count, first = _compare(checkpoint, part)
        progress.advance(part.box.numel * 4)
        return part.weight.name, count, first

    for name, count, first in run(_parts(chosen), work):
        if count:
            before = wrong.get(name, (0, first))
            wrong[name] = (before[0] + count, min(before[1], first))
    return [_problem(checkpoint.index, name, *seen) for name, seen in sorted(wrong.items())], len(chosen)


def _parts(chosen: list[Pair]) -> Iterator[_Part]:
    for weight, master in chosen:
        for i, j, common in meetings([c.box for c in weight.chunks], [c.box for c in master.chunks]):
            for box in split_rows(common, _PIECE_ELEMENTS):
                yield _Part(weight, master, weight.chunks[i], master.chunks[j], box)


def _compare(checkpoint: Checkpoint, part: _Part) -> tuple[int, tuple[int, ...]]:
    """(number of elements that differ, global coordinates of the first)."""
    sides = []
    for entry, chunk in ((part.weight, part.weight_chunk), (part.master, part.master_chunk)):
        inside = part.box.relative_to(chunk.box)
        at = checkpoint.reader.locate(entry, chunk)
        sides.append(checkpoint.reader.read_box(at, inside.offset, inside.size))
    stored = sides[0].view(f"<u{part.weight.dtype.itemsize}")
    expected, is_nan = rounded(sides[1].view("<u4"), part.weight.dtype.name)
    where = np.flatnonzero((stored != expected) & ~is_nan)
    return len(where), first_of(part.box, int(where[0])) if len(where) else ()


def rounded(master: npt.NDArray[np.uint32], name: str) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.bool_]]:
    """Bits of fp32 values rounded to the nearest value of another type, ties to even, and which are not numbers.

    Args:
        master: Bits of fp32 values.
        name: "bfloat16", "float16" or "float32".
    """
    values = master.view(np.float32)
    if name == "bfloat16":
        bits = ((master.astype(np.uint64) + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16)
        return bits, np.isnan(values)
    if name == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16), np.isnan(values)
    return master, np.isnan(values)


def _problem(index: Index, name: str, count: int, first: tuple[int, ...]) -> Problem:
    numel = index.tensors[name].numel
    message = (
        f"{name}: {count} of {numel} elements are not their fp32 master rounded, the first at {list(first)}: weights and"
        " optimizer state are not of one moment, or one of them was written wrongly"
    )
    return Problem("masters", message, tensor=name, box=Box(first, (1,) * len(first)))
