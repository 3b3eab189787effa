"""Megatron-LM itself, trained over two nodes with disks of their own: resumed from a view as from a shared directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptguard.engine.diff import diff_checkpoints
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing import node_training, view_ladder
from ckptguard.testing.node_training import losses, train
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.recipes import Recipe

pytestmark = pytest.mark.megatron

DP2 = Recipe(name="two_nodes", dp=2, num_layers=2)
TP2 = Recipe(name="two_nodes_tp", tp=2, num_layers=2, optimizer_format="fully_reshardable")
PP2 = dataclasses.replace(TP2, name="two_nodes_pp", tp=1, pp=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    preload = (*node_training.PRELOAD, "ckptguard.view.preparing", "ckptguard.cli.main")
    with Cluster(2, workdir=tmp_path_factory.mktemp("nodes"), preload=preload) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("saved", "resumed", "options"),
    [(DP2, DP2, ()), (TP2, PP2, ("--tp", "1", "--pp", "2"))],
    ids=["same layout", "another layout"],
)
def test_training_goes_on_from_a_view_as_from_a_shared_directory(
    saved: Recipe, resumed: Recipe, options: tuple[str, ...], cluster: Cluster, tmp_path: Path
) -> None:
    name, view = saved.name, f"{saved.name}-view"
    ends = train(cluster, saved, save=[node.place(name) for node in cluster.nodes])
    assert [end.code for end in ends] == [0, 0], ends
    shared = node_training.gather(cluster, name, tmp_path / "shared")
    for ended in view_ladder.prepare(cluster, name, view, options=["--ranks-per-node", "1", *options]):
        assert ended.code == 0, ended.err

    longer = dataclasses.replace(resumed, steps=saved.steps + 2)
    from_shared = train(cluster, longer, load=[shared] * 2, save=[tmp_path / "from-shared"] * 2)
    from_view = train(
        cluster, longer, load=[node.place(view) for node in cluster.nodes], save=[tmp_path / "from-view"] * 2
    )

    assert [end.code for end in (*from_shared, *from_view)] == [0] * 4, from_view
    assert list(losses(from_shared)) == [saved.steps + 1, saved.steps + 2]
    assert losses(from_view) == losses(from_shared)
    one, two = (open_checkpoint(tmp_path / f"from-{where}") for where in ("shared", "view"))
    assert not [diff for diff in diff_checkpoints(one, two) if diff.differs]
