"""Rules that explain differences: each explains its own case, and none hides anything else."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_records import Arm, arm, changed, digest, edited, values_of

from ckptguard.resume.compare import compare_loaded, compare_steps
from ckptguard.resume.excuses import OF_A_STEP, RULES
from ckptguard.resume.results import Comparison

REFERENCE = arm((1, 6), saved=(3,))
RESUME = arm((4, 6), loaded=True)
CPU = ("rng torch cpu", "rng at begin torch cpu")
BUFFER = next(name for name in values_of(0, 1) if name.startswith("unsaved buffer"))
OPERATIONS = "counter num_floating_point_operations_so_far"


def steps(one: Arm, other: Arm) -> Comparison:
    return compare_steps("reference", one, "resume", other, (4, 6), "does it go on?", RULES)


def loaded(one: Arm, other: Arm, later: Comparison | None) -> Comparison:
    return compare_loaded("save", one, "load", other, 3, "does the checkpoint hold all?", RULES, later)


def all_steps(records: Arm, values: dict[str, object]) -> Arm:
    """The same values in every step of every rank."""
    for rank in records:
        for step in (4, 5, 6):
            for item, value in values.items():
                records = changed(records, "step", step, rank, item, value)
    return records


def offset(records: Arm) -> Arm:
    """The CPU generator is elsewhere and stays there."""
    value = digest("offset", kind="uint8[5056]")
    return all_steps(records, dict.fromkeys(CPU, value))


def names(comparison: Comparison) -> set[str]:
    return {item for excused in comparison.excused for item in excused.items}


def test_the_cpu_generator_is_excused_if_nothing_draws_from_it() -> None:
    found = steps(REFERENCE, offset(RESUME))
    assert found.first is None
    (excused,) = found.excused
    assert (excused.rule, set(excused.items)) == ("CPU generator without a consumer", set(CPU))
    assert (excused.ranks, excused.steps, excused.count) == ((0, 1), (4, 6), 12)
    assert "DataLoader" in excused.why
    assert "load_checkpoint" in excused.why


def test_the_cpu_generator_right_after_loading() -> None:
    wrong = RESUME
    for rank in (0, 1):
        wrong = changed(wrong, "loaded", 3, rank, CPU[0], digest("offset", kind="uint8[5056]"))
    later = steps(REFERENCE, offset(RESUME))
    assert loaded(REFERENCE, wrong, later).first is None
    assert names(loaded(REFERENCE, wrong, later)) == {CPU[0]}
    worse = steps(REFERENCE, changed(RESUME, "step", 6, 0, "loss lm loss", digest("planted")))
    for not_enough in (None, worse):
        assert loaded(REFERENCE, wrong, not_enough).first is not None
    both = changed(wrong, "loaded", 3, 0, BUFFER, digest("planted"))
    assert names(loaded(REFERENCE, both, later)) == {CPU[0], BUFFER}


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 6), st.integers(0, 1), st.sampled_from([n for n in values_of(0, 4) if n not in CPU]))
def test_any_other_difference_makes_the_cpu_generator_one(step: int, rank: int, item: str) -> None:
    found = steps(REFERENCE, changed(offset(RESUME), "step", step, rank, item, digest("planted")))
    assert found.excused == ()
    assert found.first is not None
    assert any(count for at, where, count, _ in found.cells if (at, where) == (rank, step))
    assert sum(count for _, _, count, _ in found.cells) == 13
    assert (found.first.step, found.first.rank, found.first.item) == (step, rank, item)


def test_a_cpu_generator_that_moves_in_a_step_has_a_consumer() -> None:
    def drawing(records: Arm, *, seed: str) -> Arm:
        for rank in records:
            for step in (4, 5, 6):
                records = changed(records, "step", step, rank, CPU[1], digest(seed, step - 1, kind="uint8[5056]"))
                records = changed(records, "step", step, rank, CPU[0], digest(seed, step, kind="uint8[5056]"))
        return records

    found = steps(drawing(REFERENCE, seed="a"), drawing(RESUME, seed="b"))
    assert found.first is not None
    assert found.excused == ()
    once = changed(offset(RESUME), "step", 5, 1, CPU[0], digest("drawn", kind="uint8[5056]"))
    assert steps(REFERENCE, once).first is not None


def test_a_cpu_generator_that_gives_dropout_cannot_be_excused() -> None:
    def lacks_cuda(records: Arm) -> Arm:
        for rank in records:
            for e in records[rank].events:
                records = edited(
                    records, e.kind, e.step, rank, lambda v: {n: x for n, x in v.items() if n != "rng cuda"}
                )
        return records

    assert steps(lacks_cuda(REFERENCE), lacks_cuda(offset(RESUME))).first is not None
    alias = digest("offset", kind="uint8[5056]")
    assert steps(REFERENCE, all_steps(offset(RESUME), {"rng cuda": alias})).first is not None


@pytest.mark.parametrize("item", [CPU[0].replace("torch cpu", other) for other in ("python", "numpy", "cuda")])
def test_no_other_generator_is_excused(item: str) -> None:
    found = steps(REFERENCE, all_steps(RESUME, {item: digest("offset")}))
    assert found.first is not None
    assert found.first.item == item


def test_unsaved_buffers_are_excused_right_after_loading_only() -> None:
    wrong = changed(RESUME, "loaded", 3, 1, BUFFER, digest("fresh"))
    later = steps(REFERENCE, RESUME)
    assert later.first is None
    found = loaded(REFERENCE, wrong, later)
    assert (found.first, names(found)) == (None, {BUFFER})
    assert loaded(REFERENCE, wrong, None).first is not None
    gone = edited(RESUME, "loaded", 3, 1, lambda values: {n: v for n, v in values.items() if n != BUFFER})
    assert loaded(REFERENCE, gone, later).first is None
    read = steps(REFERENCE, changed(RESUME, "step", 4, 1, BUFFER, digest("fresh")))
    assert read.first is not None
    assert loaded(REFERENCE, wrong, read).first is not None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([n for n, (g, _) in values_of(0, 3, full=False).items() if g not in OF_A_STEP]))
def test_no_rule_hides_what_else_was_loaded_wrong(item: str) -> None:
    assume(item not in (BUFFER, CPU[0]))
    wrong = changed(RESUME, "loaded", 3, 1, item, digest("planted"))
    wrong = changed(wrong, "loaded", 3, 0, BUFFER, digest("fresh"))
    found = loaded(REFERENCE, wrong, steps(REFERENCE, RESUME))
    assert {(d.rank, d.item) for d in found.at_first} == {(1, item), (0, BUFFER)}
    assert found.excused == ()


def test_padding_is_silent_whatever_else_differs() -> None:
    wrong = all_steps(RESUME, {"optimizer exp_avg bucket 0 padding": digest("noise")})
    found = steps(all_steps(REFERENCE, {"optimizer exp_avg bucket 0 padding": digest("other noise")}), wrong)
    assert (found.first, found.excused[0].rule) == (None, "padding")
    found = steps(REFERENCE, changed(wrong, "step", 5, 0, "metric grad norm", 8.0))
    assert [d.item for d in found.at_first] == ["metric grad norm"]
    assert found.excused[0].rule == "padding"


def test_counts_of_the_process() -> None:
    counted = {
        "other rerun current_iteration": 5,
        "other rerun max_values": {"loss": 9.0},
        "other rerun rerun_requested": False,
    }
    one = all_steps(REFERENCE, counted)
    other = all_steps(RESUME, counted | {"other rerun current_iteration": 0, "other rerun max_values": {"loss": 3.0}})
    found = steps(one, other)
    assert found.first is None
    assert names(found) == {"other rerun current_iteration", "other rerun max_values"}
    assert steps(one, changed(other, "step", 5, 0, "other rerun rerun_requested", True)).first is not None
    assert steps(one, changed(other, "step", 5, 0, "other rerun mode", "disabled")).first is not None


def test_counts_of_the_process_beside_another_difference() -> None:
    count = "other rerun current_iteration"
    one = changed(REFERENCE, "saved", 3, 0, count, 2)
    wrong = changed(changed(RESUME, "loaded", 3, 0, count, -1), "loaded", 3, 0, "scheduler num_steps", 8)
    found = loaded(one, wrong, None)
    assert [d.item for d in found.at_first] == ["scheduler num_steps"]
    assert names(found) == {count}


def test_pre_hooks_of_the_first_step_only() -> None:
    hooks = "other forward pre-hooks chunk 0"
    one, other = all_steps(REFERENCE, {hooks: True}), all_steps(RESUME, {hooks: True})
    found = steps(one, changed(other, "step", 4, 1, hooks, False))
    assert (found.first, names(found)) == (None, {hooks})
    assert steps(one, changed(other, "step", 5, 1, hooks, False)).first is not None
    computed = changed(changed(other, "step", 4, 1, hooks, False), "step", 4, 1, "loss lm loss", digest("planted"))
    assert [d.item for d in steps(one, computed).at_first] == ["loss lm loss", hooks]


@pytest.mark.parametrize(("value", "excused"), [(12.0, True), (13.0, False), (True, False), ("12", False)])
def test_type_of_the_count_of_operations(value: object, excused: bool) -> None:
    one = changed(REFERENCE, "saved", 3, 0, OPERATIONS, 12)
    found = loaded(one, changed(RESUME, "loaded", 3, 0, OPERATIONS, value), None)
    assert (found.first is None) is excused
