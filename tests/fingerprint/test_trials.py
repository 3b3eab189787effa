"""A sample of the trials of tools/stress/fingerprint_trials.py; and that they would find a digest that misses."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "stress"


@pytest.mark.slow
def test_twenty_thousand_trials_without_a_miss() -> None:
    command = [sys.executable, str(TOOLS / "fingerprint_trials.py"), "--trials", "20000", "--seed", "7"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert made.returncode == 0, made.stdout + made.stderr
    total = next(line for line in made.stdout.splitlines() if line.startswith("total "))
    assert total.split()[1:3] == ["20000", "0"]
    assert total.split()[-1] == "0"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("fingerprint_trials")


@pytest.mark.parametrize(
    ("weaken", "kinds"),
    [
        ("xor", {"two elements swapped", "paired flips, cancel under XOR", "[a, a] against [b, b]", "transposed"}),
        ("sum", {"steps that cancel under a sum", "all elements permuted", "rows swapped", "shifted offset"}),
        ("nothing beside", {"zeros of another length", "same bytes, other dtype"}),
    ],
)
def test_weak_digests_are_found_out(
    weaken: str,
    kinds: set[str],
    trials: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ckptguard.fingerprint.values import Fingerprint

    strong = trials.fingerprint
    weak = {
        "xor": lambda part: Fingerprint(part.dtype.name, part.shape, (trials.xor(part), 0)),
        "sum": lambda part: Fingerprint(part.dtype.name, part.shape, (int(part.data.sum()), 0)),
        "nothing beside": lambda part: Fingerprint("", (), strong(part).sums),
    }
    monkeypatch.setattr(trials, "fingerprint", weak[weaken])
    monkeypatch.setattr(sys, "argv", ["fingerprint_trials.py", "--trials", "1500"])
    assert trials.main() == 1
    rows = {line[:31].strip(): line[31:].split() for line in capsys.readouterr().out.splitlines()}
    assert {name for name in kinds if int(rows[name][1]) == 0} == set()
