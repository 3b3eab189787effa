"""The plan of an export: every tensor of the snapshot as pieces of stored chunks, and what is left out. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckptguard.convert.import_plan import plan_import
from ckptguard.convert.mapped import Mapped
from ckptguard.convert.reference import Table
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.core.index import Chunk, Index, Span, TensorEntry
from ckptguard.core.pieces import Assembly, Piece, TooManyPiecesError, invert, row_major
from ckptguard.core.plan import Computed, Made, Source, Stored
from ckptguard.formats.facts import kind_of_name
from ckptguard.megatron.hf_structure import Cell, Structure

_FLOAT32 = BY_NAME["float32"]
_SHOWN = 6
# Megatron-LM's torch_dcp and NeMo put these before Megatron's own names.
_PREFIXES = ("model.", "module.")
# Norms that Transformer Engine fuses into the linear after them where there is one: the names of the local spec, and those.
# The local spec stores them under the fused names whether or not there is one, MoE layers too
# (megatron/core/models/gpt/gpt_layer_specs.py ``sharded_state_dict_keys_map``, 0.19.2).
_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """A stored chunk, and what it holds of the snapshot.

    Attributes:
        name: Of the chunk, as the plan's pieces name it.
        key: Of the tensor in the model.
        source: The chunk.
        assembly: What it is made of when the snapshot is imported; other sources than tensors of it are constants.
        dtype: In which it is compared with what was written.
    """

    name: str
    key: str
    source: Stored
    assembly: Assembly
    dtype: DType


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A planned export.

    Attributes:
        tensors: What is written, each one whole, in the snapshot's order.
        sources: The stored chunks that their pieces name.
        held: The same chunks, seen from the other side.
        constants: Computed sources that chunks must be equal to where the snapshot has nothing for them.
        copies: Written tensors that repeat another one: {copy: original}.
        unused: Tensors of the reference that are not written, and why.
        left_behind: What of the checkpoint is not exported: how many, by use.
        narrowed: Written tensors whose dtype is narrower than the stored one's, though nobody asked for that.
        rounded: Those for which it was asked.
    """

    tensors: tuple[Made, ...]
    sources: Mapping[str, Source]
    held: tuple[Held, ...]
    constants: Mapping[str, Computed]
    copies: Mapping[str, str]
    unused: Mapping[str, str]
    left_behind: Mapping[str, int]
    narrowed: tuple[str, ...]
    rounded: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(made.size_bytes for made in self.tensors)


def plan_export(
    structure: Structure,
    index: Index,
    table: Table,
    *,
    keep_dtypes: bool = True,
    dtypes: Sequence[tuple[str, str]] = (),
    drop: Sequence[str] = (),
) -> ExportPlan:
    """Plans an export.

    Args:
        structure: The model under the layout of a single rank.
        index: Of the Megatron checkpoint, under global names or parameter names.
        table: The tensors to be written, by name.
        keep_dtypes: Write the dtypes of ``table``; else the stored ones.
        dtypes: (pattern of the snapshot's names, dtype) pairs; the last that matches decides.
        drop: Patterns of names, of either side, that may be left out.

    Raises:
        UnsupportedError: A tensor of either side has no counterpart, or another shape; lists all.
        UsageError: The dtypes asked for divide what Megatron keeps in one tensor.
    """
    as_import = plan_import(structure, {name: _entry(name, *table[name]) for name in table}, drop=drop)
    chunks, left_behind = _chunks(structure, index, drop)
    pieces = _pieces(structure, index, chunks, table, {*as_import.copies, *as_import.unused})
    sources: dict[str, Source] = {held.name: held.source for held in chunks}
    tensors: list[Made] = []
    narrowed: dict[str, None] = {}  # sets that keep their order
    rounded: dict[str, None] = {}
    for name, (wanted, shape) in table.items():
        if name in as_import.unused:
            continue
        parts = pieces[as_import.copies.get(name, name)]
        stored = {sources[part.source].dtype for part in parts}
        own = stored.pop() if len(stored) == 1 else _FLOAT32
        asked = next((BY_NAME[d] for pattern, d in reversed(dtypes) if fnmatch.fnmatchcase(name, pattern)), None)
        dtype = asked or (wanted if keep_dtypes else own)
        if not _holds(dtype, own):
            (narrowed if asked is None else rounded)[name] = None
        tensors.append(Made(name, dtype, shape, whole(shape), Assembly(shape, parts)))
    written = {made.name: made.dtype for made in tensors}
    held = tuple(replace(item, dtype=_compared(item, written, rounded)) for item in chunks)
    constants = {n: s for n, s in as_import.sources.items() if isinstance(s, Computed) and n not in table}
    return ExportPlan(
        tuple(tensors), sources, held, constants, as_import.copies, as_import.unused, left_behind, tuple(narrowed),
        tuple(rounded),
    )  # fmt: skip


def _entry(name: str, dtype: DType, shape: tuple[int, ...]) -> TensorEntry:
    """A tensor of the reference as an import sees it; it is stored nowhere."""
    return TensorEntry(name, dtype, shape, (Chunk(whole(shape), Span(name, 0, prod(shape) * dtype.itemsize)),))


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of one dtype is one of the other, so that a cast there and back changes nothing."""
    return wide == narrow or (wide == _FLOAT32 and narrow.name in ("bfloat16", "float16"))


class Names:
    """Finds a stored tensor in the model, whichever way its name was written.

    Args:
        structure: The model.
    """

    def __init__(self, structure: Structure) -> None:
        every = Mapped(structure)
        single = Mapped(replace(structure, cells=tuple(_by_parameter(structure))))
        self._known = dict.fromkeys(single.structure.keys, single) | dict.fromkeys(structure.keys, every)

    def find(self, name: str) -> tuple[str, Mapped] | None:
        """The tensor's name in the model, and how to look it up."""
        for alias in _aliases(name):
            if alias in self._known:
                return alias, self._known[alias]
        return None


def _by_parameter(structure: Structure) -> Iterator[Cell]:
    """Each parameter of the unsplit model as a tensor of its own, as ``torch_dcp`` stores it."""
    for cell in {cell.parameter: cell for cell in structure.cells}.values():
        if cell.template is not None:
            shape = structure.templates[cell.template].shape
            yield replace(cell, key=cell.parameter, shape=shape, box=whole(shape), local=whole(shape))


def _aliases(name: str) -> Iterator[str]:
    yield name
    while (prefix := next((p for p in _PREFIXES if name.startswith(p)), None)) is not None:
        name = name.removeprefix(prefix)
        yield name
    for local, fused in _NORMS:
        if local in name:
            yield name.replace(local, fused)
        elif fused in name:
            yield name.replace(fused, local)


def _chunks(structure: Structure, index: Index, drop: Sequence[str]) -> tuple[list[Held], dict[str, int]]:
    """Every stored chunk of the model, each box once; and how much of what else is stored.

    Raises:
        UnsupportedError: The checkpoint is not one of this model.
    """
    names, wrong = Names(structure), []
    held: list[Held] = []
    left = {"objects (RNG and extra state, arguments)": len(index.objects)} if index.objects else {}
    for name, entry in index.tensors.items():
        use, found = use_of(name), names.find(name)
        if use == "weights" and found is None:
            use = "tensors left out as asked (--drop)" if any(fnmatch.fnmatchcase(name, p) for p in drop) else use
            if use == "weights":
                wrong.append(f"{name} {list(entry.shape)} is stored, the model has no such tensor")
        if use != "weights":
            left[use] = left.get(use, 0) + 1
        elif found is not None:
            key, mapped = found
            shape = mapped.structure.keys[key]
            if shape != entry.shape:
                wrong.append(f"{name} has shape {list(entry.shape)}, the model's {list(shape)}")
                continue
            for chunk in {chunk.box: chunk for chunk in reversed(entry.chunks)}.values():
                assembly = mapped.assembly(key, chunk.box)
                held.append(Held(f"{name}{chunk.box}", key, Stored(entry, chunk), assembly, entry.dtype))
    if wrong:
        raise _other_model(structure, index, wrong)
    return held, left


def use_of(name: str) -> str:
    """What a stored tensor is for; only weights are exported."""
    if kind_of_name(name) != "weights":
        return "tensors of optimizer state"
    if "rng_state" in name:
        return "tensors of RNG state"
    return "tensors of extra state" if "_extra_state" in name else "weights"


def _other_model(structure: Structure, index: Index, wrong: Sequence[str]) -> UnsupportedError:
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return UnsupportedError(
        f"{index.location}: not the {structure.architecture} that config.json describes: {'; '.join(wrong[:_SHOWN])}{more}",
        next_step="Nothing was written. Give the config of this model with --reference; leave tensors out with --drop PATTERN.",
    )


def _pieces(
    structure: Structure, index: Index, chunks: Sequence[Held], table: Table, without: set[str]
) -> dict[str, tuple[Piece, ...]]:
    """Every tensor of the snapshot as parts of stored chunks.

    Raises:
        UnsupportedError: Some are not all there; lists them.
    """
    shapes = {name: shape for name, (_, shape) in table.items() if name not in without}
    try:
        found = invert({held.name: _only(held.assembly, shapes) for held in chunks}, shapes)
    except TooManyPiecesError as error:
        raise UnsupportedError(f"{structure.architecture}: the way back cannot be planned: {error}") from error
    key_of = {held.name: held.key for held in chunks}
    out, wrong = {}, []
    for name, pieces in found.items():
        wanted = prod(shapes[name])
        got = sum(piece.numel for piece in pieces)
        if got > wanted:  # Megatron keeps it more than once: one is taken, the proof compares all
            first = key_of[pieces[0].source]
            pieces = tuple(piece for piece in pieces if key_of[piece.source] == first)
            got = sum(piece.numel for piece in pieces)
        if got != wanted:
            wrong.append(f"{name}: {got} of its {wanted} elements are stored")
        out[name] = pieces
    if wrong:
        stored = {held.key for held in chunks}
        gone = {cell.key for cell in structure.cells if not {cell.key, cell.parameter} & stored}
        raise _other_model(structure, index, [*(f"{key} is not stored" for key in sorted(gone)), *wrong])
    return out


def _only(assembly: Assembly, names: Mapping[str, object]) -> Assembly:
    """Without pieces of other sources."""
    return Assembly(assembly.shape, tuple(piece for piece in assembly.pieces if piece.source in names))


def _compared(held: Held, written: Mapping[str, DType], rounded: Mapping[str, None]) -> DType:
    """The stored dtype; where rounding was asked for, the one that it was rounded to."""
    here = [name for name in held.assembly.sources if name in written]
    if not any(name in rounded for name in here):
        return held.source.dtype
    found = {written[name] for name in here}
    if len(found) > 1:
        raise UsageError(
            f"--dtype asks for {' and '.join(sorted(d.name for d in found))} in {', '.join(here[:_SHOWN])}, which Megatron "
            f"keeps in one tensor, {held.key}",
            next_step="Ask for one dtype for all of them.",
        )
    return found.pop()


def seen(held: Held, names: Mapping[str, object], *, own: bool) -> Assembly:
    """A chunk with zeros wherever its source is not among some names: as an import makes it, or as it is stored.

    Args:
        held: The chunk.
        names: The sources that count; "" among them for the zeros that an import pads with.
        own: Put the chunk's own elements in their places.
    """
    shape = held.assembly.shape
    strides = row_major(shape)
    pieces = []
    for piece in held.assembly.pieces:
        if piece.source not in names:
            pieces.append(replace(piece, source="", first=0, strides=(0,) * len(shape)))
        elif own:
            first = sum(o * s for o, s in zip(piece.offset, strides, strict=True))
            steps = tuple(step * s for step, s in zip(piece.step, strides, strict=True))
            pieces.append(replace(piece, source=held.name, first=first, strides=steps))
        else:
            pieces.append(piece)
    return Assembly(shape, tuple(pieces))
