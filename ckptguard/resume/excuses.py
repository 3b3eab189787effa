"""Rules that explain differences. What a rule explains is shown and does not decide; what no rule explains is a difference.

A rule names the items that it is about and says, from the records alone, whether its reason holds in this comparison. It holds
for all of its items or for none. Most hold only if nothing else differs: an item that could be the cause of a difference is
never explained away beside one, it is only suspected last. Item names are those of ``megatron/live_state.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptguard.core.watching import Group
from ckptguard.resume.records import Event, Kind, RankRecord, Value, same
from ckptguard.resume.results import Comparison, Excused

# Groups that a step makes and that no state before or after it holds.
OF_A_STEP: frozenset[Group] = frozenset(("rng at begin", "batch", "loss", "gradient", "metric"))


@dataclass(frozen=True, slots=True)
class Differing:
    """What differs in one event of one rank.

    Attributes:
        rank: Global rank.
        kind: Of the event in the other arm.
        step: Of the event.
        names: Items, in order of execution.
    """

    rank: int
    kind: Kind
    step: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule may look at.

    Attributes:
        kind: ``step`` or ``loaded``.
        steps: First and last step compared.
        one: The arm held to be right, by rank.
        other: The other.
        later: For a comparison of one loaded state: that of the steps after it; None if they were not compared.
    """

    kind: Kind
    steps: tuple[int, int]
    one: Mapping[int, RankRecord]
    other: Mapping[int, RankRecord]
    later: Comparison | None = None

    def pair(self, rank: int, step: int) -> tuple[Mapping[str, Value], Mapping[str, Value]]:
        """Values of both arms that are held against each other after a step; empty where there is no such event.

        Of what was saved and loaded, only what is state: losses, gradients and whatever else only a step has are left out.
        """
        if self.kind == "step":
            events = self.one[rank].event("step", step), self.other[rank].event("step", step)
            return tuple(event.values if event else {} for event in events)  # type: ignore[return-value]
        saved, loaded = self.one[rank].event("saved", step), self.other[rank].event("loaded", step)
        return self._state(rank, saved), self._state(rank, loaded)

    def group(self, rank: int, item: str) -> Group:
        """Group of an item that either arm recorded."""
        return self.one[rank].groups.get(item) or self.other[rank].groups.get(item) or "other"

    def _state(self, rank: int, event: Event | None) -> Mapping[str, Value]:
        values = event.values if event else {}
        return {name: value for name, value in values.items() if self.group(rank, name) not in OF_A_STEP}


@dataclass(frozen=True, slots=True)
class Rule:
    """An explanation.

    Attributes:
        name: Short.
        why: The explanation in words, with its reason.
        source: Where the reason can be read.
        covers: Whether it is about an item of this name and group.
        holds: Whether it is true here, given all that it covers and that differs.
        alone: It is no explanation if anything differs that no rule explains: the item might be the cause of that.
    """

    name: str
    why: str
    source: str
    covers: Callable[[str, Group], bool]
    holds: Callable[[Context, Sequence[Differing]], bool]
    alone: bool = True


def events_by_step(record: RankRecord, kind: Kind) -> dict[int, Event]:
    """Events of a kind by step; the first of each, as ``RankRecord.event``."""
    found: dict[int, Event] = {}
    for event in record.events:
        if event.kind == kind:
            found.setdefault(event.step, event)
    return found


@dataclass(frozen=True, slots=True)
class Explained:
    """Differences parted by what the rules say of them.

    Attributes:
        excused: What is explained, by rule.
        left: What is not, without events in which nothing is.
        suspects: Items in ``left`` that a rule would explain if nothing else differed. They differ in every resume of their
            kind, so they are the last to be blamed.
    """

    excused: tuple[Excused, ...]
    left: Sequence[Differing]
    suspects: frozenset[str]


def explain(rules: Sequence[Rule], found: Sequence[Differing], context: Context) -> Explained:
    """Parts differences into those that a rule explains and those that are left.

    Args:
        rules: The first that covers an item is asked.
        found: All differences of a comparison.
        context: What was compared.
    """
    rule_of: dict[str, int | None] = {}
    for event in found:
        for name in event.names:
            if name not in rule_of:
                group = context.group(event.rank, name)
                rule_of[name] = next((i for i, rule in enumerate(rules) if rule.covers(name, group)), None)
    chosen = {i for i in rule_of.values() if i is not None}
    holding = {i for i in chosen if rules[i].holds(context, _only(found, rule_of, {i}))}
    suspected: set[int] = set()
    if any(number not in holding for number in rule_of.values()):
        suspected = {i for i in holding if rules[i].alone}
        holding -= suspected
    kept = {number for number in {*rule_of.values()} if number not in holding}
    return Explained(
        tuple(_excused(rules[i], _only(found, rule_of, {i})) for i in sorted(holding)),
        _only(found, rule_of, kept) if holding else found,
        frozenset(name for name, number in rule_of.items() if number in suspected),
    )


def _only(found: Sequence[Differing], rule_of: Mapping[str, int | None], numbers: set[int | None]) -> list[Differing]:
    parts = (Differing(e.rank, e.kind, e.step, tuple(n for n in e.names if rule_of[n] in numbers)) for e in found)
    return [part for part in parts if part.names]


def _excused(rule: Rule, events: Sequence[Differing]) -> Excused:
    items = Counter(name for event in events for name in event.names)
    steps = [event.step for event in events]
    return Excused(
        rule.name,
        f"{rule.why} ({rule.source})",
        tuple(items),
        tuple(sorted({event.rank for event in events})),
        (min(steps), max(steps)),
        items.total(),
    )


# The rules.

_CPU_GENERATOR = "rng torch cpu"
_CPU_AT_BEGIN = ("rng at begin torch cpu", f"{_CPU_GENERATOR} at begin")
_RERUN = "other rerun "
_RERUN_COUNTS = frozenset(
    _RERUN + field for field in ("current_iteration", "first_iteration_complete", "large_value_counts", "max_values")
)
_RERUN_REQUESTED = f"{_RERUN}rerun_requested"
_PRE_HOOKS = "other forward pre-hooks "
_OPERATIONS = "counter num_floating_point_operations_so_far"


def _no_draw_on_the_cpu(context: Context, found: Sequence[Differing]) -> bool:
    """Whether nothing can have been drawn from the CPU generator in a step, and nothing at all followed from its offset.

    A machine without CUDA draws dropout from this generator, and so does one where both names mean the same generator.
    """
    if context.kind == "loaded" and not _later_agrees(context, found):
        return False
    seen = False
    for records in (context.one, context.other):
        for rank in {event.rank for event in found}:
            for event in records[rank].events:
                cpu, cuda = event.values.get(_CPU_GENERATOR), event.values.get("rng cuda")
                if not context.steps[0] <= event.step <= context.steps[1] or cpu is None:
                    continue
                if cuda is None or same(cpu, cuda):
                    return False
                begin = next((event.values[name] for name in _CPU_AT_BEGIN if name in event.values), None)
                if event.kind == "step" and (begin is None or not same(begin, cpu)):
                    return False
                seen = True
    return seen


def _later_agrees(context: Context, found: Sequence[Differing]) -> bool:
    """Whether this is a loaded state and the steps that follow it were compared and agree."""
    if context.kind != "loaded" or context.later is None or context.later.first is not None:
        return False
    first, last = context.later.steps
    return first == context.steps[0] + 1 <= last


def _rerun_is_idle(context: Context, found: Sequence[Differing]) -> bool:
    """Whether no result was computed again in either arm."""
    ranks = {event.rank for event in found}
    events = (event for records in (context.one, context.other) for rank in ranks for event in records[rank].events)
    return all(event.values.get(_RERUN_REQUESTED, False) is False for event in events)


def _first_of_the_process(context: Context, found: Sequence[Differing]) -> bool:
    """Whether it differs only right after loading or in the first step after that."""
    if context.kind == "loaded":
        return _later_agrees(context, found)
    begun = {rank: {e.step for e in record.events if e.kind == "loaded"} for rank, record in context.other.items()}
    return all(event.step - 1 in begun[event.rank] for event in found)


def _same_numbers(context: Context, found: Sequence[Differing]) -> bool:
    """Whether the values are the same numbers, once as an integer and once as a float."""
    for event in found:
        one, other = context.pair(event.rank, event.step)
        for name in event.names:
            a, b = one.get(name), other.get(name)
            if not (type(a) in (int, float) and type(b) in (int, float) and a == b and a != 0):
                return False
    return True


def _always(context: Context, found: Sequence[Differing]) -> bool:
    return True


RULES: tuple[Rule, ...] = (
    Rule(
        "CPU generator without a consumer",
        "making the iterator of a DataLoader draws a number from torch's CPU generator, and a resumed process makes it after"
        " the generator was restored. The generator is the same at the begin and at the end of every step compared, CUDA"
        " has its own, and everything else agrees: nobody drew from it",
        "megatron-core 0.19.2, megatron/training/training.py: load_checkpoint in setup_model_and_optimizer runs before the data"
        " iterators are built",
        lambda item, group: item in (_CPU_GENERATOR, *_CPU_AT_BEGIN) and group in ("rng", "rng at begin"),
        _no_draw_on_the_cpu,
    ),
    Rule(
        "buffer that is never saved",
        "the model registered it with persistent=False, so no checkpoint holds it and a new process starts with its own. All"
        " steps that follow agree, so nothing reads what it held",
        "torch.nn.Module.register_buffer",
        lambda _, group: group == "unsaved buffer",
        _later_agrees,
    ),
    Rule(
        "padding",
        "elements that belong to no parameter and that nothing reads; Megatron writes uninitialised memory there",
        "megatron-core 0.19.2, megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable",
        lambda item, _: "padding" in item.split(),
        _always,
        alone=False,
    ),
    Rule(
        "counts of the process in the rerun state machine",
        "it counts the steps of this process for its messages, and keeps the largest results seen to tell a surprising one. No"
        " checkpoint of a run that is not being rerun holds them, and no result was computed again: no number depends on them",
        "megatron-core 0.19.2, megatron/core/rerun_state_machine.py",
        lambda item, _: item in _RERUN_COUNTS,
        _rerun_is_idle,
        alone=False,
    ),
    Rule(
        "forward pre-hooks of the first step",
        "every process makes its first step without the hooks that gather parameters, which are in place already, and turns"
        " them on after it. Everything else agrees, so it computed the same without them",
        "megatron-core 0.19.2, megatron/training/training.py, should_disable_forward_pre_hook",
        lambda item, _: item.startswith(_PRE_HOOKS),
        _first_of_the_process,
    ),
    Rule(
        "number type of a count for reports",
        "the count of floating point operations is the same number, as an integer in one arm and as a float in the other; it is"
        " for reports only",
        "megatron-core 0.19.2, megatron/training/training.py",
        lambda item, _: item == _OPERATIONS,
        _same_numbers,
        alone=False,
    ),
)
