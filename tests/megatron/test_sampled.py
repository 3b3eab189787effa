"""A few ranks of a stage say exactly what building all of them says, or nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron import structure
from ckptguard.megatron.ask import Question, ask
from ckptguard.megatron.sampled import AXES, at_place, choose, fit
from ckptguard.megatron.structure import Structures, from_plain, structures_for

Frozen = Callable[[str], Path]
SIZES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
GROUPED = {"moe_grouped_gemm": True}
DENSE = {"num_experts": None, "moe_ffn_hidden_size": None}
MLA_MTP = {"multi_latent_attention": True, "q_lora_rank": 32, "group_query_attention": False, "mtp_num_layers": 1}
HYBRID = {
    "hybrid_layer_pattern": "M-M*", "is_hybrid_model": True, **DENSE, "mamba_state_dim": 16, "mamba_head_dim": 8,
    "mamba_num_groups": 4, "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, tuple[int, int, int], dict[str, object]]] = {  # PP, (TP, EP, ETP), other args
    "tp2 ep4 etp1": (2, (2, 4, 1), GROUPED),
    "tp2 ep4 etp1, an expert a module": (2, (2, 4, 1), {"use_distributed_optimizer": False}),
    "tp2 ep2 etp2, keys of single experts": (1, (2, 2, 2), {}),
    "tp1 ep8": (1, (1, 8, 1), GROUPED),
    "tp4 ep4 etp2, virtual stages": (2, (4, 4, 2), {**GROUPED, "num_virtual_stages_per_pipeline_rank": 2}),
    "tp16 with 8 query groups": (1, (16, 1, 16), {**DENSE, "num_attention_heads": 16, "num_query_groups": 8}),
    "mla and mtp, tp4 ep2 etp1": (2, (4, 2, 1), MLA_MTP),
    "hybrid tp4": (1, (4, 1, 4), HYBRID),
}


def _place(*numbers: int) -> dict[str, int]:
    return dict(zip(AXES, numbers, strict=True))


def _stage(tp: int, ep: int, etp: int) -> list[dict[str, int]]:
    """Places of the ranks of a stage of the smallest world, as Megatron numbers them."""
    size = max(tp, ep * etp)
    assert size % tp == size % (ep * etp) == 0
    return [_place(r % tp, r % etp, r // etp % ep, r // tp, r // (ep * etp)) for r in range(size)]


@pytest.fixture(scope="module")
def questions(frozen: Frozen) -> list[Question]:
    """Return a question for every layout."""
    with open_checkpoint(frozen("moe_pp2ep2_fully_reshardable")) as checkpoint:
        facts = checkpoint.index.facts
    out: list[Question] = []
    for name, (pp, sizes, more) in LAYOUTS.items():
        layout = {"pipeline_model_parallel_size": pp, **dict(zip(SIZES, sizes, strict=True))}
        virtual = {"virtual_pipeline_model_parallel_size": 2} if "virtual" in name else {}
        args = {**facts.args, "num_experts": 8, **layout, **virtual, **more, "transformer_impl": "transformer_engine"}
        out.append((args, {"singleton_local_shards": "keys" in name}, None))
    return out


@pytest.fixture(scope="module")
def every(questions: list[Question]) -> list[Structures]:
    """Return what building every rank says."""
    return structures_for(questions, sample_above=10**6)


@pytest.fixture(scope="module")
def sampled(questions: list[Question]) -> list[dict[str, Any]]:
    """Return what is answered from as few ranks as possible."""
    return ask(questions, sample_above=1)


def test_sampled_ranks_say_what_all_ranks_say(sampled: list[dict[str, Any]], every: list[Structures]) -> None:
    for name, answer, structures in zip(LAYOUTS, sampled, every, strict=True):
        assert all("fitted" in stage for stage in answer["stages"]), name
        assert all(rank.dense or rank.groups for rank in structures.ranks), name
        assert from_plain(answer) == structures, name


def test_ranks_that_do_not_save_all_make_every_rank_be_built(
    sampled: list[dict[str, Any]], questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong rule shows in what is saved: copies that do not make up the global tensors, or objects twice."""
    wrong_copy, wrong_object = copy.deepcopy(sampled[:2])
    wrong_copy["stages"][0]["fitted"]["chunks"][0][0]["parts"][0]["main"] = {"~zero": ["ep"]}
    for name in wrong_object["stages"][0]["fitted"]["objects"]:
        name[1] = True
    whole = {"stages": [], "megatron": "built", "no_buckets": None, "no_groups": None}
    asked: list[tuple[list[Question], int | None]] = []

    def answer(questions: list[Question], *, sample_above: int | None = None, **_: Any) -> list[dict[str, Any]]:
        asked.append((questions, sample_above))
        return [whole] * len(questions) if sample_above is None else [wrong_copy, sampled[1], wrong_object]

    monkeypatch.setattr(structure, "ask", answer)
    made = structures_for(questions[:3], sample_above=1)
    assert asked == [(questions[:3], 1), ([questions[0], questions[2]], None)]
    assert [structures.megatron == "built" for structures in made] == [True, False, True]


@pytest.mark.parametrize(
    ("sizes", "most"), [((8, 64, 1), 10), ((8, 8, 8), 14), ((16, 1, 16), 4), ((4, 4, 2), 8), ((8, 1, 1), 8)]
)
def test_rules_are_found_exactly(sizes: tuple[int, int, int], most: int) -> None:
    """From whole slopes of all axes, for whatever set of axes must be 0."""
    places, rng = _stage(*sizes), random.Random(0)
    axes = [*AXES[:3]]
    cases = []
    for _ in range(40):
        slopes = {axis: rng.choice((0, 0, 1, 128, 7168 * 2048)) for axis in axes}
        zero = rng.sample(AXES, rng.randrange(len(AXES)))
        cases.append((rng.randrange(100), slopes, zero))

    def describe(place: dict[str, int]) -> list[Any]:
        numbers = [base + sum(slope * place[axis] for axis, slope in slopes.items()) for base, slopes, _ in cases]
        return [
            {
                "offset": [n, 5],
                "key": f"layers.3.experts.{n}/shard_0.{n}_9",
                "main": not any(place[a] for a in z),
                "size": [4],
            }
            for n, (_, _, z) in zip(numbers, cases, strict=True)
        ]

    chosen = choose(places)
    assert len(chosen) <= most
    fitted = fit([places[n] for n in chosen], [describe(places[n]) for n in chosen])
    make = at_place(fitted)
    assert [make(place) for place in places] == [describe(place) for place in places]


@pytest.mark.parametrize(
    "describe",
    [
        lambda at: {"offset": [at["tp"] // 2]},
        lambda at: {"offset": [at["ep"] % 4]},
        lambda at: {"main": at["tp"] == 1},
        lambda at: {"main": at["tp"] == 0 or at["dense_dp"] == 0},
        lambda at: {"shape": [at["tp"]]},
        lambda at: {"key": f"expert.0{at['ep']}"},
        lambda at: {"key": "a" if at["tp"] else "b"},
        lambda at: {"offset": [0] * (1 + at["tp"])},
        lambda at: {"key": "x"} if at["tp"] else {"offset": "x"},
    ],
)
def test_what_follows_no_rule_is_not_described(describe: Callable[[dict[str, int]], Any]) -> None:
    places = _stage(8, 16, 1)
    chosen = choose(places)
    assert fit([places[n] for n in chosen], [describe(places[n]) for n in chosen]) is None


def test_what_is_the_same_everywhere_is_shared() -> None:
    places = _stage(8, 1, 1)
    same = {"shape": [4, 4]}
    make = at_place(fit(places, [{"tensor": same, "offset": [place["tp"]]} for place in places]))
    first, last = make(places[0]), make(places[-1])
    assert first["tensor"] is last["tensor"]
    assert (first["offset"], last["offset"]) == ([0], [7])
