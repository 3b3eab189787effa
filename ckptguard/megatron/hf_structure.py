"""A Hugging Face model in Megatron's form: which element of which global tensor comes from where, and which rank owns what.

Values only; ``ask`` gets them from a process that runs Megatron and Megatron-Bridge.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptguard.core.boxes import Box
from ckptguard.core.pieces import Piece
from ckptguard.layout.layouts import Layout
from ckptguard.megatron import ask


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of a global tensor that is one box of one parameter of the unsplit model.

    Attributes:
        key: Global name, as ``torch_dist`` stores it.
        shape: Global shape.
        box: In the global tensor.
        local: The same elements in the parameter, which has no prepended dims.
        parameter: Its name.
        dtype: Megatron's own for it, by torch's name.
        template: Number of the template that says what it is made of; None if nothing does.
        sources: Names of the template's sources.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    local: Box
    parameter: str
    dtype: str
    template: int | None
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """What parameters of one kind are made of.

    Attributes:
        shape: Of the parameter.
        pieces: Their sources are numbers into a cell's ``sources``, as text; "" stands for zeros.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Derived:
    """A source that is computed from tensors of the snapshot.

    Attributes:
        kind: ``fp8_blocks``, ``fp8_scaled``, ``fp4_rows``, ``mxfp4`` or ``ones``.
        of: The tensors, the weights first.
        shape: Of the result.
        dtype: Of the result.
    """

    kind: str
    of: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class RankPart:
    """A box of a global tensor that a rank owns."""

    key: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank of the target layout owns, in the order in which Megatron saves it."""

    number: int
    at: Mapping[str, int]
    parts: tuple[RankPart, ...]
    objects: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """A model under a layout.

    Attributes:
        architecture: transformers' class name.
        megatron: Version of Megatron Core that was asked.
        bridge: Version of Megatron-Bridge.
        templates: By number.
        cells: All parts of all parameters of the unsplit model.
        unmapped: Parameters that Bridge has no mapping for.
        derived: Computed sources, by name.
        ranks: Of the target layout.
        tied: Whether the output layer is the embedding.
        files: What is stored beside the tensors; empty if it was not asked for.
        notes: Sentences for the user.
        exported: Dtype and shape of the tensors that Bridge would export, by name and in its order; empty if the snapshot's own
            were given.
    """

    architecture: str
    megatron: str
    bridge: str
    templates: tuple[Template, ...]
    cells: tuple[Cell, ...]
    unmapped: tuple[str, ...]
    derived: Mapping[str, Derived]
    ranks: tuple[Rank, ...]
    tied: bool
    files: Mapping[str, bytes]
    notes: tuple[str, ...]
    exported: Mapping[str, tuple[str, tuple[int, ...]]]

    @cached_property
    def keys(self) -> dict[str, tuple[int, ...]]:
        """Shape of every global tensor, by key."""
        return {cell.key: cell.shape for cell in self.cells}


def ask_structure(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None,
    layout: Layout,
    *,
    dtype: str,
    pad_vocabulary_to: int | None = None,
    store_as: Mapping[str, Any] | None = None,
) -> Structure:
    """Asks Megatron and Bridge what a snapshot becomes under a layout.

    Args:
        folder: Directory of the snapshot; only its config.json is read.
        config: The content of that.
        tensors: Dtype and shape of each of its tensors, by name; None if they are not known: then those that Bridge would
            export are taken.
        layout: The target.
        dtype: Of the model's weights.
        pad_vocabulary_to: The vocabulary's multiple per TP rank instead of Bridge's.
        store_as: ``hf_model_id`` and ``iteration`` of a checkpoint to be written.

    Raises:
        UnsupportedError: Architecture or layout are not supported; says why.
        EnvironmentFailedError: The process failed.
    """
    question = {
        "kind": "hf", "folder": str(folder), "config": dict(config), "layout": layout.as_dict(), "dtype": dtype,
        "tensors": None if tensors is None else {name: [d, list(s)] for name, (d, s) in tensors.items()},
        "pad_vocabulary_to": pad_vocabulary_to, "store_as": dict(store_as) if store_as else None,
    }  # fmt: skip
    return from_plain(ask.put(question))


def from_plain(answer: Mapping[str, Any]) -> Structure:
    """Values from the plain form that crosses between the processes."""
    return Structure(
        architecture=answer["architecture"],
        megatron=answer["megatron"],
        bridge=answer["bridge"],
        templates=tuple(_template(item) for item in answer["templates"]),
        cells=tuple(cell for item in answer["tensors"] for cell in _cells(item)),
        unmapped=tuple(answer["unmapped"]),
        derived={
            n: Derived(d["kind"], tuple(d["of"]), tuple(d["shape"]), d["dtype"]) for n, d in answer["derived"].items()
        },
        ranks=tuple(_rank(item) for item in answer["ranks"]),
        tied=answer["tied"],
        files={name: base64.b64decode(data) for name, data in answer["files"].items()},
        notes=tuple(answer["notes"]),
        exported={name: (dtype, tuple(shape)) for name, (dtype, shape) in answer["exported"].items()},
    )


def _template(plain: Mapping[str, Any]) -> Template:
    shape = tuple(plain["shape"])
    pieces = tuple(
        Piece(tuple(offset), tuple(size), (1,) * len(shape), "" if source < 0 else str(source), first, tuple(strides))
        for offset, size, source, first, strides in plain["pieces"]
    )
    return Template(shape, pieces)


def _cells(plain: Mapping[str, Any]) -> list[Cell]:
    out = []
    for part in plain["parts"]:
        size = tuple(part["local_size"])
        prepended = (1,) * (len(part["shape"]) - len(size))
        box = Box(tuple(part["offset"]), prepended + size)
        local = Box(tuple(part["local_offset"]), size)
        out.append(
            Cell(
                part["key"], tuple(part["shape"]), box, local, plain["name"], plain["dtype"], plain["template"],
                tuple(plain["sources"]),
            )
        )  # fmt: skip
    return out


def _rank(plain: Mapping[str, Any]) -> Rank:
    parts = []
    for key, shape, offset, size in plain["parts"]:
        prepended = (1,) * (len(shape) - len(size))
        parts.append(RankPart(key, tuple(shape), Box(tuple(offset), (*prepended, *size))))
    return Rank(plain["rank"], plain["at"], tuple(parts), tuple(plain["objects"]))
