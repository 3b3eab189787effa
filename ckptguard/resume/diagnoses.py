"""What a first divergence looks like, in sentences: how much of what differs, and where else the wrong value is the right one.

Sentences state what the records show. A value that stands in several items at once, such as a tensor of zeros, tells nothing
about where it came from and is left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ckptguard.core.wording import ranks_text
from ckptguard.resume.excuses import OF_A_STEP, events_by_step
from ckptguard.resume.records import Event, Kind, RankRecord, Value, same
from ckptguard.resume.results import Comparison, Difference

Records = Mapping[int, RankRecord]
Place = tuple[int, str]  # rank, item
_NUMBER = re.compile(r"#[0-9a-f]{32} \w+\[[\d, ]*\] (\S+)")
_GROUP = re.compile(r"param group (\S+) (.+)")
_BATCH = re.compile(r"batch (\d+)( .*)?")
_SHOWN = 8


def describe(comparison: Comparison, one: Records, other: Records) -> tuple[str, ...]:
    """What is to be seen in the first event that differs.

    Args:
        comparison: Of these arms.
        one: What the arm held to be right recorded.
        other: What the other recorded.
    """
    found = comparison.at_first
    if not found:
        return ()
    sentences = [*_amounts(found, other), *_absent(found), *_offsets(found)]
    sentences += _moved_batches(found, one)
    where = holders(found, one)
    sentences += _of_other_ranks(found, where)
    sentences += _of_other_items(found, where)
    sentences += _of_other_groups(found)
    sentences += _of_other_steps(found, one)
    return tuple(sentences)


def number(value: Value) -> int | float | None:
    """The number that a value is, or that the one element of its tensor is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    try:
        return int(found[1])
    except ValueError:
        try:
            return float(found[1])
        except ValueError:  # True, a complex number
            return None


def is_tensor(value: Value) -> bool:
    """Whether a value is the digest of a tensor of more than one element."""
    return isinstance(value, str) and value.startswith("#") and "[" in value and value.endswith("]")


def kind_in_one(kind: Kind) -> Kind:
    """The event of the arm held to be right that an event of the other is compared with."""
    return "saved" if kind == "loaded" else kind


def holders(found: Sequence[Difference], one: Records) -> dict[str, list[Place]]:
    """Where in the same event of the right arm the values stand that the other arm has in a wrong place.

    Returns:
        Places by value, as JSON text; numbers and other short values, which stand everywhere, are left out.
    """
    wanted: dict[str, list[Place]] = {_text(d.other): [] for d in found if _is_telling(d.other)}
    kind, step = kind_in_one(found[0].kind), found[0].step
    for rank, record in one.items():
        event = record.event(kind, step)
        for item, value in event.values.items() if event else ():
            if _is_telling(value) and (places := wanted.get(_text(value))) is not None:
                places.append((rank, item))
    return wanted


def sort_of(difference: Difference) -> str:
    """``exp_avg`` of an optimizer's state, else the group."""
    words = difference.item.split(" ", 2)
    return words[1] if difference.group == "optimizer" and len(words) > 1 else difference.group


def _amounts(found: Sequence[Difference], other: Records) -> Iterator[str]:
    """Such as that on rank 1 exp_avg_sq differs in 3 of 58 values."""
    by_sort: dict[str, list[Difference]] = defaultdict(list)
    for difference in found:
        by_sort[sort_of(difference)].append(difference)
    told: list[str] = []
    for sort, differences in by_sort.items():
        first, ranks = differences[0], {d.rank for d in differences}
        start = f"optimizer {sort} " if first.group == "optimizer" else ""
        absent = sum(1 for d in differences if d.other is None)
        total = absent + sum(_of_sort(other[rank], first, start) for rank in ranks)
        told.append(
            f"{len(differences):,} of {total:,} values of {sort}{'' if len(told) else f', such as {first.item}'}"
        )
    ranks = {d.rank for d in found}
    verb = "differs" if len(found) == 1 else "differ"
    yield f"On {ranks_text([*ranks])} {verb} {'; '.join(told)}."


def _of_sort(record: RankRecord, first: Difference, start: str) -> int:
    """How many values of a group the event of a rank has whose names begin so."""
    event = record.event(first.kind, first.step)
    values = event.values.items() if event else ()
    return sum(
        1
        for name, value in values
        if value is not None and record.groups.get(name) == first.group and name.startswith(start)
    )


def _absent(found: Sequence[Difference]) -> Iterator[str]:
    for gone, words in (("other", "is gone"), ("one", "is there and should not be")):
        missing = [d for d in found if getattr(d, gone) is None and (d.one is not None or d.other is not None)]
        if missing:
            more = f", and so for {len(missing) - 1:,} more values" if len(missing) > 1 else ""
            yield f"{missing[0].item} {words} on rank {missing[0].rank}{more}."


def _offsets(found: Sequence[Difference]) -> Iterator[str]:
    """Such as that Adam's step is 1 ahead."""
    apart: dict[tuple[str, int], list[tuple[Difference, int, int]]] = defaultdict(list)
    for difference in found:
        one, other = number(difference.one), number(difference.other)
        if difference.group in OF_A_STEP or one is None or other is None or one != one or other != other:
            continue
        key = difference.item.rsplit(" ", 1)[-1] if difference.group != "optimizer" else sort_of(difference)
        is_count = key == "step" or (type(one) is int and type(other) is int)
        if is_count and int(one) == one and int(other) == other and one != other:
            apart[key, int(other) - int(one)].append((difference, int(one), int(other)))
    for (key, offset), values in apart.items():
        difference, one, other = values[0]
        way = "ahead" if offset > 0 else "behind"
        more = f", and so for {len(values) - 1:,} more values" if len(values) > 1 else ""
        adam = "Adam's step" if key == "step" else key
        yield f"{adam} is {abs(offset):,} {way}: {other:,} instead of {one:,} in {difference.item}{more}."


def _moved_batches(found: Sequence[Difference], one: Records) -> Iterator[str]:
    """Such as that the batch of step 12 is that of step 11, which is repeated."""
    by_rank: dict[int, list[Difference]] = defaultdict(list)
    for difference in found:
        if difference.group == "batch" and is_tensor(difference.other):
            by_rank[difference.rank].append(difference)
    moves: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, batches in by_rank.items():
        known = [places for places in _places_of_batches(batches, one[rank]) if places]
        if known and (common := set.intersection(*known)):
            per_step = 1 + max(int(match[1]) for d in batches if (match := _BATCH.fullmatch(d.item)))
            moves[min(common, key=abs), per_step].append(rank)
    step = found[0].step
    for (offset, per_step), ranks in moves.items():
        what = "skipped" if offset > 0 else "repeated"
        steps, rest = divmod(abs(offset), per_step)
        if rest:
            amount = _plural(abs(offset), "micro-batch", "es")
            yield f"The data of step {step} on {ranks_text(ranks)} are off by {amount}: {amount} {what}."
        else:
            held = step + (steps if offset > 0 else -steps)
            yield f"The batch of step {step} on {ranks_text(ranks)} is that of step {held}: {_plural(steps, 'step')} {what}."


def _places_of_batches(batches: Sequence[Difference], record: RankRecord) -> Iterator[set[int]]:
    """By how many micro-batches each wrong batch is after the places where the right arm has the same data."""
    at: Counter[str] = Counter()  # by field, such as tokens
    where: dict[tuple[str, str], list[int]] = defaultdict(list)
    place: dict[tuple[int, str], tuple[str, int]] = {}
    for event in record.events:
        for item, value in event.values.items() if event.kind == "step" else ():
            match = _BATCH.fullmatch(item) if item.startswith("batch ") else None
            if match:
                field = match[2] or ""
                where[field, _text(value)].append(at[field])
                place[event.step, item] = field, at[field]
                at[field] += 1
    for difference in batches:
        if (difference.step, difference.item) in place:
            field, here = place[difference.step, difference.item]
            yield {there - here for there in where.get((field, _text(difference.other)), ())}


def _plural(count: int, what: str, ending: str = "s") -> str:
    return f"{count} {what}{'' if count == 1 else ending}"


def _of_other_ranks(found: Sequence[Difference], where: Mapping[str, list[Place]]) -> Iterator[str]:
    """Such as that rank 1 has what rank 0 should have."""
    sources: dict[int, tuple[set[int], list[str]]] = {}
    for difference in found:
        places = where.get(_text(difference.other), [])
        if {item for _, item in places} != {difference.item}:
            continue
        ranks = {rank for rank, _ in places}
        common, items = sources.get(difference.rank, (ranks, []))
        if common & ranks:
            sources[difference.rank] = (common & ranks, [*items, difference.item])
    by_source: dict[int, list[int]] = defaultdict(list)
    for rank, (holding, _) in sources.items():
        by_source[min(holding)].append(rank)
    for source, holding_it in by_source.items():
        items = sources[holding_it[0]][1]
        such = items[0] if len(items) == 1 else f"{len(items):,} values, such as {items[0]}"
        verb = "has" if len(holding_it) == 1 else "have"
        text = ranks_text(holding_it)
        yield f"{text[0].upper()}{text[1:]} {verb} what rank {source} should have: {such}."


def _of_other_items(found: Sequence[Difference], where: Mapping[str, list[Place]]) -> Iterator[str]:
    """Such as that two items are swapped."""
    moved: dict[Place, str] = {}
    for difference in found:
        places = where.get(_text(difference.other), []) if difference.group != "batch" else []
        here = [item for rank, item in places if rank == difference.rank]
        if len(here) == 1 and here[0] != difference.item:
            moved[difference.rank, difference.item] = here[0]
    if not moved:
        return
    swapped = [(place, item) for place, item in moved.items() if moved.get((place[0], item)) == place[1]]
    (rank, item), source = next(iter(moved.items()))
    if swapped:
        (rank, item), source = swapped[0]
        pairs = len(swapped) // 2
        more = f", and so are {pairs - 1:,} more pairs" if pairs > 1 else ""
        yield f"On rank {rank} {item} and {source} are swapped{more}."
    if len(moved) > len(swapped):
        left = [(p, i) for p, i in moved.items() if (p, i) not in swapped]
        (rank, item), source = left[0]
        more = f", and so for {len(left) - 1:,} more values" if len(left) > 1 else ""
        yield f"On rank {rank} {item} holds what {source} should hold{more}."


def _of_other_groups(found: Sequence[Difference]) -> Iterator[str]:
    """Such as that two parameter groups have each other's options."""
    groups: dict[tuple[int, str], dict[str, Difference]] = defaultdict(dict)
    for difference in found:
        if match := _GROUP.fullmatch(difference.item):
            groups[difference.rank, match[1]][match[2]] = difference
    for ((rank, a), ours), ((other_rank, b), theirs) in combinations(groups.items(), 2):
        pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
        swapped = all(same(x.other, y.one) and same(y.other, x.one) for x, y in pairs)
        if rank == other_rank and ours.keys() == theirs.keys() and swapped:
            options = ", ".join(list(ours)[:_SHOWN])
            yield f"On rank {rank} param groups {a} and {b} have each other's options ({options})."


def _of_other_steps(found: Sequence[Difference], one: Records) -> Iterator[str]:
    """Such as that all that differs is the state of step 9, not of step 10."""
    by_group: dict[str, list[Difference]] = defaultdict(list)
    for difference in found:
        if difference.group not in OF_A_STEP or difference.group == "rng at begin":
            by_group[difference.group].append(difference)
    steps = {group: step for group, part in by_group.items() if (step := step_held(part, one)) is not None}
    step = found[0].step
    if steps.keys() == by_group.keys() and len(set(steps.values())) == 1:
        count, held = sum(map(len, by_group.values())), next(iter(steps.values()))
        yield f"All that differs is the state of step {held}, not of step {step} ({count:,} values of {', '.join(by_group)})."
        return
    for group, held in steps.items():
        yield f"What differs of {group} is the state of step {held}, not of step {step} ({len(by_group[group]):,} values)."


def step_held(found: Sequence[Difference], one: Records) -> int | None:
    """The other step of the right arm after which all these values were what they are; None if there is none.

    Values that no step records, such as counts that only a save tells, are passed over; at least one tensor has to match.
    """
    by_rank: dict[int, list[Difference]] = defaultdict(list)
    for difference in found:
        by_rank[difference.rank].append(difference)
    possible: dict[int, int] = {}  # tensors that match, by step
    for number, (rank, differences) in enumerate(by_rank.items()):
        events = events_by_step(one[rank], "step")
        events.pop(found[0].step, None)
        matches = {
            step: _matching(differences, event) for step, event in events.items() if step in possible or not number
        }
        possible = {step: possible.get(step, 0) + count for step, count in matches.items() if count is not None}
    held = [step for step, tensors in possible.items() if tensors]
    return min(held, key=lambda step: (abs(step - found[0].step), step), default=None)


def _matching(differences: Sequence[Difference], event: Event) -> int | None:
    """How many tensors are what they were in an event, or None if a value that it has is another."""
    tensors = 0
    for difference in differences:
        if difference.item in event.values:
            if not same(event.values[difference.item], difference.other):
                return None
            tensors += is_tensor(difference.other)
    return tensors


def _is_telling(value: Value) -> bool:
    return is_tensor(value) or (isinstance(value, str) and value.startswith("#b3:")) or isinstance(value, list)


def _text(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
