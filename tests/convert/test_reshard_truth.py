"""Resharding held against Megatron: its own files in the target's layout, and what its processes hold and compute from ours.

``tools/stress/reshard_truth.py`` does the same, and more of it, for every layout pair.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from ckptguard.cli.main import run
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing import recipes, state_digests
from ckptguard.testing import reshard_truth as truth
from ckptguard.testing.recipes import OptimizerFormat, Recipe
from ckptguard.testing.reshard_truth import FORMS, PAIRS, form
from ckptguard.testing.state_digests import Resumed

# Not with the warm process of the other tests: it has Transformer Engine's stand-in, which gives local models extra state.
pytestmark = [pytest.mark.megatron, pytest.mark.slow]
FULL, BUCKETS = FORMS
NAMES = ["dense_tp2_to_stages", "dense_dp1_to_dp2", "moe_ep2pp2_to_tp2ep2"]

Made = Callable[[str, OptimizerFormat], Path]


def _known(recipe: Recipe) -> str:
    """The name under which the fixtures know a recipe; one that they know already by another name keeps that."""
    names = {known.key(): name for name, known in recipes.RECIPES.items()}
    if recipe.key() not in names:
        recipes.RECIPES[recipe.name] = recipe
    return names.get(recipe.key(), recipe.name)


@pytest.fixture(scope="session")
def theirs(
    real_checkpoint: Callable[[str], Path], resaved_checkpoint: Callable[[str, str], Path]
) -> Callable[[str, OptimizerFormat, bool], Path]:
    """Return a function (pair, form, after): Megatron's own save of the pair's state in either layout."""

    def get(name: str, optimizer: OptimizerFormat, after: bool) -> Path:
        pair = PAIRS[name]
        source = _known(form(pair.before, FULL))
        if not after and optimizer == FULL:
            return real_checkpoint(source)
        wanted = form(pair.after if after else pair.before, optimizer, shared_out=not after)
        return resaved_checkpoint(source, _known(wanted))

    return get


@pytest.fixture(scope="session")
def ours(
    theirs: Callable[[str, OptimizerFormat, bool], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, OptimizerFormat], Path]:
    """Return a function (pair, form): the root that we make of the pair's dp_reshardable save, in the second layout."""

    def make(name: str, optimizer: OptimizerFormat) -> Path:
        out = tmp_path_factory.mktemp(name) / optimizer
        flags = truth.reshard_flags(PAIRS[name].after, optimizer)
        assert run(["reshard", str(theirs(name, BUCKETS, False)), str(out), *flags]) == 0
        return out

    return cache(make)


@pytest.fixture(scope="session")
def direct(real_cache: Path, theirs: Callable[[str, OptimizerFormat, bool], Path]) -> Callable[[str], Resumed]:
    """Return a function from a pair's name to the run that loads Megatron's own first save in the second layout; kept."""

    def get(name: str) -> Resumed:
        source, recipe = theirs(name, FULL, False), form(PAIRS[name].after, FULL)
        code = hashlib.sha256(Path(state_digests.__file__).read_bytes()).hexdigest()[:8]
        folder = real_cache / f"{source.parent.name}-resumed-as-{recipe.name}-{recipe.key()}-{code}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=real_cache))
                try:
                    state_digests.resume_digested(source.parent, recipe, staging)
                    staging.rename(folder)
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
        return state_digests.read_resumed(folder)

    return get


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", FORMS)
def test_files_are_those_that_megatron_writes(
    theirs: Callable[[str, OptimizerFormat, bool], Path], ours: Made, name: str, optimizer: OptimizerFormat
) -> None:
    """The same files, with the same chunks and objects in the same order, and in them the same elements and values."""
    made, expected = ours(name, optimizer), theirs(name, optimizer, True)
    assert truth.other_files(made, expected) == []
    assert truth.other_bytes(made, expected) == []
    assert truth.other_objects(made, expected) == []


@pytest.mark.parametrize("name", NAMES)
def test_megatron_goes_on_as_from_its_own(
    ours: Made, direct: Callable[[str], Resumed], tmp_path: Path, name: str
) -> None:
    """Every rank holds the same state after loading, computes the same losses, and saves the same."""
    known = direct(name)
    found = state_digests.resume_digested(ours(name, BUCKETS), form(PAIRS[name].after, FULL), tmp_path / "run")
    assert state_digests.differences(known, found) == []
    assert len(found.steps[0]) == 2
    assert any(step["losses"] for steps in found.steps for step in steps)
    with open_checkpoint(known.saved) as one, open_checkpoint(found.saved) as other:
        assert fingerprint_checkpoint(one) == fingerprint_checkpoint(other)


def test_differences_are_told(direct: Callable[[str], Resumed]) -> None:
    """One digest, one number of a param group, one loss: each is noticed."""
    known = direct(NAMES[1])
    for name in ("model chunk 0 output_layer.weight", "optimizer 0 group 0", "scheduler"):
        first = {**known.loaded[0], name: None}
        assert len(state_digests.differences(known, replace(known, loaded=(first, *known.loaded[1:])))) == 1
    assert state_digests.differences(known, replace(known, steps=((), *known.steps[1:])))  # type: ignore[arg-type]
