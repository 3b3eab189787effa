"""The state beside the tensors of a resharded checkpoint is what Megatron's own loading wants of it."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron import restate_common, restate_run_config
from ckptguard.megatron.restate import Restate, _as_json, restate
from ckptguard.megatron.structure import Bucket, Buffer

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
READER = Path(__file__).with_name("restate_reader.py")
BF16 = "(torch.bfloat16, torch.float32)"
BUFFERS = (Buffer(BF16, (Bucket(100, 128, ()), Bucket(7, 64, ()))),)
DENSE = tuple((f"optimizer.distributed.dp_group_idx_{n}", False) for n in range(2))
CHAINED = (
    ("chained_0.optimizer.distributed.dp_group_idx_0", False),
    ("chained_0.optimizer.distributed.dp_group_idx_1", False),
    ("chained_1.optimizer.distributed.dp_group_idx_3", True),
)

Found = dict[str, dict[str, Any]]


def directory(name: str) -> Path:
    """Return the iteration's directory of a frozen checkpoint."""
    (out,) = (FIXTURES / name).glob("iter_*")
    return out


def objects(name: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Return the bytes of a frozen checkpoint's objects."""
    with open_checkpoint(FIXTURES / name) as checkpoint:
        spans = {key: entry.span for key, entry in checkpoint.index.objects.items() if wanted(key)}
    return {
        key: (directory(name) / span.file).read_bytes()[span.offset_bytes :][: span.length_bytes]
        for key, span in spans.items()
    }


def question(name: str, **fields: Any) -> Restate:
    """Return a question about a frozen checkpoint; nothing changes but what the fields say."""
    place = directory(name)
    if "legacy" in name:
        common: bytes | Path = place / "mp_rank_00_000" / "model_optim_rng.pt"
    elif (place / "common.pt").exists():
        common = (place / "common.pt").read_bytes()
    else:
        (common,) = objects(name, lambda key: key == "common_state/shard_0_1").values()
    own: dict[str, Any] = {
        "iteration": 4, "layout_changed": False, "world_changed": False, "has_rng": True, "args_changes": {},
        "group_states": objects(name, lambda key: key.endswith("optimizer/shard_0_1")) if "dp_resh" in name else {},
    }  # fmt: skip
    return Restate(**({"common": common} | own | fields))


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def strange_args() -> argparse.Namespace:
    """Return args with values of a module that no process but this one has, and of a function that must not run."""
    module = types.ModuleType("nemo.of_old")
    sys.modules.update({"nemo": types.ModuleType("nemo"), "nemo.of_old": module})
    plugin = type("Plugin", (), {"__module__": "nemo.of_old"})()
    module.Plugin = type(plugin)  # type: ignore[attr-defined]
    plugin.deep = {"value": 1}
    return argparse.Namespace(
        lr=1e-3, min_lr=1e-5, decoupled_lr=2e-3, plugin=plugin, callbacks=[plugin], activation=torch.nn.functional.gelu,
        harmless={"inner": plugin, "kept": 5}, ran=Runs(), tensor_model_parallel_size=2,
    )  # fmt: skip


class Runs:
    """Would run code, were it unpickled as pickle does."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (shutil.rmtree, ("nowhere",))


def step_changed(states: dict[str, bytes]) -> dict[str, bytes]:
    """Return the states with the step of the last rank's first group one less."""
    *_, last = states
    (value,) = torch.load(io.BytesIO(states[last]), weights_only=True)
    value["param_groups"][0]["step"] -= 1
    return states | {last: saved([value])}


def old_groups() -> dict[str, Any]:
    """Return a common state whose param groups are as 0.8 to 0.15 wrote them, and an fp16 grad scaler."""
    plain = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 1e-3, "min_lr": 1e-5}
    groups = [
        {"params": [0, 1], "wd_mult": 1.0, **plain, "lr": 5e-4, "step": 7},
        {"params": [2], "wd_mult": 1.0, **plain, "is_decoupled_lr": True, "max_lr": 2e-3, "lr": 1e-3},
    ]
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    return {
        "args": strange_args(),
        "optimizer": {"optimizer": {"param_groups": groups}, "grad_scaler": scaler},
        "opt_param_scheduler": {"max_lr": 1e-3},
    }


def questions() -> dict[str, Restate]:
    moe, dense = "megatron-0.19/moe_pp2ep2_fully_reshardable", "megatron-0.19/dense_tp2pp2_dp_reshardable"
    new = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_layout": "Ett|L"}
    changed = {"layout_changed": True, "world_changed": True, "args_changes": new}
    dp = {"optimizer_format": "dp_reshardable", "groups": DENSE, "buffers": dict.fromkeys(dict(DENSE), BUFFERS)}
    chained = dp | {"groups": CHAINED, "buffers": dict.fromkeys(dict(CHAINED), BUFFERS)}
    full = {"optimizer_format": "fully_reshardable"}
    same = question(dense, **full)
    return {
        "old_to_dp": question("megatron-0.12/dense_tp2pp2_model_space", **dp, **changed),
        "dp_to_full": question("megatron-0.15/dense_tp2pp2_dp_reshardable", **full, groups=DENSE, has_rng=False),
        "same": same,
        "moe_to_dp": question(moe, **chained, **changed),
        "moe_to_dense": question(moe, **dp),
        "dense_to_moe": question(dense, **full, groups=CHAINED),
        "legacy": question("megatron-0.19/dense_tp2pp2_legacy_torch", **full, has_rng=False),
        "old_legacy": question("megatron-0.12/dense_tp2pp2_legacy_torch", **full, has_rng=False),
        "integrity": question("megatron-0.19/dense_tp2pp2_integrity", **full, args_changes=new),
        "weights": question(dense, world_changed=True),
        "contradiction": dataclasses.replace(same, group_states=step_changed(dict(same.group_states))),
        "without_groups": dataclasses.replace(same, group_states={}),
        "strange": dataclasses.replace(same, common=saved(old_groups()), group_states={}),
        "strange_dp": question(dense, **dp | {"common": saved([old_groups()]), "group_states": {}}),
        "cut_short": dataclasses.replace(same, common=saved(old_groups())[:-100]),
        "too_old": dataclasses.replace(same, common=saved({"checkpoint_version": 2.0, "iteration": 3})),
        "blocked": dataclasses.replace(same, common=saved({"args": [Blocked()]})),
    }


class Blocked:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return (os.system, ("false",))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what Megatron makes of the answer to each question."""
    place = tmp_path_factory.mktemp("restate")
    for name, asked in questions().items():
        (place / f"{name}.json").write_text(json.dumps(_as_json(asked)))
    command = [sys.executable, "-W", "ignore", str(READER), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: torch.load(place / f"{name}.out.pt", weights_only=True) for name in questions()}


def test_bucket_form_has_the_groups_of_a_model_space_source_on_every_rank(found: Found) -> None:
    out = found["old_to_dp"]
    with torch.serialization.safe_globals([argparse.Namespace]):
        stored = torch.load(directory("megatron-0.12/dense_tp2pp2_model_space") / "common.pt", weights_only=True)
    groups = stored["optimizer"]["optimizer"]["param_groups"]
    for prefix, _ in DENSE:
        (value,) = out["objects"][f"{prefix}.optimizer/shard_0_1"]
        assert value == {"param_groups": [group | {"default_config": True} for group in groups]}
        key = (torch.bfloat16, torch.float32)
        assert out["objects"][f"{prefix}.per_bucket_numel/shard_0_1"] == [[{key: [128, 64]}]]
        assert out["objects"][f"{prefix}.per_bucket_numel_unpadded/shard_0_1"] == [[{key: [100, 7]}]]
    assert len(out["objects"]) == 6
    common = out["common"]
    assert common["optimizer"] == {"param_state_sharding_type": "dp_reshardable"}
    assert common["content_metadata"] == {
        "distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip
    assert common["opt_param_scheduler"] == stored["opt_param_scheduler"]
    assert out["args"] == {name: str(value) for name, value in vars(stored["args"]).items()} | {
        "tensor_model_parallel_size": "1", "pipeline_model_parallel_layout": "Ett|L", "no_save_rng": "True",
        "no_save_optim": "False",
    }  # fmt: skip


def test_model_space_has_the_groups_that_every_rank_stored(found: Found) -> None:
    out = found["dp_to_full"]
    states = objects("megatron-0.15/dense_tp2pp2_dp_reshardable", lambda key: key.endswith(".optimizer/shard_0_1"))
    assert len(states) == 4
    stored = [torch.load(io.BytesIO(data), weights_only=True)[0] for data in states.values()]
    groups = [group | {"default_config": True} for group in stored[0]["param_groups"]]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    assert out["common"]["optimizer"] == optimizer
    assert out["common"]["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert not out["objects"]
    assert out["args"]["no_save_rng"] == "True"
    assert any("the source holds none" in note for note in out["notes"])


def test_what_nothing_changes_needs_no_note(found: Found) -> None:
    out = found["same"]
    assert out["notes"] == []
    assert out["keep_rng"]
    assert out["keep_rerun"]
    assert out["args"]["no_save_rng"] == "False"
    assert out["common"]["iteration"] == 4
    assert out["common"]["num_floating_point_operations_so_far"] == 207618048.0


def test_chained_optimizers_keep_their_groups(found: Found) -> None:
    out = found["moe_to_dp"]
    kind = {"param_state_sharding_type": "dp_reshardable"}
    assert out["common"]["optimizer"] == {0: kind, 1: kind}
    for prefix, is_expert in CHAINED:
        (value,) = out["objects"][f"{prefix}.optimizer/shard_0_1"]
        assert len(value["param_groups"]) == (1 if is_expert else 2)
        assert all(group["is_expert_parallel"] == is_expert for group in value["param_groups"])
        assert all(group["step"] == 4 for group in value["param_groups"])
    assert not out["keep_rng"]
    assert not out["keep_rerun"]
    assert any("TP or PP changed" in note for note in out["notes"])
    assert any("rerun state machine" in note for note in out["notes"])


@pytest.mark.parametrize(
    ("name", "kinds"), [("moe_to_dense", [[False, False]]), ("dense_to_moe", [[False, False], [True, True]])]
)
def test_groups_change_their_kind_with_expert_parallelism(found: Found, name: str, kinds: list[list[bool]]) -> None:
    """Experts are a part of their own with expert parallelism only; Megatron looks for their groups by that."""
    out = found[name]
    optimizer = out["common"]["optimizer"]
    if name == "moe_to_dense":
        parts = [out["objects"][f"{DENSE[0][0]}.optimizer/shard_0_1"][0]]
    else:
        parts = [optimizer[place]["optimizer"] for place in (0, 1)]
    assert [[group["is_expert_parallel"] for group in part["param_groups"]] for part in parts] == kinds
    assert {group["wd_mult"] for part in parts for group in part["param_groups"]} == {0.0, 1.0}
    assert any("param groups go along" in note for note in out["notes"])


@pytest.mark.parametrize("name", ["legacy", "old_legacy"])
def test_legacy_files_give_their_common_state_and_no_tensors(found: Found, name: str) -> None:
    out = found[name]
    assert out["common"].keys() == {
        "checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far", "optimizer",
        "content_metadata",
    }  # fmt: skip
    optimizer = out["common"]["optimizer"]
    assert optimizer["param_state_sharding_type"] == "fully_reshardable"
    assert [group["wd_mult"] for group in optimizer["optimizer"]["param_groups"]] == [1.0, 0.0]
    assert out["args"].get("ckpt_format", "torch_dist") == "torch_dist"
    assert not any("Left out" in note for note in out["notes"])


def test_hundreds_of_args_stay_as_they_are(found: Found) -> None:
    out, before = found["integrity"]["args"], found["same"]["args"]
    assert len(out) > 800
    assert out["tensor_model_parallel_size"] == "1"
    assert out.keys() == before.keys()
    assert out["attention_backend"] == before["attention_backend"]


def test_without_optimizer_state_the_user_is_told_how_to_start(found: Found) -> None:
    out = found["weights"]
    assert not {"optimizer", "opt_param_scheduler"} & out["common"].keys()
    assert out["common"]["content_metadata"] == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    assert out["args"]["no_save_optim"] == "True"
    assert out["keep_rng"]
    assert not out["keep_rerun"]
    assert any("--no-load-optim" in note for note in out["notes"])


def test_ranks_that_contradict_each_other_are_named(found: Found) -> None:
    message = found["contradiction"]["damaged"]
    assert "wd_mult 1.0" in message
    assert "step is 4 in optimizer.distributed.dp_group_idx_0 and 3 in optimizer.distributed.dp_group_idx_3" in message
    assert "no param groups" in found["without_groups"]["damaged"]


def test_what_megatron_would_not_load_is_left_out_by_name_and_never_run(found: Found) -> None:
    out = found["strange"]
    (note,) = [note for note in out["notes"] if note.startswith("Left out")]
    for name in (
        "args.plugin (nemo.of_old.Plugin)", "args.callbacks (nemo.of_old.Plugin)", "args.activation (torch._C._nn.gelu)",
        "args.harmless.inner (nemo.of_old.Plugin)", "args.ran (shutil.rmtree)",
    ):  # fmt: skip
        assert name in note
    assert out["args"].keys() == {
        "lr", "min_lr", "decoupled_lr", "harmless", "tensor_model_parallel_size", "no_save_rng", "no_save_optim"
    }  # fmt: skip
    assert out["args"]["harmless"] == "{'kept': 5}"
    assert "blocked" in found["blocked"]["damaged"]
    assert "common state" in found["cut_short"]["damaged"]


def test_groups_of_old_releases_get_what_megatron_looks_for(found: Found) -> None:
    out = found["strange"]
    usual, decoupled = out["common"]["optimizer"]["optimizer"]["param_groups"]
    assert "params" not in usual
    assert usual["default_config"]
    assert usual["lr"] == 5e-4
    assert not decoupled["default_config"]
    assert not decoupled["is_decoupled_lr"]
    assert decoupled["max_lr"] == 2e-3
    assert decoupled["step"] == 7
    assert any("is_decoupled_lr is False now" in note for note in out["notes"])
    assert any("step 7 completed" in note for note in out["notes"])
    assert (out["common"]["iteration"], out["common"]["checkpoint_version"]) == (4, 3.0)
    assert any("iteration 4 completed" in note for note in out["notes"])


def test_the_loss_scale_of_fp16_goes_along(found: Found) -> None:
    assert found["strange"]["common"]["optimizer"]["grad_scaler"]["scale"].item() == 1024.0
    for prefix, _ in DENSE:
        (scaler,) = found["strange_dp"]["objects"][f"{prefix}.grad_scaler/shard_0_1"]
        assert scaler["growth_tracker"] == 3


def test_versions_before_3_are_refused(found: Found) -> None:
    assert "checkpoint_version is 2.0" in found["too_old"]["unsupported"]
    with pytest.raises(restate_common.TooOldError, match="is 0:"):
        restate_common.without_tensors({"model": {}}, [])


def test_the_caller_gets_files_and_trackers() -> None:
    asked = question("megatron-0.19/dense_tp2pp2_dp_reshardable", train_state=b"state", run_config=CONFIG.encode())
    out = restate(dataclasses.replace(asked, iteration=12, has_rng=False))
    assert out.root_files == {"latest_checkpointed_iteration.txt": b"12", "latest_train_state.pt": b"state"}
    assert out.iteration_files.keys() == {"common.pt", "run_config.yaml", "train_state.pt"}
    assert b"save_rng: false" in out.iteration_files["run_config.yaml"]
    assert b"save_optim: false" in out.iteration_files["run_config.yaml"]
    assert out.common_state
    assert not out.keep_rng


def test_the_caller_gets_refusals_as_errors() -> None:
    asked = questions()
    with ThreadPoolExecutor() as pool:  # each is a process that takes seconds to import
        too_old, cut_short = (pool.submit(restate, asked[name]) for name in ("too_old", "cut_short"))
        assert isinstance(too_old.exception(), UnsupportedError)
        assert isinstance(cut_short.exception(), DamagedError)


def legacy(loaded: dict[str, Any], **fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "iteration": 4, "args_changes": {"x": 2}, "has_optimizer": False, "groups": (), "layout_changed": False,
        "world_changed": False, "has_rng": True,
    }  # fmt: skip
    return restate_common.common_of_legacy(loaded, {}, restate_common.Asked(**own | fields), [])


def test_legacy_target_has_no_state_that_its_form_does_not_know() -> None:
    args = argparse.Namespace(ckpt_format="torch_dist", x=1)
    out = legacy({"args": args, "iteration": 4, "rerun_state_machine": {}, "content_metadata": {"a": 1}})
    assert vars(out.pop("args")) == {"ckpt_format": "torch", "x": 2, "no_save_rng": False, "no_save_optim": True}
    assert out == {"iteration": 4, "checkpoint_version": 3.0}
    assert vars(args) == {"ckpt_format": "torch_dist", "x": 1}


RNG = {"checkpoint": {"save_rng": True}, "model": {"expert_model_parallel_size": 1}, "rng": {}}


@pytest.mark.parametrize(
    ("args", "config", "fields", "kept"),
    [
        ({}, None, {}, True),
        ({}, None, {"world_changed": True}, True),
        ({}, None, {"layout_changed": True, "world_changed": True}, False),
        ({"no_save_rng": True}, None, {}, False),
        ({"data_parallel_random_init": True}, None, {"world_changed": True}, False),
        ({"data_parallel_random_init": True}, None, {}, True),
        ({}, RNG, {"world_changed": True}, True),
        ({}, RNG | {"checkpoint": {"save_rng": False}}, {}, False),
        ({}, RNG | {"rng": {"data_parallel_random_init": True}}, {"world_changed": True}, False),
        ({}, RNG, {"args_changes": {"expert_model_parallel_size": 2}}, False),
        ({}, RNG | {"model": {"expert_model_parallel_size": 2}}, {}, True),
        ({}, RNG | {"model": {"expert_model_parallel_size": 2}}, {"world_changed": True}, False),
    ],
)
def test_rng_states_stay_where_megatron_and_bridge_find_them(
    args: dict[str, Any], config: dict[str, Any] | None, fields: dict[str, Any], kept: bool
) -> None:
    text = None if config is None else yaml.safe_dump(config)
    out = legacy({"args": argparse.Namespace(**args), "iteration": 1}, run_config=text, **fields)
    assert out["args"].no_save_rng is not kept


CONFIG = """\
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save_optim: true   # as ever
  save_rng: true
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func: &id001 {_call_: false, _target_: torch.nn.functional.silu}
  expert_model_parallel_size: 1
  gate: *id001
  num_layers_in_first_pipeline_stage:
  pipeline_model_parallel_layout:
  - - embedding
    - decoder
  - - decoder
    - loss
  pipeline_model_parallel_size: 2
  should_pad_vocab: false
  tensor_model_parallel_size: 2
  vocab_size: 128
train: null
"""


def test_run_config_changes_in_these_lines_only() -> None:
    changes = {
        "tensor_model_parallel_size": 4, "pipeline_model_parallel_layout": "Ett|tL", "padded_vocab_size": 160,
        "decoder_first_pipeline_num_layers": 3, "expert_model_parallel_size": 1, "sequence_parallel": True,
        "world_size": 8,
    }  # fmt: skip
    out = restate_run_config.edited(CONFIG, changes, save_rng=False, save_optim=True)
    expected = (
        CONFIG.replace("save_rng: true", "save_rng: false")
        .replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 4")
        .replace("pipeline_stage:", "pipeline_stage: 3")
        .replace("vocab_size: 128", "vocab_size: 160")
        .replace("layout:\n  - - embedding\n    - decoder\n  - - decoder\n    - loss\n", "layout: Ett|tL\n")
        .replace("model:\n", "model:\n  sequence_parallel: true\n")
    )
    assert out == expected
    assert restate_run_config.edited(CONFIG, {}, save_rng=True, save_optim=True) == CONFIG


def test_run_config_of_another_writer_keeps_its_form() -> None:
    text = '{"model": {"tensor_model_parallel_size": 2}, "checkpoint": {"save_optim": true}}'
    out = restate_run_config.edited(text, {"tensor_model_parallel_size": 1}, save_rng=False, save_optim=False)
    assert json.loads(out.replace("save_rng", '"save_rng"')) == {
        "model": {"tensor_model_parallel_size": 1}, "checkpoint": {"save_rng": False, "save_optim": False}
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["[", "model: 1", "model: &a {tensor_model_parallel_size: &b [1]}\ncheckpoint: {x: *b}"]
)
def test_run_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(restate_run_config.NotUnderstoodError, match=r"run_config\.yaml"):
        restate_run_config.edited(text + "\n", {"tensor_model_parallel_size": 2}, save_rng=True, save_optim=True)
