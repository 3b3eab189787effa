"""The recorder in real processes and, for what goes wrong, in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.core.watching import GROUPS, LiveItem
from ckptguard.resume import recorder as recording
from ckptguard.resume.orders import VARIABLE, Order, read_order
from ckptguard.resume.recorder import FAILED, Recorder
from ckptguard.resume.records import Event, RankRecord, read_arm, same

SITE = Path(recording.__file__).parent / "site"
LOOP = Path(__file__).with_name("plain_train.py")


def start(
    root: Path, arm: str, *words: object, recorded: bool = True, order: Mapping[str, Any] | None = None
) -> subprocess.Popen[bytes]:
    """A run of the loop, recorded into ``root / arm`` or not; what it prints is in ``root / arm.log``."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1"}
    if recorded:
        environment[VARIABLE] = str(Order(arm=arm, folder=str(root / arm), **(order or {})).write())
    with (root / f"{arm}.log").open("wb") as log:
        line = [sys.executable, str(LOOP), *map(str, words)]
        return subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(*processes: subprocess.Popen[bytes]) -> list[int]:
    """Exit codes of all of them."""
    try:
        return [process.wait(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def unequal(one: Event | None, other: Event | None) -> list[str]:
    assert one is not None
    assert other is not None
    names = list(dict.fromkeys([*one.values, *other.values]))
    return [
        n for n in names if n not in one.values or n not in other.values or not same(one.values[n], other.values[n])
    ]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 6 steps, recorded and not; 3 steps and a save, also by a loop that forgets torch's generator."""
    root = tmp_path_factory.mktemp("arms")
    kept = {"keep": ["rng torch cpu", "optimizer exp_avg chunk 0 head.weight", "rng python", "rng numpy"]}
    codes = finish(
        start(root, "unrecorded", "--steps", 6, "--final", root / "unrecorded.pt", recorded=False),
        start(root, "reference", "--steps", 6, "--final", root / "recorded.pt", "--helpers"),
        start(root, "save", "--steps", 3, "--save", root / "saved"),
        start(root, "forgets", "--steps", 3, "--save", root / "forgotten", "--forget", "torch", order=kept),
    )
    assert codes == [0, 0, 0, 0], [path.read_text() for path in root.glob("*.log")]
    return root


@pytest.fixture(scope="module")
def records(arms: Path) -> dict[str, RankRecord]:
    restored = ["rng torch cpu", "optimizer exp_avg chunk 0 head.weight", "rng python", "rng numpy"]
    back = {"restore": restored, "restore_from": str(arms / "forgets")}
    codes = finish(
        start(arms, "load", "--steps", 6, "--load", arms / "saved", order={"stop_when_loaded": True}),
        start(arms, "resume", "--steps", 6, "--load", arms / "saved"),
        start(arms, "wrong", "--steps", 6, "--load", arms / "forgotten"),
        start(arms, "restored", "--steps", 6, "--load", arms / "forgotten", order=back),
    )
    assert codes == [0, 0, 0, 0], [path.read_text() for path in arms.glob("*.log")]
    return {path.parent.name: read_arm(path.parent)[0] for path in arms.glob("*/order.json")}


def test_recording_does_not_change_the_run(arms: Path) -> None:
    one, other = (torch.load(arms / f"{name}.pt") for name in ("unrecorded", "recorded"))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stream_says_who_wrote_it_and_that_it_ended(records: dict[str, RankRecord]) -> None:
    for name, record in records.items():
        assert record.ended, name
        assert record.unobserved == [], name
        assert (record.facts["rank"], record.facts["world_size"], record.facts["framework"]) == (0, 1, "PyTorch loop")
    assert [(e.kind, e.step) for e in records["save"].events] == [
        ("loaded", 0), ("step", 1), ("step", 2), ("step", 3), ("saved", 3),
    ]  # fmt: skip


def test_helper_processes_write_nothing(records: dict[str, RankRecord], arms: Path) -> None:
    steps = [(e.kind, e.step) for e in records["reference"].events]
    assert steps == [("loaded", 0), *(("step", step) for step in range(1, 7))]
    assert sorted(path.name for path in (arms / "reference").iterdir()) == ["order.json", "rank_00000.jsonl.zst"]


def test_every_kind_of_state_is_an_item_in_the_order_of_a_step(records: dict[str, RankRecord]) -> None:
    record = records["reference"]
    step = record.event("step", 2)
    assert step is not None
    groups = [record.groups[name] for name in step.values]
    assert groups == sorted(groups, key=GROUPS.index)
    for name in (
        "rng at begin torch cpu", "batch 0 words", "loss words", "gradient chunk 0 layers.1.weight", "metric grad_norm",
        "optimizer exp_avg chunk 0 head.bias", "optimizer step chunk 0 head.bias", "parameter chunk 0 norm.weight",
        "buffer chunk 0 norm.running_mean", "unsaved buffer chunk 0 scale", "param group 0 lr", "scheduler last_epoch",
        "rng python", "rng numpy", "rng torch cpu",
    ):  # fmt: skip
        assert name in step.values
    assert step.values["scheduler last_epoch"] == 2


def test_a_resumed_run_is_equal_and_one_that_forgets_a_generator_is_not(records: dict[str, RankRecord]) -> None:
    for step in (4, 5, 6):
        assert unequal(records["reference"].event("step", step), records["resume"].event("step", step)) == []
    assert unequal(records["save"].event("saved", 3), records["resume"].event("loaded", 3)) == []
    assert unequal(records["forgets"].event("saved", 3), records["wrong"].event("loaded", 3)) == ["rng torch cpu"]
    assert (
        unequal(records["reference"].event("step", 4), records["wrong"].event("step", 4))[0] == "rng at begin torch cpu"
    )


def test_kept_items_are_put_back(records: dict[str, RankRecord]) -> None:
    assert unequal(records["save"].event("saved", 3), records["restored"].event("loaded", 3)) == []
    assert unequal(records["reference"].event("step", 6), records["restored"].event("step", 6)) == []


def test_an_arm_that_only_loads_stops_before_a_step(records: dict[str, RankRecord]) -> None:
    assert [(e.kind, e.step) for e in records["load"].events] == [("loaded", 3)]
    assert unequal(records["save"].event("saved", 3), records["load"].event("loaded", 3)) == []


def test_torn_streams_are_read_up_to_the_last_step(tmp_path: Path) -> None:
    failing = start(tmp_path, "fails", "--steps", 6, "--fail-at", 3)
    killed = start(tmp_path, "killed", "--steps", 1_000_000)
    stream = tmp_path / "killed" / "rank_00000.jsonl.zst"
    until = time.monotonic() + 100
    while time.monotonic() < until and not (stream.exists() and stream.stat().st_size > 5000):
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    assert finish(killed, failing) == [-signal.SIGKILL, 1]
    assert "the loop fails as it was told to" in (tmp_path / "fails.log").read_text()
    fails, record = (read_arm(tmp_path / name)[0] for name in ("fails", "killed"))
    assert not fails.ended
    assert [e.step for e in fails.events] == [0, 1, 2]
    assert not record.ended
    assert [e.step for e in record.events] == list(range(len(record.events)))
    assert len(record.events) > 1


# In this process.


def item(name: str, value: Any, group: Any = "parameter") -> LiveItem:
    held = [value]
    return LiveItem(name, group, lambda: held[0], lambda new: held.__setitem__(0, new))


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def made(**order: Any) -> Recorder:
        return Recorder(Order(arm="arm", folder=str(tmp_path), **order), 2, 4)

    return made


def read(recorder: Recorder) -> RankRecord:
    recorder.ended()
    return read_arm(Path(recorder.order.folder))[recorder.rank]


def step(recorder: Recorder, number: int, *items: LiveItem, **values: Any) -> None:
    recorder.step_begins(number, [])
    recorder.step_ended(number, values, items)


def test_an_error_of_the_recorder_fails_the_arm_and_not_the_training(make: Any) -> None:
    recorder = make()
    recorder.observers.append(lambda kind, step, items: 1 // 0)
    for number in (1, 2):
        step(recorder, number, item("a", number))
    record = read(recorder)
    assert [e.values for e in record.events] == [{"a": 1}, {"a": 2}]
    assert len(record.unobserved) == 1
    assert record.unobserved[0].startswith(f"{FAILED}: ZeroDivisionError")


def test_an_item_that_cannot_be_read_is_said_once(make: Any) -> None:
    recorder = make()
    broken = LiveItem("b", "parameter", lambda: {}["missing"])
    for number in (1, 2):
        step(recorder, number, item("a", 1), broken, item("c", object()))
    record = read(recorder)
    assert record.unobserved == [
        "b: cannot be read (KeyError: 'missing')",
        "c: a builtins.object has no value that could be compared",
    ]
    assert record.events[1].values == {"a": 1, "c": "?builtins.object"}


def test_a_full_disk_ends_recording_and_not_training(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = make()
    step(recorder, 1, item("a", 1))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    recorder._writer._line = full
    for number in (2, 3):
        step(recorder, number, item("a", 1))
    assert capsys.readouterr().err.count("No space left") == 2  # one line: the error, and that it cannot be written
    recorder.ended()
    assert not read_arm(Path(recorder.order.folder))[2].ended


def test_a_second_process_of_a_rank_is_refused(make: Any) -> None:
    first, second = make(), make()
    first.started({"x": 1})
    second.started({"x": 2})
    step(second, 1, item("a", 2))
    step(first, 1, item("a", 1))
    record = read(first)
    assert record.facts["x"] == 1
    assert [e.values for e in record.events] == [{"a": 1}]


def test_metrics_are_the_cheap_groups(make: Any) -> None:
    recorder = make(level="metrics")
    recorder.step_begins(1, [item("rng torch", b"", "rng")])
    recorder.batch({"tokens": torch.ones(2), "more": [torch.zeros(1)]})
    recorder.batch((torch.ones(2), 3))
    recorder.gradients([item("g", torch.ones(1), "gradient")])
    items = [item(group, 1, group) for group in GROUPS if group not in ("loss", "metric", "batch", "gradient")]
    recorder.step_ended(1, {"loss lm": torch.tensor(2.0), "metric norm": 1.5, "odd": 1}, items)
    record = read(recorder)
    assert list(record.events[0].values) == [
        "counter", "batch 0 tokens", "batch 0 more 0", "batch 1 0", "batch 1 1", "loss lm", "metric norm", "param group",
        "scheduler", "odd",
    ]  # fmt: skip


def test_plugins_see_the_moments_and_can_change_what_is_recorded(tmp_path: Path) -> None:
    order = Order(arm="a", folder=str(tmp_path), plugin="test_recorder:plugin", plugin_argument="x")
    recorder = Recorder(order, 0, 1)
    seen: list[Any] = []
    recorder.observers.append(lambda kind, number, items: seen.append((kind, number, [i.name for i in items])))
    a = item("a", 1)
    recorder.loaded(0, [a], ["something"])
    recorder.step_begins(1, [item("rng x", 7, "rng at begin")])
    recorder.gradients([item("g", 5, "gradient")])
    recorder.step_ended(1, {}, [a])
    recorder.saved(1, [a])
    record = read(recorder)
    assert recorder.plugged == [("loaded", 0, ["a"]), ("step", 1, ["a", "rng x"]), ("gradients", 1, ["a", "g"])]
    assert seen == [("loaded", 0, ["a"]), ("step", 1, ["a"]), ("saved", 1, ["a"])]
    assert [e.values for e in record.events] == [{"a": "x"}, {"rng x": 7, "g": 5, "a": "x"}, {"a": "x"}]
    assert record.unobserved == ["something"]


def plugin(recorder: Any, argument: str) -> None:
    recorder.plugged = []
    for moment, calls in recorder.before.items():
        calls.append(lambda r, step, items, moment=moment: r.plugged.append((moment, step, list(items))))
    recorder.before["loaded"].append(lambda r, step, items: items["a"].write(argument))


def test_a_plugin_that_is_not_there_fails_the_arm(make: Any) -> None:
    recorder = make(plugin="no_such_module:f")
    step(recorder, 1)
    assert read(recorder).unobserved[0].startswith(f"{FAILED}: ModuleNotFoundError")


def test_what_cannot_be_put_back_fails_the_arm(make: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    torch.save({"a": 1, "fixed": 2}, tmp_path / "other" / "kept_rank_00002.pt")
    recorder = make(restore=("a", "fixed", "gone", "new"), restore_from=str(tmp_path / "other"))
    fixed = LiveItem("fixed", "other", lambda: 0)
    recorder.loaded(3, [item("a", 0), fixed, item("new", 0)], [])
    record = read(recorder)
    assert record.events[0].values == {"a": 1, "new": 0, "fixed": 0}
    assert [words.removeprefix(f"{FAILED}: ").split(" cannot")[0] for words in record.unobserved] == [
        "fixed",
        "gone",
        "new",
    ]


def test_a_fork_writes_nothing(make: Any) -> None:
    recorder = make()
    step(recorder, 1, item("a", 1))
    if (child := os.fork()) == 0:
        step(recorder, 2, item("a", 2))
        recorder.ended()
        os._exit(0)
    os.waitpid(child, 0)
    step(recorder, 2, item("a", 3))
    assert [e.values["a"] for e in read(recorder).events] == [1, 3]


def test_an_order_survives_its_file(tmp_path: Path) -> None:
    order = Order(arm="a", folder=str(tmp_path), keep=("x",), calls=(1, 2), plugin="m:f")
    assert read_order(order.write()) == order


# What Python runs at start-up.


def python(code: str, *flags: str, cwd: Path, path: str, **environment: str) -> str:
    told = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **environment},
        cwd=cwd, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return told.stdout + told.stderr


def test_the_next_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('next')")
    code = "import sys; print(sorted(m for m in sys.modules if 'ckptguard' in m or m in ('torch', 'numpy')))"
    assert python(code, cwd=tmp_path, path=f"{SITE}:{tmp_path}") == "next\n[]\n"
    assert python(code, cwd=tmp_path, path=str(SITE)) == "[]\n"
    told = python(code, cwd=tmp_path, path=f"{SITE}:{tmp_path}", **{VARIABLE: "x"})
    assert told == "next\n['ckptguard', 'ckptguard.core', 'ckptguard.core.after_import']\n"


def test_an_interpreter_that_has_not_installed_it_finds_it_last(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(SITE)!r}); import sitecustomize, ckptguard; print(sys.path[-1])"
    told = python(code, "-S", cwd=tmp_path, path="", **{VARIABLE: "x"})
    assert told.strip() == str(SITE.parents[2])


def test_a_recorder_that_cannot_be_made_does_not_stop_the_loop(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SITE), VARIABLE: str(tmp_path / "none.json")}
    told = subprocess.run(
        [sys.executable, str(LOOP), "--steps", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert told.stderr.count("ckptguard: recording failed: FileNotFoundError") == 1


def test_the_package_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, ckptguard; ckptguard.record(1, model=None); print('torch' in sys.modules)"
    assert python(code, cwd=tmp_path, path="") == "False\n"
