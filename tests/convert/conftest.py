"""Snapshots of every family, imports of them, and the processes that load checkpoints: made and started once a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptguard.convert import importing, reshard_prepare
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.megatron import ask, restate
from ckptguard.testing import families
from ckptguard.testing.asking import Asking
from ckptguard.testing.families import FAMILIES, make_snapshot
from ckptguard.testing.megatron_loads import Megatron


@dataclasses.dataclass(frozen=True, slots=True)
class Import:
    """A snapshot and what it became; shared by all tests: copy before changing anything."""

    snapshot: Path
    root: Path
    prepared: importing.Prepared
    result: importing.Imported

    @property
    def vocab_multiple(self) -> int:
        """What the vocabulary was padded to a multiple of, per TP rank, as the checkpoint itself says."""
        with open_checkpoint(self.root) as checkpoint:
            model: Any = checkpoint.index.facts.run_config["model"]
        return int(model["make_vocab_size_divisible_by"])


def product_layout(layout: families.Layout) -> Layout:
    """The product's form of a family's layout."""
    values = dataclasses.asdict(layout)
    ends = {"first_pp_layers": values.pop("first_stage_layers"), "last_pp_layers": values.pop("last_stage_layers")}
    return Layout(**values, **ends)


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to its snapshot. Shared by all tests: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("snapshots")
    return cache(lambda name: make_snapshot(name, folder / name))


@pytest.fixture(scope="session")
def asking() -> Iterator[Asking]:
    """The warm process that answers the product's questions."""
    with Asking() as warm:
        yield warm


@pytest.fixture
def quick(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything in this process ask the warm process instead of starting one for each question."""
    monkeypatch.setattr(ask, "put", asking.put)
    monkeypatch.setattr(ask, "started_early", nullcontext)


@pytest.fixture(scope="session")
def asking_local() -> Iterator[Asking]:
    """The warm process that answers about Megatron's own layers and about common state."""
    with Asking("local") as warm:
        yield warm


@pytest.fixture
def quick_local(asking_local: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``quick``, for checkpoints of models without Transformer Engine."""
    monkeypatch.setattr(ask, "put", asking_local.put)
    monkeypatch.setattr(
        restate, "_answer", lambda question, _: asking_local.put({"kind": "restate", **question})
    )  # fmt: skip
    monkeypatch.setattr(reshard_prepare, "started_early", nullcontext)


@pytest.fixture(scope="session")
def imports(asking: Asking) -> Callable[..., Import]:
    """Return a function ``(snapshot, dst, **options)`` that imports in this process."""

    def run(source: Path, dst: Path, **chosen: Any) -> Import:
        options = importing.ImportOptions(**chosen)
        with pytest.MonkeyPatch.context() as patch, open_checkpoint(source) as checkpoint:
            patch.setattr(ask, "put", asking.put)
            prepared = importing.prepare(checkpoint, str(source), options)
            result = importing.run_import(checkpoint, prepared, dst, options, what=f"import of {source}")
        return Import(source, dst, prepared, result)

    return run


@pytest.fixture(scope="session")
def imported(
    snapshot: Callable[[str], Path], imports: Callable[..., Import], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Import]:
    """Return a function from a family's name to its import under the family's own layout."""
    folder = tmp_path_factory.mktemp("imported")
    return cache(
        lambda name: imports(snapshot(name), folder / name, layout=product_layout(FAMILIES[name].layout))
    )  # fmt: skip


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
