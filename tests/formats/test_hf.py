"""Hugging Face snapshots: real ones are read whole, and everything that can be wrong with one is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptguard.core.boxes import missing_part, whole
from ckptguard.core.errors import UnknownFormatError, UnsupportedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing import hf_writer

INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def of_every_dtype() -> dict[str, torch.Tensor]:
    """One tensor for each kind of element, with a 0-d and an empty one among them."""
    numbers = torch.arange(-12, 12).reshape(4, 6)
    plain = [
        torch.bfloat16,
        torch.float32,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.bool,
    ]
    out = {str(dtype).removeprefix("torch."): numbers.to(dtype) for dtype in plain}
    out["fp4"] = torch.arange(16, dtype=torch.uint8).reshape(2, 8).view(torch.float4_e2m1fn_x2)
    out["scale"] = torch.tensor(0.5, dtype=torch.bfloat16)
    out["empty"] = torch.empty(0, 4)
    return out


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def stored(checkpoint: Checkpoint, entry: TensorEntry) -> bytes:
    """A tensor's bytes as the reader finds them; of one chunk."""
    (chunk,) = entry.chunks
    at = checkpoint.reader.locate(entry, chunk)
    out = bytearray(entry.size_bytes)
    checkpoint.reader.read_elements(at, 0, memoryview(out))
    return bytes(out)


def index_of(path: Path) -> Index:
    """The index of a path, with its files closed again."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint.index


def damage(path: Path) -> list[Problem]:
    """What is wrong with a path, notes aside."""
    return [problem for problem in index_of(path).problems if problem.is_damage]


def seen(problems: list[Problem]) -> set[tuple[str, str | None, str | None]]:
    """The machine-readable part of problems."""
    return {(problem.kind, problem.file, problem.tensor) for problem in problems}


def write_index(folder: Path, weight_map: Mapping[str, object], total: int | None = None) -> None:
    """Writes an index file as transformers does."""
    metadata = {} if total is None else {"total_size": total}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, saved in shards by transformers itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hf") / "llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def snapshot(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row shards of three ranks, written by torch's HuggingFaceStorageWriter."""
    folder = tmp_path_factory.mktemp("dcp") / "rows"
    hf_writer.save(folder, ranks=3)
    return folder


def test_real_sharded_snapshot_is_read_whole(llama: Path) -> None:
    """Every tensor that safetensors itself loads is there, bit for bit, and nothing is wrong."""
    expected = {name: tensor for path in llama.glob("*.safetensors") for name, tensor in load_file(path).items()}
    with open_checkpoint(llama) as checkpoint:
        index = checkpoint.index
        assert index.format == "huggingface"
        assert index.problems == ()
        assert len({chunk.span.file for entry in index.tensors.values() for chunk in entry.chunks}) >= 3
        assert index.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert index.tensors[name].shape == tuple(tensor.shape)
            assert stored(checkpoint, index.tensors[name]) == raw(tensor)


def test_facts_and_roles(llama: Path) -> None:
    """config.json is shown in words that are the same for every version of transformers."""
    index = index_of(llama)
    said = index.facts.extra
    assert said["architectures"] == "LlamaForCausalLM"
    assert said["dtype"] == "bfloat16"
    assert (said["hidden_size"], said["vocab_size"], said["tie_word_embeddings"]) == (32, 64, True)
    assert index.roles["config.json"] == "model configuration"
    assert index.roles[INDEX] == "index"


def test_quantization_and_older_names_in_config(tmp_path: Path) -> None:
    """Old and multimodal configs are understood too."""
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    text = {"hidden_size": 8, "torch_dtype": "float16", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "n_layer": 3, "text_config": text}))
    said = index_of(tmp_path).facts.extra
    assert said["dtype"] == "float16"
    assert (said["hidden_size"], said["num_hidden_layers"]) == (8, 3)
    assert said["quantization"] == "fp8 (fmt=e4m3)"


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 200_000])
def test_unreadable_config_is_a_problem(tmp_path: Path, text: str) -> None:
    """The weights are still read."""
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    index = index_of(tmp_path)
    assert seen(list(index.problems)) == {("unreadable", "config.json", None)}
    assert "x" in index.tensors


@pytest.mark.parametrize("as_file", [True, False])
def test_every_dtype(tmp_path: Path, as_file: bool) -> None:
    """Each dtype that safetensors writes is read bit for bit, from a directory and from the file itself."""
    tensors = of_every_dtype()
    path = tmp_path / ("model.safetensors" if not as_file else "anything.safetensors")
    save_file(tensors, path)
    with open_checkpoint(path if as_file else tmp_path) as checkpoint:
        index = checkpoint.index
        assert index.problems == ()
        assert index.files.keys() == {path.name}
        for name, tensor in tensors.items():
            entry = index.tensors[name]
            assert entry.dtype.name == str(tensor.dtype).removeprefix("torch.")
            assert entry.shape == tuple(tensor.shape)
            assert entry.chunks[0].box == whole(entry.shape)
            assert stored(checkpoint, entry) == raw(tensor)


def test_one_shard_given_as_a_file(llama: Path) -> None:
    """What its name says of others is a note; the neighbours are not looked at."""
    path = sorted(llama.glob("*.safetensors"))[0]
    index = index_of(path)
    assert index.tensors.keys() == load_file(path).keys()
    assert [problem.kind for problem in index.problems] == ["note"]
    assert list(index.files) == [path.name]


def test_files_without_an_index(tmp_path: Path) -> None:
    """The headers alone say what is there; the same tensor in two files is damage."""
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    index = index_of(tmp_path)
    assert (set(index.tensors), index.problems) == ({"a", "b"}, ())
    save_file({"b": torch.ones(2)}, tmp_path / "three.safetensors")
    assert seen(damage(tmp_path)) == {("overlap", "three.safetensors", "b")}


def test_copies_for_other_loaders_are_named_in_a_note(snapshot: Path) -> None:
    """Mistral's consolidated.safetensors holds the same weights under other names; pickles may lie there as well."""
    save_file({"tok_embeddings.weight": torch.zeros(2)}, snapshot / "consolidated.safetensors")
    (snapshot / "pytorch_model.bin").write_bytes(b"not read")
    (snapshot / "rng_state_0.pth").write_bytes(b"no weights")
    index = index_of(snapshot)
    assert "tok_embeddings.weight" not in index.tensors
    assert seen(list(index.problems)) == {
        ("note", "consolidated.safetensors", None),
        ("note", "pytorch_model.bin", None),
    }
    assert index.roles["pytorch_model.bin"] == "pickled weights, not read"
    assert index.roles["rng_state_0.pth"] == "state of a transformers Trainer, not read"


def test_missing_shard_is_named_with_its_tensors(snapshot: Path) -> None:
    """Also when the index is gone too: the numbers in the names of the others tell."""
    gone = sorted(snapshot.glob("*.safetensors"))[1]
    tensors = load_file(gone).keys()
    gone.unlink()
    expected = {("missing-tensor", gone.name, name) for name in tensors} | {("missing-file", gone.name, None)}
    assert seen(damage(snapshot)) == expected
    (snapshot / INDEX).unlink()
    assert seen(damage(snapshot)) == {("missing-file", gone.name, None)}


def test_name_that_claims_a_billion_files(tmp_path: Path) -> None:
    """The holes are counted, not all listed."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model-000000002-of-999999999.safetensors")
    found = damage(tmp_path)
    assert len(found) == 101
    assert found[0].file == "model-000000001-of-999999999.safetensors"
    assert "999999898" in found[-1].message


def test_index_and_headers_disagree(tmp_path: Path) -> None:
    """Each way to disagree is its own problem, with file and tensor."""
    first, second, third = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    save_file({"a": torch.zeros(2), "moved": torch.zeros(2), "unnamed": torch.zeros(2)}, tmp_path / first)
    save_file({"b": torch.zeros(2), "a": torch.ones(2)}, tmp_path / second)
    save_file({"c": torch.zeros(2)}, tmp_path / third)
    write_index(tmp_path, {"a": first, "b": second, "moved": second, "nowhere": second, "out": "../x.safetensors"})
    index = index_of(tmp_path)
    assert seen([p for p in index.problems if p.is_damage]) == {
        ("missing-tensor", second, "moved"),
        ("layout", first, "moved"),
        ("missing-tensor", second, "nowhere"),
        ("layout", first, "unnamed"),
        ("layout", second, "a"),
        ("overlap", first, "a"),
        ("extra-file", third, None),
        ("escape", INDEX, "out"),
    }
    assert index.tensors.keys() == {"a", "b", "c", "moved", "unnamed"}
    assert index.tensors["a"].chunks[0].span.file == first


def test_total_size_is_a_note(snapshot: Path) -> None:
    """Writers count it in more than one way."""
    value = json.loads((snapshot / INDEX).read_text())
    write_index(snapshot, value["weight_map"], value["metadata"]["total_size"] + 2)
    (note,) = index_of(snapshot).problems
    assert (note.kind, note.file) == ("note", INDEX)
    assert "total_size" in note.message


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x", "a": "y"}}', "[" * 200_000],
)
def test_unusable_index(snapshot: Path, text: str) -> None:
    """It is a problem; the headers still tell what is there."""
    count = len(index_of(snapshot).tensors)
    (snapshot / INDEX).write_text(text)
    index = index_of(snapshot)
    assert seen([p for p in index.problems if p.is_damage]) == {("unreadable", INDEX, None)}
    assert len(index.tensors) == count


def test_single_file_beside_a_foreign_index(snapshot: Path) -> None:
    """Loaders differ on which of the two they take, so neither is right."""
    save_file({"x": torch.zeros(2)}, snapshot / "model.safetensors")
    assert seen(damage(snapshot)) == {("extra-file", "model.safetensors", None)}


def test_stale_shards_of_another_numbering(snapshot: Path) -> None:
    """Left over from an earlier save: named, not read."""
    save_file({"x": torch.zeros(2)}, snapshot / "model-00001-of-00099.safetensors")
    index = index_of(snapshot)
    assert seen(list(index.problems)) == {("note", "model-00001-of-00099.safetensors", None)}
    assert "x" not in index.tensors


def cut(path: Path) -> None:
    """Drops the last bytes."""
    os.truncate(path, path.stat().st_size - 2)


def pointer(path: Path) -> None:
    """What a clone without git-lfs leaves."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4\n")


def deep(path: Path) -> None:
    """A header that is nested too deeply to be parsed."""
    path.write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)


@pytest.mark.parametrize("harm", [cut, pointer, deep, lambda path: path.write_bytes(b"")])
def test_broken_file_does_not_stop_the_others(snapshot: Path, harm: Callable[[Path], None]) -> None:
    """Its problem is told, and its tensors are missing; everything else is read."""
    count = len(index_of(snapshot).tensors)
    broken = sorted(snapshot.glob("*.safetensors"))[1]
    tensors = load_file(broken).keys()
    harm(broken)
    index = index_of(snapshot)
    expected = {("missing-tensor", broken.name, name) for name in tensors} | {("unreadable", broken.name, None)}
    assert seen([p for p in index.problems if p.is_damage]) == expected
    assert len(index.tensors) == count - len(tensors)


def test_pickles_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """By directory and by file."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    for path in (tmp_path, tmp_path / "pytorch_model-00001-of-00002.bin"):
        with pytest.raises(UnsupportedError, match="runs whatever code") as caught:
            open_checkpoint(path)
        assert "save_pretrained" in caught.value.next_step
        assert "refs/pr/" in caught.value.next_step


def test_what_is_no_snapshot_is_told_why(tmp_path: Path) -> None:
    """With a hint, where the files are one level further down."""
    (tmp_path / "sharded").mkdir()
    save_file({"x": torch.zeros(2)}, tmp_path / "sharded" / "a.safetensors")
    with pytest.raises(UnknownFormatError) as caught:
        open_checkpoint(tmp_path)
    assert "sharded/" in caught.value.reasons["huggingface"]


@pytest.fixture
def cached(snapshot: Path, tmp_path: Path) -> Path:
    """The same snapshot in the layout of the Hugging Face cache."""
    repo = tmp_path / "hub" / "models--org--tiny"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repo / folder).mkdir(parents=True)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repo / "blobs" / f"etag{number}")
        (repo / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/etag{number}")
    (repo / "refs" / "main").write_text(COMMIT)
    return repo


def test_cache_layout(cached: Path, llama: Path, tmp_path: Path) -> None:
    """By snapshot, by repository, and through a link that the user made; the commit is told."""
    shortcut = tmp_path / "shortcut"
    shortcut.symlink_to(cached / "snapshots" / COMMIT)
    for path in (cached, cached / "snapshots" / COMMIT, shortcut):
        with open_checkpoint(path) as checkpoint:
            index = checkpoint.index
            assert index.problems == ()
            said = index.facts.extra
            assert (said["repository"], said["commit"], said["revisions"]) == ("org/tiny", COMMIT, "main")
            name, entry = next(iter(index.tensors.items()))
            assert stored(checkpoint, entry) == raw(load_file(llama / entry.chunks[0].span.file)[name])
    (cached / "refs" / "main").unlink()
    assert index_of(cached).facts.extra["commit"] == COMMIT
    assert index_of(next((cached / "snapshots" / COMMIT).glob("*.safetensors"))).tensors


def test_repository_whose_main_is_not_there(cached: Path) -> None:
    """It is not guessed which commit was meant."""
    (cached / "refs" / "main").write_text("f" * 40)
    with pytest.raises(UnknownFormatError, match="not in snapshots"):
        open_checkpoint(cached)
    (cached / "refs" / "main").unlink()
    (cached / "snapshots" / ("e" * 40)).mkdir()
    with pytest.raises(UnknownFormatError, match="give one of them"):
        open_checkpoint(cached)


def test_links_that_leave_the_snapshot(cached: Path, tmp_path: Path) -> None:
    """They are damage, and are not followed; so are links to nothing, and a store that is itself a link."""
    where = cached / "snapshots" / COMMIT
    secret = tmp_path / "secret.safetensors"
    save_file({"secret": torch.zeros(2)}, secret)
    (where / "more-00001-of-00001.safetensors").symlink_to(secret)
    (where / "tokenizer.json").symlink_to("/etc/hostname")
    (where / "merges.txt").symlink_to("../../blobs/gone")
    index = index_of(where)
    assert "secret" not in index.tensors
    assert seen([p for p in index.problems if p.is_damage]) == {
        ("escape", "more-00001-of-00001.safetensors", None),
        ("escape", "tokenizer.json", None),
        ("missing-file", "merges.txt", None),
    }
    (cached / "blobs").rename(tmp_path / "elsewhere")
    (cached / "blobs").symlink_to(tmp_path / "elsewhere")
    index = index_of(where)
    assert index.tensors == {}
    assert "escape" in {problem.kind for problem in index.problems}


def test_blob_that_is_gone(cached: Path) -> None:
    """A link without its blob is a missing file."""
    path = sorted((cached / "snapshots" / COMMIT).glob("*.safetensors"))[0]
    path.resolve().unlink()
    assert ("missing-file", path.name, None) in seen(damage(cached))


def test_row_shards_of_torch(rows: Path) -> None:
    """Chunks lie where the ranks' parts belong, and hold the bits that were saved."""
    with open_checkpoint(rows) as checkpoint:
        index = checkpoint.index
        assert [problem.kind for problem in index.problems] == ["note"]
        assert index.tensors.keys() == hf_writer.state().keys()
        for name, tensor in hf_writer.state().items():
            entry = index.tensors[name]
            assert (entry.shape, entry.dtype.name) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert missing_part([chunk.box for chunk in entry.chunks], entry.shape) is None
            for chunk in entry.chunks:
                part = tensor[tuple(slice(o, e) for o, e in zip(chunk.box.offset, chunk.box.end, strict=True))]
                assert checkpoint.files.read_span(chunk.span) == raw(part)
    assert len(index.tensors["rows"].chunks) == 3


@pytest.mark.parametrize("number", [1, 2])
def test_row_shard_that_is_missing(rows: Path, tmp_path: Path, number: int) -> None:
    """The first file is the one whose absence torch's own reader does not notice."""
    copy = Path(shutil.copytree(rows, tmp_path / "rows"))
    (copy / f"shard-0000{number}-model-00001-of-00001.safetensors").unlink()
    index = index_of(copy)
    (problem,) = [p for p in index.problems if p.is_damage]
    assert (problem.kind, problem.file) == ("missing-file", f"shard-0000{number}-*.safetensors")
    entry = index.tensors["rows"]
    assert entry.shape == (8, 4)
    gap = missing_part([chunk.box for chunk in entry.chunks], entry.shape)
    assert gap is not None
    assert gap.offset == (3 * (number - 1), 0)


def test_row_shard_that_is_missing_at_the_end_is_at_least_said(rows: Path, tmp_path: Path) -> None:
    """Nothing in the other files shows it; the note says that this cannot be ruled out."""
    copy = Path(shutil.copytree(rows, tmp_path / "rows"))
    (copy / "shard-00003-model-00001-of-00001.safetensors").unlink()
    (note,) = index_of(copy).problems
    assert note.kind == "note"
    assert "last ranks" in note.message


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"x": {"saved_offsets": [4]}}, "layout"),
        ({"x": {"saved_offsets": [-1, 0]}}, "layout"),
        ({"x": {"saved_offsets": "ab"}}, "layout"),
        ({"x": 3}, "layout"),
        ({}, "layout"),
        ({"x": {"saved_offsets": [0, 0]}, "y": {"saved_offsets": [0]}}, "missing-tensor"),
        (3, "unreadable"),
    ],
)
def test_offsets_that_cannot_be(tmp_path: Path, said: object, kind: str) -> None:
    """Each is a problem of the file, and none makes a chunk in a wrong place."""
    name = "shard-00001-model-00001-of-00001.safetensors"
    save_file({"x": torch.zeros(2, 2)}, tmp_path / name, metadata={"DCP_SHARDING_INFO": json.dumps(said)})
    (problem,) = damage(tmp_path)
    assert (problem.kind, problem.file) == (kind, name)


def test_parts_of_different_dtypes(tmp_path: Path) -> None:
    """Row shards of two different saves do not make one tensor."""
    for rank, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        info = json.dumps({"x": {"saved_offsets": [2 * rank - 2]}})
        path = tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        save_file({"x": torch.zeros(2, dtype=dtype)}, path, metadata={"DCP_SHARDING_INFO": info})
    assert seen(damage(tmp_path)) == {("layout", "shard-00002-model-00001-of-00001.safetensors", "x")}


def test_verify_names_the_rows_of_a_missing_first_shard(rows: Path, tmp_path: Path) -> None:
    """torch's own reader loads such a directory without a word and leaves half of the rows as they were."""
    from ckptguard.engine.verify import verify

    path = tmp_path / "rows"
    shutil.copytree(rows, path)
    assert not verify(path).damaged
    next(path.glob("shard-00001-*")).unlink()
    problems = [p for p in verify(path).problems if p.is_damage]
    assert "missing-file" in {p.kind for p in problems}
    gaps = [p for p in problems if p.kind == "missing-chunk"]
    assert gaps
    assert all(p.box is not None and p.box.offset[0] == 0 for p in gaps)


def test_blobs_of_the_cache_are_compared_with_their_names(snapshot: Path, tmp_path: Path) -> None:
    """Large files are named by their SHA-256 there; a flipped bit is found without a seal."""
    import hashlib

    from ckptguard.engine.verify import verify

    repo = tmp_path / "hub" / "models--org--tiny"
    at = repo / "snapshots" / COMMIT
    for folder in (repo / "blobs", at):
        folder.mkdir(parents=True)
    for path in snapshot.iterdir():
        data = path.read_bytes()
        large = path.suffix == ".safetensors"
        blob = (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()
        (repo / "blobs" / blob).write_bytes(data)
        (at / path.name).symlink_to(f"../../blobs/{blob}")
    report = verify(at)
    assert not report.damaged, report.problems
    assert any("SHA-256" in text for text in report.proved)
    shard = next(at.glob("*.safetensors"))
    blob = shard.resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert [(p.kind, p.file) for p in verify(at).problems if p.is_damage] == [("changed", shard.name)]
