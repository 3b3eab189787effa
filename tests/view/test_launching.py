"""Launch lines started from a view: flags for each framework, placeholders, refusals, and the process that takes our place."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptguard.core.errors import UsageError
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.launch_line import understand
from ckptguard.megatron.run_layout import LayoutSaid, layout_said
from ckptguard.view.launching import Launch, launch_of, training_of
from ckptguard.view.values import Step

VIEW = Path("/ckpt/view")
STEP = Step("global", "20", "abc")
LM = "python train.py --num-layers 4 --train-iters 100"
BRIDGE = "python train.py train.train_iters=100"


def _launch(line: str, step: Step = STEP, framework: str | None = None) -> Launch:
    training = training_of(shlex.split(line), framework)
    assert training is not None
    return launch_of(training, VIEW, step)


@pytest.mark.parametrize(
    ("line", "framework", "added", "notes"),
    [
        (LM, None, "--load /ckpt/view --exit-on-missing-checkpoint", 0),
        (f"{LM} --load /u", None, "--load /ckpt/view --exit-on-missing-checkpoint", 1),
        (f"{LM} --load /ckpt/view", None, "--load /ckpt/view --exit-on-missing-checkpoint", 0),
        (f"{LM} --ckpt-step 20", None, "--load /ckpt/view --exit-on-missing-checkpoint --ckpt-step 20", 0),
        ("bash run.sh", "megatron-lm", "--load /ckpt/view --exit-on-missing-checkpoint", 0),
        (BRIDGE, None, "checkpoint.load=/ckpt/view checkpoint.exit_on_missing_checkpoint=true", 0),
        (f"{BRIDGE} checkpoint.load=/u", None, "checkpoint.load=/ckpt/view checkpoint.exit_on_missing_checkpoint=true", 1),
    ],
)  # fmt: skip
def test_what_is_added(line: str, framework: str | None, added: str, notes: int) -> None:
    launch = _launch(line, framework=framework)
    assert shlex.join(launch.words) == f"{line} {added}"
    assert shlex.join(launch.added) == added
    assert len(launch.notes) == notes


def test_flags_go_into_the_text_of_a_shell() -> None:
    launch = _launch(f"bash -c 'cd / && {LM} > log'")
    assert launch.words[2] == f"cd / && {LM} --load /ckpt/view --exit-on-missing-checkpoint > log"


def test_local_checkpoints() -> None:
    added = _launch(LM, Step("local", "20")).added
    assert added == ("--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", "/ckpt/view")
    assert _launch(BRIDGE, Step("local", "20", "s1")).added == (
        "checkpoint.non_persistent_ckpt_type=local",
        "checkpoint.non_persistent_local_ckpt_dir=/ckpt/view/s1",
    )


def test_a_placeholder_is_filled_and_nothing_is_added() -> None:
    assert _launch("python train.py --from={view}/x").words == ("python", "train.py", "--from=/ckpt/view/x")
    assert _launch(f"{LM} --load {{view}}").words[-2:] == ("--load", "/ckpt/view")
    assert _launch("python train.py {view}", Step("local", "20", "s")).words[-1] == "/ckpt/view/s"


@pytest.mark.parametrize(
    ("line", "framework", "said"),
    [
        ("no-such-command-here train.py", None, "no such command"),
        ("python train.py", None, "which framework"),
        ("bash run.sh", None, r"\{view\}"),
        ("python train.py", "torch", "where to load from"),
        (LM, "jax", "not a framework"),
    ],
)
def test_refused_before_anything_is_done(line: str, framework: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        training_of(shlex.split(line), framework)


def test_the_step_that_a_line_asks_for() -> None:
    steps = [
        training_of(shlex.split(line), None)
        for line in (f"{LM} --ckpt-step 20", f"{BRIDGE} checkpoint.ckpt_step=7", LM)
    ]
    assert [training and training.step for training in steps] == [20, 7, None]
    assert training_of((), None) is None


@pytest.mark.parametrize(
    ("line", "axes", "expected"),
    [
        (f"{LM} --tensor-model-parallel-size 2 --pipeline-model-parallel-size=2", {}, Layout(tp=2, pp=2)),
        (f"{LM} --tensor-model-parallel-size 2", {"pp": 4}, Layout(tp=2, pp=4)),
        (LM, {}, Layout()),
        (
            f"{LM} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 2"
            " --expert-tensor-parallel-size 1 --context-parallel-size 2 --account-for-loss-in-pipeline-split --num-layers 7",
            {}, Layout(pp=2, vpp=4, ep=2, etp=1, cp=2, count_loss=True),
        ),
        (
            f"{LM} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
            " --num-virtual-stages-per-pipeline-rank 2", {}, Layout(pp=2, vpp=2, first_pp_layers=1),
        ),
        (f"{LM} --pipeline-model-parallel-layout Et|tL", {}, Layout(pp_layout="Et|tL")),
        (f"{BRIDGE} model.tensor_model_parallel_size=2", {"pp": 2}, Layout(tp=2, pp=2)),
        (f"{LM} --use-mp-args-from-checkpoint-args --tensor-model-parallel-size 4", {}, None),
        (BRIDGE, {}, None),
        ("bash run.sh", {}, None),
        (None, {}, None),
        (None, {"tp": 2}, Layout(tp=2)),
    ],
)  # fmt: skip
def test_layouts(line: str | None, axes: dict[str, int], expected: Layout | None) -> None:
    said = _layout(line, axes)
    assert said.unknown == ""
    assert said.layout == expected


@pytest.mark.parametrize(
    "line",
    [
        f"{BRIDGE} model.tensor_model_parallel_size=2",
        "bash run.sh --tensor-model-parallel-size 2",
        f"{LM} --yaml-cfg x.yaml",
        f"{LM} --hybrid-layer-pattern M*|M*",
    ],
)
def test_layouts_that_are_seen_in_part_are_not_known(line: str) -> None:
    said = _layout(line, {})
    assert said.layout is None
    assert said.unknown


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="--tensor-model-parallel-size is '\\$TP'"):
        _layout(f"{LM} --tensor-model-parallel-size '$TP'", {})


def _layout(line: str | None, axes: dict[str, int]) -> LayoutSaid:
    parsed = understand(shlex.split(line)) if line else None
    return layout_said(axes, parsed, parsed.framework if parsed else None)


_RUN = "from ckptguard.view.launching import run; import os; run(['sh', '-c', %r], os.environ)"


def test_the_command_takes_our_place() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN % "echo $$; exit 7"], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    with subprocess.Popen(
        [sys.executable, "-c", _RUN % "echo $$; sleep 60"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == child.pid, "one process from first to last"
        status = Path(f"/proc/{child.pid}/status").read_text()
        ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
        assert not ignored & 1 << signal.SIGPIPE - 1
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
