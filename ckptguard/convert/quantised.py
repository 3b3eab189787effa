"""fp8 weights given back: import kept their scales beside the checkpoint, export divides by them again."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckptguard.convert.export_plan import ExportPlan
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.core.pieces import of_source
from ckptguard.core.plan import Computed, Made, Source, Stored
from ckptguard.engine.filling import Array, Filler
from ckptguard.engine.proving import fingerprints_of
from ckptguard.engine.workers import Progress
from ckptguard.formats import safetensors_files
from ckptguard.formats.base import Checkpoint

SCALES_FILE = "quantised/scales.safetensors"
_BFLOAT16, _FP8 = BY_NAME["bfloat16"], BY_NAME["float8_e4m3fn"]
_SHOWN = 6


def with_fp8(checkpoint: Checkpoint, plan: ExportPlan) -> ExportPlan:
    """The same export, with the weights whose scales were kept in fp8, and the scales beside them.

    Raises:
        UsageError: The checkpoint keeps no scales.
    """
    if SCALES_FILE not in checkpoint.files.listing:
        raise UsageError(
            f"{checkpoint.files.root}: no {SCALES_FILE}, so the scales of the fp8 weights are not known",
            next_step="They are kept by `ckptguard import --fp8 keep`; without them weights are exported as bfloat16.",
        )
    scales = _kept(checkpoint)
    of = {weight_of(name): name for name in scales}
    tensors = []
    for made in plan.tensors:
        if made.name in of:
            made = replace(made, dtype=_FP8, scale=scales[of[made.name]])
        tensors.append(made)
    sources: dict[str, Source] = {**plan.sources, **scales}
    for name, stored in scales.items():
        shape = stored.shape
        tensors.append(Made(name, stored.dtype, shape, whole(shape), of_source(name, shape)))
    return replace(plan, tensors=tuple(tensors), sources=sources)


def weight_of(scale: str) -> str:
    """Name of the weight that a tensor of scales is for."""
    return (
        scale.removesuffix("_scale_inv") if scale.endswith("_scale_inv") else scale.removesuffix(".scale") + ".weight"
    )


def _kept(checkpoint: Checkpoint) -> dict[str, Stored]:
    out = {}
    for name, item in safetensors_files.read_header(checkpoint.files, SCALES_FILE).tensors.items():
        chunk = Chunk(whole(item.shape), item.span)
        out[name] = Stored(TensorEntry(name, item.dtype, item.shape, (chunk,)), chunk)
    return out


def dequantised(tensors: Sequence[Made], stored: Mapping[str, Stored]) -> dict[str, Source]:
    """Sources by name: the written fp8 weights as the bfloat16 that they stand for, everything else as it is."""
    out: dict[str, Source] = dict(stored)
    for made in tensors:
        if made.scale is not None:
            of = (stored[made.name], stored[made.scale.entry.name])
            out[made.name] = Computed("fp8_scaled", of, made.shape, _BFLOAT16)
    return out


def refuse_other_values(checkpoint: Checkpoint, plan: ExportPlan, *, threads: int | None, progress: Progress) -> None:
    """The stored values must be the ones that the kept scales were made for: training changes them.

    Raises:
        UnsupportedError: Some are not given back by fp8 and scale; names them.
    """
    chosen = [made for made in plan.tensors if made.scale is not None]
    progress.start("checking fp8", sum(made.size_bytes for made in chosen))
    checking = _Checking(chosen, plan.sources, checkpoint)
    fingerprints_of(checking, threads=threads, progress=progress)
    if checking.changed:
        names = sorted(checking.changed)
        raise UnsupportedError(
            f"{len(names)} weights are no longer what their kept scales give: {', '.join(names[:_SHOWN])}",
            next_step="Nothing was written. The model was trained since; export it as bfloat16 (without --fp8 restore).",
        )


class _Checking(Filler):
    """Fills as ever, and notes which values are not what their fp8 stands for."""

    def __init__(self, chunks: Sequence[Made], sources: Mapping[str, Source], checkpoint: Checkpoint) -> None:
        super().__init__(chunks, sources, checkpoint)
        wide = [replace(made, dtype=_BFLOAT16, scale=None) for made in chunks]
        self.changed: set[str] = set()
        self._wide = Filler(wide, sources, checkpoint)
        self._lock = threading.Lock()

    def __call__(self, key: int, begin_bytes: int, out: memoryview, /) -> None:
        super().__call__(key, begin_bytes, out)
        made = self.chunks[key]
        values: Array = np.empty(len(out), np.uint16)
        self._wide(key, 2 * begin_bytes, memoryview(values.view(np.uint8)))
        if not self.stands_for(made, begin_bytes // made.shape[-1], np.frombuffer(out, np.uint8), values):
            with self._lock:
                self.changed.add(made.name)
