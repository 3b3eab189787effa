"""Checkpoints to measure with, written by torch's own writer: a large one, and one whose index has very many chunks."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from pathlib import Path

LAYER = {"fc1": (4096, 2048), "fc2": (2048, 4096), "qkv": (3072, 2048), "proj": (2048, 2048)}


def large(path: Path, size_bytes: int) -> Path:
    """A torch_dist checkpoint of bf16 weights and fp32 masters, one key a layer, in four files.

    All layers hold the same random bits, so that making 16 GiB takes little memory; nothing that reads them can know.
    """
    if (path / "metadata.json").exists():
        return path
    import torch
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.validation import save_integrity_manifest

    shutil.rmtree(path, ignore_errors=True)
    per_layer = sum(a * b for a, b in LAYER.values()) * (2 + 4)
    layers = max(1, size_bytes // per_layer)
    generator = torch.Generator().manual_seed(0)
    state = {}
    random = {n: torch.randint(-(2**62), 2**62, (a * b * 6 // 8,), generator=generator) for n, (a, b) in LAYER.items()}
    for layer in range(layers):
        for name, shape in LAYER.items():
            bits = random[name]
            half = shape[0] * shape[1] * 2 // 8
            state[f"decoder.layers.{layer}.{name}.weight"] = bits[:half].view(torch.bfloat16).view(shape)
            state[f"optimizer.state.param.decoder.layers.{layer}.{name}.weight"] = (
                bits[half:].view(torch.float32).view(shape)
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=4), no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    save_integrity_manifest(str(path))
    return path


def many_chunks(path: Path, count: int) -> Path:
    """A torch_dist directory whose index has ``count`` chunks in 64 (sparse) files; the files hold nothing."""
    if (path / "metadata.json").exists():
        return path
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    path.mkdir(parents=True, exist_ok=True)
    per_tensor, tensors, storage, at = 100, {}, {}, [0] * 64
    for number in range(count // per_tensor):
        name = f"decoder.layers.{number % 96}.mlp.experts.experts.linear_fc{number // 96}.weight"
        size = torch.Size([per_tensor, 1024, 512])
        chunks = []
        for row in range(per_tensor):
            offset, part = torch.Size([row, 0, 0]), torch.Size([1, 1024, 512])
            chunks.append(ChunkStorageMetadata(offset, part))
            file, length = (number + row) % 64, (1 << 20) + 1200
            storage[MetadataIndex(name, offset, row)] = _StorageInfo(f"__{file}_0.distcp", at[file], length)
            at[file] += length
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, chunks)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=storage)))
    for file, length in enumerate(at):
        with (path / f"__{file}_0.distcp").open("wb") as handle:
            handle.truncate(length)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return path
