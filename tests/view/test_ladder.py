"""The ladder of node-local checkpoints: how plain Megatron ends on every row, and what a view makes of it."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

from ckptguard.core.errors import ExitCode
from ckptguard.testing import ladder_rank, view_ladder
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.view_ladder import NEWEST, OLDER, ROWS, Loaded, Row

pytestmark = pytest.mark.megatron

CLOCK_SECONDS = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(2, workdir=tmp_path_factory.mktemp("nodes"), preload=view_ladder.PRELOAD) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def saved(real_cache: Path, cluster: Cluster) -> Path:
    """What two nodes have after node-local saves, made once and kept."""
    source = Path(ladder_rank.__file__).read_text()
    key = hashlib.sha256(f"{source}{version('megatron-core')}{version('torch')}".encode()).hexdigest()[:16]
    folder = real_cache / f"ladder-{key}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=real_cache))
            try:
                view_ladder.save(cluster, staging)
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return folder


def test_a_save_leaves_different_files_on_each_node(saved: Path) -> None:
    names = [{path.name for path in (saved / f"node{n}" / "ckpt").rglob("*") if path.is_file()} for n in range(2)]
    assert names[1] == {"__1_0.distcp"}
    assert {"__0_0.distcp", ".metadata", "metadata.json", *view_ladder.TRACKERS} <= names[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.letter)
def test_plain_load_ends_as_the_row_says(row: Row, saved: Path, cluster: Cluster) -> None:
    view_ladder.lay_out(row, saved, cluster, f"{row.letter}-plain")
    places = [node.place(f"{row.letter}-plain") for node in cluster.nodes]
    ends = view_ladder.load(row, cluster, places, clock_seconds=CLOCK_SECONDS)
    assert view_ladder.misses(row, ends, CLOCK_SECONDS) == []


def test_the_last_words_before_the_long_wait(saved: Path, cluster: Cluster) -> None:
    (row,) = (row for row in ROWS if row.letter == "H")
    view_ladder.lay_out(row, saved, cluster, "words")
    places = [node.place("words") for node in cluster.nodes]
    ends = view_ladder.load(row, cluster, places, clock_seconds=1.0)
    assert "Broadcasting TrainState from rank 0 to all 2 ranks" in ends[0].log
    assert "Unable to load train state" not in ends[0].log
    cluster.nodes[1].path("words/latest_train_state.pt").write_bytes(
        cluster.nodes[0].path("words/latest_train_state.pt").read_bytes()
    )
    assert [end.step for end in view_ladder.load(row, cluster, places, clock_seconds=CLOCK_SECONDS)] == [NEWEST, NEWEST]


RANKS = ("--ranks", "0/1")
REPAIRED = [pytest.param(row, False, id=row.letter) for row in ROWS if not row.lost]
REPAIRED += [pytest.param(row, True, id=f"{row.letter}-with-source") for row in ROWS if row.lost]
LOST = [row for row in ROWS if row.lost]
CAUSES = {
    "E": "__1_0.distcp: no node has it", "F": "__1_0.distcp: cut short", "G": r"__1_0.distcp: w \[256:512\]: .*CRC-32",
    "I": "iter_0000020_1_local.pt: 0 bytes", "J": "iter_0000020_1_local.pt: .*CRC-32",
}  # fmt: skip


def _load_from(row: Row, cluster: Cluster, view: str) -> list[Loaded]:
    places = [node.place(view) for node in cluster.nodes]
    return view_ladder.load(row, cluster, places, clock_seconds=CLOCK_SECONDS, step=None)


@pytest.mark.parametrize(("row", "with_source"), REPAIRED)
def test_view_is_like_a_shared_directory(
    row: Row, with_source: bool, saved: Path, cluster: Cluster, tmp_path: Path
) -> None:
    name, view = f"{row.letter}-whole", f"{row.letter}-whole-view"
    view_ladder.lay_out(row, saved, cluster, name)
    if with_source:
        view_ladder.lay_out_source(row, saved, tmp_path / "source")
    sources = [tmp_path / "source"] if with_source else []
    for ended in view_ladder.prepare(cluster, name, view, sources=sources, options=RANKS):
        assert ended.code == 0, ended.err
    assert view_ladder.misses_in_view(_load_from(row, cluster, view), NEWEST) == []


@pytest.mark.parametrize("row", LOST, ids=lambda row: row.letter)
def test_what_is_lost_is_named_and_the_older_step_taken(row: Row, saved: Path, cluster: Cluster) -> None:
    name, view = f"{row.letter}-older", f"{row.letter}-older-view"
    view_ladder.lay_out(row, saved, cluster, name)
    ends = view_ladder.prepare(cluster, name, view, options=RANKS)
    assert [ended.code for ended in ends] == [0, 0], ends
    told = " ".join(ends[0].err.split())  # node 0 tells it for all
    assert re.search(CAUSES[row.letter], told), told
    assert view_ladder.misses_in_view(_load_from(row, cluster, view), OLDER) == []


@pytest.mark.parametrize("row", [row for row in LOST if row.wrong], ids=lambda row: row.letter)
def test_what_would_load_wrong_is_refused_where_nothing_older_is(row: Row, saved: Path, cluster: Cluster) -> None:
    name, view = f"{row.letter}-only", f"{row.letter}-only-view"
    view_ladder.lay_out(row, saved, cluster, name)
    for ended in view_ladder.prepare(cluster, name, view, options=[*RANKS, "--step", str(NEWEST)]):
        assert ended.code == ExitCode.DAMAGED, ended.err
        assert re.search(CAUSES[row.letter], " ".join(ended.err.split())), ended.err
    assert not any(node.path(view).is_symlink() for node in cluster.nodes)
