"""Arms that do what they have to, and arms that crash, hang, ignore signals, save nothing, or do something else."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from ckptguard.resume import streams
from ckptguard.resume.arm_lines import ArmLine
from ckptguard.resume.arm_logs import why
from ckptguard.resume.arms import run_arm

_MARK = "CKPTGUARD_TEST_ARM"
_BEGINNING = """
import os, signal, subprocess, sys, time
from pathlib import Path
from ckptguard.resume.records import RankWriter
folder = Path(os.environ["FOLDER"])
def rank(number=0, world=1, start=0, steps=range(1, 5), saves=(), end=True, notes=(), loaded=True):
    writer = RankWriter(folder, number)
    writer.facts({"rank": number, "world_size": world})
    if notes:
        writer.unobserved(notes)
    if loaded:
        writer.event("loaded", start, [("a", "counter", start)])
    for step in steps:
        writer.event("step", step, [("a", "counter", step)])
        if step in saves:
            writer.event("saved", step, [("a", "counter", step)])
    if end:
        writer.end()
    return writer
def checkpoint(step, tracker=True, content=True):
    root = Path(os.environ["CHECKPOINTS"]); made = root / f"iter_{step:07d}"; made.mkdir(parents=True)
    if content:
        (made / "common.pt").write_bytes(b"x")
    if tracker:
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
"""


class Arm:
    """Runs a script as an arm, and knows whether a process of it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex

    def line(self, script: str, **changed) -> ArmLine:
        path = self.folder / "train.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_BEGINNING + textwrap.dedent(script))
        checkpoints = str(self.folder / "checkpoints")
        environment = {_MARK: self.mark, "FOLDER": str(self.folder), "CHECKPOINTS": checkpoints}
        line = ArmLine(
            name="reference", role="reference", purpose="", folder=str(self.folder), added=(),
            command=(sys.executable, str(path)),
            environment=tuple(environment.items()), start=0, end=4, saves=(), checkpoints=checkpoints, elsewhere=False,
            framework="megatron-lm", world=None,
        )  # fmt: skip
        return dataclasses.replace(line, **changed)

    def run(self, script: str, *, timeout_seconds=60.0, on_progress=lambda step: None, quiet_seconds=None, **changed):
        run = run_arm(
            self.line(script, **changed), self.folder, timeout_seconds=timeout_seconds, quiet_seconds=quiet_seconds,
            grace_seconds=1.0, on_progress=on_progress,
        )  # fmt: skip
        assert self.left() == []
        return run

    def left(self) -> list[int]:
        """Processes of the arm that are still there, by a variable that all of them inherited."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def arm(tmp_path) -> Arm:
    return Arm(tmp_path / "arm")


def test_an_arm_that_does_what_it_has_to(arm):
    seen = []
    run = arm.run("print('hello'); rank()", on_progress=seen.append)
    assert (run.problem, run.exit_code, run.last_lines) == (None, 0, ())
    assert Path(run.log).read_text() == "hello\n"
    assert seen[-1] == 4
    assert run.seconds > 0


def test_progress_is_told_while_it_runs(arm):
    script = """
    writer = rank(steps=[1], end=False)
    for step in (2, 3, 4):
        while not (folder / f"seen_{step - 1}").exists():
            time.sleep(0.01)
        writer.event("step", step, [("a", "counter", step)])
    writer.end()
    """
    run = arm.run(script, on_progress=lambda step: (arm.folder / f"seen_{step}").touch())
    assert run.problem is None


_CRASH = """
def main():
    raise RuntimeError("boom")
rank(steps=range(1, 3), end=False)
main()
"""


def test_an_arm_that_crashes(arm):
    run = arm.run(_CRASH)
    assert run.problem == "it ended with code 1; the last step recorded is 2: RuntimeError: boom"
    assert run.last_lines[0] == "Traceback (most recent call last):"
    assert run.last_lines[-1] == "RuntimeError: boom"
    assert run.exit_code == 1


def test_a_command_that_is_not_there(arm):
    run = arm.run("", command=("no-such-launcher", "train.py"))
    assert run.problem.startswith(
        "no-such-launcher could not be started: no-such-launcher: cannot be started: No such file"
    )


def test_an_arm_that_is_killed(arm):
    run = arm.run("rank(end=False, steps=[1]); os.kill(os.getpid(), signal.SIGKILL)")
    assert run.problem == "it was killed by SIGKILL (is the memory full?); the last step recorded is 1"


_STUBBORN = """
import subprocess
deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(600)"
for _ in range(2):  # children in sessions of their own, and grandchildren whose parents are gone
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank(0, 2, steps=range(1, 4), end=False)
rank(1, 2, steps=range(1, 3), end=False)
time.sleep(600)
"""  # noqa: E501


def test_an_arm_that_hangs_is_ended_with_all_that_it_started(arm):
    run = arm.run(_STUBBORN, timeout_seconds=3)
    assert run.exit_code is None
    assert run.problem == "it did not end within 3 s and was stopped; the last step recorded is 3 (rank 1: 2)"


def test_an_arm_that_falls_silent(arm):
    run = arm.run("rank(end=False); time.sleep(600)", quiet_seconds=1.0)
    assert run.problem.startswith("it neither recorded nor printed anything for 1 s")
    assert run.seconds < 30


def test_what_outlives_a_good_arm_is_ended_too(arm):
    run = arm.run(
        "rank(); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    )
    assert run.problem is None


def test_nothing_is_left_after_an_interrupt(arm):
    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arm.run(_STUBBORN, on_progress=interrupt)
    assert arm.left() == []


_STARTER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_arms import Arm, _STUBBORN
arm = Arm(Path({folder!r}))
arm.mark = {mark!r}
arm.run(_STUBBORN)
"""


def test_nothing_is_left_when_the_one_who_started_it_is_killed(arm):
    script = _STARTER.format(tests=str(Path(__file__).parent), folder=str(arm.folder), mark=arm.mark)
    starter = subprocess.Popen([sys.executable, "-c", script])
    stream = streams.first_stream(arm.folder)
    deadline = time.monotonic() + 60
    while stream.step != 3:
        assert time.monotonic() < deadline
        assert starter.poll() is None
        time.sleep(0.05)
        stream.follow()
    assert len(arm.left()) >= 5
    starter.kill()
    starter.wait()
    while arm.left():
        assert time.monotonic() < deadline
        time.sleep(0.05)


_MISSING = "print(\">> '--exit-on-missing-checkpoint' set ... exiting. <<\")"


@pytest.mark.parametrize(
    ("script", "changed", "problem"),
    [
        ("", {}, "no rank recorded anything"),
        ("rank(steps=range(1, 3))", {}, "it ended at step 2, not 4: did something in the script"),
        ("rank(steps=range(1, 3))", {"command_end": "--exit-duration-in-mins"}, "the line has --exit-duration-in-mins"),
        ("rank(end=False)", {}, "rank 0 did not end in an orderly way"),
        ("rank(notes=['recorder failed: OSError: full'])", {}, "rank 0: recorder failed: OSError: full"),
        ("rank(notes=['a is not compared'])", {}, None),
        ("rank(0, 4); rank(2, 4)", {}, "ranks 1, 3 of 4 recorded nothing"),
        ("rank(0, 2); rank(1, 2)", {"world": 4}, "2 processes trained, and the line starts 4"),
        ("rank(0, 2); rank(1, 2, steps=range(1, 4))", {}, r"it ended at step 3, not 4 \(rank 1\)"),
        ("rank(loaded=False, steps=[])", {}, "rank 0 recorded no state before the first step"),
        ("rank(loaded=False)", {"framework": "torch"}, None),
        ("rank(start=2)", {}, "it started at step 2, not 0: it loads a checkpoint that the line does not show"),
        ("rank(start=0)", {"role": "resume", "start": 2}, "it resumed at step 0, not 2: it did not find .*checkpoints"),
        ("rank(start=1)", {"role": "resume", "start": 2}, "it resumed at step 1, not 2$"),
        (_MISSING, {"role": "resume"}, "it did not find the checkpoint in"),
        ("(folder / 'rank_00000.jsonl.zst').write_bytes(b'nothing like it')", {}, "is not a stream"),
    ],
)  # fmt: skip
def test_arms_that_end_well_and_did_something_else(arm, script, changed, problem):
    extra = changed.pop("command_end", None)
    line = arm.line(script)
    command = (*line.command, extra) if extra else line.command
    run = arm.run(script, command=command, **changed)
    if problem is None:
        assert run.problem is None
    else:
        assert re.search(problem, run.problem), run.problem


def test_an_arm_that_goes_on_is_stopped(arm):
    run = arm.run("rank(steps=range(1, 6), end=False); time.sleep(600)", added=("--exit-interval", "4"))
    assert run.problem.startswith(
        "it went on to step 5 instead of stopping after step 4: did what was added (--exit-interval 4)"
    )
    run = Arm(arm.folder.parent / "load").run("rank(start=4, steps=[5]); time.sleep(600)", role="load", start=4)
    assert run.problem.startswith("it went on to step 5 instead of stopping once it had loaded")


_SAVES = {"role": "save", "saves": (2, 4)}


@pytest.mark.parametrize(
    ("script", "changed", "problem"),
    [
        ("rank(saves=(2, 4)); checkpoint(4)", {}, None),
        ("rank()", {}, "nothing was saved; it had to save after step 2"),
        ("rank(saves=(3,)); checkpoint(3)", {}, "it saved after step 3, not after step 2 (rank 0)"),
        ("rank(saves=(2, 4))", {}, "no checkpoint was written to "),
        ("rank(saves=(2, 4)); checkpoint(4, tracker=False)", {}, "has no latest_checkpointed_iteration.txt"),
        ("rank(saves=(2, 4)); checkpoint(2)", {}, "says '2', and step 4 had to be saved"),
        ("rank(saves=(2, 4)); checkpoint(4, content=False)", {}, "holds nothing"),
        ("rank(); checkpoint(4, tracker=False)", {"framework": "torch"}, None),
        ("rank(); Path(os.environ['CHECKPOINTS'], 'a.pt').touch()", {"framework": "torch"}, None),
        ("rank()", {"framework": "torch"}, "no checkpoint was written to "),
    ],
)
def test_saving_arms(arm, script, changed, problem):
    run = arm.run(script, **(_SAVES | changed))
    assert run.problem is None if problem is None else problem in run.problem, run.problem


@pytest.mark.slow
def test_the_users_error_is_found_in_what_torchrun_prints(arm):
    script = """
    number = int(os.environ["RANK"])
    rank(number, 2, steps=[1], end=False)
    if number == 1:
        raise ValueError("bad batch")
    time.sleep(600)
    """
    line = arm.line(script)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        line.command[-1],
    )
    run = arm.run(script, command=torchrun, timeout_seconds=120)
    assert run.problem == "it ended with code 1; the last step recorded is 1: ValueError: bad batch"
    assert run.last_lines[-1] == "ValueError: bad batch"
    killed = Arm(arm.folder.parent / "killed")
    script = "rank(int(os.environ['RANK']), 2, steps=[1], end=False); os.kill(os.getpid(), 9)"
    run = killed.run(script, command=(*torchrun[:-1], killed.line(script).command[-1]), timeout_seconds=120)
    assert "was killed by SIGKILL (is the memory full?); the last step recorded is 1" in run.problem


_LOG = """loading
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1, in f
[rank0]:   File "b.py", line 2, in g
[rank1]: KeyError: 'x'
[rank0]: RuntimeError: [0] Connection closed by peer
[rank1]: During handling of the above exception, another exception occurred:
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 3, in f
[rank1]: ValueError: no x
"""


def test_the_error_of_the_first_failing_rank_is_shown():
    said = why(_LOG)
    assert said.error == "ValueError: no x"
    assert said.lines[0] == "Traceback (most recent call last):"
    assert "KeyError: 'x'" in said.lines
    assert not any("closed by peer" in line for line in said.lines)
    assert (
        why("\n".join(_LOG.splitlines()[i] for i in (0, 2, 4, 6))).error
        == "RuntimeError: [0] Connection closed by peer"
    )


def test_an_error_without_a_traceback():
    said = why(
        "usage: t.py\nt.py: error: unrecognized arguments: --exit-interval 4\nW1129 1 torch/distributed/elastic/x.py] bye\n"
    )
    assert said.error == "t.py: error: unrecognized arguments: --exit-interval 4"
    assert said.lines[-1] == said.error
    assert why("all is well\n").error is None
    assert why("").lines == ()


def test_flags_that_the_script_does_not_know(arm):
    script = "print('t.py: error: unrecognized arguments: --exit-interval 4', file=sys.stderr); sys.exit(2)"
    run = arm.run(script, added=("--exit-interval", "4"))
    assert "is --framework megatron-lm right?" in run.problem


def test_a_long_traceback_is_cut_in_the_middle():
    frames = "\n".join(f'  File "a.py", line {n}, in f' for n in range(200))
    said = why(f"Traceback (most recent call last):\n{frames}\nRecursionError: too deep")
    assert len(said.lines) == 41
    assert said.lines[-1] == "RecursionError: too deep"


def test_signals_reach_the_command_as_usual(arm):
    """The keeper ignores signals itself; what it starts must not."""
    script = "rank(steps=[1], end=False); os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)"
    assert arm.run(script).problem.startswith("it was killed by SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert os.getpgid(0) == os.getpgid(os.getpid())
