"""Calls of a real Megatron run: two pipeline stages, recomputation, dropout, and outputs that the schedule frees."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import wrong_kernel

from ckptguard.resume.call_compare import first_fault
from ckptguard.resume.injected import site_directory
from ckptguard.resume.orders import VARIABLE, Order
from ckptguard.resume.records import Call, RankRecord, read_arm
from ckptguard.testing.recipes import Recipe, make_checkpoint

RECIPE = Recipe(
    name="calls_pp2",
    pp=2,
    num_layers=2,
    extra_flags=tuple(
        shlex.split("""--hidden-dropout 0.1 --attention-dropout 0.1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1""")
    ),
)
STEP = wrong_kernel.STEP
Arm = dict[int, RankRecord]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arm]:
    """The same two steps three times: without calls, with all calls, and with them and a wrong kernel."""
    root = tmp_path_factory.mktemp("arms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site_directory()), str(Path(__file__).parent)]))

        def run(name: str, order: Callable[[str], Order]) -> Arm:
            folder = root / name
            patch.setenv(VARIABLE, str(order(str(folder)).write()))
            make_checkpoint(RECIPE, folder / "saved")
            return read_arm(folder)

        return {
            "plain": run("plain", lambda folder: Order(arm="plain", folder=folder)),
            "calls": run("calls", lambda folder: Order(arm="calls", folder=folder, level="op", calls=(STEP, STEP))),
            "wrong": run(
                "wrong",
                lambda folder: Order(
                    arm="wrong", folder=folder, level="op", calls=(STEP, STEP), plugin="wrong_kernel:plant"
                ),
            ),
        }


@pytest.mark.megatron
@pytest.mark.slow
def test_recording_calls_changes_nothing_that_is_recorded_of_state(arms: dict[str, Arm]) -> None:
    for rank, plain in arms["plain"].items():
        assert not plain.calls
        assert arms["calls"][rank].events == plain.events
        assert arms["calls"][rank].calls
        assert {call.step for call in arms["calls"][rank].calls} == {STEP}
        assert arms["calls"][rank].unobserved == plain.unobserved


@pytest.mark.megatron
@pytest.mark.slow
def test_what_one_stage_sends_is_what_the_next_is_handed(arms: dict[str, Arm]) -> None:
    first, second = (arms["calls"][rank].calls for rank in (0, 1))
    sent = [call.inputs[0] for call in first if call.op == "c10d.send.default"]
    handed = [call for call in second if call.scope == "chunk 0 decoder" and call.phase == "forward"]
    assert len(sent) == 4  # micro-batches
    assert [_holds(call, value) for call, value in zip(handed, sent, strict=True)] == [True] * 4
    back = [call.inputs[0] for call in second if call.op == "c10d.send.default"]
    taken = [call for call in first if call.scope == "chunk 0 decoder" and call.phase == "backward"]
    assert [_holds(call, value) for call, value in zip(taken, back, strict=True)] == [True] * 4


def _holds(call: Call, value: object) -> bool:
    return value in call.inputs


@pytest.mark.megatron
@pytest.mark.slow
def test_gradients_are_accumulated_where_megatron_keeps_them(arms: dict[str, Arm]) -> None:
    for record in arms["calls"].values():
        layer = "chunk 0 decoder.layers.0.mlp.linear_fc1"
        calls = [call for call in record.calls if call.scope == layer]
        added = [call for call in calls if call.phase == "weight gradient" and not call.op]
        assert len(added) == 4
        assert [call.inputs[1] for call in added[1:]] == [call.outputs[0] for call in added[:-1]]
        forward = [call for call in calls if call.phase == "forward" and not call.op]
        assert len(forward) == 8  # each micro-batch again in its backward pass
        assert {call.op for call in calls if call.phase == "weight gradient"} == {"", "aten.add_.Tensor"}


@pytest.mark.megatron
@pytest.mark.slow
def test_a_wrong_kernel_on_one_rank_is_named(arms: dict[str, Arm]) -> None:
    found = first_fault(arms["calls"], arms["wrong"])
    assert found is not None
    call = found.fault.call
    assert (found.fault.rank, found.fault.sort) == (1, "compute")
    assert (call.step, call.scope, call.phase) == (STEP, f"chunk 0 {wrong_kernel.MODULE}", "forward")
    assert (call.op, call.occurrence) == ("aten.mm.default", 0)
    modules = {
        name: {rank: _modules_only(record) for rank, record in arms[name].items()} for name in ("calls", "wrong")
    }
    found = first_fault(modules["calls"], modules["wrong"])
    assert found is not None
    assert (found.fault.rank, found.fault.sort) == (1, "compute")
    assert (found.fault.call.scope, found.fault.call.phase) == (f"chunk 0 {wrong_kernel.MODULE}", "forward")


def _modules_only(record: RankRecord) -> RankRecord:
    return RankRecord(calls=[call for call in record.calls if not call.op], groups=record.groups, events=record.events)
