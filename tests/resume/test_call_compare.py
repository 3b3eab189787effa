"""Streams of calls compared: the narrowest call that gets the same and gives something else, and who only received it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import digest

from ckptguard.core.watching import Group
from ckptguard.resume.call_compare import Located, align, first_fault
from ckptguard.resume.records import Call, Event, RankRecord

LAYER = "chunk 0 decoder.layers.0"
MODULES = (f"{LAYER}.attention", f"{LAYER}.mlp.linear_fc1", f"{LAYER}.mlp.linear_fc2", f"{LAYER}.mlp", LAYER, "chunk 0")
WEIGHT = f"parameter {LAYER}.mlp.linear_fc1.weight"


def call(scope: str, inputs: Sequence[str], outputs: Sequence[str], *, op: str = "", occurrence: int = 0, step: int = 11,
         phase: str = "forward") -> Call:  # fmt: skip
    return Call(step, scope, phase, op, occurrence, tuple(inputs), tuple(outputs))


def stream(*, broken: str = "", step: int = 11, start: str = "tokens", weight: str = "w", op: str = "") -> list[Call]:
    """Two micro-batches through a layer, children before parents; what ``broken`` names departs in the first."""
    calls = []
    for m in range(2):
        seen = {"x": digest(start, m)}

        def run(name: str, given: list[str], *, m: int = m, ops: bool = False) -> str:
            out = digest(name, given)
            if ops:
                mid = digest(name, given, "mul")
                for operation, inputs in (("aten.mul.Tensor", given), ("aten.mm.default", [mid])):
                    wrong = m == 0 and name == broken and operation == op
                    gives = mid if operation == "aten.mul.Tensor" else out
                    gives = digest("broken", gives) if wrong else gives
                    mid, out = (gives, out) if operation == "aten.mul.Tensor" else (mid, gives)
                    calls.append(call(name, inputs, [gives], op=operation, occurrence=m, step=step))
                    if wrong and operation == "aten.mul.Tensor":
                        out = digest(name, "from broken")
            elif m == 0 and name == broken:
                out = digest("broken", out)
            calls.append(call(name, given, [out], occurrence=m, step=step))
            return out

        ops = bool(op)
        seen["a"] = run(MODULES[0], [seen["x"]], ops=ops)
        seen["b"] = run(MODULES[1], [seen["a"], digest(weight)], ops=ops)
        mixed = digest("broken") if broken == f"inside {MODULES[3]}" and m == 0 else seen["b"]
        seen["c"] = run(MODULES[2], [mixed], ops=ops)
        for name, outer in zip(MODULES[3:], (seen["a"], seen["x"], seen["x"]), strict=True):
            below = f"parameters below {digest(weight)}"
            calls.append(call(name, [outer, below], [digest(name, seen["c"])], occurrence=m, step=step))
    return calls


def ranks(*streams: list[Call], items: dict[str, tuple[Group, str]] | None = None) -> dict[int, RankRecord]:
    groups = {name: group for name, (group, _) in (items or {}).items()}
    now = {name: value for name, (group, value) in (items or {}).items() if group in ("batch", "rng at begin")}
    before = {name: value for name, (_, value) in (items or {}).items() if name not in now}
    events = [Event("step", 10, before), Event("step", 11, now)]
    return {n: RankRecord(groups=groups, events=events, calls=calls) for n, calls in enumerate(streams)}


def located(one: dict[int, RankRecord], other: dict[int, RankRecord]) -> Located:
    found = first_fault(one, other)
    assert found is not None
    return found


def test_equal_streams() -> None:
    assert first_fault(ranks(stream(), stream()), ranks(stream(), stream())) is None
    assert first_fault(ranks([], []), ranks([], [])) is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODULES[:3]))
def test_the_module_that_gets_the_same_and_gives_something_else(module: str) -> None:
    found = located(ranks(stream()), ranks(stream(broken=module)))
    assert (found.module, found.op, found.fault.sort) == (module, "", "compute")
    (culprit,) = found.culprits()
    assert (culprit.sort, culprit.rank, culprit.step) == ("module", 0, 11)
    assert culprit.name == f"{module}, forward, call 0"
    assert f"{MODULES.index(module):,} call" in found.evidence[0]
    assert "agree" in culprit.why
    assert "output 0 differs (#" in culprit.why


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODULES[:3]), st.sampled_from(["aten.mul.Tensor", "aten.mm.default"]))
def test_the_operation(module: str, op: str) -> None:
    found = located(ranks(stream(op="aten")), ranks(stream(broken=module, op=op)))
    assert (found.module, found.op) == (module, op)
    assert [c.sort for c in found.culprits()] == ["module", "op"]
    assert found.culprits()[1].name == f"{op} in {module}, forward, call 0"


def test_code_between_the_modules_of_a_module() -> None:
    found = located(ranks(stream()), ranks(stream(broken=f"inside {MODULES[3]}")))
    assert (found.module, found.fault.sort) == (MODULES[3], "compute")
    assert found.fault.first.call.scope == MODULES[2]
    assert "made it itself" in " ".join(found.evidence)


def test_a_call_inside_that_is_listed_late_is_narrower() -> None:
    def late(calls: list[Call]) -> list[Call]:
        return [c for c in calls if c.scope != MODULES[2]] + [c for c in calls if c.scope == MODULES[2]]

    found = located(ranks(late(stream())), ranks(late(stream(broken=MODULES[2]))))
    assert found.module == MODULES[2]


def test_a_parameter_that_differs_before_the_step() -> None:
    one = ranks(stream(), items={WEIGHT: ("parameter", digest("w"))})
    other = ranks(stream(weight="wrong"), items={WEIGHT: ("parameter", digest("wrong"))})
    found = located(one, other)
    assert (found.fault.sort, found.fault.source) == ("state", WEIGHT)
    assert [(c.sort, c.name) for c in found.culprits()] == [("state", WEIGHT)]
    unknown = located(ranks(stream()), ranks(stream(weight="wrong")))
    assert (unknown.fault.sort, unknown.is_certain, unknown.culprits()) == ("receiver", False, ())
    assert unknown.module == MODULES[1]


def test_a_batch_that_differs() -> None:
    one = ranks(stream(), items={"batch 0 tokens": ("batch", digest("tokens", 0))})
    other = ranks(stream(start="others"), items={"batch 0 tokens": ("batch", digest("others", 0))})
    found = located(one, other)
    assert (found.fault.sort, found.fault.source) == ("batch", "batch 0 tokens")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_generator_that_differs(recorded: bool) -> None:
    def dropping(state: str) -> list[Call]:
        inputs = [digest("x"), f"generator cpu {state}"]
        return [call(f"{LAYER}.dropout", inputs, [digest(state)]), *stream(start=state)]

    right, wrong = (digest(seed, kind="uint8[5056]") for seed in ("right", "wrong"))
    name = "rng at begin torch cpu"
    one, other = (
        ranks(dropping(state), items={name: ("rng at begin", state)} if recorded else None) for state in (right, wrong)
    )
    found = located(one, other)
    assert (found.fault.sort, found.fault.source) == ("state", name if recorded else "generator cpu")
    assert found.module == f"{LAYER}.dropout"


def test_an_operation_that_gets_what_was_not_dispatched_is_its_module() -> None:
    def kernel(made: str) -> list[Call]:
        return [
            call(MODULES[0], [digest("x")], [digest("y")], op="aten.mul.Tensor"),
            call(MODULES[0], [digest(made)], [digest(made, "z")], op="aten.add.Tensor"),
            call(MODULES[0], [digest("x")], [digest(made, "z")]),
        ]

    found = located(ranks(kernel("right")), ranks(kernel("wrong")))
    assert (found.module, found.op, found.fault.sort) == (MODULES[0], "", "compute")
    assert found.fault.first.call.op == "aten.add.Tensor"


def reduced(mine: str, result: str, *, others: str = "", group: str = "0,1") -> list[Call]:
    return [
        *stream(broken=mine and MODULES[1]),
        call(MODULES[2], [digest("part", mine), f"ranks {group}"], [digest("sum", result or mine + others)],
             op="c10d.allreduce_.default"),
    ]  # fmt: skip


def test_an_origin_on_another_rank_beats_those_who_receive_it() -> None:
    right = reduced("", "")
    one = ranks(right, right, stream(), reduced("", "", group="2,3"))
    received = reduced("", "", others="wrong")
    other = ranks(received, reduced("wrong", ""), stream(), reduced("", "", others="wrong", group="2,3"))
    found = located(one, other)
    assert (found.fault.rank, found.module, found.fault.sort) == (1, MODULES[1], "compute")
    assert [(f.rank, f.sort) for f in found.receivers] == [(3, "collective"), (0, "receiver")]  # 3 is in another group
    assert found.equal_ranks == (2,)
    assert "came from rank 1" in found.receivers[1].evidence[-1]
    assert "All calls of rank 2 agree." in found.evidence


def test_a_collective_that_adds_in_another_order() -> None:
    found = located(ranks(reduced("", ""), reduced("", "")), ranks(reduced("", "order"), reduced("", "order")))
    assert (found.fault.sort, found.op, found.is_certain) == ("collective", "c10d.allreduce_.default", True)
    assert [f.rank for f in found.also] == [1]
    assert "on all ranks of its group" in found.fault.evidence[-1]


def test_what_another_rank_sent() -> None:
    def sending(made: str) -> list[Call]:
        return [
            *stream(),
            call("outside modules", [digest(made), "ranks 0,1"], [], op="c10d.send.default", phase="step"),
        ]

    def receiving(made: str) -> list[Call]:
        return [call(MODULES[0], [digest(made)], [digest(made, "y")])]

    found = located(ranks(sending("right"), receiving("right")), ranks(sending("wrong"), receiving("wrong")))
    assert not found.is_certain
    assert any("Rank 0 sent it" in f.evidence[-1] for f in (found.fault, *found.receivers))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 11), st.booleans())
def test_a_call_too_many_or_too_few_is_told_and_not_followed_by_false_ones(at: int, gone: bool) -> None:
    one, other = stream(), stream()
    if gone:
        other.pop(at)
    else:
        other.insert(at, call("chunk 0 extra", [digest("new")], [digest("new")]))
    pairs = align(one, other)
    assert sum(not pair.agrees for pair in pairs) == 1
    found = located(ranks(one), ranks(other))
    assert found.fault.sort == "way"
    assert found.fault.call in (one if gone else other)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 7), st.booleans())
def test_operations_of_one_kind_are_aligned_by_what_they_do(at: int, gone: bool) -> None:
    ops = [call(LAYER, [digest(n)], [digest(n, "out")], op="aten.add.Tensor", occurrence=n) for n in range(8)]
    other = (
        [*ops[:at], *ops[at + 1 :]]
        if gone
        else [*ops[:at], call(LAYER, ["new"], ["new"], op="aten.add.Tensor"), *ops[at:]]
    )
    other = [dataclasses.replace(c, occurrence=n) for n, c in enumerate(other)]
    pairs = align(ops, other)
    assert [pair.agrees for pair in pairs].count(False) == 1
    odd = next(pair for pair in pairs if not pair.agrees)
    assert (odd.one, odd.other) == ((ops[at], None) if gone else (None, other[at]))


def test_the_lowest_step_counts_first() -> None:
    later = [*stream(), *stream(step=12, broken=MODULES[0])]
    earlier = [*stream(weight="wrong"), *stream(step=12)]
    right = [*stream(), *stream(step=12)]
    found = located(ranks(right, right), ranks(later, earlier))
    assert (found.fault.rank, found.fault.call.step, found.fault.sort) == (1, 11, "receiver")


def test_many_calls_take_seconds() -> None:
    one = [
        call(f"chunk 0 layers.{n % 97}", [digest(n)], [digest(n, 1)], occurrence=n // 97, op="aten.mm")
        for n in range(20_000)
    ]
    other = [*one[:-1], dataclasses.replace(one[-1], outputs=("wrong",))]
    before = time.perf_counter()
    found = located(ranks(one, one), ranks(one, other))
    assert time.perf_counter() - before < 5
    assert (found.fault.rank, found.fault.call) == (1, one[-1])


def test_what_the_first_step_of_a_process_does_besides_is_not_to_blame() -> None:
    """It fills a cache, and multiplies into a buffer that held something else; another call gives something else."""
    cached, check = (
        digest("cached"),
        call("optimizer", [digest("flag")], [digest("flag")], op="c10d.allreduce_.default"),
    )
    reads = call(MODULES[0], [cached], [digest("a")], op="aten.mul.Tensor")
    into = [call(MODULES[0], [digest(held)], [digest("b")], op="aten.baddbmm.default") for held in ("old", "new")]
    ends = [call(MODULES[2], [digest("b")], [digest(given)], op="aten.mm.default") for given in ("right", "wrong")]
    fills = call(MODULES[0], [], [cached], op="aten.cat.default")
    flagged = call("optimizer", [digest("flag")], [digest("flag")], op="aten.abs.default")
    one = [reads, into[0], ends[0], flagged]
    other = [fills, reads, into[1], ends[1], check, flagged]
    assert located(ranks(one), ranks(other)).op == "aten.mm.default"
    gathers = call("optimizer", [digest("mine")], [digest("whole")], op="c10d.allgather_into_tensor_coalesced_.default")
    assert located(ranks([flagged, gathers]), ranks([check, flagged])).op == gathers.op
