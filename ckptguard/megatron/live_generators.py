"""Random number generators of a Megatron process, as items.

Sources (megatron-core 0.19.2): megatron/training/checkpointing.py ``get_rng_state`` lists what a checkpoint holds;
megatron/core/tensor_parallel/random.py ``CudaRNGStatesTracker`` keeps named states, as tensors or, if they are to be used in
CUDA graphs, as generators.
"""

from __future__ import annotations

import json
import random
from typing import Any

from ckptguard.core.watching import Group, LiveItem


def generator_items(group: Group = "rng") -> tuple[LiveItem, ...]:
    """The generators as they are now; names begin with the group. Python's and numpy's are bytes, the others tensors."""
    import torch

    own = default_generators(group, cuda=torch.cuda.is_available())
    return (*own, *(_tracked(group, name) for name in tracker_names()))


def default_generators(group: Group, *, cuda: bool) -> tuple[LiveItem, ...]:
    """Those that every process has, with CUDA's where that is in use: asking for its state would begin to use it."""
    import torch

    items = [
        LiveItem(f"{group} python", group, _read_python, _write_python),
        LiveItem(f"{group} numpy", group, _read_numpy, _write_numpy),
        LiveItem(f"{group} torch cpu", group, torch.get_rng_state, lambda value: torch.set_rng_state(value.cpu())),
    ]
    if cuda:
        items.append(
            LiveItem(
                f"{group} cuda", group, torch.cuda.get_rng_state, lambda value: torch.cuda.set_rng_state(value.cpu())
            )
        )
    return tuple(items)


def tracker_names() -> tuple[str, ...]:
    """Names in Megatron's tracker, sorted; empty before it is set up."""
    return tuple(sorted(_tracker().get_states()))


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _tracked(group: Group, name: str) -> LiveItem:
    import torch

    def state() -> Any:
        return _tracker().get_states()[name]

    def read() -> Any:
        now = state()
        return now.get_state() if isinstance(now, torch.Generator) else now

    def write(value: Any) -> None:
        now = state()
        if isinstance(now, torch.Generator):
            now.set_state(value.cpu())
        else:
            _tracker().states_[name] = value.to(now.device).clone()

    return LiveItem(f"{group} tracker {name}", group, read, write)


def _read_python() -> bytes:
    return json.dumps(random.getstate()).encode()


def _write_python(value: bytes) -> None:
    version, numbers, gauss = json.loads(value)
    random.setstate((version, tuple(numbers), gauss))


def _read_numpy() -> bytes:
    import numpy as np

    kind, keys, *rest = np.random.get_state()
    return json.dumps([kind, keys.tolist(), *rest]).encode()


def _write_numpy(value: bytes) -> None:
    import numpy as np

    kind, keys, *rest = json.loads(value)
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
