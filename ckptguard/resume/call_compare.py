"""Which module, and which operation in it, is the first that gets the same and gives something else. Pure.

Inputs of a call are all that its result depends on, parameters and generators included, and a call is listed when it is over,
after what is inside it (``module_calls``, ``op_calls``). On one rank everything before its first differing call agrees, so that
call tells what happened:

* its inputs agree and its outputs differ: an **origin**, the narrowest module, or the operation where those were recorded;
* its inputs differ although nothing before it gave anything different: a **receiver**. The input is looked up among the
  parameters, batches and generators that the ranks recorded. If it is none of them and a module around the call has equal
  inputs and different outputs, that module's own code is the origin. What is left came from another rank, or past the hooks;
* one arm makes a call that the other does not: the arms took different ways, in the module around it.

Across ranks the lowest step counts, then cause before effect: an origin on any rank beats receivers on all others, and a
collective is an origin only where its inputs agree on every rank of its group.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from ckptguard.core.wording import ranks_text
from ckptguard.resume.records import Call, RankRecord, Value, same
from ckptguard.resume.results import Culprit

Sort = Literal["compute", "way", "state", "batch", "collective", "receiver"]
_EFFECTS: tuple[Sort, ...] = ("collective", "receiver")
_COLLECTIVE = re.compile(r"_?c10d")
_SEND = "c10d.send"
_STATE = ("parameter", "buffer", "unsaved buffer", "master", "optimizer")
_SIDES: tuple[Callable[[CallPair], Call | None], ...] = (lambda pair: pair.one, lambda pair: pair.other)
_Key = tuple[int, str, str, str]


@dataclass(frozen=True, slots=True)
class CallPair:
    """A call as both arms made it; one of them is None where only the other arm made it."""

    one: Call | None
    other: Call | None

    @property
    def call(self) -> Call:
        """The call as the arm held to be right made it, if it did."""
        call = self.one or self.other
        assert call is not None
        return call

    @property
    def inputs_agree(self) -> bool:
        """Whether both arms gave it the same."""
        return self.one is not None and self.other is not None and _equal(self.one.inputs, self.other.inputs)

    @property
    def agrees(self) -> bool:
        """Whether both arms made it, with equal inputs and outputs."""
        return self.inputs_agree and _equal(self.one.outputs, self.other.outputs)  # type: ignore[union-attr]

    @property
    def is_origin(self) -> bool:
        """Equal inputs, different outputs."""
        return self.inputs_agree and not self.agrees


@dataclass(frozen=True, slots=True)
class Fault:
    """Where one rank first departs.

    Attributes:
        rank: Global rank.
        sort: ``compute``, ``way`` (a call that one arm does not make), ``state`` and ``batch`` are causes; a ``collective``
            gives something else from what agrees on all its ranks; a ``receiver`` got it from elsewhere.
        call: The narrowest call that tells it.
        first: The first differing call, which may be one inside ``call``.
        source: For ``state`` and ``batch`` what differs; else empty.
        evidence: Why, in sentences.
    """

    rank: int
    sort: Sort
    call: Call
    first: CallPair
    source: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """The origin among all ranks.

    Attributes:
        fault: The one to blame.
        also: Faults of ranks that have a cause of their own in the same step, or the same one seen there.
        receivers: Faults of ranks that got it from elsewhere, or later.
        equal_ranks: Ranks whose calls all agree.
    """

    fault: Fault
    also: tuple[Fault, ...]
    receivers: tuple[Fault, ...]
    equal_ranks: tuple[int, ...]

    @property
    def module(self) -> str:
        """The narrowest module to blame."""
        return self.fault.call.scope

    @property
    def op(self) -> str:
        """The operation in it; empty if operations were not recorded or none of them is to blame."""
        return self.fault.call.op

    @property
    def is_certain(self) -> bool:
        """Whether a cause was found, and not only where its effect arrived."""
        return self.fault.sort != "receiver"

    @property
    def evidence(self) -> tuple[str, ...]:
        """What was found, in sentences, for the chain."""
        told = list(self.fault.evidence)
        if self.also:
            told.append(f"The same step has an origin on {_on(self.also)}.")
        if self.receivers:
            told.append(f"It arrives on {_on(self.receivers)}.")
        if self.equal_ranks:
            told.append(f"All calls of {ranks_text(self.equal_ranks)} agree.")
        return tuple(told)

    def culprits(self) -> tuple[Culprit, ...]:
        """For the report, from the wider to the narrower; none if only receivers were found."""
        fault = self.fault
        if not self.is_certain:
            return ()
        call, why = fault.call, " ".join(fault.evidence)
        if fault.sort in ("state", "batch"):
            return (Culprit("state", fault.rank, call.step, fault.source, why),)
        where = f"{call.scope}, {call.phase}"
        if not call.op:
            return (Culprit("module", fault.rank, call.step, f"{where}, call {call.occurrence}", why),)
        op = Culprit("op", fault.rank, call.step, f"{call.op} in {where}, call {call.occurrence}", why)
        return Culprit("module", fault.rank, call.step, where, why), op


def first_fault(one: Mapping[int, RankRecord], other: Mapping[int, RankRecord]) -> Located | None:
    """The origin of a divergence, from the calls that both arms recorded.

    Args:
        one: The arm held to be right, by rank.
        other: The arm compared with it; ranks that only one arm has are left out.

    Returns:
        None if all calls agree, or if no rank recorded any.
    """
    ranks = sorted(one.keys() & other.keys())
    pairs = {rank: align(one[rank].calls, other[rank].calls) for rank in ranks}
    firsts = {rank: at for rank in ranks if (at := _first(pairs[rank])) is not None}
    if not firsts:
        return None
    faults = [_fault(rank, pairs[rank], at, one[rank], other[rank]) for rank, at in firsts.items()]
    faults = [_sent(_collective(fault, pairs), pairs) for fault in faults]

    def cause_first(fault: Fault) -> tuple[int, int]:
        return fault.call.step, _EFFECTS.index(fault.sort) + 1 if fault.sort in _EFFECTS else 0

    best, *rest = sorted(faults, key=lambda fault: (*cause_first(fault), firsts[fault.rank], fault.rank))
    also = tuple(f for f in rest if cause_first(f) == cause_first(best) and f.sort != "receiver")
    return Located(
        best, also, tuple(f for f in rest if f not in also), tuple(rank for rank in ranks if rank not in firsts)
    )


def align(one: Sequence[Call], other: Sequence[Call]) -> list[CallPair]:
    """Pairs the calls of two streams of one rank, in the order of the first.

    Calls are told apart by step, scope, phase, operation and occurrence. Where the arms make different numbers of one call,
    those that agree are paired and the others stand alone; calls of the other arm alone follow what precedes them there.
    """
    groups: tuple[dict[_Key, list[Call]], ...] = (defaultdict(list), defaultdict(list))
    for side, calls in zip(groups, (one, other), strict=True):
        for call in calls:
            side[call.step, call.scope, call.phase, call.op].append(call)
    partner: dict[int, Call] = {}
    for key, ours in groups[0].items():
        partner.update((id(a), b) for a, b in _partners(ours, groups[1].get(key, [])))
    matched = {id(call) for call in partner.values()}
    out = [CallPair(call, partner.get(id(call))) for call in one]
    if len(matched) == len(other):
        return out
    alone: dict[int, list[Call]] = defaultdict(list)  # by the partnered call that they follow
    last = 0
    for call in other:
        if id(call) in matched:
            last = id(call)
        else:
            alone[last].append(call)
    merged = [CallPair(None, call) for call in alone[0]]
    for pair in out:
        merged.append(pair)
        if pair.other is not None:
            merged += (CallPair(None, call) for call in alone.get(id(pair.other), ()))
    return merged


def _partners(ours: list[Call], theirs: list[Call]) -> Iterator[tuple[Call, Call]]:
    if len(ours) == len(theirs):
        yield from zip(ours, theirs, strict=True)
        return
    a, b = ([repr((call.inputs, call.outputs)) for call in calls] for calls in (ours, theirs))
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag in ("equal", "replace"):
            yield from zip(ours[a0:a1], theirs[b0:b1], strict=False)


def _first(pairs: Sequence[CallPair]) -> int | None:
    """Where the first call that differs stands; the lowest step counts before the order in a stream.

    The first step of a process fills caches and buffers, and checks what it checks once; the same step of a longer run does
    not. Calls that show no more than this are passed over where another call tells something.
    """
    differing = [at for at, pair in enumerate(pairs) if not pair.agrees]
    known = [
        {_text(v) for pair in pairs if (call := side(pair)) for v in (*call.inputs, *call.outputs)} for side in _SIDES
    ]
    telling = [at for at in differing if not _is_idle(pairs[at], known)]
    return min(telling or differing, key=lambda at: (pairs[at].call.step, at), default=None)


def _is_idle(pair: CallPair, known: Sequence[set[str]]) -> bool:
    """Whether a call differs without a consequence.

    It gives the same from other inputs; or one arm alone makes it, and the other has what it gives from elsewhere.

    Args:
        pair: A call that does not agree.
        known: Of either arm, all values in its calls.
    """
    if pair.one is not None and pair.other is not None:
        return _equal(pair.one.outputs, pair.other.outputs)
    return {_text(value) for value in pair.call.outputs} <= known[1 if pair.other is None else 0]


def _text(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _fault(rank: int, pairs: Sequence[CallPair], at: int, one: RankRecord, other: RankRecord) -> Fault:
    """What the first differing call of a rank says."""
    first, call = pairs[at], pairs[at].call
    before = f"Rank {rank}, step {call.step}: {_counted(at, 'call')} before {_site(call)} agree{'s' if at == 1 else ''}"
    if first.is_origin:
        narrow = _narrowest(pairs, at)
        return Fault(rank, "compute", narrow.call, first, "", (f"{before}.", f"{_outputs(narrow)}."))
    around = _around(pairs, at)
    if first.one is None or first.other is None:
        arm = "only the other arm makes it" if first.one is None else "the other arm does not make it"
        return Fault(rank, "way", around.call if around else call, first, "", (f"{before}; {arm}.",))
    told = (f"{before}.", f"Its {_changed('input', first.one.inputs, first.other.inputs)}")
    owner = next((pair for pair in pairs[at:] if not pair.call.op and _is_around(pair.call, call)), first)
    if (found := _recorded(first, one, other) or _recorded(owner, one, other)) is not None:
        sort, source, words = found
        return Fault(rank, sort, call, first, source, (told[0], f"{told[1]}: {words}."))
    if around is not None:
        inside = f"{told[1]}, and nothing that was recorded before it gave it: {_site(around.call)} made it itself"
        return Fault(rank, "compute", around.call, first, "", (told[0], f"{inside}.", f"{_outputs(around)}."))
    return Fault(rank, "receiver", call, first, "", (told[0], f"{told[1]}: it came from elsewhere."))


def _narrowest(pairs: Sequence[CallPair], at: int) -> CallPair:
    """The innermost origin of a call at a place: calls of a backward pass may be listed late, when autograd is over."""
    chosen = pairs[at]
    for pair in pairs[at + 1 :]:
        if pair.call.occurrence == chosen.call.occurrence and _is_around(chosen.call, pair.call) and pair.is_origin:
            chosen = pair
    return chosen


def _around(pairs: Sequence[CallPair], at: int) -> CallPair | None:
    """The innermost module around a call that is an origin; it is listed after the call."""
    seen = set[str]()
    for pair in pairs[at + 1 :]:
        outer = pair.call
        if outer.scope in seen or not _is_around(outer, pairs[at].call):
            continue
        if pair.is_origin:
            return pair
        seen.add(outer.scope)  # a later call of it is another
    return None


def _is_around(outer: Call, inner: Call) -> bool:
    """Whether a call can be the module that another is part of: as an operation, or as one of its submodules."""
    if outer.op or (outer.step, outer.phase) != (inner.step, inner.phase):
        return False
    if inner.scope == outer.scope:
        return bool(inner.op)
    return inner.scope.startswith((f"{outer.scope}.", f"{outer.scope} "))


def _recorded(pair: CallPair, one: RankRecord, other: RankRecord) -> tuple[Sort, str, str] | None:
    """The recorded parameter, batch or generator that a differing input is, with words for it."""
    if pair.one is None or pair.other is None:
        return None
    step = pair.call.step
    changed = [(a, b) for a, b in zip(pair.one.inputs, pair.other.inputs, strict=False) if not same(a, b)]
    for a, b in changed:
        if not isinstance(a, str) or not isinstance(b, str):
            continue
        drawn = " ".join(a.split(" ")[:2]) if a.startswith("generator ") else ""
        a, b = (text.removeprefix(f"{drawn} ") for text in (a, b))
        for name, value in _before(one, step).items():
            if value == a and _before(other, step).get(name) == b:
                sort: Sort = "batch" if one.groups[name] == "batch" else "state"
                return sort, name, f"it is {name}, which differs when the step begins"
        if drawn:
            return "state", drawn, f"it is the {drawn}, from which one arm has drawn more before this call"
    return None


def _before(record: RankRecord, step: int) -> dict[str, Value]:
    """What a step starts from: its generators and batches, and the state as it was left by the step or the load before it."""
    values: dict[str, Value] = {}
    for event in record.events:
        wanted: tuple[str, ...] = ()
        if event.kind in ("loaded", "step") and event.step == step - 1:
            wanted = _STATE
        elif event.kind == "step" and event.step == step:
            wanted = ("batch", "rng at begin")
        values.update({n: v for n, v in event.values.items() if wanted and record.groups.get(n) in wanted})
    return values


def _collective(fault: Fault, pairs: Mapping[int, Sequence[CallPair]]) -> Fault:
    """A collective that gives something else got it from a rank of its group whose inputs differ, if there is one."""
    call = fault.call
    if fault.sort != "compute" or not _COLLECTIVE.match(call.op):
        return fault
    group = _group(call)
    senders = [
        rank
        for rank, theirs in pairs.items()
        if rank != fault.rank and (group is None or rank in group)
        and any(_identity(pair.call) == _identity(call) and not pair.inputs_agree for pair in theirs)
    ]  # fmt: skip
    if senders:
        told = f"What it gave came from {ranks_text(senders)}, where its inputs differ."
        return dataclasses.replace(fault, sort="receiver", evidence=(*fault.evidence, told))
    told = "The inputs agree on all ranks of its group: the collective itself gives something else."
    return dataclasses.replace(fault, sort="collective", evidence=(*fault.evidence, told))


def _sent(fault: Fault, pairs: Mapping[int, Sequence[CallPair]]) -> Fault:
    """Says which rank sent what a receiver got, if that was recorded."""
    one, other = fault.first.one, fault.first.other
    if fault.sort != "receiver" or one is None or other is None:
        return fault
    changed = {(str(a), str(b)) for a, b in zip(one.inputs, other.inputs, strict=False) if not same(a, b)}
    for rank, theirs in pairs.items():
        for pair in theirs if rank != fault.rank else ():
            if pair.call.op.startswith(_SEND) and pair.one is not None and pair.other is not None:
                given = zip(pair.one.inputs, pair.other.inputs, strict=False)
                if changed & {(str(a), str(b)) for a, b in given}:
                    told = f"Rank {rank} sent it, in the {pair.call.phase} of {pair.call.scope}."
                    return dataclasses.replace(fault, evidence=(*fault.evidence, told))
    return fault


def _group(call: Call) -> set[int] | None:
    """Ranks of a collective, which stand at the end of its inputs."""
    told = next((v for v in call.inputs[::-1] if isinstance(v, str) and v.startswith("ranks ")), None)
    return None if told is None else {int(rank) for rank in told.removeprefix("ranks ").split(",")}


def _identity(call: Call) -> tuple[int, str, str, str, int]:
    return call.step, call.scope, call.phase, call.op, call.occurrence


def _equal(one: Sequence[Value], other: Sequence[Value]) -> bool:
    if len(one) != len(other):
        return False
    return all(a is b or same(a, b) for a, b in zip(one, other, strict=True))


def _site(call: Call) -> str:
    where = f"{call.phase} of {call.scope}"
    again = f" (call {call.occurrence + 1})" if call.occurrence else ""
    return f"{call.op} in the {where}{again}" if call.op else f"the {where}{again}"


def _outputs(pair: CallPair) -> str:
    assert pair.one is not None
    assert pair.other is not None
    count = len(pair.one.inputs)
    agree = f"the {_counted(count, 'input')} of {_site(pair.call)} agree{'s' if count == 1 else ''}"
    return f"{agree[0].upper()}{agree[1:]}, and {_changed('output', pair.one.outputs, pair.other.outputs)}"


def _changed(what: str, one: Sequence[Value], other: Sequence[Value]) -> str:
    """``output 0 differs (#1234... and #5678...)``."""
    if len(one) != len(other):
        return f"{what}s differ in number ({len(one)} and {len(other)})"
    at = [number for number, (a, b) in enumerate(zip(one, other, strict=True)) if not same(a, b)]
    if not at:
        return f"{what}s differ"
    numbers = f"{what} {at[0]} differs" if len(at) == 1 else f"{what}s {', '.join(map(str, at))} differ"
    return f"{numbers} ({_short(one[at[0]])} and {_short(other[at[0]])})"


def _short(value: Value) -> str:
    text = str(value)
    head, space, tail = text.partition(" ")
    return f"{head[:9]}…{space}{tail}" if head.startswith("#") and len(head) == 33 else text[:60]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _on(faults: Sequence[Fault]) -> str:
    return f"{ranks_text([fault.rank for fault in faults])}, first in {_site(faults[0].call)}"
