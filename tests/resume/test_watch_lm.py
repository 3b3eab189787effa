"""Megatron-LM's own loop, watched in real processes: what is told, and that a resumed run is told the same."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from ckptguard.core.errors import UnsupportedError
from ckptguard.megatron.placed_state import placed_items
from ckptguard.megatron.watch_lm import WRAPPED, check_loop
from ckptguard.megatron.watched_loop import WatchedLoop
from ckptguard.resume.placed import compare_placed
from ckptguard.resume.placed_sums import placed_sum
from ckptguard.resume.records import Event, Kind, RankRecord
from ckptguard.testing.recipes import Recipe, _launch

HERE = Path(__file__).parent
SOURCES = sorted(Path(inspect.getfile(check_loop)).parent.glob("live_*.py"))
SOURCES += [Path(inspect.getfile(WatchedLoop)), Path(inspect.getfile(placed_items)), Path(inspect.getfile(placed_sum))]
SOURCES += [Path(inspect.getfile(check_loop)), HERE / "collecting_trainer.py"]

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
DENSE = Recipe(
    name="watched_dense", dp=2, num_layers=2, steps=4, extra_flags=(*DROPOUT, "--save-interval", "2"),
    optimizer_format="fully_reshardable",
)  # fmt: skip
MOE = Recipe(
    name="watched_moe", model="moe", dp=2, ep=2, num_layers=2, steps=4, dtype="fp16",
    extra_flags=(
        *DROPOUT, "--save-interval", "2", "--initial-loss-scale", "65536", "--loss-scale-window", "2",
        "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid", "--moe-router-force-biased", "-0.5",
    ),
)  # fmt: skip

OTHER_LAYOUT = dataclasses.replace(DENSE, name="watched_dense_tp2_pp2", tp=2, pp=2, dp=1)

# What a process sets for itself after loading, and what no checkpoint of this version holds.
STARTS_ANEW = {"other rerun current_iteration", "other rerun first_iteration_complete"}
EXPERT_RNG = "rng tracker expert-parallel-rng"


@dataclasses.dataclass(frozen=True)
class Told:
    """What the ranks of an uninterrupted run and of one resumed after step 2 told."""

    whole: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    elsewhere: list[dict[str, Any]]  # loaded under another layout; only dense

    def ranks(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return list(zip(self.whole, self.resumed, strict=True))


@pytest.fixture(scope="session")
def told(real_cache: Path) -> Callable[[Recipe], Told]:
    """Runs of a recipe, made once for the sources that are tested."""

    def get(recipe: Recipe) -> Told:
        text = recipe.key() + OTHER_LAYOUT.key() + "".join(path.read_text() for path in SOURCES)
        folder = real_cache / f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=real_cache) as made:
                    _run(recipe, Path(made))
                    (Path(made) / "told").rename(folder)
        return Told(*(_read(folder / name) for name in ("whole", "resumed", "elsewhere")))

    return get


def _run(recipe: Recipe, out: Path) -> None:
    load = ["--load", str(out / "saved"), "--ckpt-step", "2"]
    runs = {
        "whole": (recipe, ["--save", str(out / "saved")]),
        "resumed": (recipe, ["--save", str(out / "again"), *load]),
        "elsewhere": (OTHER_LAYOUT, ["--load-only", *load]),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        for name, (layout, flags) in runs.items():
            folder = out / "told" / name
            folder.mkdir(parents=True)
            if name != "elsewhere" or recipe is DENSE:
                _launch(
                    layout, [*flags, "--ckpt-format", "torch_dist", f"--collect={folder}"], 150, "collecting_trainer"
                )


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(len(list(folder.iterdir())))]


def _different(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name, "none") != other.get(name, "none")}


@pytest.mark.megatron
@pytest.mark.slow
def test_calls_come_in_the_order_of_the_loop(told: Callable[[Recipe], Told]) -> None:
    steps = [[["step begins", n], ["gradients", None], ["step ended", n]] for n in (1, 2, 3, 4)]
    start = [["started", None], ["built", None]]
    for whole, resumed in told(DENSE).ranks():
        assert whole["calls"] == [
            *start, ["loaded", 0], *steps[0], *steps[1], ["saved", 2], *steps[2], *steps[3], ["saved", 4], ["ended", None],
        ]  # fmt: skip
        assert resumed["calls"] == [*start, ["loaded", 2], *steps[2], *steps[3], ["saved", 4], ["ended", None]]
        assert whole["unobserved"] == resumed["unobserved"] == []


@pytest.mark.megatron
@pytest.mark.slow
def test_what_is_saved_is_what_is_loaded(told: Callable[[Recipe], Told]) -> None:
    for whole, resumed in told(DENSE).ranks():
        assert _different(whole["saved"]["2"], resumed["loaded"]) == STARTS_ANEW


@pytest.mark.megatron
@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_item_by_item(told: Callable[[Recipe], Told]) -> None:
    for whole, resumed in told(DENSE).ranks():
        for step in ("3", "4"):
            assert _different(whole["steps"][step], resumed["steps"][step]) == set()
        assert _different(whole["steps"]["3"], whole["steps"]["4"]) > {"loss lm loss", "rng torch cpu", "batch"}
        assert _different(whole["saved"]["4"], resumed["saved"]["4"]) == set()


@pytest.mark.megatron
@pytest.mark.slow
def test_counters_stand_at_the_step_that_is_over(told: Callable[[Recipe], Told]) -> None:
    (whole, resumed), _ = told(DENSE).ranks()
    for step in ("3", "4"):
        values = resumed["steps"][step]
        assert values["counter iteration"] == int(step)
        assert values["counter consumed_train_samples"] == 4 * int(step)
        assert values["scheduler num_steps"] == 4 * int(step)
        assert values["param group 0.0 step"] == int(step)
        assert len(values["batch"]) == 2
        assert values["metric skipped"] == 0
        assert values["metric grad norm"] > 0
    assert whole["saved"]["2"]["counter num_floating_point_operations_so_far"] > 0
    assert "counter num_floating_point_operations_so_far" not in resumed["steps"]["3"]


@pytest.mark.megatron
@pytest.mark.slow
def test_a_rank_tells_the_masters_states_and_gradients_of_its_own_shards(told: Callable[[Recipe], Told]) -> None:
    ranks = [whole["steps"]["3"] for whole, _ in told(DENSE).ranks()]
    kinds = ("gradient", "master", "optimizer exp_avg", "optimizer exp_avg_sq")
    owned = [
        [{n.removeprefix(f"{kind} ") for n in r if n.startswith(f"{kind} chunk")} for kind in kinds] for r in ranks
    ]
    for shards in owned:
        assert shards[0] == shards[1] == shards[2] == shards[3] != set()
    parameters = {name.removeprefix("parameter ") for name in ranks[0] if name.startswith("parameter ")}
    assert owned[0][0] | owned[1][0] == parameters
    assert "chunk 0 decoder.layers.1.mlp.linear_fc2.weight" in parameters


@pytest.mark.megatron
@pytest.mark.slow
def test_facts_say_who_and_where(told: Callable[[Recipe], Told]) -> None:
    (_, one), (_, other) = told(MOE).ranks()
    assert one["facts"]["framework"] == "Megatron-LM"
    assert {"megatron-core", "torch"} <= set(one["facts"]["versions"])
    assert one["facts"]["sizes"]["ep"] == 2
    assert (one["facts"]["ranks"]["ep"], other["facts"]["ranks"]["ep"]) == (0, 1)
    assert one["facts"]["arguments"]["train_iters"] == 4
    assert one["facts"]["arguments"]["fp16"] is True


@pytest.mark.megatron
@pytest.mark.slow
def test_what_a_moe_checkpoint_does_not_hold_is_found(told: Callable[[Recipe], Told]) -> None:
    biases = {"other router bias of layer 1", "other router bias of layer 2"}
    (whole_0, resumed_0), (whole_1, resumed_1) = told(MOE).ranks()
    assert _different(whole_0["saved"]["2"], resumed_0["loaded"]) == STARTS_ANEW | biases
    # megatron-core 0.19.2 keeps generators by tensor and pipeline rank: an expert rank above 0 gets those of rank 0.
    assert _different(whole_1["saved"]["2"], resumed_1["loaded"]) == STARTS_ANEW | biases | {EXPERT_RNG}
    first = next(
        name for name in whole_0["steps"]["3"] if name in _different(whole_0["steps"]["3"], resumed_0["steps"]["3"])
    )
    assert first.startswith("gradient chunk 0 ")


@pytest.mark.megatron
@pytest.mark.slow
def test_scaler_and_buffers_are_items(told: Callable[[Recipe], Told]) -> None:
    (whole, resumed), _ = told(MOE).ranks()
    saved = whole["saved"]["2"]
    assert {n for n in saved if n.startswith("scaler 0")} == {
        "scaler 0 scale", "scaler 0 growth_tracker", "scaler 0 hysteresis_tracker",
    }  # fmt: skip
    assert whole["groups"]["buffer chunk 0 decoder.layers.0.mlp.router.expert_bias"] == "buffer"
    assert (
        whole["groups"]["unsaved buffer chunk 0 decoder.layers.0.mlp.router.local_tokens_per_expert"]
        == "unsaved buffer"
    )
    for number in (0, 1):  # dense and expert parameters have an optimizer each
        assert f"param group {number}.0 lr" in saved
    unwritten = set(resumed["loaded"]) - set(resumed["written"])
    assert {name.split(" ")[0] for name in unwritten} <= {"counter", "other", "param", "global"}
    assert all(name.endswith(" params") for name in unwritten if name.startswith("param group"))


def _records(ranks: list[dict[str, Any]], kind: Kind, states: list[dict[str, Any]]) -> dict[int, RankRecord]:
    return {
        number: RankRecord({"world_size": len(ranks)}, rank["groups"], [Event(kind, 2, state)])
        for number, (rank, state) in enumerate(zip(ranks, states, strict=True))
    }


@pytest.mark.megatron
@pytest.mark.slow
def test_state_loaded_under_another_layout_is_the_saved_one(told: Callable[[Recipe], Told]) -> None:
    """Saved by two data parallel ranks, loaded by two tensor parallel ranks in each of two stages; keys are the files'."""
    runs = told(DENSE)
    saved = _records(runs.whole, "saved", [rank["saved"]["2"] for rank in runs.whole])
    loaded = _records(runs.elsewhere, "loaded", [rank["loaded"] for rank in runs.elsewhere])
    compared = compare_placed("save", saved, "resume", loaded, 2, "the same?")
    assert compared.first is None
    keys = {name.split(" ")[-1] for name in saved[0].events[0].values if name.startswith("global parameter")}
    assert {"decoder.layers.self_attention.linear_qkv.weight", "embedding.word_embeddings.weight"} < keys
    assert compared.values == 4 * len(keys)  # master, exp_avg and exp_avg_sq of each
    assert runs.elsewhere[0]["unobserved"] == []

    name = "global optimizer exp_avg decoder.layers.mlp.linear_fc1.weight"
    value = loaded[0].events[0].values[name]
    assert len(value["boxes"]) == 2  # of gate and up, of the layer of this stage
    loaded[0].events[0].values[name]["sum"] = "0" * 32
    found = compare_placed("save", saved, "resume", loaded, 2, "the same?")
    assert [difference.item for difference in found.at_first] == [name]


def _module(**functions: Any) -> ModuleType:
    module = ModuleType("loop")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _function(*parameters: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(p, kind) for p in parameters])  # type: ignore[attr-defined]
    return function


def test_a_loop_that_is_known_passes() -> None:
    check_loop(_module(**{name: _function(*wanted) for name, wanted in WRAPPED.items()}))


@pytest.mark.parametrize("name", WRAPPED)
def test_a_function_that_disappears_is_named(name: str) -> None:
    functions = {n: _function(*wanted) for n, wanted in WRAPPED.items() if n != name}
    with pytest.raises(UnsupportedError, match=f"function {name}"):
        check_loop(_module(**functions))


def test_a_parameter_that_disappears_is_named() -> None:
    functions = {name: _function(*wanted[1:]) for name, wanted in WRAPPED.items()}
    with pytest.raises(UnsupportedError, match="parameter loss_dict of training_log"):
        check_loop(_module(**functions))
