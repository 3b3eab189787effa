"""A peer of ``ckptguard reshard``: torch's Distributed Checkpoint alone, in one process.

    python tools/benchmarks/dcp_reshard.py ITERATION_DIR OUT_DIR --cut 4

Loads every tensor whole and saves all of them with each cut into so many boxes along its longest dim. What is no tensor is left
out, and nothing is proved.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


class Cutting(DefaultSavePlanner):
    """A planner that cuts every tensor into ``count`` boxes."""

    def __init__(self, count: int) -> None:
        super().__init__(flatten_state_dict=False)
        self._count = count

    def create_local_plan(self) -> SavePlan:
        """One item a box."""
        items = []
        for name, tensor in self.state_dict.items():
            dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d]) if tensor.dim() else None
            at = 0
            for number, part in enumerate(tensor.chunk(self._count, dim) if dim is not None else [tensor]):
                offsets = torch.Size(at if d == dim else 0 for d in range(tensor.dim()))
                at += part.shape[dim] if dim is not None else 0
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, part.shape),
                    TensorProperties.create_from_tensor(tensor),
                    tensor.shape,
                )
                items.append(WriteItem(MetadataIndex(name, offsets, number), WriteItemType.SHARD, tensor_data=data))
        self._boxes = {item.index: item.tensor_data.chunk for item in items}
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The box of the tensor that an item is about."""
        tensor, box = self.state_dict[index.fqn], self._boxes[index]
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def main() -> None:
    """Converts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--cut", type=int, default=4)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    reader = FileSystemReader(options.source)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    writer = FileSystemWriter(options.out_dir, thread_count=2)
    save(state, storage_writer=writer, planner=Cutting(options.cut), no_dist=True)


if __name__ == "__main__":
    main()
