"""Snapshots of every family, and the processes that load checkpoints: made and started once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ckptguard.testing.families import make_snapshot
from ckptguard.testing.megatron_loads import Megatron


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to its snapshot. Shared by all tests: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("snapshots")
    return cache(lambda name: make_snapshot(name, folder / name))


@pytest.fixture(scope="session")
def megatron_te() -> Iterator[Megatron]:
    """Megatron and Bridge with the Transformer Engine specs: what they hold after a load."""
    with Megatron("te") as megatron:
        yield megatron


@pytest.fixture(scope="session")
def megatron_local() -> Iterator[Megatron]:
    """Megatron with its local spec: what it computes."""
    with Megatron("local") as megatron:
        yield megatron
