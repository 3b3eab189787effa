"""Common state that stands as one object per entry, as torch DCP stores a state dict. Values in, values out.

Sources: torch/distributed/checkpoint/_nested_dict.py ``flatten_state_dict`` (2.14.1): names are the keys and positions, joined
by dots; megatron/core/optimizer/distrib_optimizer.py ``_param_groups_to_param2group_meta``,
``_param2group_meta_to_param_groups`` (megatron-core 0.19.2): Megatron-FSDP stores the param group of each parameter.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ckptguard.megatron.restate_groups import BadGroupsError

META = "optimizer.param_to_group_meta."
_SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")


def nested(values: Mapping[str, Any], args: Mapping[str, object]) -> dict[str, Any]:
    """A common state of its objects.

    Args:
        values: By stored name; the param group of one parameter of each group.
        args: Training args to be stored where there are none.
    """
    tree: dict[str, Any] = {}
    metas: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name.startswith(META):
            parameter, _, key = name.removeprefix(META).rpartition(".")
            metas.setdefault(parameter, {})[key] = value
            continue
        at, path = tree, name.split(".")
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    out: dict[str, Any] = _listed(tree)
    if metas:
        out["optimizer"] = {"optimizer": {"param_groups": list(metas.values())}}
    if "args" not in out:
        out["args"] = Namespace(**args)
    return out


def _listed(value: Any) -> Any:
    """Mappings whose keys are positions are lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    return list(inner.values()) if inner and all(key.isdigit() for key in map(str, inner)) else inner


def flat(common: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], decays: Mapping[str, bool]) -> dict[str, Any]:
    """The objects of a common state, by the name that each is stored under.

    Args:
        common: As ``torch_dist`` has it.
        groups: Param groups of the one optimizer; none if no state goes along.
        decays: Whether weight decay applies to each of its parameters, by name.

    Raises:
        BadGroupsError: The groups differ in more than weight decay, so that nobody knows which is a parameter's.
    """
    out: dict[str, Any] = {}
    for name, value in common.items():
        if name in _SCHEDULERS:
            out |= {f"{name}.{key}": item for key, item in value.items()}
        elif name == "args":
            out[name] = Namespace(**{**vars(value), "ckpt_format": "fsdp_dtensor", "use_megatron_fsdp": True})
        elif name not in ("optimizer", "content_metadata", "rerun_state_machine"):
            out[name] = value
    if groups:
        of_decay = {decay: of_kind(groups, decay) for decay in set(decays.values())}
        for parameter, decay in decays.items():
            out |= {f"{META}{parameter}.{key}": item for key, item in of_decay[decay].items()}
    return out


def of_kind(groups: Sequence[Mapping[str, Any]], decay: bool) -> Mapping[str, Any]:
    """The one param group with weight decay, or without. Raises BadGroupsError if there is none, or several."""
    fitting = [group for group in groups if bool(group.get("wd_mult", group.get("pre_wd_mult"))) == decay]
    if len(fitting) != 1:
        what = "with" if decay else "without"
        raise BadGroupsError(
            f"the optimizer has {len(fitting)} param groups {what} weight decay: which one is a parameter's in the target is"
            " not known"
        )
    return fitting[0]
