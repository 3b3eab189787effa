"""What was saved under one layout compared with what was loaded under another: whole tensors, put together from their parts.

Where an order says so, ranks record beside their state the parts of whole tensors that they hold, as items ``global <name>``
with the part's dtype, the tensor's shape, boxes, and sum. Sums of parts add up to the fingerprint of the whole, however it is
cut (``fingerprint.values``), so nothing has to be gathered while the run is on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptguard.core.boxes import Box, missing_part, overlaps
from ckptguard.core.errors import EnvironmentFailedError
from ckptguard.core.watching import GROUPS, Group
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.resume.compare import Records, refuse_short, world_size
from ckptguard.resume.records import Kind
from ckptguard.resume.results import Comparison, Difference

PREFIX = "global "
_Boxes = tuple[Box, ...]


@dataclass(slots=True)
class _Whole:
    """A tensor of all ranks.

    Attributes:
        group: Sort of state.
        rank: The lowest one that holds some of it.
        parts: Sum of each set of boxes, with the lowest rank that holds it; replicas hold equal sets.
        problems: Why it is not one tensor, in words.
    """

    group: Group
    rank: int
    form: tuple[str, tuple[int, ...]]
    parts: dict[_Boxes, tuple[tuple[int, int], int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, rank: int, value: Mapping[str, Any]) -> None:
        """What one rank holds of it."""
        form, boxes, sums = _read(value)
        if boxes is None:
            self.problems.append(f"rank {rank} holds it in so many boxes that they were not recorded")
        elif form != self.form:
            self.problems.append(f"rank {self.rank} has {_form(self.form)} and rank {rank} has {_form(form)}")
        elif boxes:
            held, first = self.parts.setdefault(boxes, (sums, rank))
            if held != sums:
                self.problems.append(f"ranks {first} and {rank} hold different values of {_listed(boxes)}")

    def value(self) -> tuple[str, bool]:
        """The digest of the whole, or what is wrong with it; and whether it is whole."""
        boxes = [box for part in self.parts for box in part]
        owners = [rank for part, (_, rank) in self.parts.items() for _ in part]
        outside = [box for box in boxes if not box.within(self.form[1])]
        problems = [*self.problems, *(f"{box} is not inside {_form(self.form)}" for box in outside)]
        if not problems:
            for i, j in overlaps(boxes):
                problems.append(f"ranks {owners[i]} and {owners[j]} both hold {boxes[i].intersect(boxes[j])}")
        if not problems and (lost := missing_part(boxes, self.form[1])) is not None:
            problems.append(f"no rank holds {lost} of {_form(self.form)}")
        if problems:
            more = f", and {len(problems) - 1} more problems" if len(problems) > 1 else ""
            return f"{problems[0]}{more}", False
        total = Fingerprint(*self.form, (0, 0))
        for sums, _ in self.parts.values():
            total += Fingerprint(*self.form, sums)
        return f"#{total.hex} {_form(self.form)}", True


def compare_placed(
    one_name: str, one: Records, other_name: str, other: Records, step: int, question: str
) -> Comparison:
    """Compares every whole tensor that was saved after a step with the one that was loaded, whatever the layouts.

    A tensor that does not stand on its ranks exactly once, on either side, is a difference that says what is missing.

    Args:
        one_name: The arm that saved.
        one: What it recorded.
        other_name: The arm that loaded, under any layout.
        other: What that recorded.
        step: The step after which the save was made.
        question: What the answer decides, in words.

    Returns:
        A comparison whose values are tensors, and whose ranks are those of the other arm; the rank of a difference is the
        lowest that holds some of the tensor there.

    Raises:
        EnvironmentFailedError: A rank recorded no save, or no load, of that step, or an arm recorded no whole tensors.
    """
    ours, theirs = _gathered(one_name, one, "saved", step), _gathered(other_name, other, "loaded", step)
    differences: list[Difference] = []
    agreeing: Counter[Group] = Counter()
    for name in {**ours, **theirs}:
        sides = [side[name].value() if name in side else (None, False) for side in (ours, theirs)]
        whole = theirs.get(name) or ours[name]
        if sides[0] == sides[1] and sides[0][1]:
            agreeing[whole.group] += 1
        else:
            rank = whole.rank if name in theirs else 0
            differences.append(Difference("loaded", step, rank, name, whole.group, sides[0][0], sides[1][0]))
    differences.sort(key=lambda difference: GROUPS.index(difference.group))
    unequal = {difference.group for difference in differences}
    return Comparison(
        one_name,
        other_name,
        question,
        (step, step),
        len({**ours, **theirs}),
        len(other),
        differences[0] if differences else None,
        tuple(differences),
        tuple((group, agreeing[group]) for group in GROUPS if agreeing[group] and group not in unequal),
        _cells(differences, step),
        (),
    )


def _cells(differences: Sequence[Difference], step: int) -> tuple[tuple[int, int, int, Group], ...]:
    counts = Counter(difference.rank for difference in differences)
    first = {difference.rank: difference.group for difference in reversed(differences)}
    return tuple((rank, step, counts[rank], first[rank]) for rank in sorted(counts))


def _gathered(name: str, records: Records, kind: Kind, step: int) -> dict[str, _Whole]:
    """Whole tensors by name, in the order in which ranks recorded them."""
    world_size(name, records)
    refuse_short(name, records, kind, (step,))
    found: dict[str, _Whole] = {}
    for rank, record in sorted(records.items()):
        event = record.event(kind, step)
        for item, value in event.values.items() if event else ():
            if item.startswith(PREFIX):
                whole = found.get(item)
                if whole is None:
                    whole = found[item] = _Whole(record.groups.get(item, "other"), rank, _read(value)[0])
                whole.add(rank, value)
    if not found:
        raise EnvironmentFailedError(
            f"{name}: no rank recorded parts of whole tensors, which a comparison of two layouts needs",
            next_step="Record with --level state or above.",
        )
    return found


def _read(value: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], _Boxes | None, tuple[int, int]]:
    """Form of the whole, boxes with elements (None where a list was too long to be recorded), and the sum of a part."""
    boxes, digits = value["boxes"], value["sum"]
    filled = None
    if isinstance(boxes, list):
        filled = tuple(box for box in (Box(tuple(offset), tuple(size)) for offset, size in boxes) if box.numel)
    return (value["dtype"], tuple(value["shape"])), filled, (int(digits[:16], 16), int(digits[16:], 16))


def _form(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]}{list(form[1])}"


def _listed(boxes: Sequence[Box]) -> str:
    return f"{boxes[0]}{f' and {len(boxes) - 1} more boxes' if len(boxes) > 1 else ''}"
