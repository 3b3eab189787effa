"""``ckptguard reshard`` on checkpoints of all releases: there and back, old forms of optimizer state, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import s3_store
from frozen import unpacked

from ckptguard.cli.main import run
from ckptguard.convert.reshard_source import open_source
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.masters import check_masters
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint

pytestmark = pytest.mark.usefixtures("quick_local")

# What the trainer of the old fixtures left out of the args that it stored: tools/fixtures/old_release_trainer.py.
OLD_ARGS = (
    "transformer_impl=local", "max_position_embeddings=16", "group_query_attention=true", "add_bias_linear=false",
    "add_qkv_bias=false", "optimizer=adam", "accumulate_allreduce_grads_in_fp32=true",
)  # fmt: skip
FLATTENED = (
    "megatron-0.8/dense_tp2pp2_model_space", "megatron-0.12/dense_tp2dp2_model_space",
    "megatron-0.12/dense_tp2pp2_model_space", "megatron-0.14/dense_tp2pp2_model_space",
    "megatron-0.14/moe_ep2dp4_model_space",
)  # fmt: skip
BUCKETS = (
    "megatron-0.8/dense_tp2pp2_legacy_torch", "megatron-0.12/dense_tp2pp2_legacy_torch",
    "megatron-0.15/dense_tp2pp2_dp_reshardable", "megatron-0.16/dense_tp2pp2_dp_reshardable",
)  # fmt: skip


def old_args() -> list[str]:
    return [word for text in OLD_ARGS for word in ("--arg", text)]


def reshard(source: Path, target: Path, *options: str) -> int:
    return run(["reshard", str(source), str(target), *options])


def digest(checkpoint: Checkpoint, entry: TensorEntry) -> str:
    """SHA-256 of a whole tensor's bytes, as tools/fixtures/oracle.py makes it."""
    import hashlib

    out = np.empty((*entry.shape, entry.dtype.itemsize), np.uint8)
    for chunk in entry.chunks:
        at = checkpoint.reader.locate(entry, chunk)
        part = checkpoint.reader.read_box(at, (0,) * len(chunk.box.size), chunk.box.size)
        place = tuple(slice(o, o + n) for o, n in zip(chunk.box.offset, chunk.box.size, strict=True))
        out[place] = part.reshape(*chunk.box.size, entry.dtype.itemsize)
    assert whole(entry.shape).numel * entry.dtype.itemsize == out.nbytes
    return hashlib.sha256(out.tobytes()).hexdigest()


@pytest.mark.parametrize("name", FLATTENED)
def test_flattened_ranges_become_what_megatron_0_15_makes_of_them(name: str, tmp_path: Path) -> None:
    source = unpacked(name, tmp_path / "old")
    official = json.loads((Path("fixtures") / name / "official.json").read_text())
    assert reshard(source, tmp_path / "new", "--tp", "1", "--pp", "1", "--ep", "1", *old_args()) == 0
    with open_checkpoint(tmp_path / "new") as checkpoint:
        found = {n: [e.dtype.name, list(e.shape), digest(checkpoint, e)] for n, e in checkpoint.index.tensors.items()}
        common = checkpoint.index.facts
    assert found == {n: [t["dtype"], t["shape"], t["sha256"]] for n, t in official["tensors"].items()}
    assert common.optimizer_format == "fully_reshardable"


@pytest.mark.parametrize("name", BUCKETS)
def test_state_in_buckets_of_old_releases_comes_out_as_the_masters_of_the_weights(name: str, tmp_path: Path) -> None:
    """The masters, rounded, are the weights: a parameter that was taken from the wrong place would not fit."""
    source = unpacked(name, tmp_path / "old")
    options = ["--tp", "1", "--pp", "1", "--optimizer", "fully_reshardable", *old_args()]
    assert reshard(source, tmp_path / "new", *options) == 0
    with open_checkpoint(tmp_path / "new") as checkpoint:
        problems, compared = check_masters(checkpoint)
    assert (problems, compared > 8) == ([], True)


LAYOUTS: tuple[tuple[str, Sequence[str]], ...] = (
    ("dense_tp2_pp2", ["--tp", "1", "--pp", "4", "--optimizer", "fully_reshardable"]),
    ("dense_pp4_uneven_full", ["--pp", "3", "--tp", "2", "--optimizer", "dp_reshardable"]),
    ("dense_pp2_vpp2", ["--pp", "4", "--dp", "3"]),
    ("moe_ep2_pp2_full", ["--tp", "2", "--pp", "1", "--ep", "4", "--etp", "1", "--optimizer", "dp_reshardable"]),
)


@pytest.mark.parametrize(("recipe", "options"), LAYOUTS)
def test_there_and_back_every_tensor_file_and_chunk_is_as_it_was(
    recipe: str, options: Sequence[str], real_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = real_checkpoint(recipe).parent
    with open_checkpoint(source) as checkpoint:
        layout, form = checkpoint.index.facts.layout, checkpoint.index.facts.optimizer_format
    assert reshard(source, tmp_path / "own", "--optimizer", str(form)) == 0  # Megatron spreads copies over DP ranks
    assert reshard(tmp_path / "own", tmp_path / "there", *options) == 0
    back = [
        "--tp",
        str(layout["tp"]),
        "--pp",
        str(layout["pp"]),
        "--ep",
        str(layout["ep"]),
        "--etp",
        str(layout["etp"]),
    ]
    back += ["--vpp", str(layout["vpp"])] if "vpp" in layout else []
    back += ["--first-pp-layers", "1", "--last-pp-layers", "1"] if "uneven" in recipe else []
    back += ["--dp", str(layout["dp"]), "--optimizer", str(form)]
    assert reshard(tmp_path / "there", tmp_path / "back", *back) == 0
    with open_checkpoint(tmp_path / "own") as a, open_checkpoint(tmp_path / "back") as b:
        assert fingerprint_checkpoint(a) == fingerprint_checkpoint(b)
        assert _chunks(a) == _chunks(b)
    if form == "fully_reshardable":
        with open_checkpoint(source) as a, open_checkpoint(tmp_path / "back") as b:
            assert fingerprint_checkpoint(a) == fingerprint_checkpoint(b)


def _chunks(checkpoint: Checkpoint) -> set[tuple[str, str, str]]:
    entries = checkpoint.index.tensors.values()
    return {(e.name, str(chunk.box), chunk.span.file) for e in entries for chunk in e.chunks}


def test_legacy_files_and_back(real_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = real_checkpoint("dense_tp2_pp2_full").parent
    assert reshard(source, tmp_path / "legacy", "--to", "torch", "--pp", "1") == 0
    assert (tmp_path / "legacy/iter_0000002/mp_rank_01/distrib_optim.pt").is_file()
    assert reshard(tmp_path / "legacy", tmp_path / "back", "--pp", "2", "--optimizer", "fully_reshardable") == 0
    assert run(["diff", str(source), str(tmp_path / "back")]) == 0


def test_a_plan_says_everything_and_writes_nothing(
    real_checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = real_checkpoint("dense_tp2_pp2")
    assert reshard(source, tmp_path / "new", "--pipeline-model-parallel-size", "1", "--sp", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["source"]["layout"]["pp"], plan["layout"]["pp"], plan["layout"]["tp"]) == (2, 1, 2)
    assert plan["optimizer"] == "dp_reshardable"
    assert any("RNG" in note for note in plan["notes"])
    assert sum(plan["bytes_by_file"].values()) <= plan["disk_bytes"]
    assert not list(tmp_path.iterdir())


REFUSED: tuple[tuple[Sequence[str], int, str], ...] = (
    (["--tp", "3"], 2, "4 attention heads"),
    (["--pp", "3"], 2, "layers"),
    (["--ep", "2"], 2, "expert"),
    (["--optimizer", "fully_reshardable", "--arg", "hidden_size=128"], 5, "lays optimizer buckets out otherwise"),
)


@pytest.mark.parametrize(("options", "code", "says"), REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(
    options: Sequence[str],
    code: int,
    says: str,
    real_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reshard(real_checkpoint("dense_tp2_pp2"), tmp_path / "new", *options) == code
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_damaged_source_is_named_and_nothing_is_written(
    real_checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(real_checkpoint("dense_tp2_pp2").parent, source)
    file = source / "iter_0000002" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-4000])
    assert reshard(source, tmp_path / "new", "--tp", "1") == 4
    assert "__1_0.distcp" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_layouts_are_listed_with_bytes_per_rank(
    real_checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = real_checkpoint("moe_ep2_pp2")
    assert run(["reshard", str(source), "--list-layouts", "--gpus", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert {"tp", "pp", "ep", "etp", "dp"} <= found[0]["layout"].keys()
    assert run(["reshard", str(source), "--list-layouts"]) == 2


def test_from_s3_to_s3_and_to_memory(
    real_checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is proved at a URL is what is there: read again from the store, by another command."""
    source = real_checkpoint("dense_tp2_pp2").parent
    with s3_store.serving() as (_, files):
        files.put(str(source), f"{s3_store.BUCKET}/reshard/source", recursive=True)
        at = f"s3://{s3_store.BUCKET}/reshard"
        assert run(["reshard", f"{at}/source", f"{at}/new", "--tp", "1", "--pp", "4"]) == 0
        assert (
            run(["reshard", f"{at}/new", "memory://reshard/new", "--pp", "1", "--optimizer", "fully_reshardable"]) == 0
        )
        capsys.readouterr()
        assert run(["fingerprint", f"{at}/source", "--json"]) == 0
        before = json.loads(capsys.readouterr().out)
        assert run(["fingerprint", "memory://reshard/new", "--json"]) == 0
        after = json.loads(capsys.readouterr().out)
        assert before["roots"]["weights"] == after["roots"]["weights"]
        assert run(["reshard", f"{at}/source", f"{at}/new", "--tp", "1"]) == 2, "something is there already"


def test_fp8_state_in_legacy_files_is_not_dropped(real_checkpoint: Callable[[str], Path]) -> None:
    """No GPU is here to make such state: its tensor is put into the index of real files that have none."""
    name = "mp_rank_00_000/model_optim_rng.pt:model.decoder.layers.0.self_attention.linear_qkv._extra_state"
    with open_checkpoint(real_checkpoint("legacy_tp2_pp2")) as checkpoint:
        state = TensorEntry(name, BY_NAME["uint8"], (64,), ())
        index = dataclasses.replace(checkpoint.index, tensors={**checkpoint.index.tensors, name: state})
        with pytest.raises(UnsupportedError, match=r"linear_qkv\._extra_state"):
            open_source(dataclasses.replace(checkpoint, index=index), None)


def test_state_that_does_not_belong_to_the_weights_is_said(
    real_checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two parameters of one size have changed places in the bucket: every length fits, the values do not."""
    source = Path(shutil.copytree(real_checkpoint("dense_tp2_pp2").parent, tmp_path / "source"))
    with open_checkpoint(source) as checkpoint:
        name = next(n for n in checkpoint.index.tensors if "dp_group_idx_0." in n and n.endswith(".param"))
        entry = checkpoint.index.tensors[name]
        sizes: dict[int, list[Chunk]] = {}
        for chunk in entry.chunks:
            sizes.setdefault(chunk.box.numel, []).append(chunk)
        first, second = next(found for found in sizes.values() if len(found) > 1 and found[0].box.numel > 1024)[:2]
        spans = [first.span, second.span]  # with the CRC-32 that belong to the values
        values = [checkpoint.files.read_span(span) for span in spans]
    for span, value in zip(spans, reversed(values), strict=True):
        with next(source.glob(f"iter_*/{span.file}")).open("r+b") as file:
            file.seek(span.offset_bytes)
            file.write(value)
    assert reshard(source, tmp_path / "new", "--tp", "1") == 0
    assert "2 weights are not their fp32 masters rounded" in capsys.readouterr().out
