"""The command as users type it: a plain PyTorch loop and a small real Megatron model, clean, faulty, crashing and hanging."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = [sys.executable, str(Path(__file__).with_name("plain_train.py"))]
TEMPLATES = ["--reference-args", "--steps {steps}", "--save-args", "--steps {save_at} --save {dir}"]
TEMPLATES += ["--load-args", "--steps {steps} --load {dir}"]


def verify_resume(
    work: Path, *arguments: str, line: list[str] | None = None, timeout: float = 400
) -> tuple[int, str, dict]:
    """Runs the command; returns its exit code, what it printed, and report.json."""
    words = [sys.executable, "-m", "ckptguard", "verify-resume", "--work", str(work), *arguments]
    words += ["--", *line] if line else []
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env={**os.environ, "COLUMNS": "100"})
    report = work / "report.json"
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.is_file() else {}


def plain(work: Path, *extra: str, options: tuple[str, ...] = ()) -> tuple[int, str, dict]:
    arguments = ["--framework", "torch", "--steps", "4", "--save-at", "2", *TEMPLATES, *options]
    return verify_resume(work, *arguments, line=[*LOOP, *extra])


def test_a_loop_that_saves_everything_is_equal(tmp_path):
    code, said, report = plain(tmp_path / "work", options=("--repeat",))
    assert code == 0, said
    assert [arm["name"] for arm in report["arms"]] == ["reference", "repeat", "save", "load", "resume"]
    assert all(comparison["first"] is None for comparison in report["comparisons"])
    assert "equal" in said.lower()
    assert (tmp_path / "work" / "report.html").is_file()
    assert not list((tmp_path / "work").glob("*/checkpoints")), "nothing is left of checkpoints that are not needed"
    shown = subprocess.run(
        [sys.executable, "-m", "ckptguard", "verify-resume", "--show", str(tmp_path / "work")],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0
    assert report["sentence"][:40] in shown.stdout


@pytest.mark.parametrize(
    ("forgotten", "group"), [("optimizer", "optimizer"), ("torch", "rng"), ("scheduler", "scheduler")]
)
def test_what_a_loop_forgets_is_named(tmp_path, forgotten, group):
    code, said, report = plain(tmp_path / "work", "--forget", forgotten)
    assert code == 3, said
    loaded = next(comparison for comparison in report["comparisons"] if comparison["other"] == "load")
    assert group in {difference["group"] for difference in loaded["at_first"]}
    assert [culprit["sort"] for culprit in report["culprits"]] == ["state"]
    assert forgotten in report["culprits"][0]["name"] or group in report["culprits"][0]["name"], report["culprits"]
    told = "nothing of it is there" if forgotten == "optimizer" else "Put right alone, step 3 is equal"
    assert told in report["culprits"][0]["why"]


@pytest.mark.parametrize(
    ("extra", "options", "named", "told"),
    [
        (("--fail-at", "3"), (), "reference", "the loop fails as it was told to"),
        (("--no-such-flag",), (), "reference", "no-such-flag"),
        ((), ("--save-args", "--steps {save_at}"), "save", "no checkpoint was written"),
        ((), ("--load-args", "--steps {steps}"), "load", "resumed at step 0, not 2"),
    ],
)
def test_an_arm_that_does_not_do_its_part_is_named(tmp_path, extra, options, named, told):
    code, said, report = plain(tmp_path / "work", *extra, options=options)
    assert code == 6, said
    assert report["word"] == "failed"
    assert report["arms"][-1]["name"] == named
    assert told in report["sentence"] + "\n".join(report["arms"][-1]["last_lines"]), report["sentence"]
    assert (
        "Traceback" not in said.replace("\n".join(report["arms"][-1]["last_lines"]), "")
        or "fails as it was told" in said
    )


def test_a_dry_run_shows_everything_and_starts_nothing(tmp_path):
    line = shlex.split(
        "torchrun --nproc-per-node 2 pretrain_gpt.py --train-iters 100 --num-layers 2 --save keep --load keep"
    )
    code, said, report = verify_resume(tmp_path / "work", "--dry-run", "--json", line=line)
    assert code == 0, said
    arms = {arm["name"]: arm for arm in json.loads(said)["arms"]}
    assert arms["save"]["command"][-5:] == [
        "10",
        "--save",
        str(tmp_path / "work" / "save" / "checkpoints"),
        "--save-interval",
        "10",
    ]
    assert not (tmp_path / "work").exists()
    assert report == {}


@pytest.mark.parametrize(
    ("arguments", "line", "told"),
    [
        ((), "torchrun pretrain_gpt.py --num-layers 2 --load x --finetune", "--pretrained-checkpoint"),
        (("--steps", "4", "--save-at", "4"), "torchrun pretrain_gpt.py --num-layers 2", "nothing is left to compare"),
        ((), "python train.py", "--framework"),
        (("--framework", "torch"), "python train.py", "--save-args"),
        (("--gpu",), "torchrun pretrain_gpt.py --num-layers 2", "--deterministic-mode"),
        (("--plant", "exp_avg-bit"), "torchrun pretrain_gpt.py --num-layers 2", "--builtin"),
        (("--builtin", "gpt", "--plant", "nothing"), "", "--plant list"),
        ((), "", "nothing to start"),
    ],
)
def test_what_cannot_be_proved_is_refused_before_anything_starts(tmp_path, arguments, line, told):
    code, said, _ = verify_resume(tmp_path / "work", *arguments, line=shlex.split(line))
    assert code == 2, said
    assert told in said
    assert "Traceback" not in said
    assert not (tmp_path / "work").exists()


def test_a_directory_that_holds_something_is_not_written(tmp_path):
    (tmp_path / "mine").write_text("precious")
    code, said, _ = plain(tmp_path)
    assert (code, sorted(path.name for path in tmp_path.iterdir())) == (2, ["mine"]), said
    assert "not empty" in said


@pytest.mark.megatron
@pytest.mark.slow
def test_a_wrong_bit_in_a_product_is_traced_to_its_operation(tmp_path):
    arguments = ("--builtin", "gpt", "--steps", "3", "--save-at", "2", "--no-load-arm", "--plant", "wrong-bit")
    code, said, report = verify_resume(tmp_path / "work", *arguments)
    assert code == 3, said
    assert report["facts"]["framework"] == "Megatron-LM"
    assert {comparison["other"]: comparison["first"] is None for comparison in report["comparisons"]} == {
        "save": True, "resume": False
    } or len(report["comparisons"]) == 3  # fmt: skip
    assert [culprit["sort"] for culprit in report["culprits"]] == ["module", "op"]
    assert "mlp.linear_fc1" in report["culprits"][0]["name"]
    assert report["culprits"][1]["name"].startswith("aten.mm")
