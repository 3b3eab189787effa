"""torch DCP in all its flavours, as source and as target.

Megatron-FSDP cannot run here, so what it writes is played by a stand-in: ``fsdp_state`` makes, of a checkpoint that Megatron
wrote, the state dict that ``preprocess_fsdp_dtensor_state_dict`` (megatron-core 0.19.2) would hand to torch's DCP, key by
key, and torch's DCP stores it and reads it.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptguard.cli.main import run
from ckptguard.convert import dcp_names
from ckptguard.convert.canonical import SourceTable
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, Facts, Index, Span, TensorEntry
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.fingerprint.values import Fingerprint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.structure import LocalTensor, Part, RankStructure, Structures
from ckptguard.testing import recipes
from ckptguard.testing.recipes import DENSE_TP1_PP1_FULL

pytestmark = [
    pytest.mark.usefixtures("quick_local"),
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed.checkpoint"),
]

# Names of Megatron's torch_dist <- names in a module of the local layer spec.
_TO_TE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_PER_PARAMETER = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")


def prints(root: Path) -> dict[str, Fingerprint]:
    with open_checkpoint(root) as checkpoint:
        return fingerprint_checkpoint(checkpoint)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by torch's DCP."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    out = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items() if hasattr(m, "size")}
    dcp.load(out, checkpoint_id=folder, no_dist=True)
    return out


def by_module(tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors whose global names begin so, layer by layer under the names of modules, SwiGLU's parts apart."""
    out = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix) or (not prefix and name.startswith("optimizer.")):
            continue
        key = name.removeprefix(prefix)
        if key in _PER_PARAMETER:
            out[key] = tensor
            continue
        rest = key.removeprefix("decoder.layers.")
        for number, layer in enumerate(tensor):
            own = f"decoder.layers.{number}.{_TO_TE.get(rest, rest)}"
            if rest == "mlp.linear_fc1.weight":
                out[f"{own}_w"], out[f"{own}_v"] = layer.chunk(2)
            else:
                out[own] = layer
    return out


def common_state(folder: Path) -> dict[str, Any]:
    """With the args as plain values: torch would import Megatron for those of its classes."""
    with open_checkpoint(folder) as checkpoint:
        index = checkpoint.index
        value: Any = checkpoint.reader.object_value(index.objects["common_state/shard_0_1"])
        return {**value[0], "args": Namespace(**index.facts.args)}


def fsdp_state(folder: Path) -> dict[str, Any]:
    """The state dict of Megatron-FSDP for the state of a ``fully_reshardable`` checkpoint."""
    tensors, common = tensors_in(folder), common_state(folder)
    weights = by_module(tensors, "optimizer.state.param.")
    moments = {kind: by_module(tensors, f"optimizer.state.{kind}.") for kind in ("exp_avg", "exp_avg_sq")}
    groups = common["optimizer"]["optimizer"]["param_groups"]
    decays, spared = sorted(groups, key=lambda group: -group["wd_mult"])
    state = {f"module.module.module.{n}": {kind: found[n] for kind, found in moments.items()} for n in weights}
    parameters = {re.sub("_[wv]$", "", name): spared if t.dim() == 1 else decays for name, t in weights.items()}
    args = {**vars(common["args"]), "ckpt_format": "fsdp_dtensor", "use_megatron_fsdp": True}
    return {
        "args": Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": common["iteration"],
        "model": {f"module.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {
            "state": state,
            "param_to_group_meta": {f"module.module.module.{name}": dict(group) for name, group in parameters.items()},
        },
        "opt_param_scheduler": common["opt_param_scheduler"],
        "num_floating_point_operations_so_far": common["num_floating_point_operations_so_far"],
    }


@pytest.fixture
def source(real_checkpoint: Callable[[str], Path]) -> Path:
    return real_checkpoint(DENSE_TP1_PP1_FULL.name)


def test_what_megatron_fsdp_writes_becomes_any_layout(source: Path, tmp_path: Path) -> None:
    state = fsdp_state(source)
    folder = tmp_path / "fsdp/iter_0000002"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert run(["reshard", str(folder), str(tmp_path / "out"), "--tp", "2", "--pp", "2"]) == 0
    assert prints(tmp_path / "out") == prints(source)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert not checkpoint.index.facts.args["use_megatron_fsdp"]
        assert checkpoint.index.facts.iteration == 2
    groups = common_state(next((tmp_path / "out").glob("iter_*")))["optimizer"]["optimizer"]["param_groups"]
    theirs = common_state(source)["optimizer"]["optimizer"]["param_groups"]
    assert sorted(map(repr, groups)) == sorted(map(repr, theirs))


def test_megatron_fsdp_finds_all_that_it_asks_for(source: Path, tmp_path: Path) -> None:
    options = ["--to", "fsdp_dtensor", "--files", "3"]
    assert run(["reshard", str(source), str(tmp_path / "out"), *options]) == 0
    folder = tmp_path / "out/iter_0000002"
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".distcp") == [f"__{n}_0.distcp" for n in range(3)]
    expected = fsdp_state(source)
    args = expected.pop("args")
    asked = _emptied(expected)
    dcp.load(asked, checkpoint_id=folder, no_dist=True)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert set(metadata) == {"args", *_flat(expected)}
    loaded = _flat(asked)
    for name, value in _flat(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[name], value), name
        else:
            assert loaded[name] == value, name
    with open_checkpoint(folder) as checkpoint:
        assert (
            checkpoint.index.facts.args.items()
            >= {"num_layers": args.num_layers, "ckpt_format": "fsdp_dtensor"}.items()
        )
    assert run(["reshard", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert prints(tmp_path / "back") == prints(source)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(item, f"{name}.{key}" if name else str(key)) for key, item in value.items())
    return {key: item for part in parts for key, item in part.items()}


def _emptied(value: Any) -> Any:
    """What a run asks for before it has loaded."""
    if isinstance(value, dict):
        return {key: _emptied(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


@pytest.mark.slow
def test_experts_have_names_of_their_own(real_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = real_checkpoint("moe_ep2_pp2_full")
    assert run(["reshard", str(source), str(tmp_path / "fsdp"), "--to", "fsdp_dtensor"]) == 0
    with open_checkpoint(tmp_path / "fsdp") as checkpoint:
        names = " ".join(checkpoint.index.tensors)
    assert set(re.findall(r"model\.module\.decoder\.layers\.3\.\S*experts\.(\d+)\.linear_fc1\.weight_w", names)) == set(
        "0123"
    )
    assert run(["reshard", str(tmp_path / "fsdp"), str(tmp_path / "back"), "--pp", "2", "--ep", "2"]) == 0
    assert prints(tmp_path / "back") == prints(source)


def test_torch_dcp_becomes_any_layout(
    source: Path, resaved_checkpoint: Callable[[str, str], Path], tmp_path: Path
) -> None:
    stored = resaved_checkpoint(DENSE_TP1_PP1_FULL.name, "dense_dcp")
    assert run(["reshard", str(stored), str(tmp_path / "out"), "--tp", "2", "--pp", "2"]) == 0
    weights = {name: value for name, value in prints(source).items() if not name.startswith("optimizer.")}
    assert prints(tmp_path / "out") == weights


def test_plain_dcp_there_and_back(source: Path, tmp_path: Path) -> None:
    assert run(["reshard", str(source), str(tmp_path / "dcp"), "--to", "dcp", "--files", "2"]) == 0
    folder = tmp_path / "dcp/iter_0000002"
    assert not (folder / "metadata.json").exists()
    theirs = tensors_in(source)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors_in(folder).items())
    assert run(["reshard", str(tmp_path / "dcp"), str(tmp_path / "out"), "--tp", "2"]) == 0
    assert prints(tmp_path / "out") == prints(source)


def test_plain_dcp_of_others_needs_its_args(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {name: tensor for name, tensor in tensors_in(source).items() if not name.startswith("optimizer.")}
    dcp.save(weights, checkpoint_id=tmp_path / "weights", no_dist=True)
    command = ["reshard", str(tmp_path / "weights"), str(tmp_path / "out"), "--tp", "2"]
    assert run(command) == 5
    assert "--args FILE" in capsys.readouterr().err
    with open_checkpoint(source) as checkpoint:
        (tmp_path / "args.json").write_text(json.dumps(dict(checkpoint.index.facts.args), default=str))
    assert run([*command, "--args", str(tmp_path / "args.json")]) == 0
    assert prints(tmp_path / "out") == {name: value for name, value in prints(source).items() if name in weights}
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.index.facts.args["tensor_model_parallel_size"] == 2


@pytest.mark.slow
def test_state_that_ranks_gathered_into_one_object(source: Path, tmp_path: Path) -> None:
    flags = ["--ckpt-format", "torch_dist", "--save", str(tmp_path / "gathered")]
    recipes._launch(DENSE_TP1_PP1_FULL, flags, recipes.TIMEOUT_SECONDS, "tests.convert.gathering_trainer")
    with open_checkpoint(tmp_path / "gathered") as checkpoint:
        assert checkpoint.index.facts.optimizer_format == "dp_zero_gather_scatter"
        assert not any(name.startswith("optimizer.") for name in checkpoint.index.tensors)
    assert run(["reshard", str(tmp_path / "gathered"), str(tmp_path / "out"), "--tp", "2"]) == 0
    assert prints(tmp_path / "out") == prints(source)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--files", "2"], "torch_dist has one file per rank"),
        (["--to", "dcp", "--optimizer", "dp_reshardable"], "dcp has no buckets"),
    ],
)
def test_choices_that_contradict_each_other(
    options: list[str], said: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reshard", str(source), str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


def _mamba(tp: int) -> tuple[Index, Structures]:
    """A tensor of three parts, which torch_dist stores apart, as Megatron-FSDP stores it."""
    entry = TensorEntry(
        "model.module.mixer.in_proj.weight", BY_NAME["bfloat16"], (6, 2), (Chunk(whole((6, 2)), Span("f", 0, 24)),)
    )
    parts = tuple(
        Part(f"mixer.in_proj.weight.{name}", (2, 2), whole((2, 2)), Box((2 * n, 0), (2, 2)), True)
        for n, name in enumerate("zxB")
    )
    tensor = LocalTensor("mixer.in_proj.weight", "bfloat16", (6, 2), True, parts)
    at = {"tp": 0, "pp": 0, "ep": 0, "etp": 0}
    structures = Structures((RankStructure(0, at, ((tensor,),), (), (), ()),), "0.19.2", None)
    facts = Facts(args={"tensor_model_parallel_size": tp})
    return Index("fsdp_dtensor", "here", {entry.name: entry}, {}, {}, {}, facts), structures


def test_parts_that_tensor_parallelism_merged_with_others_are_refused() -> None:
    index, structures = _mamba(1)
    made = dcp_names.to_global(index, structures, SourceTable())
    assert [tensor.cells[0].box for tensor in made.values()] == [whole((2, 2))] * 3
    index, structures = _mamba(2)
    with pytest.raises(UnsupportedError, match=r"model\.module\.mixer\.in_proj\.weight is merged"):
        dcp_names.to_global(index, structures, SourceTable())
