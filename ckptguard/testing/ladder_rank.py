"""What one rank of the ladder does: save, or load with nothing but Megatron's own code (megatron-core 0.19.2, Bridge 0.6.2).

Each function is run in a process of its own, on a simulated node, and prints one line of JSON: what the rank got, or its error.
The state is one tensor ``w`` of ``ELEMENTS`` float32 per rank, all of them the rank's number plus one.
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed

ELEMENTS = 256
TRACKER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "latest_train_state.pt"
RUN_CONFIG = "run_config.yaml"
_LOCAL_FILE = re.compile(r"iter_(\d{7})_(\d+)_local\.pt")


class Group(TypedDict):
    """A process group and this process's place in it; ``store`` is where they meet, ``tcp://address:port``."""

    rank: int
    world: int
    store: str
    clock_seconds: float


class LocalState:
    """The least that nvidia-resiliency-ext's LocalCheckpointManager needs of a state that it loads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Nothing: it is on the CPU."""


def prepare() -> None:
    """Stand-ins and imports, for the process that forks ranks."""
    from ckptguard.megatron import te_skeleton
    from ckptguard.testing import cpu_stand_in, loads_bridge

    cpu_stand_in.install()
    te_skeleton.install()
    loads_bridge.prepare()
    importlib.import_module("megatron.bridge.training.checkpointing")


def save(group: Group, root: str, iterations: list[int]) -> None:
    """Save a rank's state at each iteration as Megatron does, with what Megatron-LM and Bridge write beside it."""

    def act() -> None:
        from megatron.core import dist_checkpointing

        for iteration in iterations:
            folder = Path(root, f"iter_{iteration:07d}")
            folder.mkdir(parents=True, exist_ok=True)
            state = {"w": _sharded(_filled(group["rank"], iteration), group), "iteration": iteration}
            dist_checkpointing.save(state, str(folder), verify_integrity=True)
            torch.distributed.barrier()
        if group["rank"] == 0:
            _mark(Path(root), iterations)

    _speak(group, act)


def _mark(root: Path, iterations: list[int]) -> None:
    """The small files that rank 0 alone writes: trackers of Megatron-LM and Bridge, and Bridge's own beside each step."""
    from megatron.bridge.training.state import TrainState

    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        state = TrainState(step=iteration, consumed_train_samples=iteration).state_dict()
        torch.save(state, folder / TRAIN_STATE.removeprefix("latest_"))
        torch.save(state, root / TRAIN_STATE)
        (folder / RUN_CONFIG).write_text("model: {}\n")
        (root / TRACKER).write_text(str(iteration))


def load(group: Group, root: str, iteration: int | None, verify: bool) -> None:
    """Load a step with ``dist_checkpointing.load``, then the barrier with which Megatron ends loading.

    Args:
        group: Which process group.
        root: Of the checkpoint.
        iteration: Which; None is that of Megatron-LM's tracker.
        verify: ``verify_integrity``.
    """

    def act() -> dict[str, Any]:
        step = int(Path(root, TRACKER).read_text()) if iteration is None else iteration
        return {"resolved": step, "value": _load(group, Path(root, f"iter_{step:07d}"), verify)}

    _speak(group, act)


def load_as_bridge(group: Group, root: str) -> None:
    """Find the step as Bridge does, then load it."""

    def act() -> dict[str, Any]:
        from megatron.bridge.training.checkpointing import _resolve_checkpoint_iteration

        found, _ = _resolve_checkpoint_iteration(root, None)
        if found < 0:
            torch.distributed.barrier()  # it goes on as a fresh run, whose next collective is not what the others wait in
            return {"resolved": found}
        return {"resolved": found, "value": _load(group, Path(root, f"iter_{found:07d}"), False)}

    _speak(group, act)


def load_local(group: Group, root: str, package: str | None) -> None:
    """Load as from local files: one per rank.

    Args:
        group: Which process group.
        root: The manager's ``root_local_ckpt_dir``; its session is "".
        package: Where nvidia-resiliency-ext is; None does what its manager does (version 0.4.1: the newest iteration of which
            every rank lists its file, then ``torch.load``) without it.
    """

    def act() -> dict[str, Any]:
        iteration, state = _managed(root, package) if package else _listed(group, root)
        torch.distributed.barrier()
        return {"resolved": iteration, "value": _told(state.tensor)}

    _speak(group, act)


def _managed(root: str, package: str) -> tuple[int, LocalState]:
    sys.path.insert(0, package)
    module = importlib.import_module("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")
    manager = module.LocalCheckpointManager(root)
    iteration = manager.find_latest()
    return iteration, manager.load()[0]


def _listed(group: Group, root: str) -> tuple[int, LocalState]:
    rank = group["rank"]
    found = [_LOCAL_FILE.fullmatch(path.name) for path in Path(root, str(rank)).iterdir()]
    mine = {int(match[1]) for match in found if match and int(match[2]) == rank}
    everyones: list[Any] = [None] * group["world"]
    torch.distributed.all_gather_object(everyones, mine)
    newest = max(set.intersection(*everyones))
    path = Path(root, str(rank), f"iter_{newest:07d}_{rank}_local.pt")
    return newest, torch.load(path, weights_only=False)


def save_local(path: Path, rank: int, iteration: int) -> None:
    """Write a local file as the manager does, without the manager."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(LocalState(_filled(rank, iteration)), path)


def value(rank: int, iteration: int) -> float:
    """What every element of a rank's part is."""
    return float(rank + 1 + 10 * (20 - iteration))


def _filled(rank: int, iteration: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), value(rank, iteration))


def _sharded(data: torch.Tensor, group: Group) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets("w", data, (0, group["rank"], group["world"]))


def _load(group: Group, folder: Path, verify: bool) -> list[float]:
    from megatron.core import dist_checkpointing

    state = {"w": _sharded(torch.full((ELEMENTS,), -1.0), group)}
    loaded = dist_checkpointing.load(state, str(folder), verify_integrity=verify)
    torch.distributed.barrier()
    return _told(loaded["w"])


def _told(tensor: torch.Tensor) -> list[float]:
    """Its different values."""
    return sorted({float(element) for element in tensor})


def _speak(group: Group, act: Callable[[], dict[str, Any] | None]) -> None:
    """Do something in a process group and tell how it ended; a rank with an error ends with code 1, as Megatron's does."""
    began = time.monotonic()
    answer: dict[str, Any] = {"rank": group["rank"]}
    try:
        timeout = datetime.timedelta(seconds=group["clock_seconds"])
        torch.distributed.init_process_group("gloo", group["store"], timeout, group["world"], group["rank"])
        answer |= act() or {}
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(answer | {"seconds": time.monotonic() - began}))  # noqa: T201
    raise SystemExit("error" in answer)
