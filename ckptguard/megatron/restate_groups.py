"""Optimizer param groups and grad scalers of a checkpoint, arranged anew for the optimizers of another layout. Pure.

Megatron has one optimizer for dense and, with expert parallelism, one for expert parameters, chained in this order. Their
groups stand either once, in common state (``fully_reshardable``, ``fully_sharded_model_space``, legacy files), or once per
model-parallel rank, in an object beside each ``dp_group_idx`` (``dp_reshardable``, ``dp_zero_gather_scatter``).

Sources (megatron-core 0.19.2): megatron/core/optimizer/optimizer.py ``param_group_identifier_keys``,
``ChainedOptimizer.sharded_state_dict``; distrib_optimizer.py ``sharded_state_dict``, ``load_state_dict``; __init__.py
``_get_param_groups``, ``get_megatron_optimizer``. Older groups: the same functions of 0.10, 0.12.3, 0.14, 0.15
and 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Group = dict[str, Any]
Place = int | None
"""Position in the chain of optimizers; None where there is only one."""

OBJECT = re.compile(
    r"((?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+)\.(optimizer|grad_scaler)/shard_0_1"
)
_PREFIX = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+")


class BadGroupsError(Exception):
    """Param groups are missing, or differ between the ranks that stored them; says which, where, and both values."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What is stored of an optimizer beside its tensors.

    Attributes:
        where: Name of the object or place in common state, for messages.
        place: In the chain.
        groups: Its param groups, without ``params``.
        grad_scaler: State of the loss scale, for fp16.
    """

    where: str
    place: Place
    groups: tuple[Group, ...]
    grad_scaler: dict[str, Any] | None

    @property
    def is_expert(self) -> bool:
        """Whether its parameters are cut by expert parallelism."""
        return bool(self.groups) and all(group.get("is_expert_parallel") for group in self.groups)


def stored(common: Any, objects: Mapping[str, Any]) -> list[Optimizer]:
    """The optimizers of a checkpoint.

    Args:
        common: ``optimizer`` of common state or of a legacy file: one, or a list or dict of several.
        objects: The value of each object ``<prefix>.optimizer/shard_0_1`` and ``<prefix>.grad_scaler/shard_0_1``.
    """
    if isinstance(common, list | tuple):
        common = dict(enumerate(common))
    if not isinstance(common, dict):
        common = {}
    parts = common.items() if common and all(isinstance(key, int) for key in common) else [(None, common)]
    out = [_of_common(place, part) for place, part in parts if isinstance(part, dict) and _has_groups(part)]
    names = {match[1]: int(match[2]) if match[2] else None for match in map(OBJECT.fullmatch, objects) if match}
    for prefix, place in names.items():
        inner = objects.get(f"{prefix}.optimizer/shard_0_1") or {}
        scaler = objects.get(f"{prefix}.grad_scaler/shard_0_1")
        out.append(Optimizer(prefix, place, _bare(inner.get("param_groups", ())), scaler))
    return out


def _has_groups(part: Mapping[str, Any]) -> bool:
    return "param_groups" in part.get("optimizer", part)


def _of_common(place: Place, part: Mapping[str, Any]) -> Optimizer:
    """Of a Float16 or distributed optimizer, or of an FP32 one, which is not nested."""
    inner = part.get("optimizer", part)
    groups = _bare(inner["param_groups"])
    shared = inner.get("state", {}).get("common_step") if isinstance(inner.get("state"), dict) else None
    if shared is not None:
        step = int(shared)
        groups = tuple({**group, "step": group.get("step", step)} for group in groups)
    where = "optimizer of common state" if place is None else f"optimizer {place} of common state"
    return Optimizer(where, place, groups, part.get("grad_scaler"))


def _bare(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple({key: value for key, value in group.items() if key != "params"} for group in groups)


def chain_of(prefixes: Sequence[tuple[str, bool]]) -> dict[Place, bool]:
    """Whether each optimizer of a chain is the experts', of the prefixes of all its ranks."""
    return {place_of(prefix): is_expert for prefix, is_expert in prefixes}


def place_of(prefix: str) -> Place:
    """The place in the chain that ``[chained_K.]optimizer.distributed.dp_group_idx_I`` names."""
    match = _PREFIX.fullmatch(prefix)
    assert match is not None, prefix
    return int(match[1]) if match[1] else None


def arranged(
    sources: Sequence[Optimizer], chain: Mapping[Place, bool], keys: Sequence[str], notes: list[str]
) -> dict[Place, Optimizer]:
    """The optimizers of a target: each gets the groups of its kind, every value as it is stored.

    Where the target has another chain than the source (experts are a part of their own only with expert parallelism), groups
    change their kind with it: those of the other kind are taken too, or instead.

    Args:
        sources: Of the source; several of one place where each rank stored its own.
        chain: The target's; empty for the source's own.
        keys: ``param_group_identifier_keys``, by which Megatron finds a group again.
        notes: Gets a sentence for the user where a group changes its kind.

    Raises:
        BadGroupsError: Two ranks stored the same group with different values.
    """
    own: dict[Place, list[Optimizer]] = {}
    for source in sources:
        own.setdefault(source.place, []).append(source)
    before = {place: any(part.is_expert for part in parts) for place, parts in own.items()}
    chain = chain or before
    out = {}
    for place, is_expert in chain.items():
        parts = own[place] if before == dict(chain) else list(sources)
        if before == dict(chain) and len(parts) == 1:
            groups: Sequence[Group] = parts[0].groups
        else:
            alone = (not is_expert) not in chain.values()
            groups = _merged(_of_kind(parts, is_expert, with_others=alone), keys)
        out[place] = Optimizer(f"optimizer {place or 0}", place, tuple(groups), _scaler(parts))
    if before != dict(chain):
        notes.append(_rechained(before, chain))
    return out


def _rechained(before: Mapping[Place, bool], chain: Mapping[Place, bool]) -> str:
    def said(kinds: Mapping[Place, bool]) -> str:
        return " and ".join(
            "one of expert parameters" if kind else "one of dense parameters" for kind in kinds.values()
        )

    return (
        f"Optimizers: the source has {said(before)}, the target {said(chain)}; param groups go along, values unchanged."
    )


def _of_kind(parts: Sequence[Optimizer], is_expert: bool, *, with_others: bool) -> list[tuple[str, Group]]:
    """(where, group) of one kind; those of the other kind, told to be of this one, where the target has no place for them."""
    both = [(part.where, group) for part in parts for group in part.groups]
    out = [(where, group) for where, group in both if bool(group.get("is_expert_parallel")) == is_expert]
    if with_others or not out:
        others = [(where, group) for where, group in both if bool(group.get("is_expert_parallel")) != is_expert]
        out += [(where, {**group, "is_expert_parallel": is_expert}) for where, group in others]
    return out


def _merged(groups: Iterable[tuple[str, Group]], keys: Sequence[str]) -> list[Group]:
    """One group of those with the same identifier; what only one of them has is kept."""
    out: dict[tuple[Any, ...], tuple[str, Group]] = {}
    for where, group in groups:
        identifier = identifier_of(group, keys)
        first, kept = out.setdefault(identifier, (where, dict(group)))
        for key, value in group.items():
            if not same(kept.setdefault(key, value), value):
                named = ", ".join(f"{k} {v}" for k, v in zip(keys, identifier, strict=True) if v is not None)
                raise BadGroupsError(
                    f"optimizer param group ({named}): {key} is {kept[key]!r} in {first} and {value!r} in {where}"
                )
    return [group for _, group in out.values()]


def identifier_of(group: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    """As Megatron matches groups: a missing key is None, and NeMo's names with ``pre_`` count too."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)


def _scaler(parts: Sequence[Optimizer]) -> dict[str, Any] | None:
    """The grad scaler, which every optimizer and rank has stored alike."""
    with_one = [part for part in parts if part.grad_scaler is not None]
    for part in with_one[1:]:
        if not same(part.grad_scaler, with_one[0].grad_scaler):
            raise BadGroupsError(
                f"grad_scaler is {with_one[0].grad_scaler!r} in {with_one[0].where} and {part.grad_scaler!r} in {part.where}"
            )
    return with_one[0].grad_scaler if with_one else None


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, with tensors by dtype, shape and elements."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return tensors and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def completed(optimizer: Optimizer, known: Mapping[str, Any], notes: list[str]) -> Optimizer:
    """With what Megatron 0.19 needs to find and use groups that older releases wrote.

    Before 0.16 there was no ``default_config``, which the logging of the learning rate asks for, and groups with a learning
    rate of their own were marked by ``is_decoupled_lr``; that is False since ``max_lr`` and ``min_lr`` tell them apart. A
    group without ``step`` had no parameters on the rank that stored it.

    Args:
        optimizer: Of the source.
        known: ``max_lr`` and ``min_lr`` of the run, and those of decoupled groups, as far as args and scheduler say them.
        notes: Gets a sentence for each thing that is done.
    """
    steps = [group["step"] for group in optimizer.groups if "step" in group]
    said: dict[str, None] = {}
    groups = tuple(_complete(group, known, steps, said) for group in optimizer.groups)
    notes += [note for note in said if note not in notes]
    return Optimizer(optimizer.where, optimizer.place, groups, optimizer.grad_scaler)


_PLAIN = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def _complete(group: Group, known: Mapping[str, Any], steps: Sequence[Any], said: dict[str, None]) -> Group:
    out = dict(group)
    decoupled = bool(out.get("is_decoupled_lr"))
    wanted = {**_PLAIN, **{name: known[key] for name, key in _rates(decoupled).items() if known.get(key) is not None}}
    if steps:
        wanted["step"] = steps[0]
    missing = {name: value for name, value in wanted.items() if name not in out and f"pre_{name}" not in out}
    if missing:
        listed = ", ".join(f"{name} {value}" for name, value in missing.items())
        said[f"Optimizer param groups: {listed} completed, which the Megatron that wrote them did not store."] = None
    out |= missing
    if "default_config" not in out:
        out["default_config"] = not decoupled
        if decoupled:
            out["is_decoupled_lr"] = False
            said[_DECOUPLED] = None
        said[_DEFAULT_CONFIG] = None
    if out.get("lr_mult", 1.0) != 1.0:
        said[f"A param group has lr_mult {out['lr_mult']}: it is kept, and Megatron 0.16 and newer cannot use it."] = (
            None
        )
    return out


_DEFAULT_CONFIG = "Optimizer param groups: default_config completed, which Megatron before 0.16 did not store."
_DECOUPLED = (
    "Optimizer param groups with a learning rate of their own: is_decoupled_lr is False now, as Megatron 0.16 and newer look"
    " for it; older ones will not find the group."
)


def _rates(decoupled: bool) -> dict[str, str]:
    """Key in a group <- name among what is known."""
    if decoupled:
        return {"max_lr": "decoupled_lr", "min_lr": "decoupled_min_lr"}
    return {"max_lr": "lr", "min_lr": "min_lr"}
