"""Shared fixtures: real Megatron checkpoints, made once and kept on disk between test runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from ckptguard.engine.verify import verify
from ckptguard.testing.recipes import RECIPES, make_checkpoint, resave

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def real_cache() -> Path:
    """Return the folder that keeps real checkpoints: ``CKPTGUARD_TEST_CACHE``, or one in pytest's own cache folder."""
    default = REPOSITORY / ".pytest_cache" / "ckptguard-real"
    folder = Path(os.environ.get("CKPTGUARD_TEST_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _cached(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Return the iteration folder in ``folder``, made with ``make(root)`` if it is not there.

    One worker makes it while the others wait, and it appears by a rename, so that a killed test run leaves nothing half
    made.
    """
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
            try:
                report = verify(make(staging))
                assert not report.damaged, report.problems  # no false alarm on anything that Megatron writes here
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    (iteration,) = folder.glob("iter_*")
    return iteration


@pytest.fixture(scope="session")
def real_checkpoint(real_cache: Path) -> Callable[[str], Path]:
    """Return a function from a recipe's name to the iteration folder of the checkpoint that Megatron made of it.

    The folder is shared by all tests: copy it before changing anything. Its parent is the root, for ``--load``.
    """

    def get(name: str) -> Path:
        recipe = RECIPES[name]
        return _cached(real_cache / f"{name}-{recipe.key()}", lambda root: make_checkpoint(recipe, root))

    return get


@pytest.fixture(scope="session")
def resaved_checkpoint(real_cache: Path, real_checkpoint: Callable[[str], Path]) -> Callable[[str, str], Path]:
    """Return a function ``(source, target)``: the checkpoint of one recipe, saved again by Megatron as another says.

    All targets of one source hold the same state, bit for bit, in different layouts and formats. Shared by all tests
    too.
    """

    def get(source: str, target: str) -> Path:
        recipe = RECIPES[target]
        folder = real_cache / f"{source}-{RECIPES[source].key()}-as-{target}-{recipe.key()}"
        return _cached(folder, lambda root: resave(real_checkpoint(source).parent, recipe, root))

    return get
