"""The stress tools run, and a sample of what they do holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "stress"


@pytest.mark.parametrize(
    "words", [["--trials", "150"], ["--trials", "60", "--kinds", "bit,page,cut,append,swap", "--mode", "quick"]]
)
def test_damage_trials(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / "damage_trials.py", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 misses" in done.stdout


def test_fuzzed_readers() -> None:
    words = [sys.executable, TOOLS / "fuzz_readers.py", "--trials", "200", "--seed", "5"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 misses" in done.stdout
