"""The files that a node's ranks read: what they own is there, what nobody understands goes to all, no plan is all files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ckptguard.core.boxes import Box, missing_part
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import EnvironmentFailedError, UnsupportedError, UsageError
from ckptguard.core.index import Chunk, Facts, Index, ObjectEntry, Span, TensorEntry
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.layout.ranks import Grid
from ckptguard.megatron import load_plan
from ckptguard.megatron.load_plan import LoadPlan
from ckptguard.megatron.structure import RankStructure, Structures, structures_for
from ckptguard.testing import synthetic
from ckptguard.testing.synthetic import Kind, Model
from ckptguard.view.needs import needed
from ckptguard.view.values import Step

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DENSE = FIXTURES / "megatron-0.19" / "dense_tp2pp2_dp_reshardable"
MOE = FIXTURES / "megatron-0.19" / "moe_pp2ep2_fully_reshardable"
STEP = Step("global", "4")
NAMES = tuple(f"iter_0000004/__{rank}_0.distcp" for rank in range(4))
ONE_EACH = {node: (node,) for node in range(4)}

MADE_UP = Model(
    (
        Kind("embedding.weight", (64, 8), 0, where="first"),
        Kind("layers.qkv.weight", (16, 8), 0),
        Kind("layers.norm.weight", (8,), None),
        Kind("layers.fc1.weight", (32, 8), 0, fused=2),
        Kind("layers.fc2.weight", (8, 16), 1, expert=True),
        Kind("output.weight", (64, 8), 0, where="last"),
    ),
    layers=4,
    experts=4,
)
STAGES = {1: ((0, 1, 2, 3),), 2: ((0,), (1, 2, 3)), 4: ((0,), (1,), (2,), (3,))}


def stored(structures: Structures) -> Index:
    """Weights and one state each, as the ranks of a layout save them: rank N its own parts, the state a rank further on."""
    chunks: dict[str, list[Chunk]] = {}
    entries: dict[str, TensorEntry] = {}
    for rank in structures.ranks:
        for part in (part for chunk in rank.chunks for tensor in chunk for part in tensor.parts):
            for name, shift in ((part.key, 0), (f"optimizer.state.exp_avg.{part.key}", 1)):
                known = chunks.setdefault(name, [])
                if part.box not in [chunk.box for chunk in known]:
                    file = f"__{(rank.rank + shift) % len(structures.ranks)}_0.distcp"
                    known.append(Chunk(part.box, Span(file, 0, 1)))
                entries[name] = TensorEntry(name, BY_NAME["float32"], part.shape, tuple(known))
    return Index("torch_dist", "made up", entries, {}, {}, {}, Facts(layout={"tp": 2, "pp": 2}))


def with_objects(index: Index, files: Mapping[str, str]) -> Index:
    """With objects, each with its file."""
    more = {name: ObjectEntry(name, Span(file, 0, 1)) for name, file in files.items()}
    return replace(index, objects={**index.objects, **more})


def lacking(index: Index, owner: RankStructure, files: frozenset[str]) -> list[tuple[str, Box]]:
    """What a rank owns, weights and their states, and does not find in these files."""
    out = []
    for part in (part for chunk in owner.chunks for tensor in chunk for part in tensor.parts):
        for name, entry in index.tensors.items():
            if name != part.key and not (name.startswith("optimizer.state.") and name.endswith(f".{part.key}")):
                continue
            kept = [chunk.box.intersect(part.box) for chunk in entry.chunks if chunk.span.file in files]
            inside = [box.relative_to(part.box) for box in kept if box is not None]
            if missing_part(inside, part.box.size) is not None:
                out.append((name, part.box))
    return out


def grids() -> Iterator[Grid]:
    for tp, pp, cp, dp, etp, ep in product((1, 2), (1, 4), (1, 2), (1, 4), (1, 2), (1, 2, 4)):
        if (tp * cp * dp) % (etp * ep) == 0:
            yield Grid(tp, pp, cp, dp, etp, ep)


@pytest.mark.parametrize("source", [Grid(2, 2, 1, 1, 2, 1), Grid(1, 2, 1, 2, 1, 2)], ids=["TP2PP2", "PP2EP2"])
def test_what_a_rank_owns_is_in_the_files_that_are_named(source: Grid) -> None:
    index = stored(synthetic.structures(MADE_UP, source, STAGES[source.pp]))
    fewer = 0
    for grid in grids():
        target = synthetic.structures(MADE_UP, grid, STAGES[grid.pp])
        plan = LoadPlan(index, target, grid, experts=True)
        for owner in target.ranks:
            for rank in range(grid.world):
                if place(grid, rank) == tuple(owner.at[axis] for axis in ("tp", "pp", "etp", "ep")):
                    files = plan.files_of([rank])
                    assert lacking(index, owner, files) == []
                    fewer += len(files) < len(index.spans())
    assert fewer > 100


def place(grid: Grid, rank: int) -> tuple[int, int, int, int]:
    """TP, PP, ETP and EP of a rank, counted as Megatron does: tp, cp, dp, pp, and etp, ep, dp, pp."""
    in_stage, stage = rank % (grid.world // grid.pp), rank // (grid.world // grid.pp)
    return in_stage % grid.tp, stage, in_stage % grid.etp, in_stage // grid.etp % grid.ep


def test_a_file_with_something_unknown_is_read_by_all() -> None:
    grid = Grid(2, 2, 1, 1, 2, 1)
    target = synthetic.structures(MADE_UP, grid, STAGES[2])
    index = stored(target)
    before = LoadPlan(index, target, grid, experts=False).files_of([0])
    odd = TensorEntry("lora.weight", BY_NAME["float32"], (4,), (Chunk(Box((0,), (4,)), Span("odd.distcp", 0, 1)),))
    flat = replace(
        odd,
        name="optimizer.state.fp32_param.model.layers.qkv.weight",
        chunks=(Chunk(odd.chunks[0].box, Span("flat", 0, 1)),),
    )
    index = with_objects(
        replace(index, tensors={**index.tensors, odd.name: odd, flat.name: flat}),
        {"common_state/shard_0_1": "common.distcp", "something": "object.distcp"},
    )
    plan = LoadPlan(index, target, grid, experts=False)
    assert plan.files_of([0]) == before | {"odd.distcp", "flat", "common.distcp", "object.distcp"}


def test_an_object_of_a_module_goes_to_the_ranks_of_its_layer_where_megatron_does_not_speak_of_it() -> None:
    grid = Grid(2, 2)  # layer 0 is stage 0
    target = synthetic.structures(MADE_UP, grid, STAGES[2])
    names = {"model.layers.norm": "n", "mtp.layers.norm": "elsewhere", "router": "no_layer"}
    files = {f"{name}._extra_state/shard_{n}_4": f"{short}{n}" for name, short in names.items() for n in (0, 3)}
    plan = LoadPlan(with_objects(stored(target), files), target, grid, experts=False)
    unknown = {"elsewhere0", "elsewhere3", "no_layer0", "no_layer3"}
    read = [{name for name in plan.files_of([rank]) if not name.startswith("__")} for rank in range(4)]
    assert read == [{"n0", *unknown}, {"n0", *unknown}, {"n3", *unknown}, {"n3", *unknown}]


@pytest.mark.parametrize(
    ("grid", "read"),
    [
        (Grid(2, 2), {0: {"rng00", "rr0"}, 1: {"rng01", "rr1"}, 2: {"rng10", "rr2"}, 3: {"rng11", "rr3"}}),
        (Grid(2, 2, dp=2), {0: {"rng00"}, 3: {"rng01"}, 4: {"rng10"}, 7: {"rng11"}}),
        (Grid(1, 4), {0: set(), 3: set()}),
    ],
    ids=["as-saved", "DP2", "PP4"],
)
def test_states_of_ranks_are_read_where_a_rank_asks_for_their_name(grid: Grid, read: dict[int, set[str]]) -> None:
    target = synthetic.structures(MADE_UP, grid, STAGES[grid.pp])
    index = stored(synthetic.structures(MADE_UP, Grid(2, 2), STAGES[2]))
    rng = {f"rng_state/shard_{pp}.{tp}_2.2": f"rng{pp}{tp}" for pp in (0, 1) for tp in (0, 1)}
    index = with_objects(index, rng | {f"rerun_state_machine_state/shard_{n}_4": f"rr{n}" for n in range(4)})
    plan = LoadPlan(index, target, grid, experts=False)
    for rank, files in read.items():
        assert {name for name in plan.files_of([rank]) if name.startswith("r")} == files


def with_buckets(index: Index, chained: Sequence[str]) -> Index:
    """State in buckets of four groups for each optimizer; the file is named like it: ``chained_1.2``."""
    box, dtype = Box((0,), (4,)), BY_NAME["float32"]
    entries = {}
    for chain, n in product(chained, range(4)):
        name = f"{chain}optimizer.distributed.dp_group_idx_{n}.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param"
        entries[name] = TensorEntry(name, dtype, (4,), (Chunk(box, Span(f"{chain}{n}", 0, 1)),))
    return replace(index, tensors={**index.tensors, **entries})


@pytest.mark.parametrize(
    ("chained", "experts", "read"),
    [
        (["chained_0.", "chained_1."], True, {0: "0.0 1.0", 1: "0.0 1.1", 2: "0.1 1.2", 3: "0.1 1.3"}),
        (["chained_0.", "chained_1.", "chained_2."], True, {2: "0.1 0.2 1.1 1.2 2.1 2.2"}),
        (["chained_0.", "chained_1."], False, {2: "0.1 0.2 1.1 1.2"}),
    ],
    ids=["dense-and-expert", "chunks-have-their-own", "not-of-experts"],
)
def test_buckets_are_read_by_the_ranks_of_their_group(
    chained: Sequence[str], experts: bool, read: dict[int, str]
) -> None:
    """PP2 EP2: ranks 2 and 3 are stage 1, dense group 1, and expert groups 2 and 3."""
    grid = Grid(1, 2, 1, 2, 1, 2)
    target = synthetic.structures(MADE_UP, grid, STAGES[2])
    plan = LoadPlan(with_buckets(stored(target), chained), target, grid, experts=experts)
    for rank, files in read.items():
        assert {n for n in plan.files_of([rank]) if n.startswith("chained")} == {f"chained_{n}" for n in files.split()}


def test_buckets_of_one_optimizer_are_those_of_dense_parameters() -> None:
    grid = Grid(2, 2)
    target = synthetic.structures(MADE_UP, grid, STAGES[2])
    plan = LoadPlan(with_buckets(stored(target), [""]), target, grid, experts=False)
    assert [plan.files_of([rank]) & set("0123") for rank in range(4)] == [{"0"}, {"1"}, {"2"}, {"3"}]


@pytest.fixture(scope="module")
def asked() -> dict[tuple[Path, Layout | None], tuple[Index, Structures]]:
    """What Megatron says of fixtures, asked once."""
    out = {}
    for root, layout in ((DENSE, None), (MOE, None), (MOE, Layout(tp=1, pp=4))):
        with open_checkpoint(root) as checkpoint:
            index = checkpoint.index
        run = load_plan.run_of(index.facts.args, layout, 4)
        out[root, layout] = (index, structures_for([(run.args, index.facts.content_metadata, None)])[0])
    return out


@pytest.mark.parametrize(
    ("root", "layout", "title", "files"),
    [
        (DENSE, None, "TP2 PP2 EP1 DP1", ["0", "01", "02", "0123"]),
        (MOE, None, "TP1 PP2 EP2 DP2", ["01", "01", "023", "023"]),
        (MOE, Layout(tp=1, pp=4), "TP1 PP4 EP1 DP1", ["01", "01", "023", "023"]),
    ],
    ids=["dense", "experts", "other-layout"],
)
def test_what_is_left_out_of_a_view_is_not_owned(
    asked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    layout: Layout | None,
    title: str,
    files: list[str],
) -> None:
    """Only the index and the file with common state are there, as in a staging directory."""
    index, structures = asked[root, layout]
    monkeypatch.setattr(load_plan, "structures_for", lambda _: [structures])
    staged = tmp_path / "iter_0000004"
    staged.mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        shutil.copy(root / "iter_0000004" / name, staged)
    needs = needed(tmp_path, STEP, ranks=ONE_EACH, layout=layout, names=NAMES)
    assert needs.how == f"the load plan of {title}, asked of Megatron Core {structures.megatron}"
    assert needs.names == {n: tuple(NAMES[int(file)] for file in of_node) for n, of_node in enumerate(files)}
    for owner in structures.ranks:
        there = frozenset(Path(name).name for name in needs.names[owner.rank])
        assert lacking(index, owner, there) == []
        assert {index.objects[name].span.file for name in owner.held if name in index.objects} <= there
        assert owner.held


def test_a_node_reads_what_all_its_ranks_read(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "structures_for", lambda _: [asked[DENSE, None][1]])
    needs = needed(DENSE, STEP, ranks={0: (0, 1), 1: (2, 3)}, layout=None, names=NAMES)
    assert needs.names == {0: NAMES[:2], 1: NAMES}


def test_a_file_that_the_index_does_not_speak_of_goes_to_all(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "structures_for", lambda _: [asked[DENSE, None][1]])
    more = (*NAMES, "iter_0000004/__7_0.distcp")
    needs = needed(DENSE, STEP, ranks=ONE_EACH, layout=None, names=more)
    assert needs.names[0] == (NAMES[0], more[-1])


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ({0: (0, 1), 1: ()}, "the ranks of node 1 are not known"),
        ({0: (0, 1), 1: (1, 2)}, "the ranks of the nodes are not 0 to 3, each once"),
        ({0: (0, 1), 1: (2,)}, "3 ranks cannot load it as TP2 PP2 EP1: that takes a multiple of TP x PP x CP, 4"),
    ],
    ids=["not-known", "twice", "too-few"],
)
def test_without_a_plan_all_files_go_to_all_nodes(ranks: dict[int, tuple[int, ...]], why: str) -> None:
    needs = needed(DENSE, STEP, ranks=ranks, layout=None, names=NAMES)
    assert needs.how.startswith(f"all files: {why}")
    assert needs.names == {0: NAMES, 1: NAMES}


@pytest.mark.parametrize("error", [UnsupportedError("no such spec"), EnvironmentFailedError("it ended\nTraceback")])
def test_where_megatron_does_not_answer_all_files_go_to_all_nodes(
    monkeypatch: pytest.MonkeyPatch, error: UnsupportedError | EnvironmentFailedError
) -> None:
    def fails(_: object) -> list[Structures]:
        raise error

    monkeypatch.setattr(load_plan, "structures_for", fails)
    needs = needed(DENSE, STEP, ranks=ONE_EACH, layout=None, names=NAMES)
    assert needs.how == f"all files: {error.message.splitlines()[0]}"
    assert set(needs.names.values()) == {NAMES}


def test_another_model_than_the_one_that_is_stored_has_no_plan(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "structures_for", lambda _: [asked[MOE, None][1]])
    needs = needed(DENSE, STEP, ranks=ONE_EACH, layout=None, names=NAMES)
    assert needs.how.startswith("all files: the model that Megatron makes of the args has ")


def test_args_of_the_run_go_before_those_that_are_stored() -> None:
    needs = needed(DENSE, STEP, ranks=ONE_EACH, layout=None, names=NAMES, arguments={"use_megatron_fsdp": True})
    assert needs.how.startswith("all files: the stored args have use_megatron_fsdp")


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=3, pp=1), Layout(tp=2, pp=4), Layout(tp=2, pp=2, dp=2)],
    ids=["heads", "too-few-ranks", "other-DP"],
)
def test_a_layout_that_cannot_be_is_refused(layout: Layout) -> None:
    ranks = {0: (0, 1, 2)} if layout.tp == 3 else ONE_EACH
    with pytest.raises(UsageError, match="TP"):
        needed(DENSE, STEP, ranks=ranks, layout=layout, names=NAMES)


def test_a_checkpoint_of_another_format_or_without_args_is_read_whole(tmp_path: Path) -> None:
    shutil.copytree(DENSE / "iter_0000004", tmp_path / "iter_0000004")
    (tmp_path / "iter_0000004" / "metadata.json").unlink()
    needs = needed(tmp_path, STEP, ranks=ONE_EACH, layout=None, names=NAMES)
    assert needs.how.startswith("all files: dcp cuts tensors among data parallel ranks too")
    with pytest.raises(UnsupportedError, match="no training args"):
        load_plan.run_of({}, Layout(tp=2, pp=2), 4)


def test_a_local_file_is_read_by_the_rank_whose_state_it_is(tmp_path: Path) -> None:
    names = tuple(f"{place}{rank}/iter_0000020_{rank}_local.pt" for place in ("", "run/") for rank in range(3))
    needs = needed(tmp_path, Step("local", "20", "run"), ranks={0: (1,), 1: (0, 2)}, layout=None, names=(*names, "odd"))
    assert needs.names == {0: (names[1], names[4], "odd"), 1: (names[0], names[2], names[3], names[5], "odd")}
    assert needs.how == "the files of the ranks on each node"
