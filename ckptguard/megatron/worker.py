"""What the asking process does: builds ranks' models on the meta device and describes them in plain values.

Sources (megatron-core 0.19.2): megatron/training/models/dist_utils.py ``build_virtual_pipeline_stages`` and
``_ddp_wrap``, megatron/training/checkpointing.py ``generate_state_dict``, megatron/core/dist_checkpointing/mapping.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch

from ckptguard.core.boxes import unravel
from ckptguard.core.errors import UnsupportedError
from ckptguard.megatron import sampled, worker_buckets, worker_groups, worlds
from ckptguard.megatron.model_args import to_namespace


def describe(
    args: Mapping[str, Any],
    content_metadata: Mapping[str, Any],
    transformer_impl: str | None,
    sample_above: int | None = None,
) -> dict[str, Any]:
    """Structure of every model-parallel rank; the plain form of ``structure.Structures``.

    Args:
        args: Training args.
        content_metadata: For what changes key names.
        transformer_impl: Instead of the one in the args.
        sample_above: Describe a pipeline stage of more ranks than this by some of them, where these say all. None: never.
    """
    namespace = to_namespace(args, transformer_impl)
    no_buckets, no_groups = worker_buckets.refusal(namespace, args), worker_groups.refusal(namespace, args)
    worlds.forget_devices()
    world = _World(namespace, content_metadata, buckets=no_buckets is None, groups=no_groups is None)
    places = [worlds.coordinates() for _ in worlds.ranks(namespace)]
    stages = [
        world.stage([rank for rank, at in enumerate(places) if at["pp"] == stage], places, sample_above)
        for stage in range(namespace.pipeline_model_parallel_size)
    ]
    return {
        "megatron": version("megatron-core"), "stages": stages, "no_buckets": no_buckets, "no_groups": no_groups
    }  # fmt: skip


class _World:
    """The smallest world of a layout, whose ranks are built one after the other."""

    def __init__(self, args: Namespace, content_metadata: Mapping[str, Any], *, buckets: bool, groups: bool) -> None:
        self._args, self._content_metadata, self._buckets, self._groups = args, content_metadata, buckets, groups
        self._config = _model_config(args)

    def stage(self, ranks: list[int], places: list[dict[str, int]], sample_above: int | None) -> dict[str, Any]:
        """Ranks, places and descriptions of a pipeline stage; one description with rules in it if that says all."""
        out: dict[str, Any] = {"ranks": ranks, "at": [places[rank] for rank in ranks]}
        known: dict[int, dict[str, Any]] = {}
        if sample_above is not None and len(ranks) > sample_above:
            known = {ranks[n]: self._describe(ranks[n]) for n in sampled.choose(out["at"])}
            fitted = sampled.fit([places[rank] for rank in known], list(known.values()))
            if fitted is not None:
                return {**out, "fitted": fitted}
        return {**out, "each": [known.get(rank) or self._describe(rank) for rank in ranks]}

    def _describe(self, rank: int) -> dict[str, Any]:
        """The plain form of ``structure.RankStructure``, without its place."""
        tensors: list[Any] = []
        objects: list[Any] = []
        extra: list[Any] = []
        with worlds.as_rank(self._args, rank), worlds.without_compiler():
            chunks = _build(self._config)
            for chunk in chunks:
                sharded = sharded_state(chunk, self._content_metadata)
                tensors.append(describe_sharded(chunk, sharded, rank))
                extra.append(extra_states(chunk))
                objects += [[item.unique_key, _is_main(item.replica_id)] for item in _objects(sharded)]
            buffers = worker_buckets.describe(self._args, chunks) if self._buckets else []
            groups = worker_groups.describe(self._args, chunks) if self._groups else []
        return {"chunks": tensors, "objects": objects, "extra": extra, "buffers": buffers, "groups": groups}


def _model_config(args: Namespace) -> Any:
    """GPTModelConfig or HybridModelConfig, as pretrain_gpt.py and pretrain_hybrid.py choose."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    return hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)


def _build(config: Any) -> list[Any]:
    """The model chunks of the current rank, in their training dtypes, on the meta device."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.dist_utils import (
        build_virtual_pipeline_stages,
        prepare_existing_model_chunks_for_distributed_training,
    )

    groups = ProcessGroupCollection.use_mpu_process_groups()
    transformer = config.transformer
    with torch.device("meta"):
        builder = config.get_builder_cls()(config)
        stages = build_virtual_pipeline_stages(
            builder.build_model, groups, transformer.virtual_pipeline_model_parallel_size
        )
        wrapped = prepare_existing_model_chunks_for_distributed_training(
            stages, transformer, groups, wrap_with_ddp=False
        )
    return list(wrapped)


def extra_states(chunk: Any) -> list[list[Any]]:
    """(name in the rank's state_dict, whether it is a tensor) of the ``_extra_state`` entries of a model chunk."""
    state = chunk.state_dict_for_save_checkpoint(keep_vars=True)
    return [[name, isinstance(item, torch.Tensor)] for name, item in state.items() if name.endswith("_extra_state")]


def describe_chunk(chunk: Any, content_metadata: Mapping[str, Any], rank: int) -> list[dict[str, Any]]:
    """Parameters and buffers of a model chunk of the current rank; the plain form of ``structure.LocalTensor``.

    Raises:
        UnsupportedError: Megatron does not say where one of them stands, or it is no box.
    """
    return describe_sharded(chunk, sharded_state(chunk, content_metadata), rank)


def describe_sharded(chunk: Any, sharded: Mapping[str, Any], rank: int) -> list[dict[str, Any]]:
    """As ``describe_chunk``, of a chunk whose ``sharded_state`` is known: making it is most of the work."""
    trainable = {id(p) for p in chunk.parameters() if p.requires_grad}
    out = []
    for name, tensor in chunk.state_dict_for_save_checkpoint(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or name.endswith("_extra_state"):
            continue
        if name not in sharded:
            raise UnsupportedError(f"Megatron does not say where {name} of rank {rank} stands in the whole model")
        out.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "trainable": id(tensor) in trainable,
                "parts": [_part(name, tensor, shard) for shard in _shards(sharded[name])],
            }
        )
    return out


def sharded_state(chunk: Any, content_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``sharded_state_dict`` of a model chunk with the metadata that decides about key names."""
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": bool(content_metadata.get("singleton_local_shards", False)),
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    out: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)
    return out


def object_keys(sharded: Mapping[str, Any]) -> list[str]:
    """Names on disk of the objects (``_extra_state``) in a model chunk's ``sharded_state``, in its order."""
    return [item.unique_key for item in _objects(sharded)]


def _objects(sharded: Mapping[str, Any]) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return [item for item in _leaves(sharded) if isinstance(item, ShardedObject)]


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        for value in item.values():
            yield from _leaves(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _leaves(value)
    else:
        yield item


def _shards(item: Any) -> Iterator[Any]:
    """ShardedTensors of an entry; a ShardedTensorFactory (SwiGLU, Mamba) is asked for its parts."""
    for leaf in _leaves(item):
        if hasattr(leaf, "build"):
            yield from _shards(leaf.build())
        elif hasattr(leaf, "local_shape"):
            yield leaf


def _part(name: str, tensor: torch.Tensor, shard: Any) -> dict[str, Any]:
    """Where a ShardedTensor's data stands in the rank's own tensor, told by its storage offset and strides."""
    view = shard.data
    begin = view.storage_offset() - tensor.storage_offset()
    offset = unravel(begin, tensor.shape) if tensor.dim() else ()
    is_box = (
        view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        and tensor.is_contiguous()
        and view.dim() == tensor.dim()
        and all(n == 1 or a == b for n, a, b in zip(view.shape, view.stride(), tensor.stride(), strict=True))
        and all(o + n <= size for o, n, size in zip(offset, view.shape, tensor.shape, strict=True))
    )
    if not is_box or shard.flattened_range is not None:
        raise UnsupportedError(
            f"{shard.key} is not a rectangular part of the rank's own {name}, so it cannot be read in place"
        )
    return {
        "key": shard.key,
        "shape": list(shard.global_shape),
        "offset": list(shard.global_offset),
        "local_offset": list(offset),
        "local_size": list(view.shape),
        "main": _is_main(shard.replica_id),
    }


def _is_main(replica_id: Any) -> bool:
    """``is_main_replica`` of megatron/core/dist_checkpointing/mapping.py."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0
