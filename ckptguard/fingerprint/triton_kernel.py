"""The fingerprint's sums over a box on a GPU, by Triton. Same weights, tables and values as the CPU's loops.

A program takes a tile of lines and a run of their words, keeps four 64-bit dot products per line, turns them into two
lane sums modulo p, weights them and leaves one partial sum per lane; a second kernel adds the partial sums. All of it
is integer arithmetic, so the order in which programs run cannot change a bit.

State of proof: compared with the CPU path, bit for bit, in Triton's interpreter, and compiled to machine code for
sm_80 and sm_90 without register spills. It has not run on a GPU yet, and its speed there is unknown.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import DType
from ckptguard.fingerprint.residues import DIGIT, DIGIT_BITS
from ckptguard.fingerprint.tensors import BoxSum

if TYPE_CHECKING:
    import torch

# Words of one line that a program sums before it reduces: a product of a 16-bit word and a 32-bit half residue is below
# 2**48, so the 8192 of them stay below 2**61.
RUN_WORDS = 8192
TILE = 1024  # words of one step of the loop: eight per thread and accumulator for four warps
MAX_TILE_LINES = 16
REDUCE_BLOCK = 1024

_P = tl.constexpr((1 << 61) - 1)
_HALF_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _mod(x):  # type: ignore[no-untyped-def]
    """Return x mod p for uint64 x."""
    x = (x & _P) + (x >> 61)
    return tl.where(x >= _P, x - _P, x)


@triton.jit
def _mulmod(a, b):  # type: ignore[no-untyped-def]
    """Return a * b mod p for uint64 a, b < p; the same steps as ``kernels.mulmod``."""
    a0, a1 = a & _HALF_MASK, a >> 32
    b0, b1 = b & _HALF_MASK, b >> 32
    low = a0 * b0
    mid = a0 * b1 + a1 * b0 + (low >> 32)
    high = a1 * b1 + (mid >> 32)
    low = (mid << 32) | (low & _HALF_MASK)
    return _mod((low & _P) + (high << 3) + (low >> 61))


@triton.jit
def _join(low, high):  # type: ignore[no-untyped-def]
    """Return low + high * 2**32 mod p for uint64 low and high."""
    high = _mod(high)
    # high * 2**32 = (high >> 29) * 2**61 + (high mod 2**29) * 2**32, and 2**61 = 1
    return _mod(_mod(low) + (high >> 29) + ((high & 0x1FFFFFFF) << 32))


@triton.jit
def _add_all(x):  # type: ignore[no-untyped-def]
    """Return the sum of a uint64 vector of values below p, mod p; by halves, so that nothing overflows."""
    return _join(tl.sum(x & _HALF_MASK, axis=0), tl.sum(x >> 32, axis=0))


@triton.jit
def _line_weights(lines, meta, dims, width, lane):  # type: ignore[no-untyped-def]
    """Return the product of one weight per earlier dim; ``meta`` is laid out by ``_upload``."""
    weight = tl.full(lines.shape, 1, tl.uint64)
    rest = lines
    for back in range(dims):
        dim = dims - 1 - back
        size = tl.load(meta + dim)
        start = tl.load(meta + dims + dim)
        at = 2 * dims + lane * width + start + rest % size
        weight = _mulmod(weight, tl.load(meta + at).to(tl.uint64, bitcast=True))
        rest = rest // size
    return weight


@triton.jit
def sum_tiles(  # type: ignore[no-untyped-def]
    words, table, meta, partials, lines, line_words, first_digit_words, place_words, runs, places, dims, width,
    tile_lines: tl.constexpr, tile_words: tl.constexpr, run_limit: tl.constexpr,
):  # fmt: skip
    """Writes one partial sum per lane and program.

    Args:
        words: uint8 or uint16, the box's words, row-major.
        table: int32 bits of ``Prepared.table``, (4, place_words).
        meta: int64 bits of sizes, starts, weights and high, one after the other.
        partials: int64 (2, programs), written.
        lines: Number of lines.
        line_words: Words per line.
        first_digit_words: Words of the table before the box's first step.
        place_words: Words of the table, per row.
        runs: Runs per place, so that ``runs * run_limit`` covers what a line has in one place.
        places: Digit places above the lowest that a line meets.
        dims: Dims before the split.
        width: Sum of their sizes.
        tile_lines: Lines per program.
        tile_words: Words per line and step of the loop.
        run_limit: Words per line and program.
    """
    program = tl.program_id(0)
    run = program % runs
    place = (program // runs) % places
    first_line = (program // runs // places).to(tl.int64) * tile_lines
    line = first_line + tl.arange(0, tile_lines)
    # Positions in the table: the first place begins at the box's offset, the last ends with the line.
    begin = tl.where(place == 0, first_digit_words, 0) + run * run_limit
    to_line = place.to(tl.int64) * place_words - first_digit_words  # from a position in the table to one in the line
    end = tl.minimum(tl.minimum(begin + run_limit, place_words).to(tl.int64), line_words - to_line)
    a = tl.zeros((tile_lines, tile_words), tl.uint64)
    b = tl.zeros((tile_lines, tile_words), tl.uint64)
    c = tl.zeros((tile_lines, tile_words), tl.uint64)
    d = tl.zeros((tile_lines, tile_words), tl.uint64)
    for start in range(begin, end.to(tl.int32), tile_words):
        column = start + tl.arange(0, tile_words)
        inside = column < end
        source = line[:, None] * line_words + (to_line + column)[None, :]
        word = tl.load(words + source, mask=(line < lines)[:, None] & inside[None, :], other=0).to(tl.uint64)
        row = table + column
        a += word * tl.load(row, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)[None, :]
        row += place_words
        b += word * tl.load(row, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)[None, :]
        row += place_words
        c += word * tl.load(row, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)[None, :]
        row += place_words
        d += word * tl.load(row, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)[None, :]
    high = meta + 2 * dims + 2 * width + place
    safe = tl.minimum(line, lines - 1)  # lines past the end have only zero words; they need any weight at all
    lane0 = _mulmod(_join(tl.sum(a, axis=1), tl.sum(b, axis=1)), _line_weights(safe, meta, dims, width, 0))
    lane0 = _mulmod(_add_all(lane0), tl.load(high).to(tl.uint64, bitcast=True))
    tl.store(partials + program, lane0.to(tl.int64, bitcast=True))
    lane1 = _mulmod(_join(tl.sum(c, axis=1), tl.sum(d, axis=1)), _line_weights(safe, meta, dims, width, 1))
    lane1 = _mulmod(_add_all(lane1), tl.load(high + places).to(tl.uint64, bitcast=True))
    tl.store(partials + tl.num_programs(0).to(tl.int64) + program, lane1.to(tl.int64, bitcast=True))


@triton.jit
def reduce_partials(partials, count, out, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds int64 (2, count) values below p to int64 (2,); one program per lane."""
    lane = tl.program_id(0)
    low = tl.zeros((block,), tl.uint64)
    high = tl.zeros((block,), tl.uint64)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        value = tl.load(partials + lane.to(tl.int64) * count + at, mask=at < count, other=0)
        value = value.to(tl.uint64, bitcast=True)
        low += value & _HALF_MASK
        high += value >> 32
    total = _join(tl.sum(low, axis=0), tl.sum(high, axis=0))
    tl.store(out + lane, total.to(tl.int64, bitcast=True))


class _Uploaded(NamedTuple):
    table: torch.Tensor
    meta: torch.Tensor
    lines: int
    line_words: int
    first_digit_words: int
    places: int
    dims: int
    width: int


@lru_cache(maxsize=32)
def _upload(dtype: DType, shape: tuple[int, ...], box: Box, device: torch.device, stream: int) -> _Uploaded:
    """The weights of a box on a device, kept because the layers of a model repeat few shapes.

    ``stream`` is part of the key because only the stream that a copy was queued on knows when it is done.
    """
    p = BoxSum(dtype, shape, box).prepared
    flat = [p.sizes, p.starts, p.weights.reshape(-1).view(np.int64), p.high.reshape(-1).view(np.int64)]
    line_words = p.line_steps * p.per_step
    return _Uploaded(
        table=_send(p.table.view(np.int32), device),
        meta=_send(np.concatenate(flat), device),
        lines=box.numel * dtype.words // line_words,
        line_words=line_words,
        first_digit_words=p.step_offset % DIGIT * p.per_step,
        places=((p.step_offset + p.line_steps - 1) >> DIGIT_BITS) - (p.step_offset >> DIGIT_BITS) + 1,
        dims=len(p.sizes),
        width=p.weights.shape[1],
    )


def _send(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    import torch

    host = torch.from_numpy(np.array(array))  # a writable copy: the cached tables are read-only
    if device.type == "cuda":  # a copy from pageable memory would wait for the stream
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def partial_sums(words: torch.Tensor, dtype: DType, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Starts the sums over a box on the device of its words, on the current stream, and waits for nothing.

    Args:
        words: uint8 or uint16, flat and contiguous: the words of the box's elements, row-major; not empty.
        dtype: Element type.
        shape: Global shape.
        box: Part of the tensor that the words are.

    Returns:
        int64 (2, n): partial sums of each lane, each below p; ``reduce`` adds them.
    """
    import torch

    device = words.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    up = _upload(dtype, shape, box, device, stream)
    place_words = up.table.shape[1]
    tile_lines = min(MAX_TILE_LINES, triton.next_power_of_2(up.lines))
    tile_words = min(TILE // tile_lines, RUN_WORDS)
    runs = triton.cdiv(min(place_words, up.line_words), RUN_WORDS)
    programs = triton.cdiv(up.lines, tile_lines) * up.places * runs
    partials = torch.empty((2, programs), dtype=torch.int64, device=device)
    with _on(device):
        sum_tiles[(programs,)](
            words, up.table, up.meta, partials, up.lines, up.line_words, up.first_digit_words, place_words, runs,
            up.places, up.dims, up.width, tile_lines=tile_lines, tile_words=tile_words, run_limit=RUN_WORDS,
        )  # fmt: skip
    return partials


def reduce(partials: torch.Tensor) -> torch.Tensor:
    """Adds int64 (2, n) partial sums to int64 (2,) on their device, and waits for nothing."""
    import torch

    out = torch.empty(2, dtype=torch.int64, device=partials.device)
    with _on(partials.device):
        reduce_partials[(2,)](partials.contiguous(), partials.shape[1], out, block=REDUCE_BLOCK)
    return out


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be that of the tensors."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
