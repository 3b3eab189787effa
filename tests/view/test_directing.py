"""What node 0 orders, from what the nodes say: pure, with nodes that exist in memory only."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from made_up_nodes import MadeUpCluster, MadeUpNode, reading, with_file

from ckptguard.view.directing import Wanted

SHARDS = {f"__{rank}_0.distcp": f"save20 shard {rank}" for rank in range(4)}
OLD_SHARDS = {name: content.replace("20", "10") for name, content in SHARDS.items()}
INDEX = {".metadata": "save20", "metadata.json": "{}"}
OLD_INDEX = {".metadata": "save10", "metadata.json": "{}"}
SIZES = {name: len(content) for name, content in SHARDS.items()}
EXPECTED = {"save20": SIZES, "save10": SIZES, "other": SIZES}


def node(*ranks: int, index: bool = False, step: str = "20", **more: object) -> MadeUpNode:
    """A node that holds the shards of some ranks."""
    files = {name: content for name, content in SHARDS.items() if int(name[2]) in ranks}
    return MadeUpNode([{step: {**files, **(INDEX if index else {})}}], **more)  # type: ignore[arg-type]


def cluster(*nodes: MadeUpNode) -> MadeUpCluster:
    """Nodes of one training run."""
    return MadeUpCluster(nodes, EXPECTED, common=("__0_0.distcp",))


def whole(of: Mapping[str, str] = SHARDS, index: Mapping[str, str] = INDEX, step: str = "20") -> dict[str, str]:
    """All files of a step, as named in a view."""
    return {f"iter_{step}/{name}": content for name, content in {**of, **index}.items()}


def test_every_node_gets_all_files_and_each_byte_leaves_a_node_once() -> None:
    made = cluster(node(0, index=True, tracker="20"), node(1), node(2), node(3))
    outcome = made.run()
    assert outcome.refusal is None
    assert outcome.agreement is not None
    assert [one.staged for one in made.nodes] == [whole()] * 4
    assert [one.confirmed for one in made.nodes] == [True] * 4
    assert set(made.sent.values()) == {1}
    moved = sum(one.moved_bytes for each in outcome.delivered.values() for one in each)
    missing = 3 * sum(SIZES.values()) + 3 * len("save20{}")
    assert moved == missing


def test_only_what_ranks_read_is_moved() -> None:
    made = cluster(
        reading(node(0, 1, index=True), "iter_20/__0_0.distcp", "iter_20/__2_0.distcp"),
        reading(node(2, 3), "iter_20/__2_0.distcp"),
    )
    made.run()
    assert sorted(made.nodes[0].staged) == [
        "iter_20/.metadata",
        "iter_20/__0_0.distcp",
        "iter_20/__2_0.distcp",
        "iter_20/metadata.json",
    ]
    assert "iter_20/__0_0.distcp" in made.nodes[1].staged, "common state is read by all"
    assert "iter_20/__1_0.distcp" not in made.nodes[1].staged
    checked = {copy.name for order in made.orders if order.verb == "check" for copy in order.copies}
    assert checked == {"iter_20/__0_0.distcp", "iter_20/__2_0.distcp"}, "files that nobody reads are not looked into"


def test_a_replacement_node_with_nothing_is_given_everything() -> None:
    made = cluster(node(0, 1, index=True), node(2, 3), MadeUpNode([{}]))
    assert made.run().refusal is None
    assert made.nodes[2].staged == whole()


def test_node_0_may_be_the_one_with_nothing() -> None:
    made = cluster(MadeUpNode([{}]), node(0, 1, index=True), node(2, 3))
    assert made.run().refusal is None
    assert made.nodes[0].staged == whole()


def test_a_damaged_copy_is_dropped_and_another_one_is_taken() -> None:
    bad = {**SHARDS, **INDEX, "__1_0.distcp": SHARDS["__1_0.distcp"][:-1] + "!"}
    made = cluster(MadeUpNode([{"20": bad}]), node(0, 1, 2, 3))
    outcome = made.run()
    assert made.nodes[0].staged == whole()
    assert any("node 0 (host0), /ckpt: iter_20/__1_0.distcp: its bytes do not match" in note for note in outcome.notes)


def test_all_copies_of_a_shard_gone_falls_back_to_the_older_step() -> None:
    old = {"10": {**OLD_SHARDS, **OLD_INDEX}}
    made = cluster(
        MadeUpNode([{"20": {**INDEX, "__0_0.distcp": SHARDS["__0_0.distcp"]}, **old}], tracker="20"), node(2, 3)
    )
    outcome = made.run()
    assert outcome.agreement is not None
    assert outcome.agreement.step.number == "10"
    assert outcome.agreement.passed_over == ("iteration 20: iter_20/__1_0.distcp: no node has it, and no source",)
    assert made.nodes[1].staged == whole(OLD_SHARDS, OLD_INDEX, "10")


def test_damage_found_late_falls_back_and_says_why() -> None:
    bad = with_file({**SHARDS, **INDEX}, "__3_0.distcp", "save20 shard !")
    made = cluster(MadeUpNode([{"20": bad, "10": {**OLD_SHARDS, **OLD_INDEX}}], tracker="20"), MadeUpNode([{}]))
    outcome = made.run()
    assert outcome.agreement is not None
    assert outcome.agreement.step.number == "10"
    assert (
        "no sound copy left (node 0 (host0), /ckpt: iter_20/__3_0.distcp: its bytes" in outcome.agreement.passed_over[0]
    )
    assert made.nodes[1].view == "10"


def test_a_copy_cut_short_on_a_node_without_the_index_is_told() -> None:
    short = with_file(SHARDS, "__1_0.distcp", "save20")
    made = cluster(node(0, 1, 2, 3, index=True), MadeUpNode([{"20": short}]))
    outcome = made.run()
    assert made.nodes[1].staged == whole()
    assert "node 1: iter_20/__1_0.distcp: cut short: 6 of 14 bytes, so it is not used" in outcome.notes


def test_a_step_that_is_insisted_on_does_not_fall_back() -> None:
    bad = with_file({**SHARDS, **INDEX}, "__3_0.distcp", "save20 shard !")
    made = cluster(MadeUpNode([{"20": bad, "10": {**OLD_SHARDS, **OLD_INDEX}}]), MadeUpNode([{}]))
    outcome = made.run(Wanted("1f", "now", step="20"))
    assert outcome.refusal is not None
    assert outcome.refusal.blame == "damaged"
    assert "step 20 cannot be made whole" in outcome.refusal.message
    assert [one.view for one in made.nodes] == ["", ""]


def test_metadata_of_another_save_on_one_node_takes_that_node_out() -> None:
    stray = MadeUpNode([{"20": {**SHARDS, ".metadata": "other", "metadata.json": "{}"}}])
    made = cluster(node(0, 1, 2, 3, index=True), node(0, 1, 2, 3, index=True), stray)
    outcome = made.run()
    assert outcome.agreement is not None
    assert made.nodes[2].staged == whole()
    assert any("node 2 (host2): its .metadata is that of another save" in note for note in outcome.notes)
    assert all(delivery.via is not None for o in made.orders for delivery in o.deliveries if delivery.node == 2)


def test_two_sound_copies_that_differ_are_of_two_saves() -> None:
    other = with_file(SHARDS, "__2_0.distcp", "save19 shard 2")
    made = cluster(node(0, 1, 2, 3, index=True), MadeUpNode([{"20": other}]))
    outcome = made.run()
    assert outcome.refusal is not None
    assert "iter_20/__2_0.distcp: the copies on node 0, node 1 are sound each, and differ" in outcome.refusal.message


def test_a_copy_nobody_needs_is_compared_all_the_same() -> None:
    other = with_file(SHARDS, "__2_0.distcp", "save19 shard 2")
    made = cluster(node(0, 1, 2, 3, index=True), reading(MadeUpNode([{"20": other}]), "iter_20/__1_0.distcp"))
    outcome = made.run()
    assert outcome.refusal is not None
    assert "are of two saves" in outcome.refusal.message


def test_a_step_newer_than_every_tracker_is_left_aside() -> None:
    files = {"20": {**SHARDS, **INDEX}, "10": {**OLD_SHARDS, **OLD_INDEX}}
    made = cluster(MadeUpNode([files], tracker="10"), MadeUpNode([{}]))
    outcome = made.run()
    assert outcome.agreement is not None
    assert outcome.agreement.step.number == "10"
    assert "newer than every tracker" in outcome.agreement.passed_over[0]
    insisted = cluster(MadeUpNode([files], tracker="10"), MadeUpNode([{}])).run(Wanted("1f", "now", step="20"))
    assert insisted.agreement is not None
    assert insisted.agreement.step.number == "20"


def test_trackers_that_disagree_are_told_and_the_newest_whole_step_is_taken() -> None:
    files = {"20": {**SHARDS, **INDEX}, "10": {**OLD_SHARDS, **OLD_INDEX}}
    made = cluster(MadeUpNode([files], tracker="10"), MadeUpNode([{}], tracker="20"))
    outcome = made.run()
    assert outcome.agreement is not None
    assert outcome.agreement.step.number == "20"
    assert any(
        note.startswith("trackers disagree: 10 says latest_checkpointed_iteration.txt of node 0")
        for note in outcome.notes
    )


def test_what_only_a_source_has_is_read_there_once() -> None:
    source = {"20": {**SHARDS, **INDEX}}
    made = cluster(*(MadeUpNode([{}, source]) for _ in range(3)))
    outcome = made.run()
    assert outcome.refusal is None
    assert [one.staged for one in made.nodes] == [whole()] * 3
    reads = [d for o in made.orders if o.verb == "deliver" for d in o.deliveries if d.via is None and "__" in d.name]
    assert len(reads) == len(SHARDS)
    assert len({one.node for one in reads}) > 1, "all nodes read from the source, each something else"
    assert set(made.sent.values()) == {1}


def test_a_damaged_file_of_a_source_is_bad_for_all() -> None:
    source = {"20": with_file({**SHARDS, **INDEX}, "__1_0.distcp", "save20 shard !")}
    made = cluster(*(MadeUpNode([{}, source]) for _ in range(3)))
    outcome = made.run()
    assert outcome.refusal is not None
    assert "/source1: iter_20/__1_0.distcp: its bytes do not match" in outcome.refusal.message


def test_a_file_that_changes_on_its_way_is_dropped() -> None:
    changing = with_file({**SHARDS, **INDEX}, "__1_0.distcp", "save20 shard ?")
    made = cluster(MadeUpNode([{"20": changing}]), MadeUpNode([{}]))
    outcome = made.run()
    assert outcome.refusal is not None
    assert "changed since it was checked" in outcome.refusal.message


def test_a_node_that_cannot_be_reached_ends_it_as_a_fault_of_the_network() -> None:
    made = cluster(node(0, 1, 2, 3, index=True, unreachable=True), MadeUpNode([{}]))
    outcome = made.run()
    assert outcome.refusal is not None
    assert outcome.refusal.blame == "environment"
    assert "node 1 (host1): iter_20/.metadata: node 0 is gone" in outcome.refusal.message


def test_too_little_room_is_told_before_anything_is_moved() -> None:
    made = cluster(node(0, 1, 2, 3, index=True), MadeUpNode([{}], free_bytes=20))
    outcome = made.run()
    assert outcome.refusal is not None
    assert outcome.refusal.blame == "environment"
    assert "bytes are missing there, and 20 bytes are free" in outcome.refusal.message


def test_an_earlier_view_gives_files_of_a_save_that_is_still_there_and_no_other() -> None:
    earlier = {"20": {**SHARDS, **INDEX}, "30": {**SHARDS, ".metadata": "other", "metadata.json": "{}"}}
    made = cluster(node(0, 1, index=True), MadeUpNode([{}, earlier], earlier=1))
    outcome = made.run()
    assert outcome.agreement is not None
    assert outcome.agreement.step.number == "20"
    assert [one.staged for one in made.nodes] == [whole()] * 2
    assert all(d.via is None for o in made.orders for d in o.deliveries if d.node == 1), "nothing is fetched again"
    alone = cluster(MadeUpNode([{}, earlier], earlier=1), MadeUpNode([{}])).run()
    assert alone.refusal is not None
    assert alone.refusal.blame == "absent"


def test_nodes_that_share_the_views_directory_act_as_one() -> None:
    made = cluster(node(0, 1, index=True, sees=(0, 1)), node(2, 3, sees=(0, 1)))
    outcome = made.run()
    assert outcome.agreement is not None
    assert set(outcome.agreement.origins) == {0}
    assert made.nodes[0].staged == whole()
    assert made.nodes[1].staged == {}


def test_a_dry_run_says_what_would_move() -> None:
    made = cluster(node(0, 1, index=True), node(2, 3))
    outcome = made.run(Wanted("1f", "now", dry_run=True))
    moved = {(d.name, d.node) for d in outcome.planned if d.via is not None}
    assert moved == {(f"iter_20/__{r}_0.distcp", 1 if r < 2 else 0) for r in range(4)} - {
        ("iter_20/__0_0.distcp", 1)
    } | {("iter_20/__0_0.distcp", 1)}
    assert [one.view for one in made.nodes] == ["", ""]


def test_nothing_anywhere_says_where_it_looked() -> None:
    outcome = cluster(MadeUpNode([{}]), MadeUpNode([{}])).run()
    assert outcome.refusal is not None
    assert (
        "no checkpoint on any node. Looked at node 0 (host0): /ckpt; node 1 (host1): /ckpt" in outcome.refusal.message
    )


def test_a_status_asks_for_nothing_but_the_survey() -> None:
    made = cluster(node(0, 1, index=True), node(2, 3))
    outcome = made.run(Wanted("1f", "now", survey_only=True))
    assert [order.verb for order in made.orders] == ["survey", "end"]
    assert [c.lacking for c in outcome.candidates] == [()]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_nodes_hold_the_view_is_whole_or_refused(seed: int) -> None:
    rng = random.Random(seed)

    def files(shards: Mapping[str, str], index: Mapping[str, str]) -> dict[str, str]:
        out = {name: content for name, content in shards.items() if rng.random() < 0.6}
        out = {name: content[:-1] + "!" if rng.random() < 0.15 else content for name, content in out.items()}
        return {**out, **(index if rng.random() < 0.6 else {})}

    nodes = [
        MadeUpNode(
            [{"20": files(SHARDS, INDEX), "10": files(OLD_SHARDS, OLD_INDEX)} for _ in range(rng.choice([1, 2]))]
        )
        for _ in range(rng.choice([2, 3, 4]))
    ]
    places = min(len(one.places) for one in nodes)
    made = cluster(*(replace(one, places=one.places[:places]) for one in nodes))
    outcome = made.run()
    if outcome.refusal is not None:
        assert not any(one.view for one in made.nodes)
        return
    assert outcome.agreement is not None
    step = outcome.agreement.step.number
    expected = whole() if step == "20" else whole(OLD_SHARDS, OLD_INDEX, "10")
    for one in made.nodes:
        assert {name: one.staged[name] for name in expected} == expected


def test_ten_thousand_files_on_sixteen_nodes_are_planned_in_seconds() -> None:
    shards = {f"__{rank}_{part}.distcp": "x" for rank in range(2500) for part in range(4)}
    nodes = []
    for number in range(16):
        own = {name: c for at, (name, c) in enumerate(shards.items()) if at % 16 == number}
        nodes.append(MadeUpNode([{"20": {**own, **(INDEX if number == 0 else {})}}]))
    made = MadeUpCluster(nodes, {"save20": dict.fromkeys(shards, 1)})
    begin = time.monotonic()
    assert made.run(Wanted("1f", "now", dry_run=True)).refusal is None
    assert time.monotonic() - begin < 30, "quadratic"
