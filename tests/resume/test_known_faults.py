"""Known faults are named by their marks, and a first divergence is described by what the records show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import LAYERS, Arm, arm, changed, digest, edited, values_of

from ckptguard.resume.compare import compare_loaded, compare_steps
from ckptguard.resume.diagnoses import describe, number
from ckptguard.resume.excuses import RULES
from ckptguard.resume.known_faults import recognise
from ckptguard.resume.results import KnownFault

VERSIONS = {"megatron-core": "0.19.2", "torch": "2.14.1"}
REFERENCE = arm((1, 6), ranks=4, saved=(2, 3))
RESUME = arm((4, 6), ranks=4, loaded=True)
EXPERT = "rng tracker expert-parallel-rng"


def placed(records: Arm) -> Arm:
    """Two tensor parallel ranks in two replicas; experts are cut over all four."""
    for rank, record in records.items():
        record.facts["ranks"] = {"tp": rank % 2, "pp": 0, "dp": rank // 2, "cp": 0, "ep": rank}
    return records


def known(
    one: Arm, other: Arm, arguments: Mapping[str, Any] = {}, versions: Mapping[str, str] = VERSIONS
) -> tuple[KnownFault, ...]:
    steps = compare_steps("reference", one, "resume", other, (4, 6), "", RULES)
    loaded = compare_loaded("save", one, "load", other, 3, "", RULES, steps)
    facts = {"sizes": {"tp": 2, "ep": 4, "dp": 2}, "arguments": dict(arguments)}
    return recognise((loaded, steps), {"reference": one, "save": one, "resume": other, "load": other}, facts, versions)


def issues(one: Arm, other: Arm, **arguments: Any) -> list[str]:
    return [fault.issue for fault in known(one, other, arguments)]


def sentences(one: Arm, other: Arm, kind: str = "loaded") -> str:
    steps = compare_steps("reference", one, "resume", other, (4, 6), "", RULES)
    loaded = compare_loaded("save", one, "load", other, 3, "", RULES, steps)
    return "\n".join(describe(loaded if kind == "loaded" else steps, one, other))


def loads(records: Arm, values: Mapping[str, Any], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Arm:
    for rank in ranks:
        for item, value in values.items():
            records = changed(records, "loaded", 3, rank, item, value)
    return records


def value(rank: int, item: str, step: int = 3) -> Any:
    return values_of(rank, step)[item][1]


def test_nothing_is_named_where_nothing_differs() -> None:
    assert known(REFERENCE, RESUME) == ()
    assert describe(compare_steps("reference", REFERENCE, "resume", RESUME, (4, 6), "", RULES), REFERENCE, RESUME) == ()


def test_expert_generators_of_the_first_replica() -> None:
    one, other = placed(arm((1, 6), ranks=4, saved=(3,))), placed(arm((4, 6), ranks=4, loaded=True))
    wrong = loads(loads(other, {EXPERT: value(0, EXPERT)}, (2,)), {EXPERT: value(1, EXPERT)}, (3,))
    (fault,) = known(one, wrong)
    assert fault.issue == "NVIDIA/Megatron-LM#6858"
    assert "megatron-core 0.19.2: expert parallel 4" in fault.evidence
    assert "ranks 2, 3" in fault.evidence
    assert known(one, wrong, versions={"torch": "2.14.1"}) == ()
    elsewhere = loads(wrong, {EXPERT: digest("elsewhere")}, (3,))
    other_tensor_rank = loads(wrong, {EXPERT: value(0, EXPERT)}, (3,))
    first_replica = loads(wrong, {EXPERT: value(1, EXPERT)}, (0,))
    assert known(one, elsewhere) == ()
    assert known(one, other_tensor_rank) == ()
    assert known(one, first_replica) == ()
    assert "Rank 2 has what rank 0 should have: rng tracker expert-parallel-rng." in sentences(one, wrong)
    assert "Rank 3 has what rank 1 should have" in sentences(one, wrong)


def test_stale_weight_decay() -> None:
    wrong = loads(RESUME, {"param group 0.0 weight_decay": 0.01})
    assert issues(REFERENCE, wrong, use_checkpoint_opt_param_scheduler=True) == ["NVIDIA/Megatron-LM#7468"]
    assert issues(REFERENCE, wrong) == []
    more = changed(wrong, "loaded", 3, 0, "scheduler num_steps", 32)
    assert issues(REFERENCE, more, use_checkpoint_opt_param_scheduler=True) == []


def test_a_step_of_adam_made_by_loading() -> None:
    wrong = loads(RESUME, {f"param group 0.{at} step": 4 for at in range(2)})
    assert issues(REFERENCE, wrong, use_megatron_fsdp=True) == ["NVIDIA/Megatron-LM#5974"]
    assert issues(REFERENCE, wrong, optimizer_cpu_offload=True) == ["NovaSky-AI/SkyRL#1403"]
    assert issues(REFERENCE, wrong) == []
    behind = loads(RESUME, {f"param group 0.{at} step": 1 for at in range(2)})
    assert issues(REFERENCE, behind, use_megatron_fsdp=True) == []
    assert "Adam's step is 1 ahead: 4 instead of 3 in param group 0.0 step, and so for 7 more values." in sentences(
        REFERENCE, wrong
    )


def test_quantised_weights_and_parameters_that_were_not_gathered() -> None:
    codes = f"parameter chunk 0 {LAYERS[0]}.rowwise_scale_inv"
    one = changed(REFERENCE, "saved", 3, 1, codes, digest("codes"))
    other = changed(RESUME, "loaded", 3, 1, codes, digest("other codes"))
    for records in (one, other):
        records[1].groups[codes] = "parameter"
    assert issues(one, other) == ["NVIDIA/Megatron-LM#6666"]
    assert known(one, other, versions={"megatron-core": "0.20.0"}) == ()
    assert issues(one, changed(other, "loaded", 3, 1, f"master chunk 0 {LAYERS[0]}", digest("m"))) == []
    layer_wise = {"optimizer": "dist_muon"}
    elsewhere = f"parameter chunk 0 {LAYERS[0]}.bias"
    one, other = (changed(a, k, 3, 1, elsewhere, digest(k)) for a, k in ((REFERENCE, "saved"), (RESUME, "loaded")))  # type: ignore[arg-type]
    for records in (one, other):
        records[1].groups[elsewhere] = "parameter"
    assert [f.issue for f in known(one, other, layer_wise, {"megatron-core": "0.20.0rc1"})] == [
        "NVIDIA/Megatron-LM#6920"
    ]
    assert known(one, other, layer_wise) == ()
    owned = changed(RESUME, "loaded", 3, 1, f"parameter chunk 0 {LAYERS[0]}", digest("p"))
    assert known(REFERENCE, owned, layer_wise, {"megatron-core": "0.20.0"}) == ()


def test_the_first_step_without_hooks() -> None:
    settings = {"overlap_param_gather": True, "fp8_recipe": "mxfp8"}
    wrong = changed(RESUME, "step", 4, 1, "loss lm loss", digest("loss"))
    assert issues(REFERENCE, wrong, **settings) == ["NVIDIA-NeMo/Megatron-Bridge#5066"]
    assert issues(REFERENCE, changed(RESUME, "step", 5, 1, "loss lm loss", digest("loss")), **settings) == []
    assert issues(REFERENCE, loads(wrong, {"rng numpy": digest("n")}), **settings) == []
    assert issues(REFERENCE, wrong) == []


def stale(records: Arm, step: int, ranks: tuple[int, ...]) -> Arm:
    """Tensors as they were after an earlier step."""
    for rank in ranks:
        old = {
            n: v for n, (g, v) in values_of(rank, step, full=False).items() if g in ("parameter", "master", "optimizer")
        }
        records = edited(records, "loaded", 3, rank, lambda values, old=old: {**values, **old})
    return records


def test_a_stale_checkpoint() -> None:
    wrong = stale(RESUME, 2, (0, 1, 2, 3))
    assert issues(REFERENCE, wrong, async_save=True) == ["NVIDIA-NeMo/RL#3312"]
    assert issues(REFERENCE, wrong) == []
    assert issues(REFERENCE, stale(RESUME, 1, (0, 1, 2, 3)), async_save=True) == []  # no save was made there
    told = sentences(REFERENCE, wrong)
    assert "All that differs is the state of step 2, not of step 3 (48 values of master, optimizer, parameter)." in told
    assert told.startswith("On ranks 0, 1, 2, 3 differ 12 of 12 values of master, such as master chunk 0")
    assert "; 12 of 12 values of exp_avg_sq; 12 of 12 values of parameter." in told
    assert "the state of step 1, not of step 3 (12 values" in sentences(REFERENCE, stale(RESUME, 1, (2,)))
    mixed = changed(wrong, "loaded", 3, 0, f"master chunk 0 {LAYERS[0]}", digest("other"))
    told = sentences(REFERENCE, mixed)
    assert "All that differs" not in told
    assert "What differs of parameter is the state of step 2" in told


def test_how_much_differs_and_what_is_gone() -> None:
    item = f"optimizer exp_avg_sq chunk 0 {LAYERS[1]}"
    told = sentences(REFERENCE, changed(RESUME, "loaded", 3, 1, item, digest("wrong")))
    assert told == f"On rank 1 differs 1 of 3 values of exp_avg_sq, such as {item}."
    gone = edited(RESUME, "loaded", 3, 1, lambda values: {n: v for n, v in values.items() if n != item})
    assert f"{item} is gone on rank 1." in sentences(REFERENCE, gone)
    assert "1 of 3 values of exp_avg_sq" in sentences(REFERENCE, gone)
    assert "new is there and should not be on rank 1" in sentences(
        REFERENCE, changed(RESUME, "loaded", 3, 1, "other new", 1)
    )


@pytest.mark.parametrize(("shift", "told"), [(-1, "1 step repeated"), (1, "1 step skipped"), (-4, "4 steps repeated")])
def test_a_batch_of_another_step(shift: int, told: str) -> None:
    wrong = RESUME
    for m in range(2):
        name = f"batch {m} tokens"
        wrong = changed(wrong, "step", 5, 1, name, value(1, name, 5 + shift))
    found = sentences(REFERENCE, wrong, "step")
    assert f"The batch of step 5 on rank 1 is that of step {5 + shift}: {told}." in found


def test_a_batch_off_by_a_micro_batch() -> None:
    wrong = changed(RESUME, "step", 5, 1, "batch 0 tokens", value(1, "batch 1 tokens", 5))
    wrong = changed(wrong, "step", 5, 1, "batch 1 tokens", value(1, "batch 0 tokens", 6))
    told = "The data of step 5 on rank 1 are off by 1 micro-batch: 1 micro-batch "
    assert f"{told}skipped." in sentences(REFERENCE, wrong, "step")
    wrong = changed(RESUME, "step", 5, 1, "batch 0 tokens", value(1, "batch 1 tokens", 4))
    wrong = changed(wrong, "step", 5, 1, "batch 1 tokens", value(1, "batch 0 tokens", 5))
    assert f"{told}repeated." in sentences(REFERENCE, wrong, "step")


def test_swapped_items() -> None:
    a, b = (f"master chunk 0 {name}" for name in LAYERS[:2])
    wrong = loads(RESUME, {a: value(1, b), b: value(1, a)}, (1,))
    assert f"On rank 1 {a} and {b} are swapped." in sentences(REFERENCE, wrong)
    one_way = loads(RESUME, {a: value(1, b)}, (1,))
    assert f"On rank 1 {a} holds what {b} should hold." in sentences(REFERENCE, one_way)
    groups = [f"param group 0.{at} params" for at in range(2)]
    swapped = loads(RESUME, {groups[0]: value(1, groups[1]), groups[1]: value(1, groups[0])}, (1,))
    assert f"{groups[0]} and {groups[1]} are swapped." in sentences(REFERENCE, swapped)
    decays = [f"param group 0.{at} weight_decay" for at in range(2)]
    swapped = loads(RESUME, {decays[0]: 0.0, decays[1]: 0.1}, (1,))
    assert "On rank 1 param groups 0.0 and 0.1 have each other's options (weight_decay)." in sentences(
        REFERENCE, swapped
    )
    ranks = loads(loads(RESUME, {a: value(0, a)}, (1,)), {a: value(1, a)}, (0,))
    assert "Rank 1 has what rank 0 should have" in sentences(REFERENCE, ranks)
    assert "Rank 0 has what rank 1 should have" in sentences(REFERENCE, ranks)


def test_values_that_stand_everywhere_tell_nothing() -> None:
    zeros = {f"optimizer exp_avg chunk 0 {name}": digest("zeros") for name in LAYERS[:2]}
    one = REFERENCE
    for item, zero in zeros.items():
        one = changed(one, "saved", 3, 2, item, zero)
    told = sentences(one, loads(RESUME, {f"optimizer exp_avg chunk 0 {LAYERS[2]}": digest("zeros")} | zeros, (2,)))
    assert "holds what" not in told
    assert "should have" not in told


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.sampled_from(sorted(values_of(0, 3, full=False))))
def test_an_unknown_fault_has_no_name(rank: int, item: str) -> None:
    every = {"use_megatron_fsdp": True, "optimizer_cpu_offload": True, "async_save": True, "optimizer": "muon",
             "overlap_param_gather": True, "fp8_recipe": "mxfp8"}  # fmt: skip
    wrong = changed(RESUME, "loaded", 3, rank, item, digest("planted"))
    assert issues(REFERENCE, wrong, **every) == []
    told = sentences(REFERENCE, wrong)
    assert not any(word in told for word in ("swapped", "should", "state of step"))


@pytest.mark.parametrize(
    ("text", "is_number"),
    [(3, 3), (0.5, 0.5), (True, None), (None, None), ("3", None), (digest("a", kind="float32[]") + " 0.25", 0.25),
     (digest("a", kind="int64[1]") + " 7", 7), (digest("a"), None), (digest("a", kind="bool[]") + " True", None)],
)  # fmt: skip
def test_numbers(text: object, is_number: float | None) -> None:
    assert number(text) == is_number
    assert type(number(text)) is type(is_number)
