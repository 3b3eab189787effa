"""Benchmark of recording inside a training process: what it adds to a step, what it stores, and how fast it digests.

    tools/bench recording                   some minutes
    tools/bench recording --parts digests

A GPT of Megatron's trains on the CPU. Its steps are recorded not at all, at level ``metrics`` and at level ``state``, one of
each in every three, in random order; the ratios are medians over the threes. ``digests`` is the path that tensors take alone,
in turns with a copy of the same memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from imports import Row, say, show
from recording_switch import MODES
from run import PYTHON, ROOT

import ckptguard.resume
from ckptguard.resume.digests import Draft
from ckptguard.resume.orders import VARIABLE, Order
from ckptguard.testing.recipes import Recipe

PARTS = ("steps", "digests")
_HERE = ROOT / "tools" / "benchmarks"
_BARS = {"metrics": 0.01, "state": 0.10}  # of a step's time
_STEP_SECONDS = 0.5  # the bars are for steps of at least this
_STORED_BYTES = 64 << 10


def steps(work: Path, options: argparse.Namespace) -> list[Row]:
    """Trains, switching the recorder from step to step."""
    size = "--hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --num-query-groups 4 --micro-batch-size 4"
    length = ("--seq-length", str(options.length), "--max-position-embeddings", str(options.length))
    recipe = Recipe(
        name="recording",
        num_layers=options.layers,
        steps=options.steps,
        extra_flags=(*size.split(), *length),
    )
    told = work / "steps.json"
    order = Order(
        arm="benchmark", folder=str(work), level="state", plugin="recording_switch:install", plugin_argument=str(told)
    )
    site = Path(ckptguard.resume.__file__).parent / "site"
    environment = os.environ | {VARIABLE: str(order.write()), "PYTHONPATH": f"{site}:{_HERE}"}
    line = [PYTHON, "-m", "torch.distributed.run", "--standalone", "-m", "ckptguard.testing.tiny_trainer"]
    say(f"training {options.steps} steps")
    done = subprocess.run([*line, *recipe.megatron_flags()], env=environment, cwd=work, capture_output=True, text=True)
    if done.returncode or not told.exists():
        sys.exit(f"training failed with exit code {done.returncode}\n{done.stderr[-4000:]}")
    return step_rows(json.loads(told.read_text()))


def step_rows(found: list[tuple[str, float, float, int]]) -> list[Row]:
    """Rows of ``(mode, seconds, the recorder's own CPU seconds, bytes)`` of steps that come in threes, one of each mode."""
    threes = [{mode: rest for mode, *rest in found[i : i + 3]} for i in range(0, len(found) - 2, 3)]
    assert all(three.keys() == set(MODES) for three in threes)
    off = statistics.median(three["off"][0] for three in threes)
    rows = [Row("a step that is not recorded", off, "s", least=_STEP_SECONDS, detail=f"{len(threes)} of each")]
    for level, bar in _BARS.items():
        ratios = sorted(three[level][0] / three["off"][0] - 1 for three in threes)
        quarter = len(ratios) // 4
        spread = f"quartiles {ratios[quarter]:.1%} and {ratios[-1 - quarter]:.1%}"
        own = statistics.median(three[level][1] for three in threes)
        spread += f"; CPU time of the recorder {own * 1e3:.1f} ms, {own / off:.1%}"
        rows.append(
            Row(
                f"--level {level}: added to a step", statistics.median(ratios) * 100, "%", most=bar * 100, detail=spread
            )
        )
        stored = statistics.median(three[level][2] for three in threes)
        rows.append(Row(f"--level {level}: stored per rank and step", stored / 1024, "KiB", most=_STORED_BYTES / 1024))
    return rows


def digests(_: Path, options: argparse.Namespace) -> list[Row]:
    """Digests of tensors beside copies of them, each thread count as torch has it for the copy, one for ours."""
    shapes = {
        "large, float32": [(4096, 4096)] * 4,
        "large, bfloat16": [(8192, 4096)] * 4,
        "those of a small model": [(256, 256), (512, 256), (256,), (256, 512)] * 75,
    }
    rows = []
    for name, sizes in shapes.items():
        dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
        tensors = [torch.randn(size).to(dtype) for size in sizes]
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        volume = sum(tensor.nbytes for tensor in tensors)
        ours, theirs = in_turns(lambda t=tensors: _digest(t), lambda t=tensors, c=targets: _copy(t, c), options.rounds)
        detail = f"{volume / ours / 1e9:.1f} GB/s; copy {volume / theirs / 1e9:.1f} GB/s; {len(tensors)} tensors"
        rows.append(Row(f"digests of tensors, {name}: rate / that of a copy", theirs / ours, detail=detail))
    return rows


def _digest(tensors: list[torch.Tensor]) -> None:
    draft = Draft()
    for number, tensor in enumerate(tensors):
        draft.add(str(number), tensor)
    draft.values()


def _copy(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for tensor, target in zip(tensors, targets, strict=True):
        target.copy_(tensor)


def in_turns(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median seconds of both, after one round that does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, call in enumerate((ours, theirs)):
            start = time.perf_counter()
            call()
            if number:
                seconds[side].append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    """Measures, prints a table and JSON, and fails when a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="tools/bench recording", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; by default all: %(default)s")
    parser.add_argument("--steps", type=int, default=151, help="of training (151)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence; 4 sequences make a step (512)")
    parser.add_argument("--rounds", type=int, default=15, help="of digests (15)")
    options = parser.parse_args()
    chosen = options.parts.split(",")
    if set(chosen) - set(PARTS):
        parser.error(f"--parts: of {', '.join(PARTS)}")
    work = ROOT / ".bench" / "recording"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    rows: list[Row] = []
    try:
        for part in chosen:
            rows += {"steps": steps, "digests": digests}[part](work, options)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        show(rows)
    missed = [row.what for row in rows if row.missed]
    if missed:
        sys.exit("bars missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
