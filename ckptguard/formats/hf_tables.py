"""Which tensor of a Hugging Face snapshot stands in which file, and whether its index, names and headers agree.

Sources:
    * ``model.safetensors.index.json`` maps tensor names to files (``weight_map``), ``metadata.total_size`` is in bytes;
      shards are named ``model-0000K-of-0000N.safetensors``, K from 1: huggingface_hub/serialization/_base.py
      ``split_state_dict_into_shards_factory`` and ``constants.SAFETENSORS_WEIGHTS_FILE_PATTERN`` (1.33).
    * torch's ``HuggingFaceStorageWriter(save_distributed=True)`` (torch/distributed/checkpoint/hf_storage.py and
      _hf_utils.py, 2.14.1) writes ``shard-0000R-model-0000K-of-0000N.safetensors``, R from 1 per rank, no index, and in
      each header's metadata under ``DCP_SHARDING_INFO`` the JSON ``{name: {"saved_offsets": [...]}}``. Neither global
      shapes nor the number of ranks are stored: a shape is taken to be the largest offset + size, as by torch's reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptguard.core.boxes import Box
from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Chunk, Encoding, Span, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.formats import hf_names
from ckptguard.formats.hf_names import INDEX_SUFFIX, SUFFIX, WeightMap
from ckptguard.formats.safetensors_files import Header, StoredTensor, read_header
from ckptguard.formats.storage import Directory

__all__ = ["INDEX_SUFFIX", "SUFFIX", "read_tables"]

_SHARDING = "DCP_SHARDING_INFO"
_NO_END = (
    "written by HuggingFaceStorageWriter(save_distributed=True), which stores neither the global shapes nor the number "
    "of ranks: if the files of the last ranks are missing, nothing here shows it"
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor, or part of one, in one file. ``offset`` is set where the file says which part it holds."""

    file: str
    stored: StoredTensor
    offset: tuple[int, ...] | None


@dataclass(slots=True)
class _Found:
    """What the headers hold."""

    places: dict[str, list[_Place]] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    distributed: bool = False


def read_tables(files: Directory, *, alone: bool) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """Reads every header that belongs to the snapshot, and checks them against each other and the index.

    Args:
        files: The snapshot.
        alone: Only one file was asked for, so what its name says of others is not checked.

    Returns:
        The tensors by name, by file and in the order of its header; and everything that is wrong.
    """
    problems: list[Problem] = []
    names = [name for name in files.listing if name.endswith(SUFFIX) and "/" not in name]
    index = hf_names.read_weight_map(files, problems)
    chosen = hf_names.choose(names, index, problems)
    if alone:
        problems += hf_names.part_of_more(names)
    else:
        problems += hf_names.holes(chosen, index)
    found = _read_headers(files, chosen, problems)
    if found.distributed and not alone:
        problems.append(Problem("note", _NO_END))
    if index is not None:
        problems += _against_index(found, index, files)
    entries = {}
    for name, places in found.places.items():
        entry = _entry(name, places, index.files.get(name) if index else None, problems)
        if entry is not None:
            entries[name] = entry
    if index is not None:
        problems += _total(index, entries)
    return entries, problems


def _read_headers(files: Directory, chosen: Iterable[str], problems: list[Problem]) -> _Found:
    """Reads header after header; one that is broken does not stop the others."""
    found = _Found()
    for name in chosen:
        entry = files.listing.get(name)
        if entry is None or not entry.inside:  # a link that leaves the snapshot is reported with all the others
            found.unreadable.add(name)
            continue
        try:
            if entry.size_bytes < 0:
                raise _damaged("missing-file", f"{name}: a link to {entry.link_target}, where no file is", name)
            _refuse_pointer(files, name)
            header = read_header(files, name)
        except DamagedError as error:
            problems.extend(error.problems or [Problem("unreadable", error.message, file=name)])
            found.unreadable.add(name)
            continue
        offsets = _offsets(name, header, problems)
        found.distributed = found.distributed or (offsets is not None and hf_names.is_rank_file(name))
        for tensor, stored in header.tensors.items():
            offset = None if offsets is None else offsets.get(tensor)
            if offsets is None or offset is not None:
                found.places.setdefault(tensor, []).append(_Place(name, stored, offset))
    return found


def _refuse_pointer(files: Directory, name: str) -> None:
    """A clone without git-lfs holds small text files in the place of the large ones."""
    size = files.size(name)
    if len(_LFS_POINTER) <= size < 1024 and files.read(name).startswith(_LFS_POINTER):
        message = f"{name}: a git-lfs pointer, not the file itself; run 'git lfs pull' in the clone"
        raise _damaged("unreadable", message, name)


def _offsets(name: str, header: Header, problems: list[Problem]) -> dict[str, tuple[int, ...]] | None:
    """Where each tensor of a file begins in its global tensor; None for a file that holds whole ones."""
    text = header.metadata.get(_SHARDING)
    if text is None:
        return None
    try:
        said = hf_names.parse_object(text)
    except ValueError as error:
        problems.append(Problem("unreadable", f"{name}: {_SHARDING} in its header is not usable ({error})", file=name))
        return {}
    out = {}
    for tensor, stored in header.tensors.items():
        item = said.pop(tensor, None)
        offset = item.get("saved_offsets") if isinstance(item, dict) else None
        if (
            isinstance(offset, list)
            and len(offset) == len(stored.shape)
            and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in offset)
        ):
            out[tensor] = tuple(offset)
        else:
            message = f"{name}: {_SHARDING} says {offset!r} of {tensor}, expected {len(stored.shape)} offsets"
            problems.append(Problem("layout", message, file=name, tensor=tensor))
    for tensor in said:
        message = f"{name}: {_SHARDING} names {tensor}, which the file does not hold"
        problems.append(Problem("missing-tensor", message, file=name, tensor=tensor))
    return out


def _against_index(found: _Found, index: WeightMap, files: Directory) -> list[Problem]:
    """Both ways: what the index names must be there, and what is there must be named."""
    out = []
    for file, tensors in index.by_file().items():
        if file not in files.listing:
            message = f"{file} is missing; {index.name} says that it holds {len(tensors)} tensors ({tensors[0]}, ...)"
            out.append(Problem("missing-file", message, file=file))
        for tensor in tensors:
            if not any(place.file == file for place in found.places.get(tensor, ())):
                why = "is missing" if file not in files.listing else "does not hold it"
                why = "cannot be read" if file in found.unreadable and file in files.listing else why
                message = f"{tensor}: {index.name} says that it is in {file}, which {why}"
                out.append(Problem("missing-tensor", message, file=file, tensor=tensor))
    named = set(index.files.values())
    for tensor, places in found.places.items():
        said = index.files.get(tensor)
        for place in places:
            if said is None and place.file in named:  # a whole file that is not named is one problem, made elsewhere
                message = f"{place.file}: holds {tensor}, which {index.name} does not name"
                out.append(Problem("layout", message, file=place.file, tensor=tensor))
            elif said is not None and said != place.file:
                message = f"{place.file}: holds {tensor}, which {index.name} says is in {said}"
                out.append(Problem("layout", message, file=place.file, tensor=tensor))
    return out


def _entry(name: str, places: list[_Place], said: str | None, problems: list[Problem]) -> TensorEntry | None:
    """Puts the parts of a tensor together; of several whole ones keeps the one that the index means, or the first."""
    first = next((place for place in places if place.file == said), places[0])
    if len(places) > 1 and any(place.offset is None for place in places):
        others = ", ".join(place.file for place in places if place is not first)
        message = f"{name}: stands in {first.file} and again in {others}"
        problems.append(Problem("overlap", message, file=first.file, tensor=name))
        places = [first]
    fitting = []
    for place in places:
        if place.stored.dtype == first.stored.dtype and len(place.stored.shape) == len(first.stored.shape):
            fitting.append(place)
        else:
            message = f"{name}: {_kind(place.stored)} in {place.file}, but {_kind(first.stored)} in {first.file}"
            problems.append(Problem("layout", message, file=place.file, tensor=name))
    chunks = tuple(sorted((_chunk(place) for place in fitting), key=lambda chunk: chunk.box.offset))
    shape = tuple(max(ends) for ends in zip(*(chunk.box.end for chunk in chunks), strict=True))
    return TensorEntry(name, first.stored.dtype, shape, chunks)


def _chunk(place: _Place) -> Chunk:
    shape, span = place.stored.shape, place.stored.span
    box = Box(place.offset if place.offset is not None else (0,) * len(shape), shape)
    return Chunk(box, Span(place.file, span.offset_bytes, span.length_bytes), Encoding.RAW)


def _kind(stored: StoredTensor) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def _total(index: WeightMap, entries: Mapping[str, TensorEntry]) -> list[Problem]:
    """``total_size`` is what writers count, some with tied tensors twice or rounded, so a difference is only a note."""
    if index.total_size is None or any(name not in entries for name in index.files):
        return []
    stored = sum(entries[name].size_bytes for name in index.files)
    if stored == index.total_size:
        return []
    message = f"{index.name}: says total_size {index.total_size}, its tensors have {stored} bytes"
    return [Problem("note", message, file=index.name)]


def _damaged(kind: hf_names.FileKind, message: str, file: str) -> DamagedError:
    return DamagedError(message, problems=[Problem(kind, message, file=file)])
