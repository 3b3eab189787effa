"""Public faults of installed versions, recognised by marks that the records show for certain. Naming one excuses nothing.

A fault is named only if its marks are all there: the items that it touches differ and hold what it makes them hold, what it
leaves alone agrees, and the run has the setting without which it does not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.core.watching import Group
from ckptguard.core.wording import ranks_text
from ckptguard.resume.diagnoses import holders, number, sort_of, step_held
from ckptguard.resume.records import RankRecord
from ckptguard.resume.results import Comparison, Difference, KnownFault

Records = Mapping[int, RankRecord]
_EXPERT_TRACKER = "rng tracker expert-parallel-rng"
_QUANTISED = (".rowwise_", ".columnwise_")  # parts of Transformer Engine's quantised tensors


@dataclass(frozen=True, slots=True)
class Seen:
    """One comparison that differs, with all that its arms recorded.

    Attributes:
        comparison: What differs.
        one: The arm held to be right.
        other: The other.
        facts: Of rank 0: framework, versions, sizes of the axes, arguments.
        loaded: The comparison of what was loaded with what was saved, if there was one.
    """

    comparison: Comparison
    one: Records
    other: Records
    facts: Mapping[str, Any]
    loaded: Comparison | None

    @property
    def found(self) -> tuple[Difference, ...]:
        """All differences of the first event that differs."""
        return self.comparison.at_first

    @property
    def kind(self) -> str:
        """Of that event: ``loaded`` or ``step``."""
        return self.found[0].kind

    def argument(self, name: str) -> Any:
        """A parsed argument of the run; None if it has none of that name."""
        return self.facts.get("arguments", {}).get(name)


@dataclass(frozen=True, slots=True)
class _Fault:
    """A fault that is known.

    Attributes:
        issue: Where it is described.
        title: In one sentence.
        remedy: What to do.
        package: The package that has it.
        since: First release that has it; empty for all.
        until: First release that has it no more; empty for none known.
        marks: Evidence that it is here, or None.
    """

    issue: str
    title: str
    remedy: str
    package: str
    since: str
    until: str
    marks: Callable[[Seen], str | None]


def recognise(
    comparisons: Sequence[Comparison],
    arms: Mapping[str, Records],
    facts: Mapping[str, Any],
    versions: Mapping[str, str],
) -> tuple[KnownFault, ...]:
    """Names the known faults that a verification shows.

    Args:
        comparisons: All of them.
        arms: What the arms recorded, by name.
        facts: Facts of rank 0.
        versions: Installed versions by package.

    Returns:
        Each fault once, in the order of the comparisons.
    """
    loaded = next((c for c in comparisons if c.steps[0] == c.steps[1] and _is_of_loading(c)), None)
    named: dict[str, KnownFault] = {}
    for comparison in comparisons:
        if not comparison.at_first or comparison.one not in arms or comparison.other not in arms:
            continue
        seen = Seen(comparison, arms[comparison.one], arms[comparison.other], facts, loaded)
        for fault in _FAULTS:
            if fault.issue not in named and _has(versions, fault) and (evidence := fault.marks(seen)):
                told = f"{fault.package} {versions[fault.package]}: {evidence}"
                named[fault.issue] = KnownFault(fault.issue, fault.title, told, fault.remedy)
    return tuple(named.values())


def _is_of_loading(comparison: Comparison) -> bool:
    return comparison.other.startswith("load") or (comparison.first is not None and comparison.first.kind == "loaded")


def _has(versions: Mapping[str, str], fault: _Fault) -> bool:
    installed = versions.get(fault.package)
    if installed is None:
        return False
    now = _release(installed)
    return not (fault.since and now < _release(fault.since)) and not (fault.until and now >= _release(fault.until))


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``0.19.2+abc`` is (0, 19, 2)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:  # 0rc1
            break
    return tuple(numbers)


# The marks.


def _groups(found: Sequence[Difference]) -> set[Group]:
    return {difference.group for difference in found}


def _expert_generators(seen: Seen) -> str | None:
    """Ranks load what the first data-parallel rank of their (pp, tp) saved: ``get_rng_state`` tells no more apart."""
    found = [d for d in seen.found if d.item == _EXPERT_TRACKER]
    if seen.kind != "loaded" or not found:
        return None
    where = holders(found, seen.one)
    for difference in found:
        sources = {rank for rank, item in where.get(str(difference.other), ()) if item == _EXPERT_TRACKER}
        own, replica = _shard(seen.other, difference.rank)
        if not replica or (own, 0) not in [_shard(seen.one, rank) for rank in sources]:
            return None
    size = seen.facts.get("sizes", {}).get("ep")
    ranks = ranks_text([d.rank for d in found])
    return (
        f"expert parallel {size}; {_EXPERT_TRACKER} of {ranks} is what the first data-parallel rank of its stage saved"
    )


def _shard(records: Records, rank: int) -> tuple[tuple[int | None, ...], int]:
    """Place of a rank on the axes by which generators are saved, (pp, tp), and 0 for the one of them that is saved."""
    own = tuple(_place(records, rank, axis) for axis in ("pp", "tp"))
    return own, sum(_place(records, rank, axis) or 0 for axis in ("dp", "cp"))


def _place(records: Records, rank: int, axis: str) -> int | None:
    """Place of a rank on an axis, as it told."""
    place = records[rank].facts.get("ranks", {}).get(axis) if rank in records else None
    return place if isinstance(place, int) else None


def _stale_weight_decay(seen: Seen) -> str | None:
    """Groups are loaded with the weight decay of this launch, and the scheduler with that of the checkpoint."""
    if seen.kind != "loaded" or not all(
        d.group == "param group" and d.item.endswith(" weight_decay") for d in seen.found
    ):
        return None
    if not seen.argument("use_checkpoint_opt_param_scheduler"):
        return None
    first = seen.found[0]
    return (
        f"--use-checkpoint-opt_param-scheduler; of all that was loaded only the weight decay of groups differs: {first.item} is"
        f" {first.other} and was {first.one}"
    )


def _steps_of_adam(seen: Seen, switch: str) -> str | None:
    """Adam's steps are off in the same way everywhere, and nothing else is."""
    if seen.kind != "loaded" or not seen.argument(switch):
        return None
    offsets = set()
    for difference in seen.found:
        one, other = number(difference.one), number(difference.other)
        is_step = sort_of(difference) == "step" or (
            difference.group == "param group" and difference.item.endswith(" step")
        )
        if not is_step or one is None or other is None:
            return None
        offsets.add(other - one)
    if len(offsets) != 1:
        return None
    return f"{switch}; of all that was loaded only Adam's step differs, by {offsets.pop():+g} in {len(seen.found):,} values"


def _dummy_step(seen: Seen) -> str | None:
    evidence = _steps_of_adam(seen, "use_megatron_fsdp")
    return evidence if evidence and "+1 in" in evidence else None


def _stale_step(seen: Seen) -> str | None:
    return _steps_of_adam(seen, "optimizer_cpu_offload")


def _quantised_again(seen: Seen) -> str | None:
    """Codes and scales of quantised weights differ though the masters that they are made of agree."""
    parts = [d for d in seen.found if any(part in d.item for part in _QUANTISED)]
    if seen.kind != "loaded" or not parts or len(parts) < len(seen.found) or _groups(seen.found) != {"parameter"}:
        return None
    if "master" not in dict(seen.comparison.agreeing):
        return None
    return (
        f"{len(parts):,} values are codes or scales of quantised parameters; all masters agree, such as {parts[0].item}"
    )


def _not_gathered(seen: Seen) -> str | None:
    """Parameters differ though all masters agree: what other ranks own did not arrive after loading."""
    if seen.kind != "loaded" or _groups(seen.found) != {"parameter"} or _quantised_again(seen):
        return None
    layer_wise = seen.argument("use_layer_wise_distributed_optimizer") or "muon" in str(seen.argument("optimizer"))
    if not layer_wise or seen.facts.get("sizes", {}).get("dp", 1) < 2 or "master" not in dict(seen.comparison.agreeing):
        return None
    owned = [d.item for d in seen.found if d.item.replace("parameter ", "master ", 1) in seen.other[d.rank].groups]
    if owned:
        return None
    return f"a layer-wise optimizer; {len(seen.found):,} parameters differ, each on ranks that have no master of it"


def _without_pre_hooks(seen: Seen) -> str | None:
    """The first resumed step computes something else from equal state, with quantised parameters that are gathered."""
    loaded = seen.loaded
    if seen.kind != "step" or loaded is None or loaded.first is not None or seen.found[0].step != loaded.steps[1] + 1:
        return None
    if not (seen.argument("overlap_param_gather") and str(seen.argument("fp8_recipe")) == "mxfp8"):
        return None
    if seen.facts.get("framework") == "Megatron-Bridge":  # its loop keeps them since 0.6
        return None
    agree = dict(seen.comparison.agreeing)
    if not {"rng at begin", "batch"} <= agree.keys() or seen.found[0].group not in ("loss", "gradient"):
        return None
    return (
        f"what was loaded agrees, and so do batch and generators of step {seen.found[0].step}, the first of the process;"
        " it runs with MXFP8 and overlapped gathering of parameters"
    )


def _stale_checkpoint(seen: Seen) -> str | None:
    """What was loaded is the state after a step at which the same process saved before."""
    if seen.kind != "loaded" or not seen.argument("async_save"):
        return None
    tensors = [d for d in seen.found if d.group in ("parameter", "master", "optimizer", "buffer")]
    held = step_held(tensors, seen.one)
    saves = {event.step for record in seen.one.values() for event in record.events if event.kind == "saved"}
    if held is None or held not in saves:
        return None
    saved = ", ".join(map(str, sorted(saves)))
    return f"asynchronous saves after steps {saved}; what was loaded is the state after step {held}"


_FAULTS = (
    _Fault(
        "NVIDIA/Megatron-LM#6858",
        "Ranks come back with the expert generator of the first data-parallel rank of their stage.",
        "Take a Megatron Core with this change, or carry it over to get_rng_state; a checkpoint that was written without it has"
        " one state per group only.",
        "megatron-core",
        "",
        "",
        _expert_generators,
    ),
    _Fault(
        "NVIDIA/Megatron-LM#7468",
        "The first step after a resume uses the weight decay of the command line instead of the checkpoint's.",
        "Give the same weight decay arguments in both launches, or take a Megatron Core with this change.",
        "megatron-core",
        "",
        "",
        _stale_weight_decay,
    ),
    _Fault(
        "NVIDIA/Megatron-LM#5974",
        "Megatron-FSDP makes a step to allocate optimizer state before loading, and Adam's step counts it.",
        "Take a Megatron Core with NVIDIA/Megatron-LM#5976.",
        "megatron-core",
        "",
        "",
        _dummy_step,
    ),
    _Fault(
        "NovaSky-AI/SkyRL#1403",
        "With the optimizer on the CPU, loading keeps the step that Adam had before.",
        "Save with --dist-ckpt-optim-fully-reshardable, or set the step again after loading as described there.",
        "megatron-core",
        "",
        "",
        _stale_step,
    ),
    _Fault(
        "NVIDIA/Megatron-LM#6666",
        "Checkpoints hold quantised weights in bfloat16; quantising them again on loading gives other codes and scales.",
        "Take a Megatron Core after 0.19.2, which makes them from the fp32 masters again.",
        "megatron-core",
        "",
        "0.20",
        _quantised_again,
    ),
    _Fault(
        "NVIDIA/Megatron-LM#6920",
        "After loading, a layer-wise optimizer does not hand its parameters to the other ranks.",
        "Take a Megatron Core with this change, or train without --use-distributed-optimizer.",
        "megatron-core",
        "0.19.3",
        "",
        _not_gathered,
    ),
    _Fault(
        "NVIDIA-NeMo/Megatron-Bridge#5066",
        "The first step of every process runs without the hooks that gather and quantise parameters.",
        "Train by Megatron-Bridge 0.6 or later, which keeps the hooks in a resumed MXFP8 run.",
        "megatron-core",
        "",
        "",
        _without_pre_hooks,
    ),
    _Fault(
        "NVIDIA-NeMo/RL#3312",
        "With asynchronous saves and a cached structure, later checkpoints hold the tensors of the first.",
        "Turn --ckpt-assume-constant-structure off, or save synchronously; `ckptguard diff` tells which checkpoints on disk are"
        " copies.",
        "megatron-core",
        "",
        "",
        _stale_checkpoint,
    ),
)
