"""Every rank of a layout in turn, in one process: torch's ``fake`` process group and Megatron's own parallel_state.

Runs in the asking process only: it changes process-wide state.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from math import lcm
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ckptguard.megatron.te_skeleton import empty_package


def forget_devices() -> None:
    """Let Megatron's constructors name a GPU: tensors stay where they are made, on the meta device.

    ``LanguageModule.setup_embeddings_and_output_layer`` moves tied weights with ``.cuda()``, token dispatchers make
    streams, several modules ask for ``torch.cuda.current_device()``, and Mamba's fork CUDA's generator, while they are
    built (megatron-core 0.19.2). For good; the asking process only.
    """
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_args, **_kwargs: nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("meta")
    cuda.Stream = cuda.Event = lambda *_args, **_kwargs: None


class _AsItIs(ModuleType):
    """A module whose every function gives its first argument back."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda value=None, *_args, **_kwargs: value


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch's compiler, which takes a second to import, out of the meta device's operators.

    Those that are written in Python ask dynamo to leave them alone when they are first called (torch/_compile.py
    ``_disable_dynamo``, 2.14.1) and let symbolic_shapes look at each condition (torch/__init__.py ``_check_with``); nothing
    is compiled here, and no shape is symbolic, so that sympy, whose classes they ask after, is not needed either.
    """
    stand_ins: dict[str, ModuleType] = {
        name: _AsItIs(name) for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes")
    }
    stand_ins["sympy"] = empty_package("sympy")
    names = [name for name in stand_ins if name not in sys.modules]
    sys.modules |= {name: stand_ins[name] for name in names}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        if "torch._dynamo" in names:
            vars(torch).pop("_dynamo", None)


def world_size(args: Namespace) -> int:
    """Ranks of the smallest world that has every model-parallel rank of the layout.

    Data and context parallel ranks hold the same tensors, so they are left out. The dense grid is TP x PP, the expert
    grid ETP x EP x PP (megatron/core/parallel_state.py ``initialize_model_parallel``, 0.19.2).
    """
    dense = args.tensor_model_parallel_size
    expert = (args.expert_tensor_parallel_size or dense) * args.expert_model_parallel_size
    return int(args.pipeline_model_parallel_size) * lcm(dense, expert)


def ranks(args: Namespace) -> Iterator[int]:
    """Yields each rank of the smallest world, with Megatron's groups set up for it while it is current."""
    for rank in range(world_size(args)):
        with as_rank(args, rank):
            yield rank


@contextmanager
def as_rank(args: Namespace, rank: int) -> Iterator[None]:
    """This process is a rank of the smallest world, with Megatron's groups set up for it."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size(args))
    try:
        with _only_own_groups(rank):
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,  # the fake backend has no gloo beside it
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _only_own_groups(rank: int) -> Iterator[None]:
    """Of the groups of each kind, Megatron makes the one that a rank is in.

    ``initialize_model_parallel`` makes all groups of the world, since its processes must make them together. Here no other
    process waits, and at a thousand ranks the groups of others would take most of the time.
    """
    from megatron.core import parallel_state

    generate = parallel_state.generate_masked_orthogonal_rank_groups

    def own(size: int, sizes: list[int], mask: list[bool]) -> list[list[int]]:
        return [list(_groups(generate, size, tuple(sizes), tuple(mask))[rank])]

    parallel_state.generate_masked_orthogonal_rank_groups = own
    try:
        yield
    finally:
        parallel_state.generate_masked_orthogonal_rank_groups = generate


@cache
def _groups(
    generate: Callable[[int, list[int], list[bool]], list[list[int]]],
    size: int,
    sizes: tuple[int, ...],
    mask: tuple[bool, ...],
) -> dict[int, list[int]]:
    """Each rank's group of a kind, as Megatron says."""
    return {rank: group for group in generate(size, list(sizes), list(mask)) for rank in group}


def coordinates() -> dict[str, Any]:
    """Where the current rank stands in each axis, and in the groups that decide file names and optimizer keys."""
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "ep": mpu.get_expert_model_parallel_rank(),
        "etp": mpu.get_expert_tensor_parallel_rank(),
        "dense_dp": mpu.get_data_parallel_rank(with_context_parallel=True),
        "expert_dp": mpu.get_expert_data_parallel_rank(),
        "dense_group": dist.get_rank(groups.mp),
        "expert_group": dist.get_rank(groups.tp_ep_pp),
    }
