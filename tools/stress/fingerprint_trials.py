"""Tries to find two different tensors with one fingerprint.

Every trial makes a pair of tensors, or parts of one, that differ in one named way, checks that they really differ, and
compares their fingerprints. On one trial in a hundred an XOR of the elements and torch.hash_tensor are asked too (with
dtype and shape told beside them, as in a fingerprint), and the first tensor is fingerprinted again in two parts, which
must agree. Exit code 1 if a difference was missed or parts did not add up.

Usage::

    python tools/stress/fingerprint_trials.py --trials 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from random import Random

import numpy as np
import torch
from fingerprint_mutations import KINDS
from fingerprint_parts import Bytes, Kind, Part

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.fingerprint.tensors import BoxSum
from ckptguard.fingerprint.values import Fingerprint

PER_SHAPE = 250  # trials with one dtype and shape, so that weights are made once for them
SAMPLE = 100  # one trial in so many is also given to the peers
EXTENTS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 63, 64, 65, 100)
LONG = (4095, 4096, 4097, 5000, 9000)
MAX_BYTES = 40_000


@dataclass(slots=True)
class Tally:
    """What was counted for one kind."""

    trials: int = 0
    misses: int = 0
    equal_sums: int = 0  # told apart by dtype or shape only
    redrawn: int = 0
    sample: int = 0
    xor_misses: int = 0
    hash_sample: int = 0
    hash_misses: int = 0
    false_alarms: int = 0


@lru_cache(maxsize=256)
def _weights(dtype: DType, shape: tuple[int, ...], box: Box) -> BoxSum:
    return BoxSum(dtype, shape, box)


def fingerprint(part: Part) -> Fingerprint:
    """The fingerprint that is on trial."""
    sums = _weights(part.dtype, part.shape, Box(part.offset, part.size)).of(part.data.reshape(-1))
    return Fingerprint(part.dtype.name, part.shape, sums)


def xor(part: Part) -> int:
    """XOR of the elements' bits."""
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}.get(part.dtype.itemsize, np.uint64)
    words = np.ascontiguousarray(part.data).reshape(-1).view(width)
    columns = words.reshape(-1, part.dtype.itemsize // words.itemsize)
    return int.from_bytes(np.bitwise_xor.reduce(columns, axis=0).tobytes(), "little")


def torch_hash(part: Part) -> int | None:
    """torch.hash_tensor, or None where it does not know the dtype."""
    if not part.data.size:
        return 0  # an XOR of nothing; torch refuses it
    tensor = torch.from_numpy(part.flat.reshape(-1)).view(getattr(torch, part.dtype.name))
    try:
        return int(torch.hash_tensor(tensor).item())
    except NotImplementedError:
        return None


def draw_shape(kind: Kind, itemsize: int, random: Random) -> tuple[int, ...]:
    """A shape of 0 to 4 dims, some with a dim beyond one digit."""
    while True:
        shape = [random.choice(EXTENTS) for _ in range(random.choices(range(5), (1, 6, 12, 6, 3))[0])]
        if shape and random.random() < 0.15:
            shape[random.randrange(len(shape))] = random.choice(LONG)
        if kind.square:
            shape.insert(random.randint(0, len(shape)), random.choice(shape or [7]))
        if prod(shape) * itemsize <= MAX_BYTES:
            return tuple(shape)


def draw_content(dtype: DType, shape: tuple[int, ...], random: Random) -> Part:
    """Elements that are random, mostly zero, of two values, small, or all ones."""
    count = prod(shape) * dtype.itemsize
    style = random.randrange(6)
    data: Bytes
    if style == 0:
        data = np.full(count, 255, np.uint8)
    elif style == 1:
        pair = np.frombuffer(random.randbytes(2 * dtype.itemsize), np.uint8).reshape(2, -1)
        data = pair[np.frombuffer(random.randbytes(prod(shape)), np.uint8) & 1].reshape(-1)
    else:
        data = np.frombuffer(random.randbytes(count), np.uint8)
        if style == 2:
            data = data * (np.frombuffer(random.randbytes(count), np.uint8) > 240)
        elif style == 3:
            data = data & np.uint8(3)
    if dtype.kind == "bool":
        data = data & np.uint8(1)
    return Part(dtype, shape, (0,) * len(shape), data.reshape(*shape, dtype.itemsize))


def _halves(part: Part, random: Random) -> tuple[Part, Part]:
    """The part cut in two along some dim; 0-d, into itself and nothing."""
    if not part.size:
        return part, part.with_flat(np.zeros_like(part.flat))
    dim = random.randrange(len(part.size))
    at = random.randint(0, part.size[dim])
    first, second = np.split(part.data, [at], axis=dim)
    moved = tuple(o + at * (d == dim) for d, o in enumerate(part.offset))
    return replace(part, data=np.ascontiguousarray(first)), replace(
        part, data=np.ascontiguousarray(second), offset=moved
    )


def ask_peers(tally: Tally, a: Part, b: Part, random: Random) -> None:
    """Gives one trial to XOR and torch.hash_tensor, and takes the fingerprint of the first tensor in two parts."""
    told = (a.dtype, a.shape) != (b.dtype, b.shape)
    tally.sample += 1
    tally.xor_misses += not told and xor(a) == xor(b)
    ours, theirs = torch_hash(a), torch_hash(b)
    if told or ours is not None:
        tally.hash_sample += 1
        tally.hash_misses += not told and ours == theirs
    first, second = _halves(a, random)
    tally.false_alarms += fingerprint(first) + fingerprint(second) != fingerprint(a)


def run_kind(kind: Kind, trials: int, random: Random) -> Tally:
    """All trials of one kind."""
    tally = Tally()
    names = sorted(kind.dtypes)
    while tally.trials < trials:
        dtype = BY_NAME[random.choice(names)]
        shape = draw_shape(kind, dtype.itemsize, random)
        for _ in range(min(PER_SHAPE, trials - tally.trials)):
            pair = kind.make(draw_content(dtype, shape, random), random)
            if pair is None or pair[0].says_the_same(pair[1]):
                tally.redrawn += 1
                continue
            first, second = (fingerprint(part) for part in pair)
            tally.misses += first == second
            tally.equal_sums += first.sums == second.sums
            if tally.trials % SAMPLE == 0:
                ask_peers(tally, *pair, random)
            tally.trials += 1
    return tally


def table(tallies: dict[str, Tally]) -> str:
    """The counts as text, with a line for all."""
    total = Tally(*(sum(getattr(t, name) for t in tallies.values()) for name in Tally.__slots__))
    head = (
        f"{'difference':31} {'trials':>9} {'misses':>6} {'=sums':>7} {'redrawn':>8} | {'sample':>6} {'XOR misses':>10}"
    )
    lines = [head + f" {'hash_tensor misses':>20} {'false alarms':>12}"]
    for name, t in (tallies | {"total": total}).items():
        peers = f"{t.sample:>6} {t.xor_misses:>10} {t.hash_misses:>11} of {t.hash_sample:>5} {t.false_alarms:>12}"
        lines.append(f"{name:31} {t.trials:>9} {t.misses:>6} {t.equal_sums:>7} {t.redrawn:>8} | {peers}")
    return "\n".join(lines)


def main() -> int:
    """Runs the trials; 1 on any miss or false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1_000_000, help="in all, spread evenly over the kinds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    random = Random(options.seed)
    tallies = {}
    for number, kind in enumerate(KINDS):
        share = options.trials * (number + 1) // len(KINDS) - options.trials * number // len(KINDS)
        tallies[kind.name] = run_kind(kind, share, random)
    print(table(tallies))
    print(f"seed {options.seed}, {time.monotonic() - begin:.0f} s. =sums: told apart by dtype or shape only.")
    return int(any(t.misses or t.false_alarms for t in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
