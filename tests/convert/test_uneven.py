"""Replicas with another tensor parallel degree: Megatron's own cut where it has one, whole units elsewhere, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptguard.cli.main import run
from ckptguard.convert.uneven_target import Uneven, cutting_of, refuse_uneven, replica_args, uncut_args, uneven
from ckptguard.core.boxes import missing_part, overlaps
from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron import ask
from ckptguard.megatron.legacy_names import to_global_view
from ckptguard.megatron.structure import Part, RankStructure, Structures, structures_for
from ckptguard.testing import recipes
from ckptguard.testing.asking import Asking

FROZEN = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
DENSE, MOE = FROZEN / "dense_tp2pp2_legacy_torch", FROZEN / "moe_pp2ep2_fully_reshardable"
SIZES = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 4}
HYBRID = {
    "transformer_impl": "transformer_engine", "normalization": "RMSNorm", "add_bias_linear": False, "num_layers": 3,
    "position_embedding_type": "none", "mamba_num_groups": 4, "mamba_head_dim": 16, "mamba_state_dim": 16,
    "use_mamba_mem_eff_path": False,
}  # fmt: skip
MLA = {
    "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MODELS: Mapping[str, tuple[Path, Mapping[str, object]]] = {
    "dense": (DENSE, {"pipeline_model_parallel_size": 2}),
    "moe": (MOE, {"expert_model_parallel_size": 2, "num_query_groups": 4, "sequence_parallel": True}),
    "few groups": (MOE, {"expert_model_parallel_size": 1}),
    "mla": (DENSE, {**HYBRID, **MLA, "hybrid_layer_pattern": "M-+"}),
    "linear attention": (DENSE, {**HYBRID, **LINEAR, "hybrid_layer_pattern": "G*-"}),
}

Cutter = Callable[..., Uneven]


def args_of(model: str) -> dict[str, object]:
    path, changes = MODELS[model]
    with open_checkpoint(path) as checkpoint:
        args = dict(checkpoint.index.facts.args)
    args |= {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1, **SIZES, **changes}
    return args | replica_args(args, 4)  # the world's size


@pytest.fixture(scope="module")
def asked(asking: Asking, asking_local: Asking) -> Callable[[str, int], Structures]:
    """Return a function from a model and a TP, which ETP follows, to what Megatron says of it; 1, 2 or 4."""

    def put(question: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        return (asking if ask._imports(question) == "te" else asking_local).put(question)

    @cache
    def all_at_once() -> dict[tuple[str, int], Structures]:
        questions = {}
        for model in MODELS:
            args = args_of(model)
            for tp, own in ((1, uncut_args(args)), (2, {**args, **replica_args(args, 2)}), (4, args)):
                questions[model, tp] = (own, {}, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ask, "put", put)
            return dict(zip(questions, structures_for(list(questions.values())), strict=True))

    return lambda model, tp: all_at_once()[model, tp]


@pytest.fixture(scope="module")
def cutter(asked: Callable[[str, int], Structures]) -> Cutter:
    """Return a function ``(model, tp, *parts)`` that cuts a replica of a run with TP 4."""

    def cut(model: str, tp: int, *parts: tuple[str, int], **changes: object) -> Uneven:
        full = args_of(model) | changes
        args = {**full, **(replica_args(full, tp) if tp < 4 else {})}
        return uneven(asked(model, 1), asked(model, 4), args, cutting_of(full, args, parts), 12)

    return cut


def parts_of(rank: RankStructure, name: str) -> list[Part]:
    """Parts of the first layer that has a tensor with a name that ends so, in the rank's own order."""
    found = [p for chunk in rank.chunks for t in chunk if t.name.endswith(name) for p in t.parts]
    return [part for part in found if part.key == found[0].key and part.box.offset[:-2] == found[0].box.offset[:-2]]


def ranges(cut: Uneven, name: str, dim: int) -> list[tuple[int, int]]:
    """Where the ranks' parts of a tensor begin and end, along a dim counted from behind; of the first pipeline stage."""
    boxes = [parts_of(rank, name)[0].box for rank in cut.structures.ranks if not rank.at["pp"]]
    return [(box.offset[dim], box.end[dim]) for box in boxes]


@pytest.mark.parametrize("model", ["dense", "moe", "mla", "linear attention", "few groups"])
def test_a_degree_that_divides_gives_megatrons_own_ranks(
    model: str, asked: Callable[[str, int], Structures], cutter: Cutter
) -> None:
    made, own = cutter(model, 2).structures, asked(model, 2)
    assert [rank.rank for rank in made.ranks] == [rank.rank for rank in own.ranks]
    for rank, other in zip(made.ranks, own.ranks, strict=True):
        assert dict(rank.at) == dict(other.at)
        assert rank.chunks == other.chunks
        assert rank.objects == other.objects
        places = [
            [[[place.tensor for place in b.places] for b in buffer.buckets] for buffer in (*r.dense, *r.expert)]
            for r in (rank, other)
        ]
        assert places[0] == places[1]
    assert made.has_expert_optimizer == own.has_expert_optimizer


@pytest.mark.parametrize("model", ["dense", "moe", "mla", "linear attention"])
def test_an_uneven_cut_saves_everything_once(model: str, cutter: Cutter) -> None:
    cut = cutter(model, 3)
    saved: dict[str, list[Part]] = {}
    for part in (p for r in cut.structures.ranks for c in r.chunks for t in c for p in t.parts):
        assert part.box.numel == part.local.numel
        saved.setdefault(part.key, []).extend([part] if part.main else [])
    for parts in saved.values():
        boxes = [part.box for part in parts]
        assert not list(overlaps(boxes))
        assert missing_part(boxes, parts[0].shape) is None
    for rank in cut.structures.ranks:
        for tensor in (t for chunk in rank.chunks for t in chunk):
            local = [part.local for part in tensor.parts]
            assert not list(overlaps(local))
            assert missing_part(local, tensor.shape) is None


def test_heads_stay_with_their_query_group_and_their_columns(cutter: Cutter) -> None:
    dense = cutter("dense", 3)  # 4 heads of 16, each a query group
    assert ranges(dense, "linear_qkv.weight", -2) == [(0, 96), (96, 144), (144, 192)]
    assert ranges(dense, "linear_qkv.bias", -1) == [(0, 96), (96, 144), (144, 192)]
    assert ranges(dense, "linear_proj.weight", -1) == [(0, 32), (32, 48), (48, 64)]
    assert (
        ranges(dense, "linear_fc1.weight", -2)
        == ranges(dense, "linear_fc2.weight", -1)
        == [(0, 86), (86, 171), (171, 256)]
    )
    assert ranges(dense, "word_embeddings.weight", -2) == [(0, 171), (171, 342), (342, 512)]
    assert ranges(dense, "linear_proj.bias", -1) == [(0, 64)] * 3


def test_latent_attention_is_cut_by_heads_and_mamba_by_groups(cutter: Cutter) -> None:
    mla = cutter("mla", 3)
    assert ranges(mla, "linear_q_up_proj.weight", -2) == [(0, 32), (32, 48), (48, 64)]
    assert ranges(mla, "linear_kv_up_proj.weight", -2) == [(0, 44), (44, 66), (66, 88)]
    assert ranges(mla, "self_attention.linear_proj.weight", -1) == [(0, 20), (20, 30), (30, 40)]
    assert ranges(mla, "linear_kv_down_proj.weight", -2) == [(0, 20)] * 3
    assert ranges(mla, "mixer.out_proj.weight", -1) == [(0, 64), (64, 96), (96, 128)]
    assert ranges(mla, "mixer.A_log", -1) == [(0, 4), (4, 6), (6, 8)]
    (first,) = [t for t in mla.structures.ranks[0].chunks[0] if t.name.endswith("mixer.in_proj.weight")]
    assert [(p.key.rpartition(".")[2], p.local.offset[0], p.local.size[0]) for p in first.parts] == [
        ("z", 0, 64), ("x", 64, 64), ("B", 128, 32), ("C", 160, 32), ("dt", 192, 4),
    ]  # fmt: skip
    linear = cutter("linear attention", 3)
    assert ranges(linear, "self_attention.out_proj.weight", -1) == [(0, 32), (32, 48), (48, 64)]


def test_gate_and_up_of_an_expert_are_cut_alike(cutter: Cutter) -> None:
    cut = cutter("few groups", 4, ("*.mlp.experts.*", 3))  # experts of 128 columns
    gate, up = zip(*[parts_of(rank, "linear_fc1.weight")[:2] for rank in cut.structures.ranks[:3]], strict=True)
    assert [(p.box.offset[-2], p.box.size[-2]) for p in gate] == [(0, 43), (43, 43), (86, 42)]
    assert [(p.box.offset[-2], p.box.size[-2]) for p in up] == [(128, 43), (171, 43), (214, 42)]
    assert [p.local.offset[0] for p in up] == [43, 43, 42]
    assert not any(t.name.endswith("linear_fc1.weight") for t in cut.structures.ranks[3].chunks[0])
    experts, rest = cut.held
    assert (experts.part, experts.degree, experts.weight_bytes[3]) == ("*.mlp.experts.*", 3, 0)
    # 4 layers, 4 experts, 3 matrices of 64 rows: what rank i has beyond columns [32 i, 32 i + 32) of 128
    assert experts.crossing_bytes == tuple(4 * 4 * 3 * 64 * n * 2 for n in (11, 22, 32, 0))
    assert rest.crossing_bytes == (0, 0, 0, 0)
    assert rest.state_bytes == tuple(n * 6 for n in rest.weight_bytes)  # 12 bytes beside each 2


def test_a_part_of_some_layers_has_its_own_degree(cutter: Cutter) -> None:
    cut = cutter("dense", 4, ("decoder.layers.*.mlp.*", 2), ("decoder.layers.1.mlp.*", 3))
    sizes = [
        [p.box.size[-2] for t in rank.chunks[0] for p in t.parts if t.name.endswith("linear_fc1.weight")]
        for rank in cut.structures.ranks[:4]
    ]
    assert sizes == [[128, 86], [128, 85], [128, 85], [128]]  # two copies in layer 0; rank 3 is left over in layer 1
    mains = [
        [p.main for t in rank.chunks[0] for p in t.parts if t.name.endswith("0.mlp.linear_fc1.weight")]
        for rank in cut.structures.ranks[:4]
    ]
    assert mains == [[True], [True], [False], [False]]


@pytest.mark.parametrize(
    ("model", "tp", "parts", "message"),
    [
        ("few groups", 3, (), r"self_attention\.linear_\w+\.weight and 7 more: 2 query groups .* to 3 ranks \(1 to 2 work\)"),
        ("dense", 3, (("*.mlp.*", 4),), r"--tp-for \*\.mlp\.\*=4: .* the 3 ranks of a replica \(1 to 3 work\)"),
        ("dense", 4, (("encoder.*", 2),), r"--tp-for encoder\.\*=2: .* none is left"),
        ("dense", 4, (("*.linear_fc1.*", 2),), r"gives .* degree \d and .* \d, which one block computes together"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_said(
    model: str, tp: int, parts: tuple[tuple[str, int], ...], message: str, cutter: Cutter
) -> None:
    with pytest.raises(UsageError, match=message):
        cutter(model, tp, *parts)


def test_tensors_of_unknown_units_are_not_cut(asked: Callable[[str, int], Structures]) -> None:
    def renamed(structures: Structures) -> Structures:
        def other(part: Part) -> Part:
            return replace(part, key=part.key.replace("self_attention", "new_attention"))

        ranks = [
            replace(r, chunks=tuple(tuple(replace(t, parts=tuple(map(other, t.parts))) for t in c) for c in r.chunks))
            for r in structures.ranks
        ]
        return replace(structures, ranks=tuple(ranks))

    args = args_of("dense")
    both = args | replica_args(args, 3)
    with pytest.raises(UnsupportedError, match=r"12 tensors that TP cuts: decoder\.layers\.0\.new_attention"):
        uneven(renamed(asked("dense", 1)), renamed(asked("dense", 4)), both, cutting_of(args, both), 0)


@pytest.mark.parametrize(
    ("replicas", "parts", "form", "to", "error", "message"),
    [
        (((2, 3),), (), None, "torch_dist", UsageError, "the 2 data parallel replicas have the numbers 0 to 1"),
        (((0, 8),), (), None, "torch_dist", UsageError, "not below --tp 8 .1 to 7 work"),
        (((0, 6),), (), None, "torch", UsageError, "--replica-tp with --to torch"),
        ((), (("*", 2),), None, "fsdp_dtensor", UsageError, "--tp-for with --to fsdp_dtensor"),
        (((0, 6),), (), "dp_reshardable", "torch_dist", UnsupportedError, "the buckets of each rank"),
    ],
)  # fmt: skip
def test_replicas_that_cannot_be_are_refused(
    replicas: Any, parts: Any, form: str | None, to: str, error: type[Exception], message: str
) -> None:
    args = {"tensor_model_parallel_size": 8, "data_parallel_size": 2}
    with pytest.raises(error, match=message):
        refuse_uneven(args, replicas, parts, optimizer=form, to=to)


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, dict[str, Any]]]:
    """Return a function that gives the dense checkpoint as TP 4 with a replica of TP 3, and the plan that was printed."""
    root = tmp_path_factory.mktemp("uneven") / "run"

    @cache
    def make() -> tuple[Path, dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            printed: list[str] = []
            patch.setattr("ckptguard.cli.options.click.echo", lambda text="", **_: printed.append(text))
            command = ["reshard", str(DENSE), str(root), "--tp", "4", "--pp", "2", "--dp", "2", "--replica-tp", "1=3"]
            assert run([*command, "--optimizer", "fully_reshardable", "--json"]) == 0
        return root, json.loads("".join(printed))

    return make


@pytest.mark.usefixtures("quick_local")
def test_a_replicas_checkpoint_holds_the_same_state(resharded: Callable[[], tuple[Path, dict[str, Any]]]) -> None:
    root, printed = resharded()
    with (
        open_checkpoint(root) as full,
        open_checkpoint(root / "replica_1") as replica,
        open_checkpoint(DENSE) as source,
    ):
        expected = fingerprint_checkpoint(full)
        assert fingerprint_checkpoint(replica) == expected
        view = to_global_view(source.index).index
        weights = fingerprint_checkpoint(replace(source, index=view))
        assert {name: expected[name] for name in weights if name in expected} == {
            name: value for name, value in weights.items() if name in expected
        }
        assert len(weights.keys() & expected.keys()) > 8
        args = replica.index.facts.args
        key = "decoder.layers.self_attention.linear_qkv.weight"
        state = replica.index.tensors[f"optimizer.state.exp_avg.{key}"]
        for entry in (replica.index.tensors[key], state):
            assert sorted({(c.box.offset[1], c.box.size[1]) for c in entry.chunks}) == [(0, 96), (96, 48), (144, 48)]
    assert (args["tensor_model_parallel_size"], args["world_size"], args["data_parallel_size"]) == (3, 6, 1)
    for place in (root, root / "replica_1"):
        report = verify(place)
        assert not report.damaged, report.problems
        assert report.seal
    (part,) = printed["plan"]["replicas"]["1"]["parts"]
    assert part["degree"] == 3
    assert list(part["weight_bytes"]) == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.megatron
@pytest.mark.usefixtures("quick_local")
def test_megatron_loads_a_replicas_checkpoint_and_saves_what_the_source_holds(
    resharded: Callable[[], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    model = recipes.Recipe(
        name="learned positions", optimizer_format="fully_reshardable",
        without_flags=(
            "--swiglu", "--group-query-attention", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
        ),
        extra_flags=(
            "--position-embedding-type", "learned_absolute", "--normalization", "LayerNorm", "--ffn-hidden-size", "256",
            "--use-checkpoint-opt_param-scheduler",
        ),
    )  # fmt: skip
    root, _ = resharded()
    again = recipes.resave(root / "replica_1", model, tmp_path / "again")
    with open_checkpoint(again) as saved, open_checkpoint(root) as full:
        assert fingerprint_checkpoint(saved) == fingerprint_checkpoint(full)


@pytest.mark.usefixtures("quick_local")
def test_the_whole_target_can_be_cut_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new"
    options = [
        "--tp",
        "2",
        "--etp",
        "4",
        "--pp",
        "1",
        "--tp-for",
        "*.experts.*=3",
        "--tp-for",
        "*.1.self_attention.*=1",
    ]
    assert run(["reshard", str(MOE), str(target), *options]) == 0
    said = capsys.readouterr().out
    assert "*.experts.*, degree 3: " in said
    with open_checkpoint(MOE) as source, open_checkpoint(target) as new:
        assert fingerprint_checkpoint(new) == fingerprint_checkpoint(source)
        fc2 = new.index.tensors["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
        assert sorted({(c.box.offset[-1], c.box.size[-1]) for c in fc2.chunks}) == [(0, 43), (43, 43), (86, 42)]
        proj = new.index.tensors["decoder.layers.self_attention.linear_proj.weight"]
        assert sorted((c.box.offset[0], c.box.size[-1]) for c in proj.chunks) == [
            (0, 32), (0, 32), (1, 64), (2, 32), (2, 32), (3, 32), (3, 32),
        ]  # fmt: skip
    assert not verify(target).damaged
    assert not (target / "replica_0").exists()
