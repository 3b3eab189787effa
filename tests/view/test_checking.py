"""Copies of real shards, whole and damaged in every way: what is found, and what is shown to do no harm where nothing is."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat

from ckptguard.engine.seal import seal
from ckptguard.fingerprint.manifest import FILE_NAME, parse
from ckptguard.formats.dcp import read_table
from ckptguard.formats.registry import open_checkpoint
from ckptguard.formats.storage import Directory
from ckptguard.formats.zip_checks import stored_records
from ckptguard.formats.zip_records import Record as Written
from ckptguard.formats.zip_records import after_storages, before_storages
from ckptguard.view.checking import check
from ckptguard.view.values import Checked, Copy, Step

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SMALL = FIXTURES / "megatron-0.12/dense_tp2dp2_model_space/iter_0000002"
STEP = Step("global", "2", "x")
LOCAL = Step("local", "2", "")


class Node:
    """One node with a place ``ckpt`` that holds all files of a step, and a staging directory that holds the small ones."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.place, self.staged = folder / "ckpt", folder / "staged"
        self.step = self.place / "iter_0000002"
        shutil.copytree(source, self.step)
        for path in [self.step, *self.step.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.stage()

    def stage(self) -> None:
        """Brings the small files into the staging directory as they are now."""
        (self.staged / "iter_0000002").mkdir(parents=True, exist_ok=True)
        for path in self.step.iterdir():
            if path.suffix != ".distcp":
                shutil.copyfile(path, self.staged / "iter_0000002" / path.name)

    def seal(self) -> None:
        with open_checkpoint(self.step) as checkpoint:
            seal(checkpoint)
        self.stage()

    @property
    def shards(self) -> list[str]:
        return sorted(path.name for path in self.step.glob("*.distcp"))

    def copies(self, names: Sequence[str] | None = None) -> list[Copy]:
        """The files as the survey lists them: small ones with their digest."""
        out = []
        for name in names or sorted(path.name for path in self.step.iterdir()):
            data = (self.step / name).read_bytes()
            digest = "" if name.endswith(".distcp") else blake3(data).hexdigest()
            out.append(Copy(0, 0, f"iter_0000002/{name}", f"iter_0000002/{name}", len(data), digest))
        return out

    def check(
        self, names: Sequence[str] | None = None, *, copies: Sequence[Copy] = (), **options: object
    ) -> list[Checked]:
        options = {"digests": True, "threads": 2} | options
        return check(copies or self.copies(names), [str(self.place)], step=STEP, staged=self.staged, **options)  # type: ignore[arg-type]

    def problems(self, name: str) -> tuple[str, ...]:
        (checked,) = self.check([name])
        assert (checked.digest is None) == bool(checked.problems)
        return checked.problems


@pytest.fixture
def small(tmp_path: Path) -> Node:
    return Node(SMALL, tmp_path)


@pytest.fixture
def symmetric(tmp_path: Path) -> Node:
    """Two shards of which each holds one tensor, of the same shape at the same place, and Megatron's list of digests."""
    return Node(save_symmetric(tmp_path / "made", 0.0), tmp_path)


def save_symmetric(to: Path, first: float) -> Path:
    state = {"a": torch.arange(first, first + 10), "b": torch.arange(first + 1, first + 11)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, storage_writer=FileSystemWriter(to, thread_count=2), no_dist=True)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in to.iterdir()}
    (to / "integrity.json").write_text(json.dumps({"files": digests}))
    return to


class Told:
    """A progress display for tests: the phases and the bytes; ``then`` is called at the first bytes."""

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        self.total, self.done, self.then = 0, 0, then

    def start(self, label: str, total_bytes: int) -> None:
        self.total += total_bytes

    def advance(self, count_bytes: int) -> None:
        self.done += count_bytes
        if self.then:
            then, self.then = self.then, None
            then()


REAL = sorted(path.parent for path in FIXTURES.rglob(".metadata"))


@pytest.mark.parametrize("source", REAL, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
@pytest.mark.parametrize("sealed", [False, True], ids=["unsealed", "sealed"])
def test_real_checkpoints_are_sound(source: Path, sealed: bool, tmp_path: Path) -> None:
    node, told = Node(source, tmp_path), Told()
    if sealed:
        node.seal()
    copies = node.copies()
    checked = node.check(progress=told)
    assert [c.copy for c in checked] == copies
    assert [c.problems for c in checked] == [()] * len(copies)
    assert told.done == told.total == sum(copy.size_bytes for copy in copies)
    for found in checked:
        data = (node.place / found.copy.path).read_bytes()
        assert found.digest is not None
        assert (found.digest.size_bytes, found.digest.blake3) == (len(data), blake3(data).hexdigest())
        assert (found.digest.blocks == "") == bool(found.copy.blake3)
    fast = node.check(digests=False)
    assert [(c.fast, c.digest) for c in fast] == [(c.fast, None) for c in checked]
    assert len({c.fast for c in fast}) == len(copies)


def test_digests_are_those_of_the_manifest(small: Node) -> None:
    unsealed = small.check(small.shards)
    small.seal()
    manifest = parse((small.step / FILE_NAME).read_bytes(), "x")
    for checked in [*unsealed, *small.check(small.shards)]:
        sealed, found = manifest.files[Path(checked.copy.path).name], checked.digest
        assert found is not None
        assert (found.size_bytes, found.blake3, found.block_bytes) == (
            sealed.size_bytes, sealed.blake3, sealed.block_bytes,
        )  # fmt: skip
        assert found.blocks == sealed.blocks.hex()


# Bits that flip


def flipped(data: bytes, at_bit: int) -> bytes:
    out = bytearray(data)
    out[at_bit // 8] ^= 1 << at_bit % 8
    return bytes(out)


def items_of(step: Path, file: str) -> list[tuple[int, int]]:
    """The bytes of each item of a shard."""
    table = read_table(Directory(step))
    spans = [chunk.span for entry in table.tensors.values() for chunk in entry.chunks]
    spans += [blob.span for blob in table.objects.values()]
    return sorted((s.offset_bytes, s.end_bytes) for s in spans if s.file == file)


def as_torch_loads(data: bytes) -> object:
    """What a loader makes of an item, comparable."""
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()


def harmless(sound: bytes, damaged: bytes, items: Sequence[tuple[int, int]], at: int) -> bool:
    """Whether torch loads from the damaged file what it loads from the sound one."""
    begin, end = next((begin, end) for begin, end in items if begin <= at < end)
    return as_torch_loads(sound[begin:end]) == as_torch_loads(damaged[begin:end])


def unseen_flips(node: Node, name: str, bits: Sequence[int]) -> int:
    """Checks a copy per bit, each with that bit flipped. Returns how many are called sound; torch loads those as before."""
    sound, items = (node.step / name).read_bytes(), items_of(node.step, name)
    copies = []
    for number, bit in enumerate(bits):
        path = node.place / f"flip{number}" / name
        path.parent.mkdir()
        path.write_bytes(flipped(sound, bit))
        copies.append(Copy(0, 0, f"flip{number}/{name}", f"iter_0000002/{name}", len(sound)))
    unseen = [bit for bit, found in zip(bits, node.check(copies=copies), strict=True) if not found.problems]
    for bit in unseen:
        assert harmless(sound, flipped(sound, bit), items, bit // 8), bit
    return len(unseen)


def test_every_bit_of_an_item_that_matters_is_looked_at(symmetric: Node) -> None:
    """Headers, pickle, data, directory and end of one item: a flip is found, or torch loads the same tensor."""
    (symmetric.staged / "iter_0000002/integrity.json").unlink()
    name = symmetric.shards[0]
    bits = random.Random(1).sample(range(8 * (symmetric.step / name).stat().st_size), 3000)
    assert 0 < unseen_flips(symmetric, name, bits) < 1800  # the filler before the data is half of so small an item


@pytest.mark.parametrize("number", range(4))
def test_flips_anywhere_in_shards_are_found_or_harmless(small: Node, number: int) -> None:
    name = small.shards[number]
    bits = random.Random(number).sample(range(8 * (small.step / name).stat().st_size), 60)
    assert unseen_flips(small, name, bits) < 30


def test_an_object_whose_first_bytes_change_is_not_taken_for_raw_state(small: Node) -> None:
    blob = next(o for o in read_table(Directory(small.step)).objects.values() if o.span.length_bytes > 100)
    sound = (small.step / blob.span.file).read_bytes()
    for bit in range(32):
        (small.step / blob.span.file).write_bytes(flipped(sound, 8 * blob.span.offset_bytes + bit))
        assert blob.name in small.problems(blob.span.file)[0]


def test_a_flip_is_placed(small: Node) -> None:
    name = small.shards[0]
    with open_checkpoint(small.step) as checkpoint:
        entry, chunk = next(
            (e, c)
            for e in checkpoint.index.tensors.values()
            for c in e.chunks
            if c.span.file == name and c.box.numel > 500
        )
        at = checkpoint.reader.locate(entry, chunk).span.offset_bytes
    sound = (small.step / name).read_bytes()
    small.seal()
    (small.step / name).write_bytes(flipped(sound, 8 * at + 3))
    (problem,) = small.problems(name)
    assert str(small.step / name) in problem
    assert f"block {at // 4096} (bytes" in problem
    assert entry.name in problem
    (small.staged / "iter_0000002" / FILE_NAME).unlink()
    (problem,) = small.problems(name)
    assert problem == (
        f"{small.step / name}: {entry.name} {chunk.box}: its bytes do not match the CRC-32 stored beside them"
    )


def test_sealed_every_bit_counts(small: Node) -> None:
    small.seal()
    choice = random.Random(3)
    for name in [*small.shards[:2], "metadata.json", "common.pt"]:
        sound, copies = (small.step / name).read_bytes(), small.copies([name])
        for _ in range(25):
            (small.step / name).write_bytes(flipped(sound, choice.randrange(8 * len(sound))))
            (checked,) = small.check(copies=copies)
            assert checked.problems
            assert checked.digest is None
        (small.step / name).write_bytes(sound)


# Files that are cut, emptied, exchanged, of another save


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_of_another_length_is_found(small: Node, sealed: bool) -> None:
    if sealed:
        small.seal()
    name = small.shards[1]
    sound = (small.step / name).read_bytes()
    for size in (0, 1, 100, len(sound) // 2, len(sound) - 1):
        (small.step / name).write_bytes(sound[:size])
        (problem,) = small.problems(name)
        assert f"cut short: {size} bytes" in problem
        (checked,) = small.check(copies=[Copy(0, 0, f"iter_0000002/{name}", f"iter_0000002/{name}", len(sound))])
        assert f"has {size} bytes, had {len(sound)} when it was listed" in checked.problems[0]
    (small.step / name).write_bytes(sound + b"more")
    assert bool(small.problems(name)) == sealed  # no loader reads what stands behind the last item


@pytest.mark.parametrize("sealed", [False, True])
def test_zeros_are_found(small: Node, sealed: bool) -> None:
    if sealed:
        small.seal()
    name = small.shards[1]
    sound = (small.step / name).read_bytes()
    (small.step / name).write_bytes(bytes(len(sound)))
    problems = small.problems(name)
    assert 1 < len(problems) <= 9
    assert any("decoder" in problem for problem in problems)
    for begin in (0, 8192, len(sound) - 4096):  # a page that never reached the disk
        (small.step / name).write_bytes(sound[:begin] + bytes(4096) + sound[begin + 4096 :])
        assert small.problems(name)


def swap(step: Path, one: str, other: str) -> None:
    (step / one).rename(step / "between")
    (step / other).rename(step / one)
    (step / "between").rename(step / other)


def test_exchanged_shards_are_found_by_their_shapes(small: Node) -> None:
    swap(small.step, "__0_0.distcp", "__1_0.distcp")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert small.problems(name)


def test_exchanged_shards_of_the_same_shapes_differ_in_their_fast_digest_only(symmetric: Node) -> None:
    pair = symmetric.shards
    before = symmetric.check(pair, digests=False)
    swap(symmetric.step, *pair)
    for problems in map(symmetric.problems, pair):  # Megatron's own list of digests tells them apart
        assert len(problems) == 1
        assert "integrity.json says" in problems[0]
    (symmetric.staged / "iter_0000002/integrity.json").unlink()
    after = symmetric.check(pair)
    assert [checked.problems for checked in after] == [(), ()]
    assert [checked.fast for checked in after] == [checked.fast for checked in reversed(before)]


def test_exchanged_shards_of_a_sealed_step_are_found(symmetric: Node) -> None:
    symmetric.seal()
    swap(symmetric.step, *symmetric.shards)
    for name, tensor in zip(symmetric.shards, "ab", strict=True):
        (problem,) = symmetric.problems(name)
        assert (
            f"block 0 (bytes 0 to {(symmetric.step / name).stat().st_size}) is not what was sealed: {tensor} ["
            in problem
        )
        assert "of another save" in problem


def test_a_shard_of_another_step_is_told_by_its_fast_digest_only(symmetric: Node, tmp_path: Path) -> None:
    """Sound in itself, of the same layout, other values: every check of the file alone passes."""
    name = symmetric.shards[0]
    (before,) = symmetric.check([name])
    shutil.copyfile(save_symmetric(tmp_path / "later", 5.0) / name, symmetric.step / name)
    assert "is it of another save?" in symmetric.problems(name)[0]
    (symmetric.staged / "iter_0000002/integrity.json").unlink()
    (after,) = symmetric.check([name])
    assert after.problems == ()
    assert after.fast != before.fast


def test_a_file_that_the_index_does_not_name(small: Node) -> None:
    shutil.copyfile(small.step / "__0_0.distcp", small.step / "__7_0.distcp")
    assert "that the index does not name" in small.problems("__7_0.distcp")[0]
    (small.step / "__7_0.distcp").unlink()
    small.seal()
    (small.step / "notes.txt").write_text("kept")
    assert "was not there when the checkpoint was sealed" in small.problems("notes.txt")[0]


# Indexes and manifests


def test_a_damaged_manifest_is_its_own_problem(small: Node) -> None:
    small.seal()
    manifest = small.step / FILE_NAME
    manifest.write_bytes(flipped(manifest.read_bytes(), 8 * 200))
    small.stage()
    (checked,) = small.check([FILE_NAME])
    assert len(checked.problems) == 1
    assert "not a whole manifest" in checked.problems[0]
    name = small.shards[0]
    assert small.problems(name) == ()
    sound = (small.step / name).read_bytes()
    _, end = items_of(small.step, name)[0]
    (small.step / name).write_bytes(flipped(sound, 8 * end - 1))
    assert small.problems(name)  # by its CRCs


def test_a_manifest_of_another_save(small: Node, tmp_path: Path) -> None:
    small.seal()
    other = Node(FIXTURES / "megatron-0.12/dense_tp2pp2_model_space/iter_0000002", tmp_path / "other")
    other.seal()
    shutil.copyfile(other.step / FILE_NAME, small.step / FILE_NAME)
    small.stage()
    checked = {Path(c.copy.path).name: c.problems for c in small.check()}
    (problem,) = checked.pop(FILE_NAME)
    assert "of another save" in problem
    assert set(checked.values()) == {()}


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04N.", b"noise"])
def test_a_broken_index_keeps_shards_from_being_used_and_nothing_else(small: Node, content: bytes | None) -> None:
    index = small.staged / "iter_0000002/.metadata"
    index.unlink() if content is None else index.write_bytes(content)
    for checked in small.check():
        assert bool(checked.problems) == checked.copy.path.endswith(".distcp")
        assert all(str(index) in problem for problem in checked.problems)


def test_small_files_and_trackers(small: Node) -> None:
    (small.place / "latest_checkpointed_iteration.txt").write_text("2")
    tracker = Copy(
        0, 0, "latest_checkpointed_iteration.txt", "latest_checkpointed_iteration.txt", 1, blake3(b"2").hexdigest()
    )
    copies = [tracker, *small.copies(["common.pt", "metadata.json", ".metadata"])]
    small.seal()  # it does not list trackers, which stand beside the step
    assert [c.problems for c in small.check(copies=copies)] == [()] * 4
    (small.place / "latest_checkpointed_iteration.txt").write_text("4")
    common = small.step / "common.pt"
    common.write_bytes(flipped(common.read_bytes(), 4000))
    problems = [c.problems for c in small.check(copies=copies)]
    assert [len(p) > 0 for p in problems] == [True, True, False, False]
    assert "its BLAKE3 is" in problems[0][0]
    (small.staged / "iter_0000002" / FILE_NAME).unlink()
    (checked,) = small.check(["common.pt"])  # listed with the digest it has now: its CRCs tell
    assert any("CRC-32" in problem or "torch.save" in problem for problem in checked.problems)


# Disks and stores


def test_what_is_not_a_readable_file(small: Node) -> None:
    copies = small.copies(small.shards[:4])
    gone, folder, pipe, outside = (small.place / copy.path for copy in copies)
    for path in (gone, folder, pipe, outside):
        path.unlink()
    folder.mkdir()
    os.mkfifo(pipe)
    outside.symlink_to(FIXTURES / "text/the_ferry.txt")
    for digests in (True, False):
        checked = small.check(copies=copies, digests=digests)
        for found, text in zip(
            checked, ("missing", "not a plain file", "not a plain file", "leads out of"), strict=True
        ):
            assert len(found.problems) == 1
            assert text in found.problems[0]
            assert found.copy.path in found.problems[0]
            assert (found.fast, found.digest) == ("", None)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["preadv", "open", "stat"])
def test_a_failing_disk_is_a_problem_of_the_copies_on_it(
    small: Node, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    bad, copies = small.shards[0], small.copies()
    inode = (small.step / bad).stat().st_ino
    real = getattr(os, call)

    def failing(target: object, *rest: object, **options: object) -> object:
        if call == "preadv":
            assert isinstance(target, int)
            hit = os.fstat(target).st_ino == inode
        else:
            hit = str(target).endswith(bad)
        if hit:
            raise OSError(number, os.strerror(number))
        return real(target, *rest, **options)

    monkeypatch.setattr(os, call, failing)
    checked = {Path(c.copy.path).name: c.problems for c in small.check(copies=copies)}
    (problem,) = checked.pop(bad)
    assert os.strerror(number) in problem
    assert bad in problem
    assert set(checked.values()) == {()}


@pytest.mark.parametrize("place", ["nowhere://x", "s3://user:word@bucket", f"{SMALL}/metadata.json"])
def test_a_place_that_cannot_be_used(small: Node, place: str) -> None:
    for checked in check(small.copies(), [place], step=STEP, staged=small.staged, digests=True):
        (problem,) = checked.problems
        assert checked.copy.path in problem
        assert "word" not in problem.removeprefix(checked.copy.name).replace("a password in it", "")


def test_a_file_that_changes_meanwhile(small: Node) -> None:
    name = small.shards[0]
    path = small.step / name
    sound = path.read_bytes()

    def grow() -> None:
        path.write_bytes(sound + b"more")

    def shrink() -> None:
        path.write_bytes(sound[:-1])

    def touch() -> None:
        os.utime(path, ns=(1, 1))

    def replace() -> None:
        (small.step / "new").write_bytes(sound)
        (small.step / "new").replace(path)

    for change in (grow, shrink, touch, replace):
        path.write_bytes(sound)
        copies = small.copies([name])
        (checked,) = small.check(copies=copies, progress=Told(change))
        assert checked.problems == (f"{path}: changed while it was read",)
        assert checked.digest is None


def test_copies_at_a_url(small: Node) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(small.step), "/view-checking/iter_0000002", recursive=True)
    places = [str(small.place), "memory://view-checking"]
    near = small.copies()
    far = [Copy(0, 1, copy.path, copy.name, copy.size_bytes, copy.blake3) for copy in near]
    told = Told()
    options = {"step": STEP, "staged": small.staged, "digests": True, "threads": 2}
    both = check([*near, *far], places, progress=told, **options)  # type: ignore[arg-type]
    assert [c.problems for c in both] == [()] * len(both)
    assert [(c.fast, c.digest) for c in both[: len(near)]] == [(c.fast, c.digest) for c in both[len(near) :]]
    assert told.done == told.total
    bad = next(copy for copy in far if copy.path.endswith("__1_0.distcp"))
    gone = next(copy for copy in far if copy.path.endswith("__0_1.distcp"))
    data = store.cat_file(f"/view-checking/{bad.path}")
    store.pipe_file(f"/view-checking/{bad.path}", flipped(data, 8 * 900))
    store.rm_file(f"/view-checking/{gone.path}")
    for checked in check(far, places, **options):  # type: ignore[arg-type]
        assert bool(checked.problems) == (checked.copy in (bad, gone))
        assert all(problem.startswith(f"memory://view-checking/{checked.copy.path}: ") for problem in checked.problems)


# Local files of nvidia-resiliency-ext: one torch.save of its own classes


class TensorAwareState:
    """Stands for the class whose instance is saved there: no pickle of it may be run here."""

    def __init__(self) -> None:
        self.tensors = [torch.arange(900.0), torch.ones(40, 7, dtype=torch.bfloat16)]

    def __setstate__(self, state: object) -> None:
        raise AssertionError("unpickled")


def local(folder: Path, damage: Callable[[bytes], bytes]) -> Checked:
    """What is said of a replica of rank 3's file that stands in the folder of rank 1."""
    path = folder / "s/1/iter_0000002_3_local.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(TensorAwareState(), path)
    path.write_bytes(damage(path.read_bytes()))
    copy = Copy(0, 0, "s/1/iter_0000002_3_local.pt", "s/3/iter_0000002_3_local.pt", path.stat().st_size)
    (checked,) = check([copy], [str(folder)], step=LOCAL, staged=folder / "none", digests=True)
    return checked


def test_a_local_file_is_sound(tmp_path: Path) -> None:
    checked = local(tmp_path, lambda data: data)
    assert checked.problems == ()
    assert checked.digest is not None
    assert checked.digest.block_bytes == 4096


def test_every_bit_of_a_local_file_that_matters_is_found(tmp_path: Path) -> None:
    choice, data = random.Random(4), b""

    def flip(sound: bytes) -> bytes:
        nonlocal data
        data = flipped(sound, choice.randrange(8 * len(sound)))
        return data

    found = 0
    for _ in range(400):
        if local(tmp_path, flip).problems:
            found += 1
            continue
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))  # sound for torch, record by record
        sound = io.BytesIO()
        torch.save(TensorAwareState(), sound)
        whole = torch._C.PyTorchFileReader(io.BytesIO(sound.getvalue()))
        assert reader.get_all_records() == whole.get_all_records()
        assert all(reader.get_record(name) == whole.get_record(name) for name in whole.get_all_records())
    assert found > 200


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: b"", "0 bytes are too few"),
        (lambda data: data[:-1], "mark is missing"),
        (lambda data: data[: len(data) // 2], "mark is missing"),
        (lambda data: bytes(len(data)), "mark is missing"),
        (lambda data: data + b"x", "mark is missing"),
        (lambda data: b"x" + data, "not a whole file"),
        (lambda data: data[:1200] + data[1300:], "not a whole file"),
        (lambda data: data[:2000] + bytes(1000) + data[3000:], "record data/0: its bytes do not match"),
    ],
)  # fmt: skip
def test_a_local_file_that_is_broken(tmp_path: Path, damage: Callable[[bytes], bytes], text: str) -> None:
    checked = local(tmp_path, damage)
    assert len(checked.problems) == 1
    assert text in checked.problems[0]
    assert checked.problems[0].startswith(f"{tmp_path}/s/1/iter_0000002_3_local.pt: ")
    assert checked.digest is None


def test_a_zip_of_more_than_4_gib(tmp_path: Path) -> None:
    """Its 64-bit fields are read; the file is a hole between its two ends."""
    head, records = before_storages("archive", b"\x80\x02N.")
    for number in range(2):
        records = [*records, Written("archive", f"data/{number}", records[-1].end_bytes, 5 << 30, 7 + number)]
    path = tmp_path / "iter_0000002_0_local.pt"
    with path.open("wb") as file:
        file.write(head)
        for record in records[-2:]:
            file.seek(record.begin_bytes)
            file.write(record.header())
            file.seek(record.length_bytes, os.SEEK_CUR)
            file.write(record.descriptor())
        file.write(after_storages(records, 0))
    with path.open("rb") as file:

        def read_at(at: int, count: int) -> bytes:
            file.seek(at)
            return file.read(count)

        found = stored_records(read_at, path.stat().st_size, where="x", file="x")
    assert [(r.name, r.length_bytes, r.crc32) for r in found if r.name.startswith("data/")] == [
        ("data/0", 5 << 30, 7), ("data/1", 5 << 30, 8),
    ]  # fmt: skip


# What torch's checkpoints may hold besides zips of tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("writer", "covered"),
    [
        ({}, True),
        ({"_extensions": [ZStandard()]}, True),
        ({"serialization_format": SerializationFormat.SAFETENSORS}, False),  # its data carry no CRC
    ],
    ids=["zip", "zstd", "safetensors"],
)
def test_other_ways_to_store(tmp_path: Path, writer: dict[str, object], covered: bool) -> None:
    state = {"w": torch.arange(3000.0), "b": torch.ones(5)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "made", **writer), no_dist=True)  # type: ignore[arg-type]
    node = Node(tmp_path / "made", tmp_path)
    (name,) = node.shards
    assert node.problems(name) == ()
    sound = (node.step / name).read_bytes()
    (node.step / name).write_bytes(flipped(sound, 8 * (len(sound) // 2)))
    assert bool(node.problems(name)) == covered
    node.step.joinpath(name).write_bytes(sound[:-1])
    assert node.problems(name)
