"""``ckptguard view`` as a user runs it: one node in this process, two nodes as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptguard.cli.main import run
from ckptguard.view.records import Publication, write_publication

MOE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19" / "moe_pp2ep2_fully_reshardable"
LM = ("pretrain_gpt.py", "--num-layers", "2", "--train-iters", "9")


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    shutil.copytree(MOE, tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "PET_")) or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK", "NNODES"):
            monkeypatch.delenv(name)


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, click.unstyle(captured.err)


def test_a_single_node_from_status_to_prune(ckpt: Path, tmp_path: Path, capsys) -> None:
    view = tmp_path / "view"
    code, out, _ = call(capsys, "view", "status", ckpt, "--view", view)
    assert code == 0
    assert "all 6 files" in out
    assert "can be whole: iteration 4" in click.unstyle(out)
    code, out, err = call(capsys, "view", "prepare", ckpt, "--view", view, "--dry-run")
    assert (code, out) == (0, "")
    assert "iteration 4 would be taken" in err
    assert not view.exists()
    code, out, err = call(capsys, "view", "prepare", ckpt, "--view", view)
    assert (code, out) == (0, "")
    assert f"{view} holds iteration 4" in err
    assert (view / "iter_0000004" / "metadata.json").is_file()
    assert (view / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    code, out, _ = call(capsys, "view", "prepare", ckpt, "--view", view, "--json")
    told = json.loads(out)
    assert (code, told["view"], told["agreement"]["step"]["number"]) == (0, str(view), "4")
    code, out, _ = call(capsys, "view", "prune", "--view", view, "--json")
    assert code == 0
    assert len(json.loads(out)["removed"]) == 1
    assert call(capsys, "view", "prune", "--view", view)[1] == "nothing removed\n"


def test_nothing_that_can_be_whole(ckpt: Path, tmp_path: Path, capsys) -> None:
    next(ckpt.rglob("*.distcp")).unlink()
    code, out, _ = call(capsys, "view", "status", ckpt)
    assert code == 4
    assert "NOTHING WHOLE" in out
    assert "no node has it" in out
    code, _, err = call(capsys, "view", "prepare", ckpt, "--view", tmp_path / "view", "--json")
    assert code == 4
    assert "no node has it" in err
    assert not (tmp_path / "view").exists()
    assert call(capsys, "view", "status", tmp_path / "nowhere")[0] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "no-such-command-here"), "no such command"),
        (("--", "python", "train.py"), "which framework"),
        (("--step", "5", "--", "python", *LM, "--ckpt-step", "4"), "--step is 5, and the launch line asks for step 4"),
        (("--step", "newest"), "is no step"),
        (("--nodes", "2"), "which of them this is is not known"),
        (("--nodes", "2", "--", "torchrun", *LM), "--nodes is 2, and torchrun"),
    ],
)
def test_contradictions_are_found_before_anything_is_done(
    words: tuple[str, ...], said: str, ckpt: Path, tmp_path: Path, capsys
) -> None:
    code, _, err = call(capsys, "view", "prepare", ckpt, "--view", tmp_path / "view", *words)
    assert code == 2
    assert said in err
    assert os.listdir(tmp_path) == ["ckpt"]


def _start(node: int, port: int, places: tuple[Path, ...], view: Path, *more: str) -> subprocess.Popen[str]:
    sources = [word for place in places[1:] for word in ("--source", str(place))]
    words = ["view", "prepare", str(places[0]), "--view", str(view), *sources, "--nodes", "2", "--node-rank", str(node)]
    words += ["--rdzv", f"127.0.0.1:{port}", "--timeout", "60", "--wait", "0", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "ckptguard", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_two_nodes_prepare_and_each_becomes_its_launch_line(ckpt: Path, tmp_path: Path) -> None:
    """Node 1 has nothing. The line prints what it is given and ends with a code of its own, from the same process."""
    (tmp_path / "empty").mkdir()
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(os.getpid(), *sys.argv[1:])\nsys.exit(41)\n")
    line = ["--", sys.executable, str(script), *LM[1:], "--load", "/somewhere"]
    port, views = _port(), [tmp_path / "view0", tmp_path / "view1"]
    started = [
        _start(node, port, (place,), views[node], *line) for node, place in enumerate((ckpt, tmp_path / "empty"))
    ]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
    for node, (out, err, code) in enumerate(ended):
        assert code == 41, err
        pid, *arguments = out.split()
        assert int(pid) == started[node].pid
        assert arguments[-3:] == ["--load", str(views[node]), "--exit-on-missing-checkpoint"]
        assert (views[node] / "iter_0000004" / ".metadata").is_file()
        assert "the line loads from /somewhere" in err
    assert "node 1" in ended[0][1]
    assert "nothing" in ended[0][1]
    assert f"{views[1]} holds iteration 4" in ended[1][1]


def test_a_first_start_is_no_error_where_that_was_said(tmp_path: Path, capsys) -> None:
    command = ("view", "prepare", tmp_path / "ckpt", "--view", tmp_path / "view")
    code, _, err = call(capsys, *command)
    assert code == 4
    assert "--allow-none" in err
    code, _, err = call(capsys, *command, "--allow-none")
    assert code == 0
    assert "training starts anew" in err
    (tmp_path / "view.d" / "0000020-1f3a").mkdir()
    write_publication(tmp_path / "view.d" / "0000020-1f3a.json", Publication("", "then", "then"))
    (tmp_path / "view").symlink_to("view.d/0000020-1f3a")
    code, _, err = call(capsys, *command, "--allow-none")
    assert code == 2
    assert "holds one of an earlier run (0000020-1f3a)" in err
