"""Args of a target layout are what Megatron-LM stores for it; what is accepted Megatron builds, what is refused it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import prod
from pathlib import Path

import pytest

from ckptguard.core.errors import UnsupportedError, UsageError
from ckptguard.core.index import Index
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.layout.possible import estimate
from ckptguard.megatron import ask, process
from ckptguard.megatron.model_numbers import counts_of
from ckptguard.megatron.reshard_args import TargetArgs, target_args
from ckptguard.megatron.structure import RankStructure, rank_structures, structures_for
from ckptguard.testing.asking import Asking
from ckptguard.testing.recipes import Model, Recipe

WORKER = Path(__file__).with_name("parsed_args_worker.py")
FROZEN = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
DENSE, MOE = "dense_tp2pp2_integrity", "moe_pp2ep2_fully_reshardable"

# A layout, and the flags that say it to Megatron-LM. Data parallel ranks fill the world of 8.
_SAID: dict[Model, list[tuple[Layout, str]]] = {
    "dense": [
        (Layout(), ""),
        (Layout(tp=4, pp=2), "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"),
        (Layout(tp=2, cp=2), "--tensor-model-parallel-size 2 --context-parallel-size 2"),
        (Layout(pp=2, vpp=2), "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        (
            Layout(pp=2, vpp=2, first_pp_layers=2),
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 2",
        ),
        (Layout(pp=2, last_pp_layers=1), "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"),
        (
            Layout(pp=2, count_embedding=True, count_loss=True),
            "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split"
            " --account-for-loss-in-pipeline-split",
        ),
        (
            Layout(pp=2, pp_layout="Et|tt,|t|L"),
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt,|t|L",
        ),
    ],
    "moe": [
        (Layout(), ""),
        (Layout(ep=4, pp=2), "--expert-model-parallel-size 4 --pipeline-model-parallel-size 2"),
        (
            Layout(tp=2, ep=2, etp=1),
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
            " --sequence-parallel",
        ),
        (Layout(tp=2, ep=4), "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sequence-parallel"),
    ],
    "hybrid": [
        (Layout(), "--hybrid-layer-pattern M-M*"),
        (Layout(tp=2), "--tensor-model-parallel-size 2 --hybrid-layer-pattern M-M*"),
        (Layout(pp=2), "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|M*"),
        (Layout(pp=2, vpp=2), "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M|-|M|*"),
    ],
}


@pytest.fixture(scope="module")
def parsed() -> dict[Model, list[dict[str, object]]]:
    """Return what Megatron-LM makes of the flags, by model, in the order of ``_SAID``."""
    said = [(model, flags) for model, pairs in _SAID.items() for _, flags in pairs]
    questions = [
        (8, [*Recipe(name="", model=model, num_layers=4).megatron_flags(), "--global-batch-size", "8", *flags.split()])
        for model, flags in said
    ]
    done = subprocess.run(
        [sys.executable, str(WORKER)], input=json.dumps(questions), env=process.environment(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    out: dict[Model, list[dict[str, object]]] = {}
    for (model, _), answer in zip(said, json.loads(done.stdout), strict=True):
        assert isinstance(answer, dict), answer
        out.setdefault(model, []).append(answer)
    return out


@pytest.mark.parametrize("model", _SAID)
def test_changed_args_are_those_of_a_run_in_the_target_layout(
    parsed: dict[Model, list[dict[str, object]]], model: Model
) -> None:
    """From the args of every layout to those of every other, all of them equal."""
    pairs = list(zip((layout for layout, _ in _SAID[model]), parsed[model], strict=True))
    for (_, source), (layout, expected) in permutations(pairs, 2):
        made = target_args(source, layout, optimizer="dp_reshardable", vocabulary_rows=512, keep_rng=True)
        assert {**source, **made.changes} == expected, layout
        assert {name for name, value in made.changes.items() if source.get(name) == value} == set()
        assert made.args | {**made.changes} == made.args


def _index(name: str) -> Index:
    with open_checkpoint(FROZEN / name) as checkpoint:
        return checkpoint.index


@cache
def _model(name: str) -> dict[str, object]:
    """Args of a small model with Transformer Engine's layers, as a checkpoint stores them."""
    dense, moe = dict(_index(DENSE).facts.args), dict(_index(MOE).facts.args)
    hybrid = moe | {
        "hybrid_layer_pattern": "M-M*M-EM", "is_hybrid_model": True, "mamba_state_dim": 16, "mamba_head_dim": 16,
        "mamba_num_groups": 4, "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    }  # fmt: skip
    four = dense | {"num_layers": 4}
    models = {
        "dense": four,
        "mtp": four | {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        "groups": four | {"num_attention_heads": 12, "num_query_groups": 4, "kv_channels": 8, "ffn_hidden_size": 96},
        "mla": four | {"multi_latent_attention": True, "q_lora_rank": 32, "group_query_attention": False},
        "moe": moe,
        "biased": moe | {"add_bias_linear": True},
        "odd": moe | {"ffn_hidden_size": 130},
        "mixed": moe | {"ffn_hidden_size": 130, "moe_layer_freq": [1, 1, 0, 1]},
        "shared": moe | {"moe_shared_expert_intermediate_size": 130},
        "hybrid": hybrid,
        "hybrid-mtp": hybrid | {"hybrid_layer_pattern": "M-M*|M-EM/*M", "mtp_num_layers": 1},
    }
    return models[name] | {"transformer_impl": "transformer_engine"}


def _target(model: str, layout: Layout) -> TargetArgs:
    return target_args(_model(model), layout, optimizer="fully_reshardable", vocabulary_rows=None)


# Model, layout, and how many layers of the decoder each pipeline rank has.
ACCEPTED: list[tuple[str, Layout, list[int]]] = [
    ("dense", Layout(tp=4), [4]),  # more ranks than query groups
    ("groups", Layout(tp=4, pp=2), [2, 2]),
    ("mla", Layout(tp=4), [4]),
    ("dense", Layout(pp=3, first_pp_layers=1, last_pp_layers=1), [1, 2, 1]),
    ("dense", Layout(pp=3, last_pp_layers=2), [1, 1, 2]),
    ("dense", Layout(pp=2, vpp=2, first_pp_layers=2), [2, 2]),
    ("dense", Layout(pp=6, count_embedding=True, count_loss=True), [0, 1, 1, 1, 1, 0]),
    ("dense", Layout(pp=3, vpp=2, count_embedding=True, count_loss=True), [1, 2, 1]),
    ("dense", Layout(pp=4, pp_layout="E|tt|tt|L"), [0, 2, 2, 0]),
    ("dense", Layout(pp=2, pp_layout="E(t|)*3tL"), [2, 2]),
    ("mtp", Layout(pp=2, vpp=2), [2, 2]),
    ("mtp", Layout(pp=4, pp_layout="Et|ttt|m|L"), [1, 3, 0, 0]),
    ("mtp", Layout(pp=2, pp_layout="Et|t|ttm|L"), [3, 1]),
    ("moe", Layout(pp=2, ep=2, etp=2), [2, 2]),
    ("moe", Layout(tp=2, ep=4, etp=1), [4]),
    ("biased", Layout(tp=2, etp=1), [4]),
    ("odd", Layout(tp=4), [4]),  # no layer has an MLP of that width
    ("mixed", Layout(tp=2, pp=2), [2, 2]),
    ("hybrid", Layout(tp=4), [8]),
    ("hybrid", Layout(pp=2, vpp=2), [4, 4]),
    ("hybrid", Layout(pp=3, first_pp_layers=2, last_pp_layers=2), [2, 4, 2]),
    ("hybrid", Layout(pp=2, ep=2, pp_layout="M-M*M|-EM"), [5, 3]),
    ("hybrid-mtp", Layout(), [8]),
    ("hybrid-mtp", Layout(pp=4), [2, 2, 2, 2]),
]


@pytest.fixture(scope="module")
def asking() -> Iterator[None]:
    """Have a warm process answer what is asked of Megatron."""
    with Asking() as warm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask, "put", warm.put)
        yield


@pytest.mark.usefixtures("asking")
def test_accepted_layouts_are_built_with_the_stages_asked_for() -> None:
    found = structures_for([(_target(model, layout).args, {}, None) for model, layout, _ in ACCEPTED])
    for (model, layout, layers), structures in zip(ACCEPTED, found, strict=True):
        by_stage: dict[int, set[tuple[int, str]]] = {rank.at["pp"]: set() for rank in structures.ranks}
        for rank in structures.ranks:
            for number, chunk in enumerate(rank.chunks):
                names = [t.name.split(".") for t in chunk if t.name.startswith("decoder.layers.")]
                by_stage[rank.at["pp"]] |= {(number, name[2]) for name in names}
        assert [len(by_stage[pp]) for pp in sorted(by_stage)] == layers, (model, layout)
        assert max(rank.at["tp"] for rank in structures.ranks) == layout.tp - 1
        assert max(rank.at["ep"] for rank in structures.ranks) == layout.ep - 1


# Model, layout, what we say, the args that Megatron would be started with, and what it says.
REFUSED: list[tuple[str, Layout, str, dict[str, object], str]] = [
    (
        "dense", Layout(tp=3), r"4 attention heads in 2 query groups over --tp 3 \(these work: 1, 2, 4\); the MLP's width, 64,",
        {"tensor_model_parallel_size": 3}, "num_attention_heads",
    ),
    (
        "groups", Layout(tp=6), r"12 attention heads in 4 query groups over --tp 6 \(these work: 1, 2, 4\)",
        {"tensor_model_parallel_size": 6}, "num_query_groups",
    ),
    (
        "groups", Layout(tp=12), "in 4 query groups over --tp 12",
        {"tensor_model_parallel_size": 12, "padded_vocab_size": 384}, "160 is not divisible",
    ),
    (
        "dense", Layout(pp=3), r"4 layers over --pp 3 \(these --pp work: 1, 2, 4; these --last-pp-layers: 2\)",
        {"pipeline_model_parallel_size": 3}, "num_layers=4 should be divisible",
    ),
    (
        "dense", Layout(pp=2, vpp=4), "4 layers over --pp 2 --vpp 4",
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4}, "should be divisible by vp_size",
    ),
    (
        "dense", Layout(vpp=2), "2 virtual stages need --pp above 1",
        {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": 2}, "greater than 1 with interleaved",
    ),
    (
        "dense", Layout(pp=2, first_pp_layers=1, last_pp_layers=1), r"these --last-pp-layers: 3\)",
        {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}, "2 middle layers remaining",
    ),
    (
        "dense", Layout(pp=2, count_loss=True), r"4 layers and 1 counted as such over --pp 2 \(these --pp work: 1, 5\)",
        {"account_for_loss_in_pipeline_split": True}, "number of middle layers: 5",
    ),
    (
        "dense", Layout(pp=2, count_loss=True, first_pp_layers=1), "--first-pp-layers and --count-loss together",
        {"account_for_loss_in_pipeline_split": True, "decoder_first_pipeline_num_layers": 1}, "at the same time",
    ),
    (
        "dense", Layout(pp=2, pp_layout="Ett|ttL", last_pp_layers=2), "--last-pp-layers beside --pp-layout",
        {"pipeline_model_parallel_layout": "Ett|ttL", "decoder_last_pipeline_num_layers": 2}, "cannot be set",
    ),
    (
        "dense", Layout(pp=2, pp_layout="Ett|ttL", vpp=2), "--vpp 2 beside a --pp-layout of 1 virtual stages",
        {"pipeline_model_parallel_layout": "Ett|ttL", "virtual_pipeline_model_parallel_size": 2}, "conflicts with",
    ),
    (
        "dense", Layout(pp=2, pp_layout="Ett|tL"), r"has 3 t \(this works: 4, the model's layers\)",
        {"pipeline_model_parallel_layout": "Ett|tL"}, "Number of decoder layers 3",
    ),
    (
        "dense", Layout(pp=2, pp_layout="E|tt|ttL"), r"has 3 stages over --pp 2 \(these work: 1, 3\)",
        {"pipeline_model_parallel_layout": "E|tt|ttL"}, "must be divisible",
    ),
    (
        "mtp", Layout(pp=2, pp_layout="Ett|ttL"), r"has 0 m \(this works: 1, the model's MTP layers\)",
        {"pipeline_model_parallel_layout": "Ett|ttL"}, "Number of mtp layers",
    ),
    (
        "mtp", Layout(pp=2, pp_layout="Ett|tmtL"), "has a t after an m",
        {"pipeline_model_parallel_layout": "Ett|tmtL"}, "before MTP layers",
    ),
    (
        "mtp", Layout(pp=2, pp_layout="Ett|ttm||L"), "has m before a rank's last virtual stage",
        {"pipeline_model_parallel_layout": "Ett|ttm||L"}, "MTP should be always in the last",
    ),
    (
        "moe", Layout(ep=3), r"4 experts over --ep 3 \(these work: 1, 2, 4\)", {"expert_model_parallel_size": 3},
        "AssertionError",
    ),
    ("dense", Layout(ep=2), "has no experts", {"expert_model_parallel_size": 2}, "num_moe_experts must be non None"),
    (
        "moe", Layout(etp=3), "an expert's width, 128, over --etp 3", {"expert_tensor_parallel_size": 3},
        "256 is not divisible by 3",
    ),
    (
        "biased", Layout(tp=2), "biases over --etp 2, which is --tp unless given",
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, "only supported when ETP==1",
    ),
    (
        "shared", Layout(tp=4), "the shared experts' width, 130, over --tp 4", {"tensor_model_parallel_size": 4},
        "65 is not divisible",
    ),
    (
        "hybrid", Layout(tp=8), "Mamba groups, 4, over --tp 8",
        {"tensor_model_parallel_size": 8, "num_attention_heads": 8, "num_query_groups": 8}, "ngroups must be evenly",
    ),
    (
        "hybrid", Layout(pp=3), "8 layers over --pp 3", {"pipeline_model_parallel_size": 3},
        r"layers \(8\) must be evenly divisible",
    ),
    (
        "hybrid", Layout(pp=2, pp_layout="M|-|M*M-EM"), r"has 3 stages over --pp 2 \(these work: 1, 3\)",
        {"hybrid_layer_pattern": "M|-|M*M-EM"}, "must be evenly divisible by",
    ),
]  # fmt: skip


@pytest.mark.usefixtures("asking")
@pytest.mark.parametrize(("model", "layout", "ours", "raw", "theirs"), REFUSED)
def test_refused_layouts_are_refused_by_megatron(
    model: str, layout: Layout, ours: str, raw: dict[str, object], theirs: str
) -> None:
    with pytest.raises(UsageError, match=ours):
        _target(model, layout)
    sizes = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": 1,
    }
    args = _model(model) | sizes | {"expert_tensor_parallel_size": None} | raw
    with pytest.raises(UnsupportedError, match=theirs):
        rank_structures(args)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("dense", Layout(pp=2, pp_layout="Exx|L"), "has x "),
        ("dense", Layout(pp=2, pp_layout="ttE|ttL"), "must begin with its only E"),
        (
            "dense",
            Layout(pp=3, first_pp_layers=3, last_pp_layers=3),
            "4 layers over --pp 3",
        ),  # Megatron does not see it
        ("hybrid", Layout(pp=2, count_loss=True), "a hybrid model's stages hold layers only"),
        ("hybrid", Layout(pp=2, pp_layout="MM|MM"), r"its pattern with \| between stages works: M-M\*M-EM"),
        (
            "moe",
            Layout(tp=2, ep=4, etp=1, dp=1),
            r"2 ranks, TP x PP x CP x DP, over ETP x EP x PP, 4 \(these --dp work: 2, 4",
        ),
    ],
)
def test_other_refusals(model: str, layout: Layout, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _target(model, layout)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        _target("moe", Layout(tp=3, pp=3, ep=3))
    assert caught.value.message.startswith("the model cannot be laid out as TP3 PP3 EP3: ")
    assert caught.value.message.count(" over --") == 4
    assert "--list-layouts" in caught.value.next_step


@pytest.mark.parametrize(
    ("stored", "tp", "rows", "expected"),
    [
        ({"vocab_size": 127, "make_vocab_size_divisible_by": 128}, 1, 256, 128),  # known: padded as a run would
        ({"vocab_size": 127, "make_vocab_size_divisible_by": 128}, 4, 256, 512),
        ({"vocab_size": 128, "make_vocab_size_divisible_by": 128}, 1, 512, 512),  # 512 are no padding of 128 for TP 2
        ({"vocab_size": None, "make_vocab_size_divisible_by": 128}, 4, 256, 256),  # not known: kept where TP divides
        ({"vocab_size": None, "make_vocab_size_divisible_by": 2}, 4, 250, 256),
        ({"vocab_size": None, "make_vocab_size_divisible_by": 128}, 4, None, 256),  # as the args say
        ({}, 2, 251, 252),
    ],
)
def test_padded_vocabulary(stored: dict[str, object], tp: int, rows: int | None, expected: int) -> None:
    args = {n: v for n, v in _model("dense").items() if n not in ("vocab_size", "make_vocab_size_divisible_by")}
    made = target_args(args | stored, Layout(tp=tp), optimizer=None, vocabulary_rows=rows)
    assert made.args["padded_vocab_size"] == expected
    assert any("vocabulary is padded" in note for note in made.notes) == (rows not in (None, expected))


@pytest.mark.parametrize(
    ("layout", "world", "dp"),
    [
        (Layout(), 4, 4),
        (Layout(tp=4, dp=3), 12, 3),
        (Layout(tp=4, pp=2), 8, 1),
        (Layout(tp=2, cp=2), 4, 1),
        (Layout(tp=2, ep=4, etp=1), 4, 2),
        (Layout(tp=2, ep=4), 8, 4),
    ],
)
def test_world_size(layout: Layout, world: int, dp: int) -> None:
    args = _target("moe", layout).args
    assert (args["world_size"], args["data_parallel_size"]) == (world, dp)


def test_notes_and_saved_parts() -> None:
    source = _model("moe") | {"sequence_parallel": True, "tensor_model_parallel_size": 2, "no_save_optim": True}
    made = target_args(source, Layout(cp=3), optimizer="dp_reshardable", vocabulary_rows=512)
    assert (made.changes["no_save_rng"], made.changes["no_save_optim"]) == (True, False)
    assert made.changes["dist_ckpt_optim_fully_reshardable"] is False
    for words in ("world size, 4, does not fit", "Sequence parallelism is off", "Context parallelism is 3"):
        assert any(words in note for note in made.notes), words
    made = target_args(source, Layout(tp=2, dp=3), optimizer=None, vocabulary_rows=512, keep_rng=True)
    assert "no_save_rng" not in made.changes
    assert "no_save_optim" not in made.changes
    assert made.notes == (
        "The global batch size, 4, is no multiple of micro batch size x DP, 1 x 3: Megatron-LM will want other sizes.",
    )


def test_arguments_that_an_old_release_does_not_know_are_not_stored() -> None:
    path = FROZEN.with_name("megatron-0.12") / "dense_tp2pp2_model_space"
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.index.facts.args
    made = target_args(stored, Layout(tp=2), optimizer="dp_reshardable", vocabulary_rows=128)
    assert made.changes == {"pipeline_model_parallel_size": 1, "data_parallel_size": 2, "no_save_rng": True}


def test_old_hybrid_patterns_become_today_s() -> None:
    old = {n: v for n, v in _model("hybrid").items() if n != "hybrid_layer_pattern"}
    old |= {"hybrid_override_pattern": "M-M*", "mtp_hybrid_override_pattern": "MM", "mtp_num_layers": 2}
    assert (
        target_args(old, Layout(pp=2), optimizer=None, vocabulary_rows=None).changes["hybrid_layer_pattern"]
        == "M-|M*/MM/MM"
    )


def _held(rank: RankStructure, dp: int, edp: int) -> int:
    """Bytes of a rank's bfloat16 weights, and of its share of 12 bytes of state for each element of them."""
    tensors = [tensor for chunk in rank.chunks for tensor in chunk]
    return sum(prod(t.shape) * 2 + prod(t.shape) * 12 // (edp if ".experts." in t.name else dp) for t in tensors)


@pytest.mark.usefixtures("asking")
@pytest.mark.parametrize("name", [DENSE, MOE])
def test_estimates_are_what_the_largest_rank_holds(name: str) -> None:
    index = _index(name)
    counts = counts_of(index)
    assert (counts.weight_bytes, counts.optimizer_bytes, counts.distributed) == (2, 12, True)
    layouts = [Layout(tp=2, pp=2), Layout(), Layout(pp=2, last_pp_layers=1)]
    layouts += [Layout(tp=2, pp=2, ep=2, etp=1), Layout(tp=4, ep=2)] if name == MOE else [Layout(tp=4)]
    layouts = [replace(layout, dp=16 // (layout.tp * layout.pp)) for layout in layouts]
    rows = counts.vocabulary
    stored = index.facts.args | {
        "make_vocab_size_divisible_by": 1,
        "vocab_size": rows,
        "transformer_impl": "transformer_engine",
    }
    args = [target_args(stored, layout, optimizer=None, vocabulary_rows=rows).args for layout in layouts]
    found = structures_for([(one, {}, None) for one in args])
    for layout, structures in zip(layouts, found, strict=True):
        edp = 16 // (layout.pp * layout.ep * (layout.etp or layout.tp))
        largest = max(_held(rank, layout.dp or 1, edp) for rank in structures.ranks)
        assert estimate(counts, layout, 16).total_bytes == pytest.approx(largest, rel=0.001), layout


def test_counts_need_global_names() -> None:
    with pytest.raises(UnsupportedError, match="word embedding cannot be found"):
        counts_of(_index("dense_tp2pp2_legacy_torch"))
