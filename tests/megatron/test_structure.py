"""What Megatron Core says a stored model is made of agrees with what Megatron stored."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from ckptguard.core.boxes import missing_part, overlaps
from ckptguard.core.errors import UnsupportedError
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.structure import Structures, rank_structures, structures_for, structures_of
from ckptguard.testing import recipes

Frozen = Callable[[str], Path]
Asked = Callable[[str], Structures]
DENSE, MOE = "dense_tp2pp2_dp_reshardable", "moe_pp2ep2_fully_reshardable"
MLA = {"multi_latent_attention": True, "q_lora_rank": 32, "group_query_attention": False}
HYBRID = {
    "hybrid_layer_pattern": "M-M*", "is_hybrid_model": True, "num_experts": None, "moe_ffn_hidden_size": None,
    "expert_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2, "mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2,
    "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
}  # fmt: skip


@pytest.fixture(scope="module")
def moe_args(frozen: Frozen) -> Mapping[str, object]:
    """Return the args that the frozen MoE checkpoint stores."""
    with open_checkpoint(frozen(MOE)) as checkpoint:
        return checkpoint.index.facts.args


def _covered(structures: Structures) -> None:
    """Every global tensor is owned exactly once by the ranks that Megatron lets save it."""
    for key, shape in structures.global_shapes.items():
        boxes = [
            part.box
            for rank in structures.ranks
            for chunk in rank.chunks
            for tensor in chunk
            for part in tensor.parts
            if part.key == key and part.main
        ]
        assert all(box.within(shape) for box in boxes), key
        assert not list(overlaps(boxes)), key
        assert missing_part(boxes, shape) is None, key


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_owned_boxes_are_the_stored_chunks(frozen: Frozen, asked: Asked, name: str) -> None:
    """Keys, global shapes and the boxes of the chunks, as Megatron itself wrote them on disk."""
    with open_checkpoint(frozen(name)) as checkpoint:
        weights = {n: e for n, e in checkpoint.index.tensors.items() if not n.startswith(("optimizer.", "chained_"))}
    structures = asked(name)
    assert structures.global_shapes == {n: e.shape for n, e in weights.items()}
    stored = {(n, chunk.box) for n, e in weights.items() for chunk in e.chunks}
    tensors = [t for rank in structures.ranks for chunk in rank.chunks for t in chunk]
    assert {(part.key, part.box) for t in tensors for part in t.parts} == stored
    assert {t.dtype for t in tensors} == {e.dtype.name for e in weights.values()}
    _covered(structures)


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_every_extra_state_has_one_rank_that_saves_it(frozen: Frozen, asked: Asked, name: str) -> None:
    with open_checkpoint(frozen(name)) as checkpoint:
        stored = [entry for entry in checkpoint.index.objects if "_extra_state/" in entry]
    assert sorted(entry for rank in asked(name).ranks for entry in rank.objects) == sorted(stored)


def test_several_layouts_are_asked_about_at_once(frozen: Frozen, asked: Asked) -> None:
    """Each is answered as if it were alone, whether or not another of them wants Transformer Engine."""
    with open_checkpoint(frozen(DENSE)) as checkpoint:
        facts = checkpoint.index.facts
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_tensor_parallel_size")
    whole = {**facts.args, **dict.fromkeys(sizes, 1)}
    te, one, same = structures_for(
        [
            (facts.args, facts.content_metadata, "transformer_engine"),
            (whole, facts.content_metadata, None),
            (facts.args, facts.content_metadata, None),
        ]
    )
    assert same == asked(DENSE)
    assert len(one.ranks) == 1
    assert one.global_shapes == same.global_shapes == te.global_shapes
    objects = {entry for rank in same.ranks for entry in rank.objects}
    assert {entry for rank in te.ranks for entry in rank.objects} > objects  # TE's norm has state of its own


class _NotDistributed(recipes.Recipe):
    """Trains with an optimizer whose state every data parallel rank has whole."""

    def megatron_flags(self) -> list[str]:
        return [flag for flag in super().megatron_flags() if flag != "--use-distributed-optimizer"]


class _Unpickler(pickle.Unpickler):
    """Reads Megatron's enums as ``Facts.args`` has them, without importing Megatron."""

    def find_class(self, module: str, name: str) -> Any:
        return (
            (lambda number: f"{name}({number})") if module.startswith("megatron.") else super().find_class(module, name)
        )


@pytest.mark.megatron
@pytest.mark.slow
def test_groups_number_the_state_of_an_optimizer_that_is_not_distributed(tmp_path: Path) -> None:
    """Each parameter's master is its weight, bit for bit: of two model chunks, dense and expert parameters."""
    recipe = _NotDistributed(name="groups", model="moe", pp=2, vpp=2, dp=2, ep=2, ckpt_format="torch")
    files = sorted(recipes.make_checkpoint(recipe, tmp_path).rglob("model_optim_rng.pt"))
    plainly = SimpleNamespace(Unpickler=_Unpickler, __name__="plainly")
    states = [torch.load(file, weights_only=False, pickle_module=plainly) for file in files]
    structures = rank_structures(vars(states[0]["args"]))
    assert structures.no_groups is None
    for rank, state in zip(structures.ranks, states, strict=True):
        weights = [state["model0"], state["model1"]]
        of_chunk = {id(tensor): chunk for chunk, tensors in enumerate(rank.chunks) for tensor in tensors}
        for groups, optimizer in zip((rank.groups, rank.expert_groups), state["optimizer"], strict=True):
            members = [tensor for group in groups for tensor in group]
            adam = optimizer["optimizer"]["state"]
            assert {n: tuple(moments["exp_avg"].shape) for n, moments in adam.items()} == {
                n: tensor.shape for n, tensor in enumerate(members)
            }
            masters = [master for group in optimizer["fp32_from_fp16_params"] for master in group]
            for tensor, master in zip(members, masters, strict=True):
                weight = weights[of_chunk[id(tensor)]][tensor.name]
                assert torch.equal(master.detach().bfloat16().view(torch.int16), weight.view(torch.int16)), tensor.name


def test_groups_are_the_same_on_all_ranks(moe_args: Mapping[str, object]) -> None:
    """A rank without parameters for a group has it empty: the only experts are in the last stage here."""
    args = {**moe_args, "moe_layer_freq": [0, 0, 1, 1], "use_distributed_optimizer": False}
    ranks = rank_structures(args).ranks
    assert {(len(rank.groups), len(rank.expert_groups)) for rank in ranks} == {(2, 1)}
    for rank in ranks:
        assert bool(rank.expert_groups[0]) == (rank.at["pp"] == 1)
        assert all(len(tensor.shape) == 1 for tensor in rank.groups[1])
        assert sum(map(len, rank.groups + rank.expert_groups)) == sum(t.trainable for t in rank.chunks[0])


def test_gate_and_up_are_two_halves_of_the_rank_s_tensor(asked: Asked) -> None:
    tensors = {t.name: t for t in asked(MOE).ranks[1].chunks[0]}
    gate, up = tensors["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"].parts
    assert (gate.local.offset, gate.local.size) == ((0, 0), (128, 64))
    assert (up.local.offset, up.local.size) == ((128, 0), (128, 64))
    assert (gate.box.offset, up.box.offset) == ((0, 2, 0, 0), (0, 2, 128, 0))  # expert 2 is the first of EP rank 1


@pytest.mark.parametrize(
    ("changes", "local_name", "key"),
    [
        ({}, "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.pre_mlp_layernorm.weight"),
        (
            {"moe_grouped_gemm": True, "tensor_model_parallel_size": 2},
            "decoder.layers.0.mlp.experts.linear_fc1.weight1",
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        ),
        (
            {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3},
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            MLA,
            "decoder.layers.0.self_attention.linear_kv_up_proj.weight",
            "decoder.layers.self_attention.linear_kv_up_proj.weight",
        ),
        ({"mtp_num_layers": 1}, "embedding.word_embeddings.weight", "mtp.layers.0.eh_proj.weight"),
        (HYBRID, "decoder.layers.0.mixer.in_proj.weight", "decoder.layers.0.mixer.in_proj.weight.z"),
    ],
    ids=["moe", "grouped-tp2", "uneven", "mla", "mtp", "hybrid-tp2"],
)
def test_transformer_engine_models_without_transformer_engine(
    moe_args: Mapping[str, object], changes: dict[str, object], local_name: str, key: str
) -> None:
    """The keys of a GPU run, from Megatron's own Transformer Engine specs."""
    structures = rank_structures({**moe_args, **changes, "transformer_impl": "transformer_engine"})
    assert local_name in {t.name for rank in structures.ranks for t in rank.chunks[0]}
    assert key in structures.global_shapes
    assert structures.no_buckets is None
    _covered(structures)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None, "num_layers": None}, "num_layers, hidden_size"),
        ({"spec": ["os", "system"]}, "os.system"),
        ({"yaml_cfg": "model.yaml"}, "yaml_cfg"),
        ({"use_megatron_fsdp": True}, "Megatron-FSDP"),
        ({"gtp_weight_remat_size": 2}, "gtp_weight_remat_size=2"),
        ({"num_layers": 5}, "num_layers=5 should be divisible"),
    ],
)
def test_what_cannot_be_derived_is_refused_by_name(
    moe_args: Mapping[str, object], changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words.replace(".", r"\.")):
        rank_structures({**moe_args, **changes})


def test_no_args_no_structure() -> None:
    with pytest.raises(UnsupportedError, match="stores no training args"):
        rank_structures({})


def test_the_caller_s_process_stays_as_it_was(frozen: Frozen) -> None:
    """No process group, no redirected call, whatever the asking process did to itself."""
    before = (torch.cuda.current_device, torch.Tensor.cuda, torch.distributed.is_initialized())
    with open_checkpoint(frozen(DENSE)) as checkpoint:
        structures_of(checkpoint.index)
    assert (torch.cuda.current_device, torch.Tensor.cuda, torch.distributed.is_initialized()) == before
