"""The plan of an import: every chunk of every rank's file, what it is made of, and what is left over. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptguard.convert.mapped import Mapped, is_whole
from ckptguard.convert.rank_files import RankFile, grouped, refuse_holes
from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import TensorEntry
from ckptguard.core.plan import Computed, Made, Source, Stored
from ckptguard.megatron.hf_structure import Structure

_FLOAT32 = BY_NAME["float32"]
# Tensors of a snapshot that hold nothing of their own, by what their names end with.
_COMPUTED_BUFFERS = {
    "rotary_emb.inv_freq": "computed from config.json when the model is built",
    "attn.masked_bias": "a constant of old transformers releases",
    "attn.bias": "a mask, computed when the model is built",
}


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """A planned import.

    Attributes:
        files: By rank; ranks that own nothing of their own have none.
        sources: What the chunks' pieces name.
        copies: Tensors of the snapshot that must equal another one, which is used: {copy: original}.
        unused: Tensors that are left out, and why.
    """

    files: tuple[RankFile, ...]
    sources: Mapping[str, Source]
    copies: Mapping[str, str]
    unused: Mapping[str, str]

    @property
    def chunks(self) -> tuple[Made, ...]:
        """All chunks, file by file."""
        return tuple(chunk for file in self.files for chunk in file.chunks)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.size_bytes for chunk in self.chunks)


def plan_import(
    structure: Structure,
    tensors: Mapping[str, TensorEntry],
    *,
    dtypes: Sequence[tuple[str, str]] = (),
    drop: Sequence[str] = (),
) -> ImportPlan:
    """Plans an import.

    Args:
        structure: The model under the target layout.
        tensors: Of the snapshot.
        dtypes: (pattern of Megatron's names, dtype) pairs; the last that matches decides.
        drop: Patterns of the snapshot's names that may be left out.

    Raises:
        UnsupportedError: A Megatron tensor has no source, or a tensor of the snapshot no place; lists all.
    """
    sources = _sources(structure, tensors)
    _refuse_unfilled(structure, tensors)
    mapped = Mapped(structure)
    dtype_of = {key: _dtype(mapped, key, sources, dtypes) for key in structure.keys}
    taken: dict[str, set[Box]] = {}
    written: set[str] = set()
    files = []
    for rank in structure.ranks:
        chunks = []
        for part in rank.parts:
            boxes = taken.setdefault(part.key, set())
            if part.box not in boxes:
                boxes.add(part.box)
                chunks.append(
                    Made(part.key, dtype_of[part.key], part.shape, part.box, mapped.assembly(part.key, part.box))
                )
        objects = tuple(name for name in dict.fromkeys(rank.objects) if name not in written)
        written.update(objects)
        if chunks or objects:
            files.append(RankFile(rank.number, objects, grouped(chunks)))
    _refuse_holes(structure, files, taken)
    copies, unused = _left_over(structure, tensors, sources, drop)
    return ImportPlan(tuple(files), sources, copies, unused)


def _sources(structure: Structure, tensors: Mapping[str, TensorEntry]) -> dict[str, Source]:
    def stored(name: str) -> Stored:
        (chunk,) = tensors[name].chunks
        return Stored(tensors[name], chunk)

    out: dict[str, Source] = {name: stored(name) for name in tensors if tensors[name].chunks}
    for name, item in structure.derived.items():
        out[name] = Computed(item.kind, tuple(stored(part) for part in item.of), item.shape, BY_NAME[item.dtype])
    return out


def _refuse_unfilled(structure: Structure, tensors: Mapping[str, TensorEntry]) -> None:
    wrong = [f"{name}: Bridge maps nothing to it" for name in structure.unmapped]
    for cell in structure.cells:
        wrong += [
            f"{cell.parameter}: made of {name}, which the snapshot does not have"
            for name in cell.sources
            if name not in tensors and name not in structure.derived
        ]
    if wrong:
        raise UnsupportedError(
            f"{structure.architecture}: {len(wrong)} Megatron tensors have no source: {'; '.join(wrong[:6])}",
            next_step="Nothing was written. Check that config.json belongs to these tensors.",
        )


def _refuse_holes(structure: Structure, files: Sequence[RankFile], taken: Mapping[str, set[Box]]) -> None:
    """The chunks must be the whole of every tensor, once, and be made of something everywhere."""
    for file in files:
        for chunk in file.chunks:
            if not is_whole(chunk.assembly):
                raise UnsupportedError(
                    f"{chunk.name} {chunk.box}: Bridge's mapping leaves elements of it without a source"
                )
    for key, shape in structure.keys.items():
        refuse_holes(key, shape, list(taken.get(key, ())))


def _dtype(mapped: Mapped, key: str, sources: Mapping[str, Source], rules: Sequence[tuple[str, str]]) -> DType:
    """What the rules say; else float32 where Megatron or the snapshot has it, else the snapshot's own."""
    for pattern, name in reversed(rules):
        if fnmatch.fnmatchcase(key, pattern):
            return BY_NAME[name]
    found = {sources[name].dtype for cell in mapped.cells_of(key) for name in cell.sources}
    megatron = {cell.dtype for cell in mapped.cells_of(key)}
    if "float32" in megatron or _FLOAT32 in found or len(found) != 1:
        return _FLOAT32
    return found.pop()


def _left_over(
    structure: Structure, tensors: Mapping[str, TensorEntry], sources: Mapping[str, Source], drop: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Tensors that nothing is made of: (copies of used ones, others with the reason).

    Raises:
        UnsupportedError: There is no reason known for some; lists them.
    """
    used = set(_used(structure, sources))
    ends = _ends(structure)
    copies: dict[str, str] = {}
    unused: dict[str, str] = {}
    wrong = []
    for name, entry in tensors.items():
        if name in used:
            continue
        original = _original(name, entry, tensors, ends)
        reason = next((why for end, why in _COMPUTED_BUFFERS.items() if name.endswith(end)), None)
        if original is not None:
            copies[name] = original
        elif reason is not None:
            unused[name] = reason
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in drop):
            unused[name] = "left out as asked (--drop)"
        else:
            wrong.append(f"{name} {entry.dtype} {list(entry.shape)}")
    if wrong:
        raise UnsupportedError(
            f"{structure.architecture}: Megatron-Bridge {structure.bridge} has no place for {len(wrong)} tensors of the "
            f"snapshot: {'; '.join(wrong[:6])}{'; ...' if len(wrong) > 6 else ''}",
            next_step="Nothing was written. Leave them out knowingly with --drop PATTERN.",
        )
    return copies, unused


def _used(structure: Structure, sources: Mapping[str, Source]) -> Iterator[str]:
    for cell in structure.cells:
        for name in cell.sources:
            source = sources[name]
            if isinstance(source, Stored):
                yield name
            else:
                yield from (part.entry.name for part in source.of)


def _ends(structure: Structure) -> dict[str, str]:
    """The snapshot's names of the embedding and of the output layer (the embedding again, where they are tied)."""
    out = {}
    for cell in structure.cells:
        if cell.parameter.endswith("embedding.word_embeddings.weight") and cell.sources:
            out["embedding"] = cell.sources[0]
        if cell.parameter.endswith("output_layer.weight") and cell.sources:
            out["output"] = cell.sources[0]
    return {"output": out["embedding"], **out} if "embedding" in out else out


def _original(name: str, entry: TensorEntry, tensors: Mapping[str, TensorEntry], ends: Mapping[str, str]) -> str | None:
    """The used tensor that a repeated embedding or output layer must equal: tied ones, and those of MTP layers."""
    if name.endswith(("lm_head.weight", "shared_head.head.weight", "output.weight", "head.weight")):
        original = ends.get("output")
    elif name.endswith(("embed_tokens.weight", "emb.tok_emb.weight", "embeddings.weight")):
        original = ends.get("embedding")
    else:
        return None
    same = original is not None and (tensors[original].dtype, tensors[original].shape) == (entry.dtype, entry.shape)
    return original if same else None
