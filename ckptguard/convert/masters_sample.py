"""A look at some masters before a resharding: weights that are not made of them tell of state that belongs to others.

Where a parameter stands in buckets is derived, and two neighbours of one size that changed places would fit too. After every
step Megatron makes each weight of its master, so a few elements of each tell. What differs is said, not refused: a checkpoint
may have been saved so, and ``verify --masters`` compares everything.
"""

from __future__ import annotations

import re

import numpy as np

from ckptguard.convert.canonical import State
from ckptguard.convert.sources import state_name
from ckptguard.core.boxes import Box
from ckptguard.core.plan import Made
from ckptguard.engine.filling import Filler
from ckptguard.engine.masters import rounded
from ckptguard.formats.base import Checkpoint

_COMPARABLE = ("bfloat16", "float16", "float32")
_ELEMENTS = 64
_SHOWN = 3
_ALL_LAYERS = re.compile(r"\.layers\.(?!\d)")  # not decoder.layers.7.mlp...


def masters_note(state: State, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A sentence if some weights are not their masters rounded, at both ends of each tensor and layer.

    Args:
        state: The source's tensors.
        checkpoint: The files that they stand in.

    Raises:
        DamagedError: A chunk is not what the index says.
    """
    made: list[Made] = []
    for name, weight in state.tensors.items():
        master = state.tensors.get(state_name("param", name))
        if master is None or master.shape != weight.shape or weight.dtype.name not in _COMPARABLE:
            continue
        made += [
            Made(side.name, side.dtype, side.shape, box, state.assembly(side.name, box))
            for box in _looked_at(name, weight.shape)
            for side in (weight, master)
        ]
    filler = Filler(made, state.sources, checkpoint)
    words = [np.frombuffer(_filled(filler, key), f"<u{one.dtype.itemsize}") for key, one in enumerate(made)]
    wrong = []
    for number in range(0, len(made), 2):
        expected, is_nan = rounded(words[number + 1], made[number].dtype.name)
        if ((words[number] != expected) & ~is_nan).any():
            wrong.append(made[number].name)
    names = list(dict.fromkeys(wrong))
    if not names:
        return ()
    shown = ", ".join(names[:_SHOWN])
    return (
        f"{len(names)} weights are not their fp32 masters rounded, such as {shown}: weights and optimizer state may not belong"
        " together. They go along as they are; look with `ckptguard verify --masters`.",
    )


def _looked_at(name: str, shape: tuple[int, ...]) -> list[Box]:
    """Boxes of a few elements at both ends of a tensor, of each layer where it holds all layers."""
    if not shape or 0 in shape:
        return []
    size = (*(1 for _ in shape[1:]), min(shape[-1], _ELEMENTS))
    last = tuple(n - s for n, s in zip(shape, size, strict=True))
    layers = range(shape[0]) if _ALL_LAYERS.search(name) and len(shape) > 1 else (None,)
    ends = ((0,) * len(shape), last)
    offsets = (end if layer is None else (layer, *end[1:]) for layer in layers for end in ends)
    return [Box(offset, size) for offset in dict.fromkeys(offsets)]


def _filled(filler: Filler, key: int) -> bytearray:
    out = bytearray(filler.chunks[key].size_bytes)
    filler(key, 0, memoryview(out))
    return out
