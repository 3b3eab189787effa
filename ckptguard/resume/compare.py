"""Two arms compared value by value: what differs first, and on which ranks. Pure; values in, values out.

**First** is the lowest step, then the order in which a rank runs, which is the order in which values stand in its event. Across
ranks of one step, a rank whose first difference comes earlier in that order is where it may have begun; a rank that differs
only further on can have received it. ``Comparison.at_first`` is sorted so: the ranks whose first difference is the earliest
come first, then the receivers; ``origins`` tells them apart.

Items that a rule would explain if nothing else differed stay differences, and are blamed last: ``first`` is one of them only if
there is no other, and in ``at_first`` they stand at the end of their rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.core.watching import GROUPS, Group
from ckptguard.core.wording import some
from ckptguard.resume.excuses import Context, Differing, Rule, events_by_step, explain
from ckptguard.resume.records import Kind, RankRecord, Value, same
from ckptguard.resume.results import Comparison, Difference

Records = Mapping[int, RankRecord]
_ORDER = {group: number for number, group in enumerate(GROUPS)}
_SHOWN = 5


def compare_steps(
    one_name: str,
    one: Records,
    other_name: str,
    other: Records,
    steps: tuple[int, int],
    question: str,
    rules: Sequence[Rule],
) -> Comparison:
    """Compares the states after every step of a range, on all ranks.

    Args:
        one_name: The arm held to be right.
        one: What it recorded.
        other_name: The arm compared with it.
        other: What that recorded.
        steps: First and last step.
        question: What the answer decides, in words.
        rules: Explanations of differences.

    Raises:
        UsageError: The arms have different world sizes.
        EnvironmentFailedError: A rank of an arm did not record all of the steps.
    """
    wanted = range(steps[0], steps[1] + 1)
    ranks = _ranks(one_name, one, other_name, other)
    refuse_short(one_name, one, "step", wanted)
    refuse_short(other_name, other, "step", wanted)
    tally = _Tally(Context("step", steps, one, other))
    for rank in ranks:
        ours, theirs = (events_by_step(records[rank], "step") for records in (one, other))
        for step in wanted:
            tally.add(rank, step, ours[step].values, theirs[step].values)
    return tally.result(one_name, other_name, question, rules)


def compare_loaded(
    one_name: str,
    one: Records,
    other_name: str,
    other: Records,
    step: int,
    question: str,
    rules: Sequence[Rule],
    later: Comparison | None = None,
) -> Comparison:
    """Compares what was saved after a step with what was loaded, on all ranks.

    Losses, gradients and whatever else only a step has are left out; an item that one side has and the other has not is a
    difference.

    Args:
        one_name: The arm that saved.
        one: What it recorded.
        other_name: The arm that loaded.
        other: What that recorded.
        step: The step after which the save was made.
        question: What the answer decides, in words.
        rules: Explanations of differences.
        later: The comparison of the steps that follow, which some explanations need.

    Raises:
        UsageError: The arms have different world sizes.
        EnvironmentFailedError: A rank recorded no save, or no load, of that step.
    """
    ranks = _ranks(one_name, one, other_name, other)
    refuse_short(one_name, one, "saved", (step,))
    refuse_short(other_name, other, "loaded", (step,))
    tally = _Tally(Context("loaded", (step, step), one, other, later))
    for rank in ranks:
        tally.add(rank, step, *tally.context.pair(rank, step))
    return tally.result(one_name, other_name, question, rules)


class _Tally:
    """Collects what differs, event by event."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._found: list[Differing] = []
        self._ranks: set[int] = set()
        self._values = 0

    def add(self, rank: int, step: int, one: Mapping[str, Value], other: Mapping[str, Value]) -> None:
        """One event of one rank, as it stands in both arms."""
        self._ranks.add(rank)
        self._values += len(one) if one.keys() == other.keys() else len(one.keys() | other.keys())
        if names := unequal(one, other):
            self._found.append(Differing(rank, self.context.kind, step, names))

    def result(self, one_name: str, other_name: str, question: str, rules: Sequence[Rule]) -> Comparison:
        """What was found, with what the rules explain set apart."""
        context = self.context
        told = explain(rules, self._found, context)
        events = [_Event(event, told.suspects) for event in told.left]
        step = min(((not e.blamed, e.step) for e in events), default=(True, context.steps[1]))[1]
        at_first = _in_order([event for event in events if event.step == step], context)
        return Comparison(
            one_name,
            other_name,
            question,
            context.steps,
            self._values,
            len(self._ranks),
            at_first[0] if at_first else None,
            at_first,
            _agreeing([event for event in self._found if event.step == step], at_first, context, self._ranks, step),
            tuple((e.rank, e.step, len(e.names), context.group(e.rank, e.names[0])) for e in events),
            told.excused,
        )


class _Event:
    """What differs in one event: items in order of execution, suspects last. ``blamed`` if there are others."""

    __slots__ = ("blamed", "kind", "names", "rank", "step")

    def __init__(self, event: Differing, suspects: frozenset[str]) -> None:
        self.rank, self.kind, self.step, self.names = event.rank, event.kind, event.step, event.names
        self.blamed = True
        if suspects:
            last = [name for name in event.names if name in suspects]
            first = [name for name in event.names if name not in suspects]
            self.blamed, self.names = bool(first), (*first, *last)


def _in_order(events: Sequence[_Event], context: Context) -> tuple[Difference, ...]:
    """All differences of one step: ranks whose first one comes earliest first, in order of execution within a rank."""
    ranks = []
    for event in events:
        one, other = context.pair(event.rank, event.step)
        before = list(one) if list(one) == list(other) else _merged(one, other)
        before = before[: before.index(event.names[0])]
        groups = {name: context.group(event.rank, name) for name in (*before, *event.names)}
        group = groups[event.names[0]]
        differences = [
            Difference(event.kind, event.step, event.rank, name, groups[name], one.get(name), other.get(name))
            for name in event.names
        ]
        # Stages of a pipeline hold other items: places are counted within a group, which all of them have.
        place = (not event.blamed, _ORDER[group], sum(groups[name] == group for name in before), event.rank)
        ranks.append((place, differences))
    ranks.sort(key=lambda rank: rank[0])
    return tuple(difference for _, differences in ranks for difference in differences)


def _agreeing(
    found: Sequence[Differing], at_first: Sequence[Difference], context: Context, ranks: Iterable[int], step: int
) -> tuple[tuple[Group, int], ...]:
    """Groups without an unexplained difference after a step, with how many values agree."""
    counts: Counter[Group] = Counter()
    for rank in ranks:
        one, other = context.pair(rank, step)
        counts.update(context.group(rank, name) for name in one.keys() & other.keys())
    for event in found:
        one, other = context.pair(event.rank, event.step)
        counts.subtract(context.group(event.rank, name) for name in event.names if name in one and name in other)
    for group in {difference.group for difference in at_first}:
        del counts[group]
    return tuple((group, counts[group]) for group in GROUPS if counts[group] > 0)


def origins(at_first: Sequence[Difference]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks where a first divergence may have begun, and ranks that differ only further on in the step.

    Args:
        at_first: ``Comparison.at_first``.
    """
    firsts: dict[int, Difference] = {}
    for difference in at_first:
        firsts.setdefault(difference.rank, difference)
    if not firsts:
        return (), ()
    earliest = at_first[0]
    began = tuple(r for r, d in firsts.items() if (d.group, d.item) == (earliest.group, earliest.item))
    return began, tuple(rank for rank in firsts if rank not in began)


def unequal(one: Mapping[str, Value], other: Mapping[str, Value]) -> tuple[str, ...]:
    """Names whose values differ or that one side has not, in order of execution."""
    if list(one) == list(other):
        pairs = zip(one, one.values(), other.values(), strict=True)
        return tuple(name for name, a, b in pairs if a is not b and not same(a, b))
    names = _merged(one, other)
    return tuple(n for n in names if n not in one or n not in other or not same(one[n], other[n]))


def _merged(one: Mapping[str, Value], other: Mapping[str, Value]) -> list[str]:
    """Names of both in the order of one; those of the other alone after what stands before them there."""
    place = {name: (number, 0) for number, name in enumerate(one)}
    last = (-1, 0)
    for name in other:
        last = place.setdefault(name, (last[0], last[1] + 1))
    return sorted(place, key=place.__getitem__)


def _ranks(one_name: str, one: Records, other_name: str, other: Records) -> list[int]:
    """Ranks of both arms, none of which lacks one.

    Raises:
        UsageError: Their worlds have different sizes.
        EnvironmentFailedError: A rank of a world recorded nothing.
    """
    sizes = world_size(one_name, one), world_size(other_name, other)
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{one_name} has {sizes[0]} ranks and {other_name} has {sizes[1]}: ranks of different layouts hold different parts",
            next_step="Compare whole tensors, which do not depend on the layout.",
        )
    return sorted(one)


def world_size(name: str, records: Records) -> int:
    """How many ranks an arm has, all of which recorded something.

    Raises:
        EnvironmentFailedError: One did not, or they do not tell of the same world.
    """
    told = {record.facts["world_size"] for record in records.values() if "world_size" in record.facts}
    if len(told) > 1:
        raise EnvironmentFailedError(
            f"{name}: its ranks tell of worlds of {some(sorted(told), _SHOWN)} ranks",
            next_step="Start every arm in a folder of its own.",
        )
    size = int(told.pop()) if told else max(records, default=-1) + 1
    absent = [rank for rank in range(size) if rank not in records]
    if absent or not records:
        raise EnvironmentFailedError(
            f"{name}: {len(absent)} of {size} ranks recorded nothing: {some(absent, _SHOWN)}",
            next_step="See the arm's log; its folder has to be visible on every node.",
        )
    return size


def refuse_short(name: str, records: Records, kind: Kind, steps: Sequence[int]) -> None:
    """Sees to it that no rank lacks an event.

    Raises:
        EnvironmentFailedError: One does; names it, its last event, and whether its stream is torn.
    """
    short: dict[int, list[int]] = {}
    for rank, record in sorted(records.items()):
        present = events_by_step(record, kind)
        if absent := [step for step in steps if step not in present]:
            short[rank] = absent
    if not short:
        return
    rank, absent = next(iter(short.items()))
    record = records[rank]
    last = max((event.step for event in record.events if event.kind == kind), default=None)
    what = {"step": "state after", "saved": "save after", "loaded": "load of"}[kind]
    raise EnvironmentFailedError(
        f"{name}: {len(short)} of {len(records)} ranks did not record all that was asked for ({some(list(short), _SHOWN)}):"
        f" rank {rank} has no {what} step {some(absent, _SHOWN)}, its last is {'none' if last is None else f'of step {last}'}"
        f"{'' if record.ended else ', and its stream is torn'}",
        next_step="See the arm's log.",
    )
