"""Plans of imports from small models made up here: who writes what, in which dtype, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ckptguard.convert.import_plan import ImportPlan, plan_import
from ckptguard.convert.mapped import Mapped
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, Span, TensorEntry
from ckptguard.core.pieces import Piece
from ckptguard.megatron.hf_structure import Cell, Derived, Rank, RankPart, Structure, Template

EMBEDDING = "embedding.word_embeddings.weight"
NORM, LINEAR = "decoder.layers.norm.weight", "decoder.layers.linear.weight"


def _entry(name: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> TensorEntry:
    kind = BY_NAME[dtype]
    box = whole(shape)
    return TensorEntry(name, kind, shape, (Chunk(box, Span("model.safetensors", 0, box.numel * kind.itemsize)),))


SNAPSHOT = {
    entry.name: entry
    for entry in (
        _entry("embed_tokens.weight", (6, 4)),
        *(_entry(f"layers.{n}.norm.weight", (4,)) for n in range(2)),
        *(_entry(f"layers.{n}.linear.weight", (8, 4)) for n in range(2)),
    )
}


def _copy(shape: tuple[int, ...]) -> Template:
    strides = (4, 1) if len(shape) == 2 else (1,)
    return Template(shape, (Piece((0,) * len(shape), shape, (1,) * len(shape), "0", 0, strides),))


def _cells() -> list[Cell]:
    """Two layers stacked along a prepended dim; the embedding padded from 6 rows to 8."""
    padded = Template((8, 4), (*_copy((6, 4)).pieces, Piece((6, 0), (2, 4), (1, 1), "", 0, (0, 0))))
    assert padded == TEMPLATES[0]
    full = whole((8, 4))
    out = [Cell(EMBEDDING, (8, 4), full, full, EMBEDDING, "bfloat16", 0, ("embed_tokens.weight",))]
    for n in range(2):
        name = f"decoder.layers.{n}."
        out.append(
            Cell(NORM, (2, 4), Box((n, 0), (1, 4)), whole((4,)), f"{name}norm.weight", "bfloat16", 1,
                 (f"layers.{n}.norm.weight",))
        )  # fmt: skip
        out.append(
            Cell(LINEAR, (2, 8, 4), Box((n, 0, 0), (1, 8, 4)), full, f"{name}linear.weight", "bfloat16", 2,
                 (f"layers.{n}.linear.weight",))
        )  # fmt: skip
    return out


TEMPLATES = (
    Template((8, 4), (*_copy((6, 4)).pieces, Piece((6, 0), (2, 4), (1, 1), "", 0, (0, 0)))),
    _copy((4,)),
    _copy((8, 4)),
)


def _ranks(tp: int) -> list[Rank]:
    """Every rank reads the norms; linears and the embedding are cut by rows."""
    rows = 8 // tp
    out = []
    for rank in range(tp):
        parts = [RankPart(EMBEDDING, (8, 4), Box((rank * rows, 0), (rows, 4)))]
        for n in range(2):
            parts.append(RankPart(NORM, (2, 4), Box((n, 0), (1, 4))))
            parts.append(RankPart(LINEAR, (2, 8, 4), Box((n, rank * rows, 0), (1, rows, 4))))
        objects = tuple(f"decoder.layers.linear._extra_state/shard_{n}_2" for n in range(2))
        out.append(Rank(rank, {"tp": rank}, tuple(parts), objects))
    return out


def structure(**changes: Any) -> Structure:
    values: dict[str, Any] = {
        "architecture": "TinyForCausalLM", "megatron": "0", "bridge": "0", "templates": TEMPLATES, "cells": tuple(_cells()),
        "unmapped": (), "derived": {}, "ranks": tuple(_ranks(2)), "tied": True, "files": {}, "notes": (), "exported": {},
    }  # fmt: skip
    return Structure(**{**values, **changes})


def _plan(snapshot: dict[str, TensorEntry] = SNAPSHOT, *, made_of: Structure | None = None, **more: Any) -> ImportPlan:
    return plan_import(made_of or structure(), snapshot, **more)


def _more(*entries: TensorEntry) -> dict[str, TensorEntry]:
    return SNAPSHOT | {entry.name: entry for entry in entries}


def test_the_first_rank_that_owns_a_chunk_writes_it_and_each_object_once() -> None:
    plan = _plan()
    first, second = plan.files
    assert [chunk.name for chunk in first.chunks] == [
        EMBEDDING,
        NORM,
        NORM,
        LINEAR,
        LINEAR,
    ]  # as Megatron: a key's parts together
    assert [chunk.name for chunk in second.chunks] == [EMBEDDING, LINEAR, LINEAR]
    assert first.objects == (
        "decoder.layers.linear._extra_state/shard_0_2",
        "decoder.layers.linear._extra_state/shard_1_2",
    )
    assert second.objects == ()
    assert plan.total_bytes == sum(volume * 2 for volume in (8 * 4, 2 * 4, 2 * 8 * 4))


def test_what_chunks_are_made_of() -> None:
    plan = _plan()
    embedding, linear = plan.files[1].chunks[0], plan.files[1].chunks[2]
    assert [(p.source, p.offset, p.size, p.first) for p in embedding.assembly.pieces] == [
        ("embed_tokens.weight", (0, 0), (2, 4), 16), ("", (2, 0), (2, 4), 0)
    ]  # fmt: skip
    assert linear.box == Box((1, 4, 0), (1, 4, 4))
    (piece,) = linear.assembly.pieces
    assert (piece.source, piece.offset, piece.size, piece.first) == ("layers.1.linear.weight", (0, 0, 0), (1, 4, 4), 16)


def test_a_box_that_crosses_layers() -> None:
    """Any box can be looked up, not only those that some layout has."""
    assembly = Mapped(structure()).assembly(LINEAR, Box((0, 2, 1), (2, 3, 2)))
    assert [(p.source, p.offset, p.size, p.first) for p in assembly.pieces] == [
        ("layers.0.linear.weight", (0, 0, 0), (1, 3, 2), 9), ("layers.1.linear.weight", (1, 0, 0), (1, 3, 2), 9)
    ]  # fmt: skip


def test_dtypes() -> None:
    def of(plan: ImportPlan) -> dict[str, str]:
        return {chunk.name: chunk.dtype.name for chunk in plan.chunks}

    assert set(of(_plan()).values()) == {"bfloat16"}
    chosen = of(_plan(dtypes=[("*", "float16"), ("*norm*", "float32"), ("nothing", "bfloat16")]))
    assert chosen == {EMBEDDING: "float16", NORM: "float32", LINEAR: "float16"}
    mixed = _more(_entry("layers.1.linear.weight", (8, 4), "float16"))
    assert of(_plan(mixed))[LINEAR] == "float32"  # holds both exactly
    whole_snapshot = _more(_entry("layers.1.norm.weight", (4,), "float32"))
    assert of(_plan(whole_snapshot))[NORM] == "float32"
    cells = [Cell(c.key, c.shape, c.box, c.local, c.parameter, "float32" if c.key == NORM else c.dtype, c.template, c.sources)
             for c in _cells()]  # fmt: skip
    assert of(_plan(made_of=structure(cells=tuple(cells))))[NORM] == "float32"


def test_all_that_has_no_source_is_named_at_once() -> None:
    snapshot = {n: e for n, e in SNAPSHOT.items() if n not in ("layers.0.norm.weight", "layers.1.linear.weight")}
    with pytest.raises(UnsupportedError) as caught:
        _plan(snapshot, made_of=structure(unmapped=("decoder.extra.weight",)))
    for text in ("3 Megatron tensors", "decoder.extra.weight", "layers.0.norm.weight", "layers.1.linear.weight"):
        assert text in caught.value.message


def test_what_is_left_over_is_named_unless_it_may_be() -> None:
    snapshot = _more(_entry("layers.0.bias", (4,)), _entry("layers.1.bias", (4,), "float32"))
    with pytest.raises(
        UnsupportedError, match=r"2 tensors.*layers\.0\.bias bfloat16 \[4\]; layers\.1\.bias float32 \[4\]"
    ):
        _plan(snapshot)
    with pytest.raises(UnsupportedError, match=r"1 tensors.*layers\.1\.bias"):
        _plan(snapshot, drop=["layers.0.*"])
    assert set(_plan(snapshot, drop=["*.bias"]).unused) == {"layers.0.bias", "layers.1.bias"}
    buffers = _more(_entry("layers.0.self_attn.rotary_emb.inv_freq", (8,), "float32"))
    assert "computed" in _plan(buffers).unused["layers.0.self_attn.rotary_emb.inv_freq"]


def test_repeated_ends_are_checked_and_not_stored() -> None:
    """Under the names of tied output layers and of MTP layers; of another shape they are tensors of their own."""
    again = _more(_entry("lm_head.weight", (6, 4)), _entry("layers.2.shared_head.head.weight", (6, 4)),
                  _entry("layers.2.embed_tokens.weight", (6, 4)))  # fmt: skip
    assert set(_plan(again).copies) == {
        "lm_head.weight",
        "layers.2.shared_head.head.weight",
        "layers.2.embed_tokens.weight",
    }
    assert set(_plan(again).copies.values()) == {"embed_tokens.weight"}
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight"):
        _plan(_more(_entry("lm_head.weight", (5, 4))))
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight"):
        _plan(_more(_entry("lm_head.weight", (6, 4), "float32")))


def test_scales_of_quantised_weights_are_used() -> None:
    name = "fp8_blocks(layers.0.linear.weight, layers.0.linear.weight_scale_inv)"
    of = ("layers.0.linear.weight", "layers.0.linear.weight_scale_inv")
    cells = [Cell(c.key, c.shape, c.box, c.local, c.parameter, c.dtype, c.template,
                  (name,) if c.sources == (of[0],) else c.sources) for c in _cells()]  # fmt: skip
    made_of = structure(cells=tuple(cells), derived={name: Derived("fp8_blocks", of, (8, 4), "bfloat16")})
    snapshot = _more(_entry(of[0], (8, 4), "float8_e4m3fn"), _entry(of[1], (1, 1), "float32"))
    plan = _plan(snapshot, made_of=made_of)
    assert not plan.unused
    assert {chunk.dtype.name for chunk in plan.chunks} == {"bfloat16"}


def test_holes_are_refused() -> None:
    ranks = [Rank(r.number, r.at, tuple(p for p in r.parts if p.key != NORM or p.box.offset[0] == 0), r.objects)
             for r in _ranks(2)]  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"decoder\.layers\.norm\.weight.*4 of its 8 elements"):
        _plan(made_of=structure(ranks=tuple(ranks)))
    short = (_copy((6, 4)), *TEMPLATES[1:])  # nothing says what the padding is made of
    with pytest.raises(UnsupportedError, match=r"word_embeddings.*without a source"):
        _plan(made_of=structure(templates=short))
