"""Snapshots of every family, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ckptguard.testing.families import make_snapshot


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to its snapshot. Shared by all tests: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("snapshots")
    return cache(lambda name: make_snapshot(name, folder / name))
