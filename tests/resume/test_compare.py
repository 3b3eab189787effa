"""Two arms compared: what is planted is found, where it was planted, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import Arm, arm, changed, digest, edited, event, values_of, without

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.core.watching import GROUPS
from ckptguard.resume.compare import compare_loaded, compare_steps, origins
from ckptguard.resume.excuses import OF_A_STEP, RULES
from ckptguard.resume.records import RankRecord
from ckptguard.resume.results import Comparison

REFERENCE = arm((1, 6), ranks=3, saved=(3,))
RESUME = arm((4, 6), ranks=3, loaded=True)
NAMES = list(values_of(0, 4))
NO_SUSPECTS = [name for name in NAMES if "torch cpu" not in name]  # both of them planted alike can be explained
STATE = [name for name, (group, _) in values_of(0, 3, full=False).items() if group not in OF_A_STEP]


def steps(one: Arm, other: Arm, first: int = 4, last: int = 6) -> Comparison:
    return compare_steps("reference", one, "resume", other, (first, last), "does it go on as it would have?", RULES)


def loaded(one: Arm, other: Arm, later: Comparison | None = None) -> Comparison:
    return compare_loaded("save", one, "load", other, 3, "does the checkpoint hold all?", RULES, later)


def test_equal_arms() -> None:
    found = steps(REFERENCE, RESUME)
    assert (found.first, found.at_first, found.cells, found.excused) == (None, (), (), ())
    assert (found.ranks, found.values) == (3, 3 * 3 * len(NAMES))
    assert sum(count for _, count in found.agreeing) == 3 * len(NAMES)
    assert [group for group, _ in found.agreeing] == [g for g in GROUPS if g in dict(found.agreeing)]
    assert loaded(REFERENCE, RESUME).first is None
    assert loaded(REFERENCE, RESUME).values == 3 * len(STATE)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 6), st.integers(0, 2), st.sampled_from(NAMES))
def test_one_planted_change_is_the_first_difference(step: int, rank: int, item: str) -> None:
    wrong = changed(RESUME, "step", step, rank, item, digest("planted"))
    found = steps(REFERENCE, wrong)
    assert found.first is not None
    assert (found.first.kind, found.first.step, found.first.rank, found.first.item) == ("step", step, rank, item)
    assert (found.first.one, found.first.other) == (REFERENCE[rank].event("step", step).values[item], digest("planted"))
    assert found.at_first == (found.first,)
    assert found.cells == ((rank, step, 1, found.first.group),)
    assert found.first.group not in dict(found.agreeing)
    back = steps(wrong, REFERENCE)
    assert [(d.rank, d.step, d.item, d.one, d.other) for d in back.at_first] == [
        (d.rank, d.step, d.item, d.other, d.one) for d in found.at_first
    ]
    assert back.cells == found.cells


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2), st.sampled_from(STATE))
def test_one_planted_change_in_what_is_loaded(rank: int, item: str) -> None:
    found = loaded(REFERENCE, changed(RESUME, "loaded", 3, rank, item, digest("planted")))
    assert found.first is not None
    assert (found.first.kind, found.first.rank, found.first.item) == ("loaded", rank, item)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(4, 6), st.integers(0, 2), st.sampled_from(NO_SUSPECTS)),
        min_size=1,
        max_size=12,
        unique=True,
    )
)
def test_many_planted_changes(planted: list[tuple[int, int, str]]) -> None:
    wrong = RESUME
    for step, rank, item in planted:
        wrong = changed(wrong, "step", step, rank, item, digest("planted"))
    found, back = steps(REFERENCE, wrong), steps(wrong, REFERENCE)
    places = set(planted)
    lowest = min(step for step, _, _ in places)
    assert {(d.step, d.rank, d.item) for d in found.at_first} == {place for place in places if place[0] == lowest}
    assert found.first == found.at_first[0]
    assert found.first.item == min((i for s, _, i in places if s == lowest), key=NAMES.index)
    assert sum(count for _, _, count, _ in found.cells) == len(places)
    assert (back.cells, len(back.at_first)) == (found.cells, len(found.at_first))
    for rank in range(3):
        order = [NAMES.index(d.item) for d in found.at_first if d.rank == rank]
        assert order == sorted(order)


def test_the_rank_that_differs_earlier_in_the_step_comes_first() -> None:
    wrong = changed(RESUME, "step", 5, 0, "metric grad norm", 1.5)
    wrong = changed(wrong, "step", 5, 2, "loss lm loss", digest("planted"))
    wrong = changed(wrong, "step", 5, 2, "metric grad norm", 1.5)
    found = steps(REFERENCE, changed(wrong, "step", 6, 1, "counter iteration", 7))
    assert [(d.rank, d.group) for d in found.at_first] == [(2, "loss"), (2, "metric"), (0, "metric")]
    assert origins(found.at_first) == ((2,), (0,))
    assert origins(()) == ((), ())


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [(0.0, -0.0, True), (math.nan, math.nan, False), (1, 1.0, True), (1, True, True), (None, None, False),
     ([1, {"a": 0.0}], [1, {"a": -0.0}], True), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False), (None, 0, True)],
)  # fmt: skip
def test_values_are_compared_bit_for_bit(one: object, other: object, differs: bool) -> None:
    a, b = (changed(REFERENCE, "step", 4, 0, "metric x", value) for value in (one, other))
    assert (steps(a, b).first is not None) is differs


def test_an_item_that_one_side_has_not_is_a_difference_in_its_place() -> None:
    def drop(values: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in values.items() if name != "gradient chunk 0 output_layer.weight"}

    lacking = edited(RESUME, "step", 4, 1, drop)
    for one, other in ((REFERENCE, lacking), (lacking, REFERENCE)):
        found = steps(one, changed(other, "step", 4, 1, "metric grad norm", 8.0))
        assert [d.item for d in found.at_first] == ["gradient chunk 0 output_layer.weight", "metric grad norm"]
        assert (found.at_first[0].one is None) is (one is lacking)
        assert (found.at_first[0].other is None) is (other is lacking)
    null = changed(RESUME, "step", 4, 0, "metric new", None)
    found = steps(REFERENCE, null)
    assert found.first is not None
    assert found.first.item == "metric new"


def test_what_only_a_step_has_is_no_part_of_a_loaded_state() -> None:
    saved = arm((1, 3), ranks=3)
    for rank, record in saved.items():
        event("saved", 3, values_of(rank, 3), record)
    assert loaded(saved, RESUME).first is None


def test_ends_that_do_not_match_are_refused() -> None:
    with pytest.raises(UsageError, match=r"reference has 3 ranks and resume has 2:"):
        steps(REFERENCE, arm((4, 6), ranks=2))
    short = without(without(RESUME, "step", 5, 1), "step", 6, 1)
    torn = {**short, 1: dataclasses.replace(short[1], ended=False)}
    with pytest.raises(
        EnvironmentFailedError, match=r"resume: 1 of 3 ranks .*rank 1 has no state after step 5, 6.*of step 4.*torn"
    ):
        steps(REFERENCE, torn)
    with pytest.raises(EnvironmentFailedError, match=r"save: 3 of 3 ranks.* no save after step 3, its last is none"):
        loaded(arm((1, 3), ranks=3), RESUME)
    with pytest.raises(EnvironmentFailedError, match=r"load: 1 of 3 ranks .*\(2\): rank 2 has no load of step 3"):
        loaded(REFERENCE, without(RESUME, "loaded", 3, 2))
    mixed = {**RESUME, 1: dataclasses.replace(RESUME[1], facts={"world_size": 4})}
    with pytest.raises(EnvironmentFailedError, match=r"resume: its ranks tell of worlds of 3, 4 ranks"):
        steps(REFERENCE, mixed)
    silent = {rank: record for rank, record in RESUME.items() if rank != 1}
    with pytest.raises(EnvironmentFailedError, match=r"resume: 1 of 3 ranks recorded nothing: 1"):
        steps(REFERENCE, silent)


def test_excused_differences_do_not_hide_others_in_the_map() -> None:
    wrong = RESUME
    for step in (4, 5, 6):
        for item in ("rng torch cpu", "rng at begin torch cpu"):
            wrong = changed(wrong, "step", step, 1, item, digest("offset", kind="uint8[5056]"))
    found = steps(REFERENCE, wrong)
    assert (found.first, found.cells) == (None, ())
    assert [(e.ranks, e.steps, e.count) for e in found.excused] == [((1,), (4, 6), 6)]
    assert sum(count for _, count in found.agreeing) == 3 * len(NAMES) - 2
    found = steps(REFERENCE, changed(wrong, "step", 6, 0, "loss lm loss", digest("planted")))
    assert [(d.rank, d.step, d.item) for d in found.at_first] == [
        (0, 6, "loss lm loss"),
        (1, 6, "rng at begin torch cpu"),
        (1, 6, "rng torch cpu"),
    ]
    assert found.excused == ()
    assert [cell[:3] for cell in found.cells] == [(0, 6, 1), (1, 4, 2), (1, 5, 2), (1, 6, 2)]


def test_many_ranks_take_seconds() -> None:
    names = [f"parameter chunk 0 decoder.layers.{n}.weight" for n in range(380)]
    groups = dict.fromkeys(names, "parameter") | {f"metric {n}": "metric" for n in range(20)}
    values = {name: digest(name) for name in names} | {f"metric {n}": n / 7 for n in range(20)}

    def made(ranks: int) -> Arm:
        out = {}
        for rank in range(ranks):
            record = RankRecord({"world_size": ranks}, dict(groups), ended=True)
            for step in range(1, 21):
                event("step", step, {}, record)
                record.events[-1] = dataclasses.replace(
                    record.events[-1], values={f"{n}": v if isinstance(v, float) else f"{v}" for n, v in values.items()}
                )
            out[rank] = record
        return out

    one, other = made(64), made(64)
    for step in range(11, 21):
        names_then = {name: digest(name, step) for name in names}
        for rank in range(64):
            record = other[rank]
            record.events[step - 1] = dataclasses.replace(record.events[step - 1], values={**values, **names_then})
    before = time.perf_counter()
    assert steps(one, one, 1, 20).first is None
    found = steps(one, other, 1, 20)
    assert time.perf_counter() - before < 5
    assert (len(found.at_first), len(found.cells)) == (64 * 380, 64 * 10)
