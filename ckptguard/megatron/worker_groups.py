"""Parameter groups of a rank's optimizers: which parameter is which number in a state. Part of the asking process.

Sources (megatron-core 0.19.2): megatron/core/optimizer/__init__.py ``_get_param_groups`` makes the groups and
``get_megatron_optimizer`` one optimizer of those of dense and one of those of expert parameters;
megatron/training/training.py ``get_megatron_optimizer_config`` says what groups differ in.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_REFUSED = {
    "use_distributed_optimizer": "its state is in buckets",
    "overlap_param_gather_with_optimizer_step": "the first model chunk then has an optimizer of its own",
    "optimizer_cpu_offload": "offloaded parameters have optimizers of their own",
    "use_mup": "learning rates then depend on more than is asked",
}


def refusal(args: Namespace, stored: Mapping[str, Any]) -> str | None:
    """Why the groups are not described, or None. ``stored`` are the args before anything was neutralised."""
    if stored.get("no_save_optim") or "lr" not in stored:
        return "the stored args are of no run that has an optimizer"
    if args.optimizer not in ("adam", "sgd"):
        return f"optimizer {args.optimizer!r} is not adam or sgd"
    named = (f"the stored args have {name}: {reason}" for name, reason in _REFUSED.items() if stored.get(name))
    return next(named, None)


def describe(args: Namespace, chunks: list[Any]) -> list[list[Any]]:
    """Groups of the current rank: whether they are of experts, what they differ in, (chunk, name) of their parameters.

    A group that only other ranks have parameters for is left out.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    wanted = {field.name for field in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{name: value for name, value in vars(args).items() if name in wanted})
    names = {
        id(tensor): [number, name]
        for number, chunk in enumerate(chunks)
        for name, tensor in chunk.state_dict_for_save_checkpoint(keep_vars=True).items()
    }
    with _gathered() as gathered:
        groups = optimizer._get_param_groups(chunks, config, optimizer.get_standard_config_overrides(config))
    keys = sorted(gathered, key=lambda key: (key[0] is not None, key[0]))  # as it does
    return [
        [is_expert, differs, [names[id(parameter)] for parameter in group["params"]]]
        for (differs, is_expert), group in zip(keys, groups, strict=True)
    ]


@contextmanager
def _gathered() -> Iterator[list[Any]]:
    """Keys of the current rank's groups, which Megatron gathers: here it gets them back from every rank."""
    keys: list[Any] = []

    def gather(out: list[Any], own: list[Any]) -> None:
        keys.extend(own)
        out[:] = [own] * len(out)

    distributed: Any = torch.distributed
    kept = distributed.all_gather_object
    distributed.all_gather_object = gather
    try:
        yield keys
    finally:
        distributed.all_gather_object = kept
