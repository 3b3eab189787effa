"""Legacy ``--ckpt-format torch`` files: one directory per model-parallel rank, each holding torch.save files.

Source: megatron/training/checkpointing.py ``get_checkpoint_name`` (0.19.2): ``mp_rank_TT[_PPP][_EEE]/`` with
``model_optim_rng.pt`` (or ``model_rng.pt``) and, with the distributed optimizer, ``distrib_optim.pt``. A file does not say
where its tensors stand in the global ones, so every tensor is listed as that rank's own:
``mp_rank_00_001/model_optim_rng.pt:model.decoder.layers.0...``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptguard.core.boxes import whole
from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Chunk, Index, ObjectEntry, Span, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.formats import facts
from ckptguard.formats.chunks import Reader, row_major
from ckptguard.formats.pickles import TensorRef
from ckptguard.formats.remote import directory
from ckptguard.formats.storage import Directory
from ckptguard.formats.torch_zips import TorchZip

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


class LegacyTorch:
    """``mp_rank_*`` directories."""

    name = "torch"

    def why_not(self, path: Path) -> str | None:
        """As ``Format.why_not``."""
        if not path.is_dir():
            return "not a directory"
        folders = [p for p in path.iterdir() if RANK_FOLDER.fullmatch(p.name)]
        if not folders:
            return "no mp_rank_* directory"
        return (
            None
            if any(f.suffix == ".pt" for p in folders for f in p.iterdir())
            else "mp_rank_* directories hold no .pt file"
        )

    def open_files(self, path: Path) -> Directory:
        """As ``Format.open_files``."""
        return directory(path)

    def read_index(self, files: Directory) -> Index:
        """As ``Format.read_index``."""
        reader = Reader(files)
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ObjectEntry] = {}
        problems: list[Problem] = []
        common: dict[str, Any] = {}
        for name in files.listing:
            if not (RANK_FOLDER.fullmatch(name.partition("/")[0]) and name.endswith(".pt")):
                continue
            span = Span(name, 0, files.size(name))
            objects[name] = ObjectEntry(name, span)
            try:
                archive = reader.open_zip(span, where=str(files.root / name))
                tensors.update((entry.name, entry) for entry in entries(name, archive, span))
            except DamagedError as error:
                problems.extend(error.problems)
                continue
            if isinstance(archive.value, dict) and "args" in archive.value and not common:
                common = archive.value
        optimizer = "legacy distributed (bucket space)" if any("distrib_optim.pt" in n for n in objects) else None
        extra = {"checkpoint_version": common["checkpoint_version"]} if "checkpoint_version" in common else {}
        said = facts.gather(common, {}, version=None, optimizer=optimizer, extra=extra)
        problems += _missing_ranks(files, said.layout)
        return Index("torch", str(files.root), tensors, objects, files.listing, {}, said, tuple(problems))


def entries(name: str, archive: TorchZip, span: Span) -> Iterator[TensorEntry]:
    """One entry per tensor in a file of torch.save, called ``name:path``; tensors that share a storage share its span.

    Args:
        name: What the file is called.
        archive: Its directory and value.
        span: Where it stands.

    Raises:
        DamagedError: A tensor's storage is missing.
    """
    for path, ref in _tensors(archive.value, "", 0):
        try:
            record = archive.storage(ref.storage.key)
        except KeyError:
            message = f"{name}: record data/{ref.storage.key} of {path} is missing"
            raise DamagedError(
                message, problems=[Problem("missing-chunk", message, file=span.file, tensor=path)]
            ) from None
        stored = Span(span.file, span.offset_bytes + record.data_bytes, record.length_bytes)
        strides = None if row_major(ref.size, ref.strides) else ref.strides
        chunk = Chunk(whole(ref.size), stored, first_element=ref.offset, strides=strides, crc32=record.crc32)
        yield TensorEntry(f"{name}:{path}", ref.dtype, ref.size, (chunk,))


def _tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(value, TensorRef):
        yield path, value
    elif isinstance(value, dict) and depth < 32:
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{_key(key)}" if path else _key(key), depth + 1)
    elif isinstance(value, list | tuple) and depth < 32:
        for number, item in enumerate(value):
            yield from _tensors(item, f"{path}.{number}" if path else str(number), depth + 1)


def _key(key: Any) -> str:
    if isinstance(key, tuple | list):
        return "(" + ", ".join(_key(k) for k in key) + ")"
    return f"torch.{key}" if type(key).__name__ == "DType" else str(key)


def _missing_ranks(files: Directory, layout: Mapping[str, int]) -> list[Problem]:
    """Ranks run from 0 without holes in each axis, and each rank has the files that the others have."""
    ranks: dict[tuple[int, ...], set[str]] = {}
    for name in files.listing:
        folder, _, rest = name.partition("/")
        match = RANK_FOLDER.fullmatch(folder)
        if match and rest.endswith(".pt"):
            ranks.setdefault(tuple(int(g) for g in match.groups() if g is not None), set()).add(rest)
    usual = set().union(*ranks.values()) if ranks else set()
    out = []
    for rank in sorted(_expected(set(ranks), layout)):
        for rest in sorted(usual - ranks.get(rank, set())):
            name = "mp_rank_" + "_".join(f"{n:0{2 if i == 0 else 3}d}" for i, n in enumerate(rank)) + f"/{rest}"
            out.append(Problem("missing-file", f"{name} is missing; the other ranks have theirs", file=name))
    return out


def _expected(ranks: set[tuple[int, ...]], layout: Mapping[str, int]) -> set[tuple[int, ...]]:
    """Every index of every axis; with experts, each stage has the (tensor, expert) pairs that the other stages have.

    Not every pair exists: with expert TP below TP, a tensor rank meets only some expert ranks. Without stages the second
    number is that of the expert rank; which pairs there are then follows from the sizes.
    """
    shape = [max(axis) + 1 for axis in zip(*ranks, strict=False)]
    ep = layout.get("ep", 1)
    if len(shape) == 2 and layout.get("pp", 1) == 1 and ep > 1:
        tp = layout.get("tp", 1)
        etp = layout.get("etp", tp)
        return {(rank % tp, rank // etp % ep) for rank in range(max(tp, etp * ep))}
    if len(shape) < 3:
        return set(_product(shape))
    pairs = {(tensor, expert) for tensor, _, expert in ranks}
    return {(tensor, stage, expert) for tensor, expert in pairs for stage in range(shape[1])}


def _product(shape: list[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for head in range(shape[0]):
        for tail in _product(shape[1:]):
            yield (head, *tail)
