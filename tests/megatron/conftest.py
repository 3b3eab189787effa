"""Recipes beside the common ones, and reading of tensors through ckptguard's own reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptguard.core.index import TensorEntry
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.structure import Structures, structures_of
from ckptguard.testing import recipes

FROZEN = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"

_OVERLAP = dataclasses.replace(
    recipes.DENSE_TP1_PP1,
    name="overlap_tp1_pp1",
    # Buckets that end off the padding's multiple of 128: a norm of 64 elements and a matrix fill the first one.
    extra_flags=("--overlap-grad-reduce", "--ddp-bucket-size", "5000"),
)
_MORE = (
    _OVERLAP,
    dataclasses.replace(_OVERLAP, name="legacy_overlap_tp1_pp1", ckpt_format="torch"),
    dataclasses.replace(recipes.DENSE_PP2_VPP2, name="legacy_pp2_vpp2", ckpt_format="torch"),
    dataclasses.replace(
        recipes.LEGACY_MOE_EP2, name="moe_ep2_full", ckpt_format="torch_dist", optimizer_format="fully_reshardable"
    ),
)
recipes.RECIPES.update({recipe.name: recipe for recipe in _MORE})  # known to the fixtures that make and cache them

Read = Callable[[Checkpoint, TensorEntry], torch.Tensor]
_TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="session")
def frozen() -> Callable[[str], Path]:
    """Return a function from a frozen checkpoint's name to its root."""
    return lambda name: FROZEN / name


@pytest.fixture(scope="session")
def asked() -> Callable[[str], Structures]:
    """Return a function from a frozen checkpoint's name to what Megatron says of it, asked once a session."""

    @cache
    def ask_once(name: str) -> Structures:
        with open_checkpoint(FROZEN / name) as checkpoint:
            return structures_of(checkpoint.index)

    return ask_once


@pytest.fixture(scope="session")
def read() -> Read:
    """Return a function that reads a whole global tensor, chunk by chunk."""

    def whole(checkpoint: Checkpoint, entry: TensorEntry) -> torch.Tensor:
        item = np.dtype((np.void, entry.dtype.itemsize))
        out = np.zeros(entry.shape, item)
        for chunk in entry.chunks:
            at = checkpoint.reader.locate(entry, chunk)
            data = checkpoint.reader.read_box(at, (0,) * len(chunk.box.size), chunk.box.size)
            where = tuple(slice(b, e) for b, e in zip(chunk.box.offset, chunk.box.end, strict=True))
            out[where] = data.view(item).reshape(chunk.box.size)
        return torch.frombuffer(bytearray(out.tobytes()), dtype=_TORCH[entry.dtype.name]).reshape(entry.shape)

    return whole
