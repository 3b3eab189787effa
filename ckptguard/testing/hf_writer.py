"""Row shards as torch writes them: real ranks save one DTensor state with torch's own HuggingFaceStorageWriter."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def state() -> dict[str, torch.Tensor]:
    """The global values: sharded by rows, sharded by columns, unevenly sharded, replicated, 0-d."""
    return {
        "rows": torch.arange(32, dtype=torch.float32).reshape(8, 4),
        "columns": torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16),
        "uneven": torch.arange(5, dtype=torch.int32),
        "same": torch.arange(3, dtype=torch.float16),
        "step": torch.tensor(7.0),
    }


def save(folder: Path, ranks: int = 2) -> None:
    """Runs the ranks in a process of their own, and waits for them.

    Args:
        folder: Where the files go; made if it is not there.
        ranks: Number of processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ckptguard.testing.hf_writer", str(folder), str(ranks)]
    subprocess.run(command, check=True, timeout=120)


def _rank(folder: str, meeting: str, ranks: int, rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_state
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    how = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0)}
    sharded = {name: distribute_tensor(value, mesh, [how.get(name, Replicate())]) for name, value in state().items()}
    save_state(sharded, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.destroy_process_group()


def _main(folder: str, ranks: int) -> None:
    """Forks the ranks from a process that has imported torch once: each import takes seconds."""
    import torch.distributed.checkpoint.hf_storage
    import torch.distributed.tensor  # noqa: F401  # imported for the forks

    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        running = [fork.Process(target=_rank, args=(folder, f"{scratch}/meeting", ranks, n)) for n in range(ranks)]
        for process in running:
            process.start()
        for process in running:
            process.join()
    codes = [process.exitcode for process in running]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
