"""The stress tools of ``reshard`` run, and a sample of what they do holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "fixtures" / "megatron-0.19" / "dense_tp2pp2_dp_reshardable"


@pytest.mark.slow
@pytest.mark.megatron
def test_killed_reshardings_end_as_undisturbed_ones():
    done = run("reshard_kills.py", "--trials", "3", "--commands", "1", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 misses" in done.stdout


@pytest.mark.slow
@pytest.mark.megatron
def test_full_disks_and_killed_ranks_are_said_and_a_rerun_ends_well():
    done = run("reshard_faults.py", "--trials", "1", "--kinds", "full,rank")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 misses" in done.stdout


def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A tool with its output."""
    command = [sys.executable, ROOT / "tools" / "stress" / tool, "--source", SOURCE, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
