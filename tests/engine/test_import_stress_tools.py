"""The stress tools of ``import`` run, and a sample of what they do holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "stress"


@pytest.mark.slow
@pytest.mark.megatron
def test_killed_imports_end_as_undisturbed_ones():
    done = run("import_kills.py", "--trials", "3", "--commands", "0", "--size", "16MiB", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 misses" in done.stdout


@pytest.mark.slow
@pytest.mark.megatron
def test_a_full_disk_is_said_and_leaves_nothing_that_looks_whole():
    done = run("import_disk_full.py", "--trials", "2", "--no-command", "--size", "16MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    if "cannot be mounted" in done.stdout:
        pytest.skip(done.stdout)
    assert "0 misses" in done.stdout


def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A tool with its output."""
    command = [sys.executable, TOOLS / tool, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
