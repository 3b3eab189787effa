"""A small sample of what ``tools/bench view`` holds the shared view to; limits are wide: other work shares the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ckptguard.testing import nodes, view_bars, view_transfers
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.view_calls import PRELOAD

pytestmark = pytest.mark.skipif(nodes.reason_against() is not None, reason=str(nodes.reason_against()))
FILES = 1000
SIZE_BYTES = 32 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(3, workdir=tmp_path_factory.mktemp("nodes"), preload=PRELOAD) as cluster:
        yield cluster


@pytest.mark.parametrize("everywhere", [False, True])
def test_nodes_soon_agree_on_very_many_files(cluster: Cluster, everywhere: bool) -> None:
    ckpt = "everywhere" if everywhere else "spread"
    view_bars.many_files(cluster, ckpt, FILES, everywhere=everywhere)
    asked = view_bars.ask(cluster, ckpt, "status")
    assert asked.files == FILES
    assert asked.cpu_seconds < 1.5
    assert asked.seconds < 10


def test_staging_is_not_much_slower_than_curl(cluster: Cluster) -> None:
    with view_transfers.link(cluster, SIZE_BYTES) as link:
        ours = min(link.stage() for _ in range(3))
        curl = min(link.curl(plain=False) for _ in range(3))
        assert ours < 5 * curl + 0.2
        assert link.stage(2) < 30


def test_copying_is_not_much_slower_than_cp(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    for name in ("from", "to"):
        node.disk(name, 2 * SIZE_BYTES)
    digest = view_transfers.random_file(node.path("from/file"), SIZE_BYTES)
    node.path("from/digest").write_text(json.dumps(digest))
    ours, cp = (
        min(view_transfers.copy_seconds(cluster, "from", "to", with_cp=with_cp) for _ in range(3))
        for with_cp in (False, True)
    )
    assert ours < 5 * cp + 0.2


def test_bytes_moved_are_the_bytes_missing(cluster: Cluster) -> None:
    missing = view_transfers.spread_checkpoint(cluster, SIZE_BYTES)
    moved = view_transfers.make_view(cluster, missing)
    assert moved.body_bytes == missing
    assert (
        missing < moved.wire_bytes < 1.05 * missing
    )  # 1.01 where more is missing: what nodes say does not grow with it
