"""Legacy ``--ckpt-format torch`` files under Megatron's global names, so that they compare with ``torch_dist``.

A legacy file holds a rank's own tensors under the rank's own names. Which part of which global tensor each one is comes
from Megatron Core (``structure``). Where files are, and who writes them: megatron/training/checkpointing.py
``get_checkpoint_name`` and ``save_checkpoint`` (0.19.2): weights by the first expert data parallel rank, each optimizer's
state by the first rank of the group that shards it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.megatron import legacy_optimizer
from ckptguard.megatron.legacy_parts import Gathered, ReplicaGroup, cut, folder_of
from ckptguard.megatron.structure import Structures, structures_of

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class GlobalView:
    """Legacy files as one checkpoint.

    Attributes:
        index: Its tensors have global names, shapes and boxes; ``torch_dist`` of the same state has the same.
        replicas: What was left out because another rank holds the same box.
        structures: What Megatron said.
    """

    index: Index
    replicas: tuple[ReplicaGroup, ...]
    structures: Structures


def to_global(index: Index) -> Index:
    """``to_global_view(index).index``."""
    return to_global_view(index).index


def to_global_view(index: Index, *, structures: Structures | None = None) -> GlobalView:
    """A legacy checkpoint under the names, dtypes, shapes and boxes of ``torch_dist``.

    Weights always; state of the distributed optimizer as ``fully_reshardable`` names it where its buckets are known.
    What has no global name (RNG state, ``_extra_state``, other optimizers' state) is told in a note: RNG and extra state
    stay in the index as objects only, as in ``torch_dist``; optimizer state keeps the rank's own names.

    Args:
        index: Of a legacy checkpoint.
        structures: What Megatron says of it, if it was asked before.

    Raises:
        UnsupportedError: Not legacy files; or Megatron cannot be asked, or says otherwise than the files.
        EnvironmentFailedError: The process that asks failed.
    """
    if index.format != "torch":
        raise UnsupportedError(
            f"{index.location}: only legacy `torch` files have names per rank, this is {index.format}"
        )
    if structures is None:
        structures = structures_of(index, transformer_impl=_impl_by_names(index))
    gathered = Gathered()
    placed = _weights(index, structures, gathered)
    done, notes = legacy_optimizer.place(index, structures, gathered)
    tensors, replicas = gathered.result()
    rest = {name: entry for name, entry in index.tensors.items() if name not in placed and name not in done}
    kept, more = _leftovers(rest)
    view = replace(index, tensors=tensors | kept).with_problems(*notes, *more)
    return GlobalView(view, replicas, structures)


def _impl_by_names(index: Index) -> str | None:
    """What the names say about the layer spec: norms fused into linears are TE's, one beside a plain QKV is not."""
    if any(name.endswith(".layer_norm_weight") for name in index.tensors):
        return "transformer_engine"
    plain = any(name.endswith(".input_layernorm.weight") for name in index.tensors)
    qkv = any(name.endswith(".self_attention.linear_qkv.weight") for name in index.tensors)
    return "local" if plain and qkv else None


def _weights(index: Index, structures: Structures, gathered: Gathered) -> set[str]:
    """Places every weight; returns the names it took from the index."""
    file = "model_rng.pt" if any("/model_rng.pt:" in name for name in index.tensors) else "model_optim_rng.pt"
    expected: set[str] = set()
    missing, wrong = [], []
    for rank in structures.ranks:
        path = f"{folder_of(rank, structures)}/{file}"
        if (rank.at["expert_dp"] and rank.at["dense_dp"]) or path not in index.files:
            continue  # a copy; or a missing file, which is the index's own problem, and leaves its boxes open
        for number, chunk in enumerate(rank.chunks):
            prefix = f"{path}:model{number if len(rank.chunks) > 1 else ''}."
            for tensor in chunk:
                stored = index.tensors.get(prefix + tensor.name)
                expected.add(prefix + tensor.name)
                if stored is None:
                    missing.append(prefix + tensor.name)
                elif stored.shape != tensor.shape:
                    wrong.append(f"{stored.name} has shape {list(stored.shape)}, Megatron's {list(tensor.shape)}")
                else:
                    for part in tensor.parts:
                        gathered.add(part.key, part, stored, cut(stored, part.box, part.local))
    extra = [name for name in index.tensors if is_weight(name) and name not in expected]
    _refuse_other_model(index.location, missing, wrong, extra)
    return expected


def is_weight(name: str) -> bool:
    """Whether a legacy tensor is a weight (or a buffer beside the weights), by its path inside the file."""
    head, _, rest = name.partition(":")[2].partition(".")
    return bool(re.fullmatch(r"model\d*", head)) and not rest.endswith("_extra_state")


def _refuse_other_model(location: str, missing: list[str], wrong: list[str], extra: list[str]) -> None:
    """Raises if Megatron's model has other tensors than the files: then its word on where they stand is worth nothing."""
    said = [
        f"{len(names)} {what}: {'; '.join(names[:_SHOWN])}"
        for what, names in (
            ("that it has are not stored", missing),
            ("differ", wrong),
            ("that are stored it has not", extra),
        )
        if names
    ]
    if said:
        raise UnsupportedError(
            f"{location}: the model that Megatron builds from the stored args is not the one in the files. Of its tensors,"
            f" {'. '.join(said)}",
            next_step="Install the megatron-core release that wrote the checkpoint.",
        )


def _leftovers(rest: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """What has no global name: kept under the rank's name if it is optimizer state, and told in any case."""
    kept = {n: e for n, e in rest.items() if "distrib_optim.pt:" in n or n.partition(":")[2].startswith("optimizer.")}
    gone = [name for name in rest if name not in kept]
    notes = []
    if gone:
        notes.append(
            _note(
                f"{len(gone)} tensors are listed as part of their files only, as torch_dist has them as objects", gone
            )
        )
    if kept:
        notes.append(_note(f"{len(kept)} tensors of optimizer state keep the names of their rank", kept))
    return kept, notes


def _note(message: str, names: Iterable[str]) -> Problem:
    shown = sorted({name.rpartition("/")[2] for name in names})
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return Problem("note", f"{message}: {', '.join(shown[:_SHOWN])}{more}")
