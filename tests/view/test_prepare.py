"""``prepare`` on several nodes that have parts of a real checkpoint: what each gets, whence, and that it is the truth."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.testing import view_node
from ckptguard.testing.nodes import Cluster
from ckptguard.testing.view_runs import CHECKPOINT, TRACKER, VIEW, Bench, Running, Truth

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
STEPS = {
    "20": FIXTURES / "moe_pp2ep2_fully_reshardable" / "iter_0000004",
    "10": FIXTURES / "dense_tp2pp2_integrity" / "iter_0000002",
}
OTHER_SAVE = FIXTURES / "dense_tp2pp2_dp_reshardable" / "iter_0000004" / ".metadata"
SHARDS = [f"iter_0000020/__{rank}_0.distcp" for rank in range(4)]
Make = Callable[[int], Bench]


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth.of(STEPS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nodes in namespaces, or on the loopback address where those are not allowed."""
    with Cluster(4, workdir=tmp_path_factory.mktemp("nodes"), preload=view_node.PRELOAD) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster, truth: Truth) -> Iterator[Make]:
    """Makes nodes, the checkpoint laid out over them."""
    made: list[Bench] = []
    numbers = itertools.count()

    def bench(count: int) -> Bench:
        made.append(Bench(cluster, truth, f"bench{next(numbers)}", count, timeout_seconds=30))
        made[-1].lay_out()
        return made[-1]

    yield bench
    for one in made:
        one.clean()


def moved(running: Running, *how: str) -> int:
    """Bytes that came to all nodes, or only those that came so."""
    told = [one for node in running.ends for one in running.told(node)["delivered"]]
    return sum(count for _, came, count in told if not how or came in how)


def served(running: Running) -> int:
    return sum(running.told(node)["served_bytes"] for node in running.ends)


def whole(bench: Bench, running: Running, step: str = "20") -> None:
    """Every node has the view of that step, byte by byte, and it is the same one."""
    bench.wait(running)
    assert set(running.codes().values()) == {0}, [end.err for end in running.ends.values()]
    assert [end.err for end in running.ends.values()] == [""] * bench.count
    assert bench.torn == []
    seen = [bench.seen(node) for node in range(bench.count)]
    assert [one.wrong for one in seen] == [()] * bench.count
    assert {(one.step, one.confirmed) for one in seen} == {(step, True)}
    assert len({one.id for one in seen}) == 1


def refused(bench: Bench, running: Running, code: int, *words: str) -> None:
    """Every node ends with the code and says the words, and none has a view."""
    bench.wait(running)
    assert set(running.codes().values()) == {code}
    for end in running.ends.values():
        assert [word for word in words if word not in end.err] == [], end.err
    assert [bench.seen(node).step for node in range(bench.count)] == [""] * bench.count


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_node_gets_what_it_lacks_and_no_byte_more(cluster: Cluster, make: Make, count: int) -> None:
    bench = make(count)
    missing = sum(bench.missing_bytes(node, "20") for node in range(count))
    running = bench.start()
    whole(bench, running)
    assert missing <= moved(running) <= 1.01 * missing
    assert moved(running, "fetched") == served(running)
    again = bench.start()
    whole(bench, again)
    assert moved(again) == 0 or cluster.kind == "loopback"  # where CKPT_DIR has another path on every node


def test_nodes_on_the_loopback_address(truth: Truth, tmp_path: Path) -> None:
    """As where namespaces are not allowed, so that both are run here."""
    with Cluster(2, workdir=tmp_path, kind="loopback", preload=view_node.PRELOAD) as cluster:
        bench = Bench(cluster, truth, "bench", 2)
        bench.lay_out()
        missing = sum(bench.missing_bytes(node, "20") for node in range(2))
        running = bench.start()
        whole(bench, running)
        assert missing <= moved(running) <= 1.01 * missing


@pytest.mark.parametrize("empty", [0, 2])
def test_a_node_that_has_nothing_gets_all(make: Make, empty: int) -> None:
    bench = make(3)
    bench.lay_out(index=(0, 1), copies=2)
    shutil.rmtree(bench.path(empty, CHECKPOINT))
    running = bench.start()
    whole(bench, running)
    assert "not there on this node" not in running.ends[empty].err


def test_what_no_node_has_comes_from_a_source_once(make: Make, truth: Truth, tmp_path: Path) -> None:
    bench = make(3)
    for name in SHARDS[1:3]:
        data = bench.path(bench.owners(name)[0], f"{CHECKPOINT}/{name}")
        data.unlink()
    source = tmp_path / "source"
    shutil.copytree(STEPS["20"], source / "iter_0000020")
    (source / TRACKER).write_text("20")
    asked = {node: {"places": [str(bench.place(node, CHECKPOINT)), str(source)]} for node in range(3)}
    missing = sum(bench.missing_bytes(node, "20") for node in range(3))
    running = bench.start(asked=asked)
    whole(bench, running)
    lost = sum(len(truth.steps["20"][name]) for name in SHARDS[1:3])
    assert moved(running, "copied") <= lost  # less where the source can be linked
    assert moved(running) <= 1.01 * missing


def test_a_dry_run_changes_nothing_and_says_what_would_be_moved(make: Make) -> None:
    bench = make(2)
    running = bench.prepare(dry_run=True)
    assert running.codes() == {0: 0, 1: 0}
    told = running.told(0)
    assert told["step"] == "20"
    assert {(name, node) for name, node, via in told["planned"] if via is not None} == {
        (name, 1 - bench.owners(name)[0]) for name in SHARDS
    }
    assert [list(bench.path(node, VIEW).parent.iterdir()) for node in range(2)] == [[], []]


def test_nodes_that_share_the_views_directory_act_as_one(make: Make, truth: Truth, tmp_path: Path) -> None:
    bench = make(3)
    view = tmp_path / "shared" / "view"
    running = bench.prepare(view=str(view))
    assert running.codes() == {0: 0, 1: 0, 2: 0}, [end.err for end in running.ends.values()]
    for name, data in truth.steps["20"].items():
        assert (view / name).read_bytes() == data
    assert len([path for path in view.with_name("view.d").iterdir() if path.is_dir() and path.name != ".staging"]) == 1
    lacking = sum(len(truth.steps["20"][name]) for name in SHARDS if bench.owners(name) != [0])
    assert moved(running, "fetched") == served(running) == lacking
    assert not [path for path in view.with_name("view.d").iterdir() if path.name.startswith(".probe")]


def test_a_newer_step_takes_the_place_of_a_view(make: Make) -> None:
    bench = make(2)
    whole(bench, bench.start(step="10"), "10")
    before = [path.resolve() for path in (bench.path(0, VIEW), bench.path(1, VIEW))]
    whole(bench, bench.start())
    assert all(path.is_dir() for path in before), "kept until it is pruned"


def test_an_earlier_view_is_a_place_to_take_files_from(cluster: Cluster, make: Make) -> None:
    if cluster.kind == "loopback":
        pytest.skip("CKPT_DIR has another path on every node")
    bench = make(2)
    whole(bench, bench.start())
    for node in range(2):
        for path in bench.path(node, CHECKPOINT).glob("iter_0000020/*.distcp"):
            path.unlink()
    running = bench.start()
    whole(bench, running)
    assert moved(running) == 0


def test_the_loss_of_all_copies_of_a_shard_is_named_and_the_older_step_taken(make: Make) -> None:
    bench = make(3)
    bench.path(bench.owners(SHARDS[3])[0], f"{CHECKPOINT}/{SHARDS[3]}").unlink()
    running = bench.start()
    whole(bench, running, "10")
    for node in range(3):
        (note,) = [note for note in running.told(node)["notes"] if "__3_0.distcp" in note]
        assert note == f"iteration 20: {SHARDS[3]}: no node has it, and no source"


def test_a_step_that_is_insisted_on_is_refused_where_it_is_not_whole(make: Make) -> None:
    bench = make(2)
    bench.path(bench.owners(SHARDS[1])[0], f"{CHECKPOINT}/{SHARDS[1]}").unlink()
    refused(bench, bench.start(step="20"), 4, "step 20 cannot be made whole", SHARDS[1], "no node has it")


def test_a_damaged_shard_of_which_there_is_another_copy_is_left_alone(make: Make) -> None:
    bench = make(3)
    bench.lay_out(copies=2)
    path = bench.path(1, f"{CHECKPOINT}/{SHARDS[1]}")
    data = bytearray(path.read_bytes())
    data[bench.truth.tensors[SHARDS[1]][0][0]] ^= 1
    path.write_bytes(data)
    running = bench.start()
    whole(bench, running)
    notes = running.told(0)["notes"]
    assert any(note.startswith("node 1 (node1)") and SHARDS[1].rpartition("/")[2] in note for note in notes), notes
    assert path.read_bytes() == data


def test_trackers_that_disagree_are_told(make: Make) -> None:
    bench = make(2)
    (bench.path(1, CHECKPOINT) / TRACKER).write_text("10")
    running = bench.start()
    whole(bench, running)
    (note,) = running.told(1)["notes"]
    assert note == f"trackers disagree: 10 says {TRACKER} of node 1; 20 says {TRACKER} of node 0"


@pytest.mark.parametrize("copies", [1, 2])
def test_nothing_is_taken_from_a_node_that_has_the_index_of_another_save(make: Make, copies: int) -> None:
    bench = make(3)
    bench.lay_out(copies=copies)
    bench.put(1, "iter_0000020/.metadata", OTHER_SAVE.read_bytes())
    running = bench.start()
    whole(bench, running, "20" if copies == 2 else "10")
    assert any("its .metadata is that of another save" in note for note in running.told(2)["notes"])


def test_every_node_hears_that_there_is_nothing(make: Make) -> None:
    bench = make(2)
    for node in range(2):
        shutil.rmtree(bench.path(node, CHECKPOINT))
    refused(bench, bench.start(), 4, "no checkpoint on any node", "node 0 (node0)", "node 1 (node1)")


def test_local_files_go_to_the_nodes_that_have_their_ranks_now(make: Make) -> None:
    bench = make(2)
    for node in range(2):
        shutil.rmtree(bench.path(node, CHECKPOINT))
        rank = 1 - node
        path = bench.path(node, f"{CHECKPOINT}/session/{rank}/iter_0000020_{rank}_local.pt")
        path.parent.mkdir(parents=True)
        torch.save({"rank": torch.full((5000,), rank)}, path)
    running = bench.prepare(ranks=[[0], [1]])
    assert running.codes() == {0: 0, 1: 0}, [end.err for end in running.ends.values()]
    for node in range(2):
        name = f"session/{node}/iter_0000020_{node}_local.pt"
        found = list(bench.path(node, VIEW).rglob("*.pt"))
        assert found == [bench.path(node, f"{VIEW}/{name}")]
        assert found[0].read_bytes() == bench.path(1 - node, f"{CHECKPOINT}/{name}").read_bytes()


@pytest.mark.megatron
@pytest.mark.slow
def test_nodes_get_only_what_their_ranks_read(make: Make, truth: Truth) -> None:
    bench = make(2)
    running = bench.prepare(ranks=[[0, 1], [2, 3]], timeout_seconds=60.0)
    assert running.codes() == {0: 0, 1: 0}, [end.err for end in running.ends.values()]
    needs: dict[str, Any] = running.told(0)["needs"]
    for node in range(2):
        view = bench.path(node, VIEW)
        shards = {f"iter_0000020/{path.name}" for path in view.glob("iter_0000020/*.distcp")}
        assert shards == set(needs[str(node)])
        assert all((view / name).read_bytes() == truth.steps["20"][name] for name in shards)
    assert len(needs["0"]) < 4
