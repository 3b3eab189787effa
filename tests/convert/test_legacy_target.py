"""Legacy targets: read back under global names they are the source, and Megatron loads and saves them unchanged."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptguard.convert.canonical import Cell, GlobalTensor, SourceTable, State
from ckptguard.convert.legacy_target import LegacyFile, LegacyPlan, plan_legacy, target_files
from ckptguard.convert.sources import state_of, states_in
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.pieces import of_source
from ckptguard.core.plan import Made
from ckptguard.core.writing import WritePlan
from ckptguard.engine import writing
from ckptguard.engine.filling import Filler
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.staging import Staging
from ckptguard.engine.verify import verify
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.pickles import as_plain
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron import legacy_pickles_worker
from ckptguard.megatron.legacy_names import to_global_view
from ckptguard.megatron.legacy_pickles import (
    OPTIMIZER_STATES,
    BufferState,
    ExtraState,
    ModelFile,
    ModelTensor,
    OptimizerFile,
    Pickled,
    from_plain,
    rank_pickles,
    to_plain,
)
from ckptguard.megatron.legacy_pickles_worker import NoGroupsError
from ckptguard.megatron.structure import (
    Bucket,
    Buffer,
    LocalTensor,
    Part,
    Place,
    RankStructure,
    Structures,
    structures_for,
)
from ckptguard.megatron.worker import extra_states
from ckptguard.testing import recipes

FROZEN = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
MOE, DENSE = "moe_pp2ep2_fully_reshardable", "dense_tp2pp2_legacy_torch"
FOLDER = "iter_0000004"
TP2 = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2, "sequence_parallel": True, "world_size": 4, "data_parallel_size": 2,
}  # fmt: skip
ETP1 = {**TP2, "expert_tensor_parallel_size": 1, "world_size": 2, "data_parallel_size": 1}
LAYOUTS: dict[str, Mapping[str, object]] = {
    "own": {}, "tp2": TP2, "tp2 of one expert rank": {**ETP1, "expert_model_parallel_size": 1},
    "etp2": {**TP2, "tensor_model_parallel_size": 1, "sequence_parallel": False}, "muon": {"optimizer": "muon"},
}  # fmt: skip

Asked = Callable[[str], Structures]


@pytest.fixture(scope="module")
def asked() -> Asked:
    """Return a function from a layout's name to the structures of the MoE model in it; "dense" is the other model."""

    @cache
    def all_at_once() -> dict[str, Structures]:
        questions = {}
        for source, names in ((MOE, LAYOUTS), (DENSE, ["dense"])):
            with open_checkpoint(FROZEN / source) as checkpoint:
                facts = checkpoint.index.facts
                for name in names:
                    questions[name] = (dict(facts.args) | dict(LAYOUTS.get(name, {})), facts.content_metadata, None)
        return dict(zip(questions, structures_for(list(questions.values())), strict=True))

    return lambda name: all_at_once()[name]


def common_of(checkpoint: Checkpoint, changes: Mapping[str, object]) -> dict[str, Any]:
    """The common state with other args, which are plain here: restating them in Megatron's own is not under test."""
    (value,) = checkpoint.reader.object_value(checkpoint.index.objects["common_state/shard_0_1"])
    args = argparse.Namespace(**{**as_plain(value["args"]), **changes})
    names = ("checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "content_metadata")
    return {"args": args, **{name: value[name] for name in names}}


def blob(checkpoint: Checkpoint, name: str) -> bytes:
    return checkpoint.files.read_span(checkpoint.index.objects[name].span)


def pickles(plan: LegacyPlan, common: Mapping[str, Any]) -> tuple[Pickled, ...]:
    """As ``rank_pickles``, in this process: starting another takes seconds."""
    return from_plain(legacy_pickles_worker.rank_pickles(to_plain(plan.descriptions), common))


def planned(checkpoint: Checkpoint, structures: Structures, *, optimizer: bool = True, **more: Any) -> LegacyPlan:
    state = state_of(checkpoint.index)
    return plan_legacy(state, structures, folder=FOLDER, states=states_in(state) if optimizer else (), **more)


def write(dst: Path, checkpoint: Checkpoint, plan: LegacyPlan, made: tuple[Pickled, ...]) -> None:
    of = WritePlan(target_files(plan, made), "a test")
    with Staging.open(dst, of.identity, what="a test") as staging:
        writing.write(of, staging, Filler(plan.chunks, plan.sources, checkpoint), memory_bytes=1 << 20, threads=2)
        staging.commit({"latest_checkpointed_iteration.txt": FOLDER.removeprefix("iter_").encode()})


def refingerprinted(root: Path, structures: Structures) -> dict[str, Any]:
    with open_checkpoint(root) as checkpoint:
        assert all(chunk.crc32 for entry in checkpoint.index.tensors.values() for chunk in entry.chunks)
        view = to_global_view(checkpoint.index, structures=structures)
        return fingerprint_checkpoint(dataclasses.replace(checkpoint, index=view.index))


@pytest.mark.parametrize("layout", ["own", "tp2"])
def test_read_back_it_is_the_source(tmp_path: Path, asked: Asked, layout: str) -> None:
    structures = asked(layout)
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        plan = planned(checkpoint, structures)
        write(tmp_path / "c", checkpoint, plan, pickles(plan, common_of(checkpoint, LAYOUTS[layout])))
        source = fingerprint_checkpoint(checkpoint)
    assert len(source) == 4 * 10
    assert refingerprinted(tmp_path / "c", structures) == source
    report = verify(tmp_path / "c")
    assert not report.damaged, report.problems


def test_files_of_two_optimizers(tmp_path: Path, asked: Asked) -> None:
    """Of PP2 EP2 DP2 the second expert rank writes the state of its experts only; Megatron's own objects pass through."""
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        rng = {
            f"{FOLDER}/mp_rank_00_00{pp}_00{ep}/model_optim_rng.pt": blob(checkpoint, f"rng_state/shard_{pp}.0_2.1")
            for pp in range(2)
            for ep in range(2)
        }
        plan = planned(checkpoint, asked("own"))
        common = blob(checkpoint, "common_state/shard_0_1")
        write(tmp_path / "c", checkpoint, plan, rank_pickles(plan.descriptions, common, rng_states=rng))
        (first,) = checkpoint.reader.object_value(checkpoint.index.objects["rng_state/shard_1.0_2.1"])
    root = tmp_path / "c" / FOLDER
    dense, expert = torch.load(root / "mp_rank_00_000_000" / "distrib_optim.pt")
    nothing, other = torch.load(root / "mp_rank_00_000_001" / "distrib_optim.pt")
    key = (torch.bfloat16, torch.float32)
    assert nothing is None
    assert all(list(of) == ["buckets_coalesced", 0] and list(of[0]) == [key] for of in (dense, expert, other))
    assert list(dense[0][key]) == ["param", "exp_avg", "exp_avg_sq", "numel_unpadded"]
    assert dense[0][key]["param"].shape == (dense[0][key]["numel_unpadded"],)
    assert not torch.equal(expert[0][key]["exp_avg"], other[0][key]["exp_avg"])
    with open_checkpoint(tmp_path / "c") as made:
        stored = made.reader.object_value(made.index.objects["mp_rank_00_001_000/model_optim_rng.pt"])
    assert type(stored["args"]).__name__ == "Namespace"
    assert [list(one) for one in stored["optimizer"]] == [["optimizer"], ["optimizer"]]
    assert stored["optimizer"][1]["optimizer"]["param_groups"][0]["is_expert_parallel"] is True
    assert stored["rng_state"][0]["random_rng_state"] == first[0]["random_rng_state"]
    assert not {"content_metadata", "rerun_state_machine"} & set(stored)


def test_a_dense_checkpoint_is_what_megatron_wrote(tmp_path: Path, asked: Asked) -> None:
    """Names, dtypes, shapes and values of every file; the tied embedding on both ends, and zeros between parameters."""
    originals = {p.relative_to(FROZEN / DENSE).as_posix(): p for p in (FROZEN / DENSE).glob("iter_*/*/*.pt")}
    with open_checkpoint(FROZEN / DENSE) as checkpoint:
        names = (p for p in originals if p.endswith("_rng.pt"))
        values = {p: checkpoint.reader.object_value(checkpoint.index.objects[p.partition("/")[2]]) for p in names}
        extra = {}
        for rank in asked("dense").ranks:
            path = f"{FOLDER}/mp_rank_{rank.at['tp']:02d}_{rank.at['pp']:03d}/model_optim_rng.pt"
            extra[rank.rank] = [[ExtraState(n, False) for n in values[path]["model"] if n.endswith("_extra_state")]]
        first = values[f"{FOLDER}/mp_rank_00_000/model_optim_rng.pt"]
        args = argparse.Namespace(**as_plain(first["args"]))
        common = {"args": args, **{n: first[n] for n in first if n not in ("args", "model", "rng_state")}}
        seen = to_global_view(checkpoint.index, structures=asked("dense")).index
        plan = planned(dataclasses.replace(checkpoint, index=seen), asked("dense"), extra_states=extra)
        write(tmp_path / "c", checkpoint, plan, pickles(plan, common))
    assert {p.relative_to(tmp_path / "c").as_posix() for p in (tmp_path / "c").rglob("*.pt")} == set(originals)
    with torch.serialization.safe_globals([argparse.Namespace]):
        for path, original in originals.items():
            ours = torch.load(tmp_path / "c" / path)
            if path.endswith("distrib_optim.pt"):
                _same(ours, torch.load(original))
            else:
                assert list(ours) == [name for name in values[path] if name != "rng_state"]
                assert set(ours["model"]) == set(values[path]["model"])
                assert ours["optimizer"] == values[path]["optimizer"]
    with open_checkpoint(FROZEN / DENSE) as theirs, open_checkpoint(tmp_path / "c") as made:
        kept = {n for n in theirs.index.tensors if "rng_state" not in n}
        assert fingerprint_checkpoint(made) == {n: f for n, f in fingerprint_checkpoint(theirs).items() if n in kept}


def _same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            _same(ours[key], theirs[key])
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def test_weights_alone(tmp_path: Path, asked: Asked) -> None:
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        plan = planned(checkpoint, asked("tp2"), optimizer=False)
        write(tmp_path / "c", checkpoint, plan, pickles(plan, common_of(checkpoint, TP2)))
    assert all(isinstance(file, ModelFile) for file in plan.descriptions)
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(tmp_path / "c" / FOLDER / "mp_rank_01_001" / "model_optim_rng.pt")
    assert "optimizer" not in loaded
    assert loaded["args"].tensor_model_parallel_size == 2


def test_ranks_beyond_the_expert_ranks_write_too(asked: Asked) -> None:
    """TP2 with one expert rank: every tensor rank has a folder, and only the first the experts' optimizer state."""
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        plan = planned(checkpoint, asked("tp2 of one expert rank"))
    assert [file.path for file in plan.descriptions] == [
        f"{FOLDER}/mp_rank_0{tp}/{name}" for tp in range(2) for name in ("distrib_optim.pt", "model_optim_rng.pt")
    ]
    written_by = [
        [buffers is not None for buffers in file.optimizers]
        for file in plan.descriptions
        if isinstance(file, OptimizerFile)
    ]
    assert written_by == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("layout", "states", "match"),
    [
        ("etp2", (), "hold different parts of the experts"),
        ("muon", ("param", "exp_avg", "exp_avg_sq"), "'muon' is not adam or sgd"),
        ("own", ("param", "momentum_buffer"), "the source has momentum_buffer, param"),
        ("dense", (), "embedding.position_embeddings.weight: the ranks of the target hold it"),
    ],
)
def test_what_has_no_defined_form_is_refused(asked: Asked, layout: str, states: tuple[str, ...], match: str) -> None:
    with open_checkpoint(FROZEN / MOE) as checkpoint, pytest.raises(UnsupportedError, match=match):
        plan_legacy(state_of(checkpoint.index), asked(layout), folder="i", states=states)


def test_a_part_without_elements_is_refused(asked: Asked) -> None:
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        entry = checkpoint.index.tensors["decoder.layers.mlp.router.weight"]
        entry = dataclasses.replace(entry, chunks=entry.chunks[1:])
        index = dataclasses.replace(checkpoint.index, tensors={**checkpoint.index.tensors, entry.name: entry})
        with pytest.raises(UnsupportedError, match=r"router\.weight: .* and the source has 0 of its"):
            plan_legacy(state_of(index), asked("own"), folder="i")


def test_dtypes_of_the_source_are_kept_and_told(asked: Asked) -> None:
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        entry = checkpoint.index.tensors["decoder.layers.mlp.router.weight"]
        entry = dataclasses.replace(entry, dtype=BY_NAME["float16"])
        index = dataclasses.replace(checkpoint.index, tensors={**checkpoint.index.tensors, entry.name: entry})
        (file, *_) = plan_legacy(state_of(index), asked("own"), folder="i").descriptions
    assert isinstance(file, ModelFile)
    assert {t.dtype for t in file.chunks[0] if t.name.endswith("router.weight")} == {"float16"}


def test_common_state_that_is_not_enough() -> None:
    files = [ModelFile("i/mp_rank_00/model_optim_rng.pt", ((),), optimizer=True)]
    with pytest.raises(NoGroupsError, match="no parameter groups"):
        legacy_pickles_worker.rank_pickles(
            to_plain(files), {"optimizer": {"param_state_sharding_type": "dp_reshardable"}}
        )
    with pytest.raises(DamagedError, match="the common state: cannot be loaded"):
        rank_pickles(files, b"no zip")


def test_virtual_stages_and_extra_states(tmp_path: Path) -> None:
    """Two model chunks of one rank; an empty tensor is what Transformer Engine's modules remember."""
    chunks = (
        (ModelTensor("a.weight", "bfloat16", (3, 2)), ExtraState("a._extra_state", True)),
        (ModelTensor("a.weight", "float32", (4,)), ExtraState("b._extra_state", False)),
    )
    file = LegacyFile(
        ModelFile("i/mp_rank_00_000/model_optim_rng.pt", chunks, optimizer=False),
        ((_zero("bfloat16", (3, 2)),), (_zero("float32", (4,)),)),
    )
    with open_checkpoint(FROZEN / MOE) as checkpoint:
        plan = LegacyPlan((file,), {})
        write(tmp_path / "c", checkpoint, plan, pickles(plan, {"iteration": 4}))
    loaded = torch.load(tmp_path / "c" / file.file.path)
    assert list(loaded) == ["iteration", "model0", "model1"]
    _same(loaded["model0"]["a.weight"], torch.zeros(3, 2, dtype=torch.bfloat16))
    _same(loaded["model0"]["a._extra_state"], torch.empty(0, dtype=torch.uint8))
    _same(loaded["model1"]["a.weight"], torch.zeros(4))
    assert loaded["model1"]["b._extra_state"] is None


def _zero(dtype: str, shape: tuple[int, ...]) -> Made:
    return Made("zeros", BY_NAME[dtype], shape, whole(shape), of_source("", shape))


def test_elements_between_parameters_are_zeros_and_padding_at_the_ends_of_buckets_is_left_out() -> None:
    shapes = {"a": (3,), "b": (5, 2), "c": (2,)}
    tensors = {
        name: LocalTensor(name, "bfloat16", shape, True, (Part(name, shape, whole(shape), whole(shape), True),))
        for name, shape in shapes.items()
    }
    first = Bucket(70, 128, (Place(tensors["a"], 0, 3), Place(tensors["b"], 60, 70)))
    buffer = Buffer("(torch.bfloat16, torch.float32)", (first, Bucket(5, 128, (Place(tensors["c"], 1, 3),))))
    at = dict.fromkeys(("tp", "pp", "ep", "etp", "dense_dp", "expert_dp", "dense_group", "expert_group"), 0)
    rank = RankStructure(0, at, (tuple(tensors.values()),), (), (buffer,), ())
    names = [name for key in shapes for name in (key, *(f"optimizer.state.{s}.{key}" for s in OPTIMIZER_STATES))]
    state = State(
        {
            name: GlobalTensor(name, BY_NAME["float32"], shape, (Cell(whole(shape), of_source("", shape)),))
            for name, shape in ((name, shapes[name[-1]]) for name in names)
        },
        SourceTable(),
    )
    optimizer, _ = plan_legacy(state, Structures((rank,), "0.19.2", None), folder="i", states=OPTIMIZER_STATES).files
    assert isinstance(optimizer.file, OptimizerFile)
    assert optimizer.file.optimizers == ((BufferState(("bfloat16", "float32"), 75),),)
    assert [[made.box.numel for made in tensor] for tensor in optimizer.tensors] == [[3, 57, 10, 1, 2, 2]] * 3


def test_extra_states_of_a_model_chunk() -> None:
    class Module(torch.nn.Module):
        def __init__(self, state: object) -> None:
            super().__init__()
            self.state = state

        def get_extra_state(self) -> object:
            return self.state

        def state_dict_for_save_checkpoint(self, *, keep_vars: bool) -> dict[str, Any]:
            return self.state_dict(keep_vars=keep_vars)

    chunk = Module(None)
    chunk.te = Module(torch.empty(0, dtype=torch.uint8))
    assert [ExtraState(*one) for one in extra_states(chunk)] == [
        ExtraState("_extra_state", False),
        ExtraState("te._extra_state", True),
    ]


@pytest.mark.megatron
@pytest.mark.slow
def test_megatron_loads_it_and_saves_the_same(real_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """From PP2 EP2 DP2 to TP2 EP2: what Megatron loads of it and saves as ``torch_dist`` is the source, bit for bit."""
    recipe = dataclasses.replace(recipes.MOE_TP2_EP2_FULL, extra_flags=("--no-load-rng",))
    with open_checkpoint(real_checkpoint("moe_ep2_pp2_full")) as checkpoint:
        facts = checkpoint.index.facts
        (structures,) = structures_for([(dict(facts.args) | ETP1, facts.content_metadata, None)])
        plan = planned(checkpoint, structures)
        write(tmp_path / "c", checkpoint, plan, pickles(plan, common_of(checkpoint, ETP1)))
        source = fingerprint_checkpoint(checkpoint)
    with open_checkpoint(recipes.resave(tmp_path / "c", recipe, tmp_path / "again")) as again:
        assert fingerprint_checkpoint(again) == source
