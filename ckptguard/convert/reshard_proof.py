"""The proof of a resharding: every global tensor, put together again from the written files, has its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptguard.convert.canonical import State
from ckptguard.engine.filling import Filler
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.proving import fingerprints_of
from ckptguard.engine.workers import Following, Progress
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.base import Checkpoint

Shapes = Mapping[str, tuple[int, ...]]


def prints_of(
    state: State,
    checkpoint: Checkpoint,
    shapes: Shapes,
    *,
    known: Mapping[str, Fingerprint] | None = None,
    threads: int | None = None,
    progress: Progress,
) -> dict[str, Fingerprint]:
    """Fingerprints of global tensors, read from the files that they stand in.

    Tensors whose chunks are boxes of them are read as they are stored; those that are cut in another way, such as state in
    buckets, are put together first.

    Args:
        state: The checkpoint's tensors.
        checkpoint: The files.
        shapes: Which tensors, and how much of each: a vocabulary without padding that the other side does not have.
        known: Fingerprints that the checkpoint was sealed with, by stored name; their tensors are not read again.
        threads: Worker threads.
        progress: Hears of the bytes read.
    """
    out: dict[str, Fingerprint] = {}
    straight: dict[str, str] = {}
    rest: list[str] = []
    for name, shape in shapes.items():
        entry = state.tensors[name].entry
        if entry is None or entry.shape != shape:
            rest.append(name)
        elif known is not None and entry.name in known:
            out[name] = known[entry.name]
        else:
            straight[entry.name] = name
    found = fingerprint_checkpoint(
        checkpoint, keep=lambda entry: entry.name in straight, threads=threads, progress=Following(progress)
    )
    out |= {straight[stored]: value for stored, value in found.items()}
    if rest:
        made = [state.made(name, shapes[name]) for name in rest]
        out |= fingerprints_of(Filler(made, state.sources, checkpoint), threads=threads, progress=progress)
    return out


def common_shapes(source: State, target: State, keep: Callable[[str], bool]) -> dict[str, tuple[int, ...]]:
    """What both sides must have alike: every tensor, of a vocabulary the rows that both have.

    Args:
        source: One side.
        target: The other.
        keep: Which of the source's tensors went along.
    """
    out = {}
    for name, tensor in source.tensors.items():
        if keep(name):
            other = target.tensors[name].shape
            out[name] = tuple(min(a, b) for a, b in zip(tensor.shape, other, strict=True))
    return out
