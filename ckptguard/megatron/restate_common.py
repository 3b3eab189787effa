"""Common state for another layout or form, made from the loaded one. Values in, values out; part of an asking process.

What ``load_checkpoint`` of megatron/training/checkpointing.py (megatron-core 0.19.2) and ``_load_checkpoint_from_path`` of
megatron/bridge/training/checkpointing.py (megatron-bridge 0.6.2) do decides what is kept:

- RNG states are asked for where (TP, PP) of the run are those of the args, unless ``no_save_rng`` stands there (Bridge:
  ``save_rng`` false in run_config.yaml); a missing one then ends the run. Where (TP, PP) differ they are passed over.
- The rerun state machine is asked for where the world is the same and common state has ``rerun_state_machine``; Bridge asks
  where (TP, PP) are the same, whatever the world. Without the entry nobody asks.
- Optimizer state is asked for unless ``no_save_optim`` (``save_optim`` false); yet its absence ends the run all the same, with
  a KeyError, unless the run was started not to load it.
- The legacy form (``--ckpt-format torch``) holds no rerun state and no ``content_metadata``; its optimizers are a list.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from ckptguard.megatron import restate_groups, restate_run_config
from ckptguard.megatron.restate_groups import Optimizer, Place
from ckptguard.megatron.restate_objects import of_kind

_VERSION = 3.0
_RNG = re.compile(r"(random_|np_|torch_|cuda_)?rng_state|rng_tracker_states")
_MODEL = re.compile(r"model\d*")
_SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")


class TooOldError(Exception):
    """Stored before Megatron's checkpoint version 3."""

    next_step: ClassVar[str] = "Load it with the Megatron-LM of its time and save it again."


@dataclass(frozen=True, slots=True)
class Asked:
    """What the common state is to be of; fields as in ``restate.Restate``, ``run_config`` as text, places for prefixes."""

    iteration: int | Literal["release"]
    args_changes: Mapping[str, object]
    has_optimizer: bool
    groups: tuple[tuple[str, bool], ...]
    layout_changed: bool
    world_changed: bool
    has_rng: bool
    run_config: str | None = None
    group_decays: Mapping[Place, Sequence[bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Made:
    """Common state of a target, and what goes along with it.

    Attributes:
        common: As ``generate_state_dict`` makes it, without tensors.
        optimizers: By place in the chain; none if no optimizer state goes along.
        keep_rng: Whether the RNG states do.
        keep_rerun: Whether the objects of the rerun state machine do.
    """

    common: dict[str, Any]
    optimizers: Mapping[Place, Optimizer]
    keep_rng: bool
    keep_rerun: bool


def of_torch_dist(
    loaded: Mapping[str, Any], states: Mapping[str, Any], asked: Asked, form: str | None, notes: list[str]
) -> Made:
    """Common state of a ``torch_dist`` target.

    Args:
        loaded: Common state of the source, as it was loaded; nothing in it is changed.
        states: Values of the objects that hold the source's param groups and grad scalers, by storage name.
        asked: About the target.
        form: ``dp_reshardable``, ``fully_reshardable``, ``plain`` (not distributed), or None without optimizer state.
        notes: Gets sentences for the user.

    Raises:
        TooOldError: The checkpoint version is below 3.
        BadGroupsError: Two ranks stored the same param group differently.
    """
    made = _common(loaded, states, asked, "torch_dist", notes)
    common = made.common
    if form == "plain":
        parts = {k: _with_own_groups(o, asked.group_decays.get(k)) for k, o in made.optimizers.items()}
        common["optimizer"] = _chained({k: _plain(o, loaded["optimizer"]) for k, o in parts.items()})
    elif form is not None:
        common["optimizer"] = _chained({k: _of_form(o, form) for k, o in made.optimizers.items()})
    if made.keep_rerun:
        common["rerun_state_machine"] = loaded["rerun_state_machine"]
    common["content_metadata"] = _content_metadata(loaded.get("content_metadata") or {}, form, notes)
    return made


def common_of_legacy(
    loaded: Mapping[str, Any], states: Mapping[str, Any], asked: Asked, notes: list[str]
) -> dict[str, Any]:
    """Common state of a legacy target: what every ``model_optim_rng.pt`` holds beside ``model`` and ``rng_state``.

    Args, errors and notes as of ``of_torch_dist``.
    """
    made = _common(loaded, states, asked, "torch", notes)
    if not made.keep_rng:
        notes.append("Legacy files without RNG states load with --no-load-rng or --finetune only.")
    if asked.has_optimizer:
        parts = {k: _optimizer(o) for k, o in made.optimizers.items()}
        made.common["optimizer"] = list(parts.values()) if len(parts) > 1 else next(iter(parts.values()))
    return made.common


def without_tensors(loaded: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A legacy file's entries but weights, RNG states and what else holds tensors; of the optimizer only its groups.

    Raises:
        TooOldError: The checkpoint version is below 3, or not said.
    """
    _check_version(loaded.get("checkpoint_version", 0))
    out = {}
    for name, value in loaded.items():
        if name == "optimizer" or not (_MODEL.fullmatch(str(name)) or _RNG.fullmatch(str(name)) or _has_tensors(value)):
            out[name] = value
        elif _has_tensors(value) and not (_MODEL.fullmatch(str(name)) or _RNG.fullmatch(str(name))):
            notes.append(f"Left out: {name} of the legacy files, which holds tensors that Megatron does not load.")
    return out


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _check_version(number: Any) -> None:
    """The order of query, key and value in a weight changed with versions 1 and 2 (``fix_query_key_value_ordering``)."""
    if number < _VERSION:
        raise TooOldError(
            f"checkpoint_version is {number}: query, key and value stand in another order there; expected {_VERSION} or newer"
        )


def _common(
    loaded: Mapping[str, Any], states: Mapping[str, Any], asked: Asked, ckpt_format: str, notes: list[str]
) -> Made:
    """All but what the two forms have each for themselves."""
    out = {
        name: value
        for name, value in loaded.items()
        if name not in ("rerun_state_machine", "content_metadata", "optimizer")
    }
    if "checkpoint_version" not in out:
        out["checkpoint_version"] = _VERSION
        notes.append(f"checkpoint_version {_VERSION} completed, which the source does not say.")
    _check_version(out["checkpoint_version"])
    if "iteration" not in out and "total_iters" not in out:
        out["iteration"] = 0 if asked.iteration == "release" else asked.iteration
        notes.append(f"iteration {out['iteration']} completed, which the source does not say.")
    keep_rng = _keep_rng(loaded, asked, notes)
    if out.get("args") is not None:
        out["args"] = _args(out["args"], asked, ckpt_format, keep_rng=keep_rng)
    elif asked.run_config is None:
        notes.append("The source holds no training args: Megatron will take it to be of TP 1 and PP 1.")
    optimizers: dict[Place, Optimizer] = {}
    if asked.has_optimizer:
        optimizers = _optimizers(loaded, states, asked, notes)
    else:
        out = {name: value for name, value in out.items() if name not in _SCHEDULERS}
        if asked.iteration != "release":  # of a release Megatron loads the weights alone
            notes.append(_NO_OPTIMIZER)
    keep_rerun = ckpt_format == "torch_dist" and _keep_rerun(loaded, asked, notes)
    return Made(out, optimizers, keep_rng, keep_rerun)


_NO_OPTIMIZER = (
    "No optimizer state and no learning rate schedule go along: load it with --finetune or --no-load-optim (Megatron-Bridge:"
    " checkpoint.finetune or checkpoint.load_optim=false), else Megatron stops where it misses them."
)


def _args(args: Any, asked: Asked, ckpt_format: str, *, keep_rng: bool) -> Namespace:
    """A copy with the changes. The format is what ``--use-checkpoint-args`` would take over."""
    values = {**vars(args), **asked.args_changes}
    values |= {"no_save_rng": not keep_rng, "no_save_optim": not asked.has_optimizer}
    form = {"ckpt_format": ckpt_format, "use_dist_ckpt": ckpt_format != "torch"}
    values |= {name: value for name, value in form.items() if name in values}
    return Namespace(**values)


def _keep_rng(loaded: Mapping[str, Any], asked: Asked, notes: list[str]) -> bool:
    why_not = next(_against_rng(loaded, asked), None)
    if why_not is not None and asked.iteration != "release":
        notes.append(f"RNG states are left out: {why_not}. Megatron seeds again from --seed.")
    return why_not is None


def _against_rng(loaded: Mapping[str, Any], asked: Asked) -> Iterator[str]:
    args = loaded.get("args")
    config = restate_run_config.read(asked.run_config) if asked.run_config is not None else {}
    own = getattr(args, "data_parallel_random_init", False) or (config.get("rng") or {}).get(
        "data_parallel_random_init"
    )
    if (
        not asked.has_rng
        or getattr(args, "no_save_rng", False)
        or not config.get("checkpoint", {}).get("save_rng", True)
    ):
        yield "the source holds none that can go along"
    if asked.layout_changed:
        yield "TP or PP changed, so Megatron would ignore them"
    if own and asked.world_changed:
        yield "each data parallel rank has its own (data_parallel_random_init), and their number changed"
    if asked.run_config is not None and restate_run_config.loses_rng(
        asked.run_config, asked.args_changes, world_changed=asked.world_changed
    ):
        yield "with expert parallelism Megatron-Bridge keeps them by data parallel rank, and those changed"


def _keep_rerun(loaded: Mapping[str, Any], asked: Asked, notes: list[str]) -> bool:
    machine = loaded.get("rerun_state_machine")
    if machine is None:
        return False
    if not asked.world_changed and not asked.layout_changed:
        return True
    state = getattr(machine.get("state"), "name", "NOT_RUNNING_YET") if isinstance(machine, Mapping) else "unknown"
    pending = (
        "" if state == "NOT_RUNNING_YET" else f" Its state was {state}: the rerun that was due will not take place."
    )
    notes.append(f"The rerun state machine's state is left out: it belongs to ranks of the source's layout.{pending}")
    return False


def _optimizers(
    loaded: Mapping[str, Any], states: Mapping[str, Any], asked: Asked, notes: list[str]
) -> dict[Place, Optimizer]:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    sources = restate_groups.stored(loaded.get("optimizer"), states)
    if not any(source.groups for source in sources):
        raise restate_groups.BadGroupsError(
            "the source has optimizer state, and no param groups for it in common state"
        )
    scheduler: Mapping[str, Any] = next((loaded[name] for name in _SCHEDULERS if name in loaded), {})
    known = _learning_rates(loaded.get("args"), scheduler)
    sources = [restate_groups.completed(source, known, notes) for source in sources]
    chain = restate_groups.chain_of(asked.groups)
    return restate_groups.arranged(sources, chain, param_group_identifier_keys, notes)


def _learning_rates(args: Any, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    names = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")
    out = {name: getattr(args, name, None) for name in names}
    for name, stored in {"lr": "max_lr", "min_lr": "min_lr"}.items():
        if out[name] is None:
            out[name] = scheduler.get(stored)
    if out["decoupled_min_lr"] is None:
        out["decoupled_min_lr"] = out["min_lr"]
    return out


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """As ``DistributedOptimizer.state_dict`` gives it."""
    out: dict[str, Any] = {"optimizer": {"param_groups": list(optimizer.groups)}}
    return out if optimizer.grad_scaler is None else out | {"grad_scaler": optimizer.grad_scaler}


def _with_own_groups(optimizer: Optimizer, decays: Sequence[bool] | None) -> Optimizer:
    """The groups that an optimizer has: Megatron merges them one by one, so there may be no other where the chain is new."""
    if decays is None or len(decays) == len(optimizer.groups):
        return optimizer
    return replace(optimizer, groups=tuple(dict(of_kind(optimizer.groups, decay)) for decay in decays))


def _plain(optimizer: Optimizer, stored: Any) -> dict[str, Any]:
    """As an optimizer that is not distributed gives it: an FP32 one is not nested, torch's own keeps the step apart."""
    parts = [stored]
    if isinstance(stored, list) or not stored.keys() & {"optimizer", "param_groups"}:  # of several optimizers
        parts = list(stored if isinstance(stored, list) else stored.values())
    states = parts[0].get("optimizer", parts[0]).get("state", {})
    steps = [state["step"] for state in states.values() if isinstance(state, Mapping) and "step" in state]
    out = _optimizer(optimizer)
    if "common_step" in states or steps:
        out["optimizer"]["state"] = {"common_step": states.get("common_step", *steps[:1])}
    return out if "optimizer" in parts[0] else out["optimizer"]


def _of_form(optimizer: Optimizer, form: str) -> dict[str, Any]:
    """What common state has of an optimizer; the groups of ``dp_reshardable`` stand in objects."""
    inner = {} if form == "dp_reshardable" else _optimizer(optimizer)
    return inner | {"param_state_sharding_type": form}


def _chained(parts: Mapping[Place, dict[str, Any]]) -> dict[Any, Any]:
    return parts[None] if None in parts else dict(parts)


def _content_metadata(before: Mapping[str, Any], form: str | None, notes: list[str]) -> dict[str, Any]:
    """What decides about key names when Megatron loads; without a form it asks for no optimizer state."""
    out: dict[str, Any] = {} if form in (None, "plain") else {"distrib_optim_sharding_type": form}
    if form == "fully_reshardable":
        out["distrib_optim_fully_reshardable_mem_efficient"] = False
    out |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    known = {"distrib_optim_sharding_type", "distrib_optim_fully_reshardable_mem_efficient", *out}
    if strange := sorted(before.keys() - known):
        notes.append(f"content_metadata: {', '.join(strange)} left out, which says how the source was stored.")
    return out
