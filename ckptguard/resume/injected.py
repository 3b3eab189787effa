"""What runs in a process of an arm: hooks on the frameworks, and the recorder once one of them is used.

Every process of a job has the arm's environment: launchers, data workers, savers. Only one that calls a watcher is a rank and
gets a recorder; nothing here writes before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

from ckptguard.core.watching import Watcher
from ckptguard.resume.orders import VARIABLE, read_order

# Rank and world size as launchers tell them: torchrun, srun, Open MPI, other MPIs (PMI).
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def site_directory() -> Path:
    """The folder to put first on ``PYTHONPATH``: its ``sitecustomize`` starts the recording."""
    return Path(__file__).parent / "site"


def watch() -> None:
    """Hooks the frameworks that are known. Called when torch has been imported, before any of them is."""
    from ckptguard.megatron import watch_bridge, watch_lm

    watch_lm.watch(watcher())
    watch_bridge.watch(watcher())


def watcher() -> Watcher:
    """This process's watcher; its recorder is made by the first call of a method."""
    return cast(Watcher, _WhenCalled())


class _WhenCalled:
    def __getattr__(self, name: str) -> Any:
        return getattr(recorder(), name)


class _Nobody:
    """Stands for a recorder that could not be made."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


_made: Any = None


def recorder() -> Any:
    """This process's recorder, made now if it is not there; if it cannot be, one that takes everything and does nothing."""
    global _made
    if _made is None:
        try:
            from ckptguard.resume.recorder import Recorder

            _made = Recorder(read_order(Path(os.environ[VARIABLE])), *rank_and_world())
        except Exception as error:  # noqa: BLE001 - training goes on; the stream that is missing fails the arm
            print(f"ckptguard: recording failed: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            _made = _Nobody()
    return _made


def rank_and_world() -> tuple[int, int]:
    """Of this process: as torch.distributed says, else as its launcher does, else alone."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, world in _RANKS:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1
