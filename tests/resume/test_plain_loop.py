"""A plain loop as a watched one: what is listed, when a step begins, what the optimizer sees, calls inside a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.core.watching import LiveItem
from ckptguard.resume.orders import Order
from ckptguard.resume.plain_loop import PlainLoop
from ckptguard.resume.plain_state import PlainState, by_name
from ckptguard.resume.recorder import Recorder
from ckptguard.resume.records import RankRecord, read_arm


class Run:
    """A tiny loop in this process."""

    def __init__(self, folder: Path, **order: Any) -> None:
        torch.manual_seed(0)
        self.recorder = Recorder(Order(arm="a", folder=str(folder), **order), 0, 1)
        self.loop, self.folder = PlainLoop(self.recorder), folder
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            batch = torch.full((2, 4), float(step))
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loop.step(step, loss, batch, self.parts, {})

    def read(self) -> RankRecord:
        self.recorder.ended()
        return read_arm(self.folder)[0]


def test_gradients_are_what_the_optimizer_saw_and_the_generator_is_as_the_step_began(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.loop.loaded(0, run.parts, {"seen": 3})
    torch.rand(1)  # between loading and the step
    run.steps(1, 2)
    record = run.read()
    loaded, first, second = record.events
    assert record.unobserved == []
    assert loaded.values["other seen"] == 3
    assert loaded.values["rng torch cpu"] != first.values["rng at begin torch cpu"]
    assert (
        first.values["rng torch cpu"]
        == second.values["rng at begin torch cpu"]
        != first.values["rng at begin torch cpu"]
    )
    for event in (first, second):
        assert sum(record.groups[name] == "gradient" for name in event.values) == 4
        assert event.values["batch 0"].endswith("float32[2, 4]")
        assert event.values["loss"].split()[1] == "float32[]"
    assert "optimizer momentum_buffer chunk 0 2.weight" in first.values
    assert "optimizer momentum_buffer chunk 0 2.weight" not in loaded.values


def test_a_loop_that_tells_nothing_of_loading_is_recorded_with_the_gradients_that_are_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model(torch.ones(1, 4)).sum().backward()
    run.loop.step(1, None, None, run.parts, {"norm": 2})
    (event,) = run.read().events
    assert event.values["metric norm"] == 2
    assert "gradient chunk 0 0.weight" in event.values


def test_calls_of_modules_and_of_operations_are_those_of_the_steps_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, level="op", calls=(2, 2))
    run.loop.loaded(0, run.parts, {})
    run.steps(1, 3)
    record = run.read()
    assert record.unobserved == []
    assert {call.step for call in record.calls} == {2}
    assert {"chunk 0 0", "chunk 0 1", "chunk 0 2", "optimizer"} <= {call.scope for call in record.calls}
    assert {call.phase for call in record.calls if not call.op} >= {"forward", "backward"}
    optimizer = {call.op for call in record.calls if call.scope == "optimizer"}
    assert optimizer
    assert not any("get_state" in op or "detach" in op for op in optimizer)


def test_recording_calls_does_not_change_the_run(tmp_path: Path) -> None:
    finals = []
    for level in ("metrics", "op"):
        (tmp_path / level).mkdir()
        run = Run(tmp_path / level, level=level, calls=(1, 3))
        run.loop.loaded(0, run.parts, {})
        run.steps(1, 3)
        assert run.read().unobserved == []
        finals.append([*run.model.parameters(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*finals, strict=True))


def test_parts_are_one_several_or_named() -> None:
    assert by_name(None) == {}
    assert by_name(5) == {"": 5}
    assert by_name([5]) == {"": 5}
    assert by_name([5, 6]) == {"0 ": 5, "1 ": 6}
    assert by_name({"a": 5}) == {"a ": 5}
    both = [torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)]
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in both]
    scaler = torch.amp.GradScaler("cpu")
    found, unobserved = PlainState(model=both, optimizer={"one": sgd[0], "two": sgd[1]}, scaler=scaler).items()
    names = [item.name for item in found]
    assert len(set(names)) == len(names)
    for name in (
        "parameter chunk 1 weight",
        "buffer chunk 1 running_mean",
        "param group two 0 lr",
        "scaler _growth_tracker",
    ):
        assert name in names
    assert unobserved == []


def test_an_optimizer_of_another_form_is_said() -> None:
    _, unobserved = PlainState(model=torch.nn.Linear(1, 1), optimizer=object()).items()
    assert unobserved == ["optimizer (object): it has no state and param_groups of torch's form"]


@pytest.mark.parametrize(
    "name", ["parameter chunk 0 0.weight", "param group 0 lr", "scheduler last_epoch", "rng torch cpu"]
)
def test_what_was_read_can_be_written_back(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)

    def item() -> LiveItem:
        found = PlainState(**run.parts, scheduler=scheduler).items()[0]
        return next(item for item in found if item.name == name)

    before = item().read()
    before = before.clone() if isinstance(before, torch.Tensor) else before
    run.steps(1, 1)
    scheduler.step()
    assert not torch.equal(torch.as_tensor(item().read()), torch.as_tensor(before))
    write = item().write
    assert write is not None
    write(before)
    assert torch.equal(torch.as_tensor(item().read()), torch.as_tensor(before))
    run.recorder.ended()


def test_a_thousand_small_tensors_are_recorded_fast_and_in_little_space(tmp_path: Path) -> None:
    recorder = Recorder(Order(arm="a", folder=str(tmp_path)), 0, 1)
    tensors = [torch.full((8, 1 + n % 16), float(n)) for n in range(1000)]
    items = [LiveItem(f"parameter {n}", "parameter", lambda t=t: t) for n, t in enumerate(tensors)]
    spent, stored, path = [], [], tmp_path / "rank_00000.jsonl.zst"
    for step in range(1, 6):
        tensors[0].add_(1)
        start = time.thread_time()
        recorder.step_ended(step, {}, items)
        spent.append(time.thread_time() - start)
        stored.append(path.stat().st_size)
    recorder.ended()
    assert min(spent) < 0.15  # 0.015 s on a quiet machine
    assert stored[1] - stored[0] < 32 << 10
