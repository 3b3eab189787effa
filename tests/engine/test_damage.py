"""Every kind of damage is detected and placed; a clean checkpoint never raises a false alarm.

Each test first proves that the same call on the undamaged copy finds nothing, so that it fails when verify cries at everything.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from damage_cases import DENSE, LEGACY, MOE, copy_of, damage_of, sealed_copy

from ckptguard.core.errors import CkptguardError, DamagedError, UnsafePickleError
from ckptguard.engine.seal import seal
from ckptguard.engine.verify import Authority, verify
from ckptguard.fingerprint.manifest import FILE_NAME, Manifest, parse
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing import damage


@pytest.fixture(params=[DENSE, MOE, LEGACY], ids=["dense", "moe", "legacy"])
def sealed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path, _ = sealed_copy(request.param, tmp_path / "ckpt")
    for mode in ("full", "quick"):
        report, kinds = damage_of(path, mode=mode)
        assert not kinds, report.problems
    return path


@pytest.mark.parametrize("mode", ["full", "quick"])
@pytest.mark.parametrize("how", [damage.zero_page, damage.truncate, damage.lengthen])
def test_a_damaged_file_is_named(sealed: Path, how, mode: str) -> None:
    rng = random.Random(1)
    done = how(rng.choice(damage.data_files(sealed)), sealed, rng)
    report, kinds = damage_of(sealed, mode=mode)
    assert {p.file for p in report.problems if p.is_damage} == set(done.files), report.problems
    assert kinds & {"changed", "size"}


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_bit_flips_are_placed(sealed: Path, mode: str) -> None:
    rng = random.Random(2)
    for _ in range(25):
        file = rng.choice(damage.data_files(sealed))
        byte, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        done = damage.flip_bit(file, byte, bit, sealed)
        report, _ = damage_of(sealed, mode=mode)
        hits = [
            p for p in report.problems if p.is_damage and p.bytes_range and p.bytes_range[0] <= byte < p.bytes_range[1]
        ]
        assert hits, (done, report.problems)
        assert {p.file for p in hits} == set(done.files)
        assert all(p.rank is not None for p in hits)
        damage.flip_bit(file, byte, bit, sealed)
    assert not damage_of(sealed)[1]


def test_swapped_files(sealed: Path) -> None:
    one, other = damage.data_files(sealed)[:2]
    done = damage.swap(one, other, sealed)
    report, _ = damage_of(sealed)
    assert set(done.files) <= {p.file for p in report.problems if p.is_damage}


@pytest.mark.parametrize("source", [DENSE, MOE], ids=["dense", "moe"])
def test_swapped_tensor_names(source: Path, tmp_path: Path) -> None:
    path, _ = sealed_copy(source, tmp_path / "ckpt")
    damage.swap_names(path)
    report, kinds = damage_of(path)
    assert kinds, report
    assert ".metadata" in {p.file for p in report.problems if p.is_damage}


def test_swapped_tensor_names_of_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tmp_path.joinpath("s").mkdir()
    a, b = torch.arange(64.0), torch.arange(64.0) + 1
    save_file({"a": a, "b": b}, tmp_path / "s" / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path / "s") as checkpoint:
        seal(checkpoint)
    assert not damage_of(tmp_path / "s")[1]
    save_file({"a": b, "b": a}, tmp_path / "s" / "model.safetensors", metadata={"format": "pt"})
    report, _ = damage_of(tmp_path / "s")
    assert {p.tensor for p in report.problems if p.is_damage} == {"a", "b"}


def test_a_shard_of_an_older_step(tmp_path: Path) -> None:
    """The same layout, sizes and names, other values: only a digest can tell."""
    path, _ = sealed_copy(MOE, tmp_path / "ckpt")
    older = copy_of(MOE, tmp_path / "older")
    with open_checkpoint(older) as checkpoint:
        entry = checkpoint.index.tensors["embedding.word_embeddings.weight"]
        at = checkpoint.reader.locate(entry, entry.chunks[0])
    data = bytearray((older / at.span.file).read_bytes())
    data[at.span.offset_bytes : at.span.end_bytes] = random.Random(0).randbytes(at.span.length_bytes)
    crc = zlib.crc32(data[at.span.offset_bytes : at.span.end_bytes])
    for old in (at.crc32.to_bytes(4, "little"),):  # a real older step has CRCs that fit its own bytes
        assert data.count(old) >= 1
        data = bytearray(bytes(data).replace(old, crc.to_bytes(4, "little")))
    (path / at.span.file).write_bytes(data)
    report, kinds = damage_of(path)
    assert kinds == {"changed"}
    assert "embedding.word_embeddings.weight" in {p.tensor for p in report.problems if p.is_damage}


@pytest.mark.parametrize("declared", [False, True])
def test_a_missing_chunk(declared: bool, tmp_path: Path) -> None:
    path = copy_of(MOE, tmp_path / "ckpt")
    assert not damage_of(path)[1]
    damage.drop_chunk(path, declared=declared)
    report, kinds = damage_of(path)
    assert "missing-chunk" in kinds
    gap = next(p for p in report.problems if p.kind == "missing-chunk")
    assert gap.tensor
    assert gap.box is not None
    with open_checkpoint(path) as checkpoint, pytest.raises(DamagedError):
        seal(checkpoint)
    assert not (path / FILE_NAME).exists()


def test_overlapping_chunks(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    damage.overlap_chunk(path)
    report, kinds = damage_of(path)
    assert kinds & {"overlap", "layout", "missing-chunk"}, report.problems


def test_an_index_that_asks_for_a_huge_allocation(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    damage.huge_sizes(path)
    _, kinds = damage_of(path)
    assert "size" in kinds
    with open_checkpoint(path) as checkpoint:
        from ckptguard.engine.fingerprints import fingerprint_checkpoint

        with pytest.raises(DamagedError, match="wants"):
            fingerprint_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04\x8e" + (1 << 50).to_bytes(8, "little") + b"x.",  # BINBYTES8 of a petabyte
        b"\x80\x04Nr" + (0x7FFFFFFF).to_bytes(4, "little") + b".",  # LONG_BINPUT: a memo of 2**31 slots
        b"\x80\x04" + b"(" * 100_000 + b".",
    ],
    ids=["bytes", "memo", "marks"],
)
def test_a_pickle_that_asks_for_a_huge_allocation(pickled: bytes, tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    (path / ".metadata").write_bytes(pickled)
    _, kinds = damage_of(path)
    assert kinds == {"unreadable"}


def test_an_extra_file_and_one_in_a_sub_directory(sealed: Path) -> None:
    (sealed / "__9_0.distcp").write_bytes(b"x")
    (sealed / "deep" / "er").mkdir(parents=True)
    (sealed / "deep" / "er" / "file").write_bytes(b"y")
    report, kinds = damage_of(sealed)
    assert kinds == {"extra-file"}
    assert {p.file for p in report.problems if p.is_damage} == {"__9_0.distcp", "deep/er/file"}


def test_an_extra_shard_is_noticed_without_a_seal(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    shutil.copy(path / "__0_0.distcp", path / "__9_0.distcp")
    report, kinds = damage_of(path)
    assert kinds == {"extra-file"}
    assert "__9_0.distcp" in {p.file for p in report.problems}


def test_a_changed_file_in_a_sub_directory(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.json").write_text("{}")
    with open_checkpoint(path) as checkpoint:
        seal(checkpoint)
    (path / "tokenizer" / "vocab.json").write_text("[]")
    report, kinds = damage_of(path)
    assert kinds == {"changed"}
    assert [p.file for p in report.problems if p.is_damage] == ["tokenizer/vocab.json"]


def test_a_missing_file_names_its_tensors(sealed: Path) -> None:
    gone = damage.data_files(sealed)[-1]
    gone.unlink()
    report, kinds = damage_of(sealed)
    assert kinds <= {"missing-file", "missing-chunk"}
    assert str(gone.relative_to(sealed)) in {p.file for p in report.problems if p.kind == "missing-file"}


class TestManifest:
    """The manifest itself under attack."""

    def test_emptied_file(self, sealed: Path) -> None:
        (sealed / FILE_NAME).write_bytes(b"")
        assert "manifest" in damage_of(sealed)[1]

    def test_shortened_file(self, sealed: Path) -> None:
        data = (sealed / FILE_NAME).read_bytes()
        for keep in (1, len(data) // 2, len(data) - 1):
            (sealed / FILE_NAME).write_bytes(data[:keep])
            assert "manifest" in damage_of(sealed)[1]

    def test_every_flipped_bit(self, sealed: Path) -> None:
        data = (sealed / FILE_NAME).read_bytes()
        before = parse(data, "m").seal
        rng = random.Random(3)
        for _ in range(200):
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            try:  # the zstd frame has a few bits without meaning; what it unpacks to must be the same then
                assert parse(bytes(changed), "m").seal == before
            except CkptguardError:
                continue

    def test_emptied_list_with_a_fitting_digest(self, sealed: Path) -> None:
        own = parse((sealed / FILE_NAME).read_bytes(), "m")
        (sealed / FILE_NAME).write_bytes(Manifest(own.created, {}, {}).to_bytes())
        report, kinds = damage_of(sealed)
        assert kinds == {"extra-file"}
        assert len([p for p in report.problems if p.is_damage]) == len(own.files)

    def test_shortened_list_with_a_fitting_digest(self, sealed: Path) -> None:
        own = parse((sealed / FILE_NAME).read_bytes(), "m")
        name = next(iter(own.files))
        files = {n: f for n, f in own.files.items() if n != name}
        (sealed / FILE_NAME).write_bytes(
            Manifest(own.created, files, own.fingerprints, own.algorithm, own.root).to_bytes()
        )
        report, kinds = damage_of(sealed)
        assert kinds == {"extra-file"}
        assert [p.file for p in report.problems if p.is_damage] == [name]

    @pytest.mark.parametrize("kept", ["seal", "copy"])
    def test_rewritten_whole(self, kept: str, tmp_path: Path) -> None:
        path, kept_seal = sealed_copy(DENSE, tmp_path / "ckpt")
        copy = parse((path / FILE_NAME).read_bytes(), "kept")
        with open_checkpoint(path) as checkpoint:
            entry = max(checkpoint.index.tensors.values(), key=lambda entry: entry.size_bytes)
            span = checkpoint.reader.locate(entry, entry.chunks[0]).span
        file = path / span.file
        damage.flip_bit(file, span.offset_bytes, 0, path)
        (path / FILE_NAME).unlink()
        with open_checkpoint(path) as checkpoint:
            seal(checkpoint, crc=False)
        assert not damage_of(path, mode="quick")[1] - {"crc"}
        against = Authority(seal=kept_seal) if kept == "seal" else Authority(manifest=copy)
        report, kinds = damage_of(path, against=against)
        assert "manifest" in kinds
        if kept == "copy":
            assert {p.file for p in report.problems if p.kind == "changed"} == {file.name}

    def test_removed_but_expected(self, tmp_path: Path) -> None:
        path, kept_seal = sealed_copy(DENSE, tmp_path / "ckpt")
        assert not damage_of(path, against=Authority(seal=kept_seal))[1]
        (path / FILE_NAME).unlink()
        assert "manifest" in damage_of(path, against=Authority(seal=kept_seal))[1]


def test_a_symlink_out_of_the_directory(sealed: Path, tmp_path: Path) -> None:
    file = damage.data_files(sealed)[0]
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    report, kinds = damage_of(sealed)
    assert "escape" in kinds
    assert str(file.relative_to(sealed)) in {p.file for p in report.problems if p.kind == "escape"}


def test_an_index_that_names_a_file_outside(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")

    def change(metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"

    damage.edit_metadata(path, change)
    shutil.copy(path / "__0_0.distcp", tmp_path / "__0_0.distcp")
    assert "escape" in damage_of(path)[1]


class TestPicklesThatRunCode:
    """Nothing is run, and the file is named, wherever a pickle is read."""

    @pytest.fixture(autouse=True)
    def evil(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        mark = tmp_path / "code-was-run"
        monkeypatch.setenv("CKPTGUARD_EVIL", str(mark))
        yield
        assert not mark.exists()

    def test_the_weapon_works(self, tmp_path: Path) -> None:
        with pytest.raises(FileExistsError):
            pickle.loads(pickle.dumps([damage.Evil(), damage.Evil()]))
        os.rmdir(os.environ["CKPTGUARD_EVIL"])

    def test_metadata(self, tmp_path: Path) -> None:
        path = copy_of(DENSE, tmp_path / "ckpt")
        (path / ".metadata").write_bytes(pickle.dumps(damage.Evil()))
        with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
            open_checkpoint(path)
        report, kinds = damage_of(path)
        assert kinds == {"unsafe-pickle"}
        assert {p.file for p in report.problems if p.is_damage} == {".metadata"}

    def test_metadata_extra_attribute(self, tmp_path: Path) -> None:
        path = copy_of(DENSE, tmp_path / "ckpt")
        damage.edit_metadata(path, lambda metadata: setattr(metadata, "extra", damage.Evil()))
        assert damage_of(path)[1] == {"unsafe-pickle"}

    @pytest.mark.parametrize("name", ["common.pt"])
    def test_side_files(self, name: str, tmp_path: Path) -> None:
        path = copy_of(DENSE, tmp_path / "ckpt")
        torch.save({"args": damage.Evil()}, path / name)
        report, kinds = damage_of(path)
        assert "unsafe-pickle" in kinds, report.problems
        assert name in {p.file for p in report.problems if p.kind == "unsafe-pickle"}

    def test_train_state(self, tmp_path: Path) -> None:
        path = copy_of(DENSE, tmp_path / "ckpt")
        torch.save({"step": damage.Evil()}, path / "train_state.pt")
        report, _ = damage_of(path)
        assert "train_state.pt" in {p.file for p in report.problems if p.kind == "unsafe-pickle"}

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_objects_and_chunks(self, tmp_path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        path = tmp_path / "ckpt"
        dcp.save({"w": torch.zeros(4), "state": damage.Evil()}, checkpoint_id=path, no_dist=True)
        report, kinds = damage_of(path)
        assert kinds == {"unsafe-pickle"}
        assert {p.tensor for p in report.problems if p.is_damage} == {"state"}

    @pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
    def test_legacy_files(self, file: str, tmp_path: Path) -> None:
        path = copy_of(LEGACY, tmp_path / "ckpt")
        torch.save({"model": damage.Evil()}, path / "mp_rank_01_000" / file)
        report, kinds = damage_of(path)
        assert "unsafe-pickle" in kinds
        assert f"mp_rank_01_000/{file}" in {p.file for p in report.problems if p.kind == "unsafe-pickle"}

    def test_run_config(self, tmp_path: Path) -> None:
        path = copy_of(DENSE, tmp_path / "ckpt")
        (path / "run_config.yaml").write_text(
            f"model: !!python/object/apply:os.mkdir ['{os.environ['CKPTGUARD_EVIL']}']\n"
        )
        verify(path)


def test_unsealed_damage_is_found_by_crc(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    assert not damage_of(path)[1]
    with open_checkpoint(path) as checkpoint:
        entry = checkpoint.index.tensors["embedding.word_embeddings.weight"]
        at = checkpoint.reader.locate(entry, entry.chunks[0])
    damage.flip_bit(path / at.span.file, at.span.offset_bytes + 10, 3, path)
    report, kinds = damage_of(path)
    assert kinds == {"crc"}
    (problem,) = [p for p in report.problems if p.is_damage]
    assert (problem.tensor, problem.box) == (entry.name, entry.chunks[0].box)


def test_sealing_twice_is_refused(sealed: Path) -> None:
    with open_checkpoint(sealed) as checkpoint:
        with pytest.raises(CkptguardError, match="already sealed"):
            seal(checkpoint)
        seal(checkpoint, replace=True)
    assert not damage_of(sealed)[1]


def test_a_lost_index_still_leaves_the_manifest(sealed: Path) -> None:
    for name in (".metadata", "metadata.json"):
        (sealed / name).unlink(missing_ok=True)
    if not (sealed / "mp_rank_00_000").exists():
        report, kinds = damage_of(sealed)
        assert {"missing-file", "unreadable"} <= kinds
        assert report.format is None


def test_one_file_of_several_is_not_sealed_alone(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    with (
        open_checkpoint(tmp_path / "a.safetensors") as checkpoint,
        pytest.raises(CkptguardError, match="whole directory"),
    ):
        seal(checkpoint)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_flip_that_makes_another_format_of_it_is_damage(tmp_path: Path) -> None:
    """Sealed, it is known to have been readable."""
    path, _ = sealed_copy(DENSE, tmp_path / "ckpt")
    marker = path / "metadata.json"
    marker.write_text(marker.read_text().replace("torch_dist", "torch_dast"))
    report, kinds = damage_of(path)
    assert kinds == {"changed", "unreadable"}
    assert "metadata.json" in {p.file for p in report.problems if p.is_damage}


def test_kept_fingerprints_do_not_hide_an_unreadable_index(tmp_path: Path) -> None:
    path = copy_of(DENSE, tmp_path / "ckpt")
    (path / ".metadata").write_bytes(b"no pickle")
    report, kinds = damage_of(path, against=Authority(fingerprints={}))
    assert kinds == {"unreadable"}
    assert any("fingerprints were not compared" in p.message for p in report.problems)
