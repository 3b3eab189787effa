"""State of an optimizer that is not distributed, in its stored names and as global tensors. Pure.

In ``torch_dist`` each state has the shape of its model tensor, under ``optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.<key>``;
in legacy files, and in ``torch_dcp``, it stands under the number of its parameter among all groups of the optimizer.

Source (megatron-core 0.19.2): megatron/core/optimizer/optimizer.py ``Float16OptimizerWithFloat16Params`` and
``FP32Optimizer``, their ``state_dict`` and ``sharded_state_dict``; megatron/core/dist_checkpointing/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckptguard.convert.canonical import GlobalTensor, State
from ckptguard.convert.reshard_plan import ReshardPlan
from ckptguard.convert.sources import split_state, state_name
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.plan import Made
from ckptguard.megatron.legacy_parts import Gathered, cut, folder_of
from ckptguard.megatron.structure import LocalTensor, RankStructure, Structures

_MASTERS = state_name("param", "")
_STORED_MASTERS = state_name("fp32_param", "")
_STATE = re.compile(r"optimizer\.(?:(\d+)\.)?(?:optimizer\.)?state\.(\d+)\.(\w+)")
_MASTER = re.compile(r"optimizer\.(?:(\d+)\.)?fp32_from_fp16_params\.(\d+)\.(\d+)")
_HALF = ("bfloat16", "float16")
_LEGACY = ".pt:optimizer."


def with_stored_names(plan: ReshardPlan) -> ReshardPlan:
    """A plan under the names that Megatron asks for where the optimizer is not distributed."""

    def renamed(chunk: Made) -> Made:
        if not chunk.name.startswith(_MASTERS):
            return chunk
        return replace(chunk, name=_STORED_MASTERS + chunk.name.removeprefix(_MASTERS))

    files = tuple(replace(file, chunks=tuple(map(renamed, file.chunks))) for file in plan.files)
    return replace(plan, files=files)


def with_masters(state: State) -> State:
    """With a master copy of every parameter that has other state: a float32 parameter, which needs none, is its own.

    The distributed optimizer stores one of every parameter.

    Raises:
        UnsupportedError: A parameter in half precision has no master copy.
    """
    keys = dict.fromkeys(split[1] for name in state.tensors if (split := split_state(name)))
    missing = [key for key in keys if state_name("param", key) not in state.tensors]
    half = [key for key in missing if state.tensors[key].dtype.name in _HALF]
    if half:
        raise UnsupportedError(
            f"{len(half)} parameters in half precision have optimizer state and no float32 copy, such as {half[0]}: the"
            " distributed optimizer stores one of each",
            next_step="Leave --optimizer out: the state is resharded in the form that it has.",
        )
    made: dict[str, GlobalTensor] = {}
    for key in missing:
        made[state_name("param", key)] = replace(state.tensors[key], name=state_name("param", key), entry=None)
    return State({**state.tensors, **made}, state.sources)


def chain(structures: Structures) -> tuple[tuple[str, bool], ...]:
    """(Prefix, whether of expert parameters) of the optimizers, as ``Restate.groups`` takes them."""
    prefix = "optimizer.distributed.dp_group_idx_0"
    if any(rank.expert_groups for rank in structures.ranks):
        return (f"chained_0.{prefix}", False), (f"chained_1.{prefix}", True)
    return ((prefix, False),)


def group_decays(structures: Structures, args: Mapping[str, object]) -> dict[str, tuple[bool, ...]]:
    """Whether weight decay applies to each group of each optimizer of ``chain``, by prefix."""
    out = {}
    for prefix, is_expert in chain(structures):
        held = [rank.expert_groups if is_expert else rank.groups for rank in structures.ranks]
        firsts = [next((group[0] for group in ranks if group), None) for ranks in zip(*held, strict=True)]
        out[prefix] = tuple(decays(tensor, args) for tensor in firsts if tensor is not None)
    return out


def decays(tensor: LocalTensor, args: Mapping[str, object]) -> bool:
    """Whether weight decay applies to a parameter.

    This is what Megatron's param groups differ in (megatron/core/optimizer/__init__.py ``get_standard_config_overrides``).
    """
    is_qk = "q_layernorm." in tensor.name or "k_layernorm." in tensor.name
    spared = len(tensor.shape) == 1 or tensor.name.endswith(".bias")
    return not spared or (is_qk and bool(args.get("apply_wd_to_qk_layernorm")))


def is_of_legacy(name: str) -> bool:
    """Whether a legacy tensor, by its name in the index, is state of an optimizer that is not distributed."""
    return _LEGACY in name


def legacy_to_global(index: Index, structures: Structures) -> Index:
    """Legacy files whose weights have global names (``legacy_names.to_global_view``), with the optimizer's state so too.

    Raises:
        UnsupportedError: A state is of no parameter that Megatron's optimizer has, or the groups are not known.
    """
    stored = {name: entry for name, entry in index.tensors.items() if is_of_legacy(name)}
    if not stored:
        return index
    gathered, ranks = Gathered(), {folder_of(rank, structures): rank for rank in structures.ranks}
    for name, entry in stored.items():
        folder, _, rest = name.partition("/")
        found = of_rank(ranks[folder], structures, rest.partition(":")[2]) if folder in ranks else None
        if found is None:
            raise UnsupportedError(f"{index.location}: {name} is state of no parameter of its rank")
        kind, tensor = found
        if kind == "step":
            continue  # of torch's own optimizer: one number, which the common state has
        refuse_other_shape(index.location, entry, tensor)
        for part in tensor.parts:
            gathered.add(state_name(kind, part.key), part, entry, cut(entry, part.box, part.local))
    tensors, _ = gathered.result()
    others = {name: entry for name, entry in index.tensors.items() if name not in stored}
    return replace(index, tensors={**others, **tensors})


def refuse_other_shape(location: str, entry: TensorEntry, tensor: LocalTensor) -> None:
    """Raises UnsupportedError unless a state has the shape of its parameter."""
    if entry.shape != tensor.shape:
        raise UnsupportedError(
            f"{location}: {entry.name} has shape {list(entry.shape)}, its parameter {tensor.name} {list(tensor.shape)}"
        )


def of_rank(rank: RankStructure, structures: Structures, path: str) -> tuple[str, LocalTensor] | None:
    """(Kind of state, parameter) of a tensor at a path inside a rank's state dict; None if it is of no parameter.

    Args:
        rank: Whose state it is.
        structures: Of all ranks.
        path: Such as ``optimizer.optimizer.state.3.exp_avg``, keys and positions joined by dots.

    Raises:
        UnsupportedError: The groups of the optimizer are not known.
    """
    if structures.no_groups:
        raise UnsupportedError(
            f"which parameter each state of the optimizer belongs to is not known for this run: {structures.no_groups}",
            next_step="Convert the weights alone with --optimizer none.",
        )
    state, master = _STATE.fullmatch(path), _MASTER.fullmatch(path)
    match = state or master
    if match is None:
        return None
    groups = rank.expert_groups if int(match[1] or 0) else rank.groups
    if state is not None:
        tensors = [tensor for group in groups for tensor in group]
        return _at(tensors, int(state[2]), state[3])
    group, number = int(match[2]), int(match[3])
    if group >= len(groups):
        return None
    return _at([tensor for tensor in groups[group] if tensor.dtype in _HALF], number, "param")


def _at(tensors: list[LocalTensor], number: int, kind: str) -> tuple[str, LocalTensor] | None:
    return (kind, tensors[number]) if number < len(tensors) else None
