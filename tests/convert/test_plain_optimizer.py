"""State of an optimizer that is not distributed: every form as a source, and what Megatron loads of the targets."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ckptguard.cli.main import run
from ckptguard.convert import plain_optimizer
from ckptguard.convert.canonical import SourceTable, State, plain
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, Span, TensorEntry
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.restate import Restate, restate
from ckptguard.testing import recipes
from ckptguard.testing.recipes import Recipe, check_loads

pytestmark = pytest.mark.usefixtures("quick_local")

PLAIN = ("--use-distributed-optimizer",)
TP2 = Recipe(name="plain_tp2", tp=2, num_layers=2, steps=1, without_flags=PLAIN)
PP2 = replace(TP2, name="plain_pp2", tp=1, pp=2)
LEGACY = replace(TP2, name="plain_legacy_tp2", ckpt_format="torch")
DCP = replace(TP2, name="plain_dcp", tp=1, ckpt_format="torch_dcp")
recipes.RECIPES.update({recipe.name: recipe for recipe in (TP2, LEGACY, DCP)})


def prints(root: Path) -> dict[str, Fingerprint]:
    with open_checkpoint(root) as checkpoint:
        return fingerprint_checkpoint(checkpoint)


def as_param(found: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
    return {name.replace(".state.fp32_param.", ".state.param."): value for name, value in found.items()}


@pytest.fixture
def source(real_checkpoint: Callable[[str], Path]) -> Path:
    return real_checkpoint(TP2.name)


@pytest.mark.megatron
@pytest.mark.slow
def test_the_target_has_the_names_that_megatron_asks_for(source: Path, tmp_path: Path) -> None:
    assert run(["reshard", str(source), str(tmp_path / "out"), "--tp", "1", "--pp", "2"]) == 0
    assert prints(tmp_path / "out") == prints(source)
    assert any(name.startswith("optimizer.state.fp32_param.") for name in prints(source))
    assert "successfully loaded checkpoint" in check_loads(tmp_path / "out", PP2)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", [LEGACY.name, DCP.name])
def test_numbered_states_find_their_parameters(
    name: str, source: Path, resaved_checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    numbered = resaved_checkpoint(TP2.name, name)
    assert run(["reshard", str(numbered), str(tmp_path / "out"), "--tp", "2"]) == 0
    assert prints(tmp_path / "out") == prints(source)


@pytest.mark.megatron
@pytest.mark.slow
def test_a_run_may_go_on_with_the_distributed_optimizer(source: Path, tmp_path: Path) -> None:
    options = ["--tp", "1", "--pp", "2", "--optimizer", "fully_reshardable"]
    assert run(["reshard", str(source), str(tmp_path / "out"), *options]) == 0
    assert prints(tmp_path / "out") == as_param(prints(source))
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.index.facts.args["use_distributed_optimizer"] is True
        assert checkpoint.index.facts.optimizer_format == "fully_reshardable"
    distributed = replace(PP2, without_flags=(), optimizer_format="fully_reshardable")
    assert "successfully loaded checkpoint" in check_loads(tmp_path / "out", distributed)


@pytest.mark.megatron
def test_buckets_can_be_made_too(source: Path, tmp_path: Path) -> None:
    assert run(["reshard", str(source), str(tmp_path / "buckets"), "--optimizer", "dp_reshardable"]) == 0
    options = ["--optimizer", "fully_reshardable"]
    assert run(["reshard", str(tmp_path / "buckets"), str(tmp_path / "out"), *options]) == 0
    assert prints(tmp_path / "out") == as_param(prints(source))


@pytest.mark.megatron
def test_legacy_targets_are_refused_by_name(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reshard", str(source), str(tmp_path / "out"), "--to", "torch"]) == 5
    assert "did not use the distributed optimizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _state(dtype: str) -> State:
    def entry(name: str, kind: str) -> TensorEntry:
        chunk = Chunk(whole((4,)), Span("f", 0, 4 * BY_NAME[kind].itemsize))
        return TensorEntry(name, BY_NAME[kind], (4,), (chunk,))

    found = [entry("a.weight", dtype), entry("optimizer.state.exp_avg.a.weight", "float32")]
    return State({item.name: plain(item) for item in found}, SourceTable())


def test_a_float32_parameter_is_its_own_master_copy_and_a_half_one_is_not() -> None:
    made = plain_optimizer.with_masters(_state("float32")).tensors
    assert made["optimizer.state.param.a.weight"].cells == made["a.weight"].cells
    with pytest.raises(UnsupportedError, match=r"no float32 copy, such as a\.weight"):
        plain_optimizer.with_masters(_state("bfloat16"))


@pytest.mark.parametrize("nested", [True, False])
def test_the_step_that_torch_keeps_apart_stays_apart(nested: bool) -> None:
    import torch

    group = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    inner = {"param_groups": [{**group, "max_lr": 1.0, "min_lr": 0.0}], "state": {"common_step": 7}}
    common = {"checkpoint_version": 3.0, "iteration": 7, "optimizer": {"optimizer": inner} if nested else inner}
    buffer = io.BytesIO()
    torch.save(common, buffer)
    said = restate(
        Restate(
            common=buffer.getvalue(), iteration=7, layout_changed=False, world_changed=False, has_rng=False, args_changes={},
            optimizer_format="plain",
        )
    )  # fmt: skip
    made = torch.load(io.BytesIO(said.common_state), weights_only=True)[0]
    optimizer = made["optimizer"]["optimizer"] if nested else made["optimizer"]
    assert optimizer["state"] == {"common_step": 7}
    assert optimizer["param_groups"][0]["step"] == 7
    assert "distrib_optim_sharding_type" not in made["content_metadata"]
