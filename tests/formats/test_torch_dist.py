"""torch_dist details: common state old and new, Bridge's files, roots with trackers, versions, the DCP relatives."""

from __future__ import annotations

import json
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.engine.summary import pattern_of, summarise
from ckptguard.engine.verify import verify
from ckptguard.formats.facts import kind_of_name
from ckptguard.formats.registry import open_checkpoint

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19" / "dense_tp2pp2_dp_reshardable"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "root")
    return tmp_path / "root"


def test_a_root_leads_to_the_tracked_step(root: Path) -> None:
    shutil.copytree(root / "iter_0000004", root / "iter_0000008")
    with open_checkpoint(root) as checkpoint:
        assert checkpoint.index.location.endswith("iter_0000004")
    with open_checkpoint(root, step="8") as checkpoint:
        assert checkpoint.index.location.endswith("iter_0000008")
    (root / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CkptguardError, match="holds steps 4, 8"):
        open_checkpoint(root)
    shutil.move(root / "iter_0000008", root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    with open_checkpoint(root) as checkpoint:
        assert checkpoint.index.location.endswith("release")


def test_common_pt_wins_over_the_object(root: Path) -> None:
    step = root / "iter_0000004"
    torch.save({"iteration": 77, "args": Namespace(tensor_model_parallel_size=8, world_size=16)}, step / "common.pt")
    with open_checkpoint(root) as checkpoint:
        facts = checkpoint.index.facts
        assert (facts.iteration, facts.layout) == (77, {"tp": 8, "dp": 2})
        assert "common.pt" in checkpoint.index.roles


def test_bridge_files_are_read_and_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptguard.cli.main import run

    step = root / "iter_0000004"
    (step / "run_config.yaml").write_text(
        "model:\n  _target_: megatron.bridge.models.LlamaModelProvider\n  tensor_model_parallel_size: 2\n"
        "  pipeline_model_parallel_size: 2\n  vocab_size: 32000\n  dtype: !!python/name:torch.bfloat16 ''\n"
        "checkpoint: {save_rng: true}\n"
    )
    torch.save({"step": torch.tensor(4)}, step / "train_state.pt")
    torch.save({"step": torch.tensor(4)}, root / "latest_train_state.pt")
    (step / "tokenizer").mkdir()
    (step / "tokenizer" / "tokenizer.json").write_text("{}")
    with open_checkpoint(root) as checkpoint:
        model = checkpoint.index.facts.run_config["model"]
        assert model["vocab_size"] == 32000
    assert run(["inspect", str(root)]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("Bridge run configuration", "Bridge train state", "tokenizer/tokenizer.json"))
    assert not verify(root).damaged


def test_layout_from_run_config_alone(root: Path) -> None:
    step = root / "iter_0000004"
    torch.save({"iteration": 4}, step / "common.pt")
    (step / "run_config.yaml").write_text("model: {tensor_model_parallel_size: 4, expert_model_parallel_size: 8}\n")
    with open_checkpoint(root) as checkpoint:
        assert checkpoint.index.facts.layout == {"tp": 4, "ep": 8}


def test_a_broken_run_config_is_a_problem_not_a_crash(root: Path) -> None:
    (root / "iter_0000004" / "run_config.yaml").write_text("a: [")
    report = verify(root)
    assert [p.file for p in report.problems if p.is_damage] == ["run_config.yaml"]


def test_a_marker_without_an_index(root: Path) -> None:
    (root / "iter_0000004" / ".metadata").unlink()
    with pytest.raises(DamagedError, match=r"index \.metadata is missing"):
        open_checkpoint(root)


def test_a_nested_checkpoint_is_no_left_over(root: Path) -> None:
    nested = root / "iter_0000004" / "modelopt_state"
    dcp.save({"x": torch.ones(2)}, checkpoint_id=nested, no_dist=True)
    report = verify(root)
    assert not report.damaged, report.problems


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        (
            ["model.module.decoder.weight", "optimizer.state.module.module.module.decoder.weight.exp_avg"],
            "fsdp_dtensor",
        ),
        (["model.decoder.weight"], "torch_dcp"),
        (["decoder.weight"], "dcp"),
    ],
)
def test_dcp_relatives_are_told_by_their_keys(keys: list[str], form: str, tmp_path: Path) -> None:
    """Names as Megatron 0.19 gives them; Megatron itself cannot save fsdp_dtensor without a GPU."""
    state = {key: torch.ones(2, 2) for key in keys}
    dcp.save(
        state | {"iteration": 3, "args": Namespace(tensor_model_parallel_size=2)},
        checkpoint_id=tmp_path / "c",
        no_dist=True,
    )
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.index.format == form
        assert checkpoint.index.facts.iteration == 3
        assert checkpoint.index.facts.layout["tp"] == 2
    assert not verify(tmp_path / "c").damaged


@pytest.mark.megatron
@pytest.mark.slow
def test_real_torch_dcp(resaved_checkpoint: Callable[[str, str], Path]) -> None:
    path = resaved_checkpoint("dense_tp1_pp1_full", "dense_dcp")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.index.format == "torch_dcp"
        assert checkpoint.index.facts.iteration == 2
    report = verify(path)
    assert not report.damaged, report.problems


def test_kinds_and_patterns() -> None:
    kinds = {
        "decoder.layers.mlp.linear_fc1.weight": "weights",
        "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight": "masters",
        "optimizer.state.fp32_param.embedding.word_embeddings.weight": "masters",
        "optimizer.state.exp_avg_sq.output_layer.weight": "moments",
        "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param": "masters",
        "mp_rank_00/distrib_optim.pt:0.(torch.bfloat16, torch.float32).exp_avg": "moments",
        "mp_rank_00/model_optim_rng.pt:model.decoder.weight": "weights",
    }
    assert {name: kind_of_name(name) for name in kinds} == kinds
    assert pattern_of("decoder.layers.11.mlp.experts.3.fc1.weight") == "decoder.layers.*.mlp.experts.*.fc1.weight"
    assert pattern_of("linear_fc1.weight") == "linear_fc1.weight"


def test_summary_counts(root: Path) -> None:
    with open_checkpoint(root) as checkpoint:
        summary = summarise(checkpoint.index)
    assert summary.parameters == sum(g.elements for g in summary.kinds if g.name == "weights")
    assert {g.name for g in summary.kinds} == {"weights", "masters", "moments", "objects"}
    assert json.dumps(summary.as_dict())


def test_an_unknown_class_in_args_is_kept_as_a_name(root: Path) -> None:
    """Enums and configs of Megatron's own packages are values to show, whatever release they come from."""
    import sys
    import types

    module = types.ModuleType("megatron.core.of_tomorrow")
    backend = type("Backend", (), {"__module__": module.__name__, "__qualname__": "Backend"})
    module.Backend = backend  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        value = backend()
        value.level = 3
        torch.save({"iteration": 4, "args": Namespace(backend=value)}, root / "iter_0000004" / "common.pt")
    finally:
        del sys.modules[module.__name__]
    with open_checkpoint(root) as checkpoint:
        shown = checkpoint.index.facts.args["backend"]
    assert shown == {"class": "megatron.core.of_tomorrow.Backend", "level": 3}
    assert not verify(root).damaged


def test_what_pickles_cannot_reach() -> None:
    """BUILD must not change anything of ours that outlives the load."""
    from ckptguard.formats import pickles

    attacks = [
        b"\x80\x04cbuiltins\nset\n(N}\x8c\x04evil\x94K\x01s\x86b.",  # attributes of a stand-in
        b"\x80\x04ccollections\nOrderedDict\nN}\x8c\x04keys\x94K\x01s\x86b.",
        b"\x80\x04cargparse\nNamespace\nN}\x8c\x08__init__\x94K\x01s\x86b.",
    ]
    for attack in attacks:
        try:
            pickles.load(attack, where="x")
        except DamagedError:
            continue
    assert pickles.load(pickle.dumps(Namespace(a=1)), where="x").a == 1
    assert pickles.load(pickle.dumps({1, 2}), where="x") == {1, 2}
    assert not hasattr(pickles.Record, "keys")
