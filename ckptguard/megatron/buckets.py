"""What the buckets of a ``dp_reshardable`` checkpoint hold: which elements belong to which parameter, and which to none.

Source: megatron/core/optimizer/distrib_optimizer.py ``sharded_param_state_dp_reshardable`` (0.19.2): one 1-D tensor per
bucket and state, as long as the bucket without the padding at its end. Parameters begin at multiples of 64 elements
(``pad_param_start`` of megatron/core/optimizer/param_layout.py); what stands between them is ``torch.empty`` memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index
from ckptguard.megatron.structure import Bucket, Buffer, Structures, rank_structures, structures_of

Ranges = tuple[tuple[int, int], ...]

_STATE = re.compile(r"((?:.*\.)?dp_group_idx_\d+\.gbuf_idx_\d+\.dtype_\(.*\)\.bucket_idx_\d+)\.\w+")


def bucket_layouts(
    args: Mapping[str, object], *, content_metadata: Mapping[str, object] | None = None
) -> dict[str, Bucket]:
    """Asks Megatron Core for the buckets of every model-parallel rank.

    Args:
        args: ``Facts.args``: plain values.
        content_metadata: ``Facts.content_metadata``.

    Returns:
        By the key that the bucket's states share on disk:
        ``[chained_K.]optimizer.distributed.dp_group_idx_I.gbuf_idx_G.dtype_(...).bucket_idx_B``.

    Raises:
        UnsupportedError: The model or its buckets cannot be derived from the args; says why.
        EnvironmentFailedError: The process that asks failed.
    """
    return layouts_in(rank_structures(args, content_metadata=content_metadata))


def layouts_in(structures: Structures) -> dict[str, Bucket]:
    """As ``bucket_layouts``, from structures that are there already."""
    refuse_unknown(structures)
    out: dict[str, Bucket] = {}
    for rank in structures.ranks:
        if not rank.at["dense_dp"]:
            prefix = "chained_0." if structures.has_expert_optimizer else ""
            out |= _keys(f"{prefix}optimizer.distributed.dp_group_idx_{rank.at['dense_group']}", rank.dense)
        if not rank.at["expert_dp"]:
            out |= _keys(f"chained_1.optimizer.distributed.dp_group_idx_{rank.at['expert_group']}", rank.expert)
    return out


def refuse_unknown(structures: Structures) -> None:
    """Raises if the optimizer's buckets could not be derived."""
    if structures.no_buckets:
        raise UnsupportedError(
            f"the optimizer's buckets cannot be derived from the stored args: {structures.no_buckets}"
        )


def _keys(group: str, buffers: tuple[Buffer, ...]) -> dict[str, Bucket]:
    return {
        f"{group}.gbuf_idx_{number}.dtype_{buffer.dtype}.bucket_idx_{at}": bucket
        for number, buffer in enumerate(buffers)
        for at, bucket in enumerate(buffer.buckets)
    }


def bucket_of(name: str) -> str | None:
    """The bucket's key in a stored state's name (``....bucket_idx_0.exp_avg``), or None for any other tensor."""
    match = _STATE.fullmatch(name)
    return match[1] if match else None


def unused_ranges(index: Index, *, structures: Structures | None = None) -> dict[str, Ranges]:
    """Elements of the stored bucket tensors that belong to no parameter; what they hold means nothing.

    Args:
        index: A checkpoint; one whose optimizer is not ``dp_reshardable`` has no such tensors.
        structures: What Megatron says of it, if it was asked before.

    Returns:
        Half-open ranges of elements, in order, for every bucket tensor that has any. Empty without bucket tensors.

    Raises:
        UnsupportedError: The layout cannot be derived, or is not that of the files; names the tensors.
        EnvironmentFailedError: The process that asks failed.
    """
    stored = {name: bucket for name in index.tensors if (bucket := bucket_of(name)) is not None}
    if not stored:
        return {}
    layouts = layouts_in(structures if structures is not None else structures_of(index))
    refuse_other_layout(index, stored, layouts)
    return {name: gaps for name, bucket in stored.items() if (gaps := layouts[bucket].gaps())}


def refuse_other_layout(index: Index, stored: Mapping[str, str], layouts: Mapping[str, Bucket]) -> None:
    """Raises unless Megatron's layout has the buckets of the files, each as long as it is stored."""
    wrong = [f"{bucket} is not stored" for bucket in sorted(set(layouts) - set(stored.values()))]
    for name, bucket in stored.items():
        shape = index.tensors[name].shape
        if bucket not in layouts:
            wrong.append(f"{name} is not in the layout")
        elif shape != (layouts[bucket].numel,):
            wrong.append(f"{name} has shape {list(shape)}, the layout [{layouts[bucket].numel}]")
    if wrong:
        raise UnsupportedError(
            f"{index.location}: the installed Megatron Core lays optimizer buckets out otherwise than the one that wrote"
            f" them, in {len(wrong)} places: {'; '.join(wrong[:3])}",
            next_step="Install the megatron-core release that wrote the checkpoint.",
        )
