"""Each node tells what it has: copies by name, the save, trackers; what is wrong is a sentence and never an exception."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import EnvironmentFailedError, UnsupportedError, UsageError
from ckptguard.core.index import Span
from ckptguard.formats.torch_dist_index import IndexPickle
from ckptguard.view.survey import MOST_STEPS, survey
from ckptguard.view.values import FoundStep, NodeReport

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
NEW = FIXTURES / "megatron-0.19" / "dense_tp2pp2_integrity"  # common state is an object in a data file
OLD = FIXTURES / "megatron-0.15" / "dense_tp2pp2_fully_reshardable"  # common state is common.pt
LEGACY = FIXTURES / "megatron-0.19" / "dense_tp2pp2_legacy_torch"
STEP = "iter_0000002"
COORDINATOR = (".metadata", "metadata.json", "integrity.json", "common.pt")


def split(source: Path, target: Path, *, nodes: int) -> list[Path]:
    """A checkpoint as ``nodes`` nodes with a disk each have it: node 0 wrote the index and the tracker."""
    roots = [target / f"node{number}" for number in range(nodes)]
    for number, root in enumerate(roots):
        (root / STEP).mkdir(parents=True)
        for file in (source / STEP).iterdir():
            writer = 0 if file.name in COORDINATOR else int(file.name[2]) * nodes // 4
            if writer == number:
                shutil.copy(file, root / STEP)
    shutil.copy(source / "latest_checkpointed_iteration.txt", roots[0])
    return roots


def look(
    *places: Path | str, node: int = 0, step: str | None = None, wait: float = 0, kind: str = "ext4"
) -> NodeReport:
    """A survey that takes every disk for one of this type."""
    return survey(node, f"host{node}", list(map(str, places)), step=step, wait_seconds=wait, file_system=lambda _: kind)


def only(report: NodeReport) -> FoundStep:
    (found,) = report.found
    return found


def names(found: FoundStep) -> set[str]:
    return {copy.name.removeprefix(f"{STEP}/") for copy in found.copies}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A whole checkpoint in one place."""
    return Path(shutil.copytree(NEW, tmp_path / "ckpt"))


def local_file(root: Path, folder: str, name: str, data: bytes = b"state") -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    (root / folder / name).write_bytes(data)


def index_of(files: dict[str, int]) -> bytes:
    """A ``.metadata`` that lists these files, with so many bytes in each."""
    index = IndexPickle()
    boxes = [Box((row,), (1,)) for row in range(len(files))]
    index.tensor("w", BY_NAME["float32"], (len(files),), boxes)
    for box, (file, size) in zip(boxes, files.items(), strict=True):
        index.stored("w", box.offset, Span(file, 0, size))
    return index.whole()


def test_every_node_tells_its_part(tmp_path: Path) -> None:
    roots = split(NEW, tmp_path, nodes=2)
    one, two = (look(root, node=number) for number, root in enumerate(roots))
    first, second = only(one), only(two)
    metadata = (NEW / STEP / ".metadata").read_bytes()
    assert first.step.number == second.step.number == "2"
    assert first.step.kind == "global"
    assert first.step.save == blake3(metadata).hexdigest()
    assert second.step.save == ""
    assert names(first) == {".metadata", "metadata.json", "integrity.json", "__0_0.distcp", "__1_0.distcp"}
    assert names(second) == {"__2_0.distcp", "__3_0.distcp"}
    assert one.trackers == {"0:latest_checkpointed_iteration.txt": "2"}
    assert two.trackers == {}
    assert not (first.problems)
    assert not (second.problems)
    assert not (one.notes)
    assert not (two.notes)
    assert (two.node, two.host, two.places) == (1, "host1", (str(roots[1]),))
    for copy in (*first.copies, *second.copies):
        file = roots[copy.node] / copy.path
        assert copy.size_bytes == file.stat().st_size
        assert copy.blake3 == ("" if file.suffix == ".distcp" else blake3(file.read_bytes()).hexdigest())


def test_spans_and_common_state_are_known_without_the_data_files(tmp_path: Path) -> None:
    (root,) = split(NEW, tmp_path, nodes=1)
    for file in root.glob("*/*.distcp"):
        file.unlink()
    found = only(look(root))
    sizes = {file.name: file.stat().st_size for file in (NEW / STEP).glob("*.distcp")}
    assert {name.removeprefix(f"{STEP}/"): end for name, end in found.expected.items()} == sizes
    assert found.common == (f"{STEP}/__0_0.distcp",)


def test_common_state_in_a_file_of_its_own_is_a_small_file(tmp_path: Path) -> None:
    (root,) = split(OLD, tmp_path, nodes=1)
    found = only(look(root))
    assert found.common == ()
    assert [bool(copy.blake3) for copy in found.copies if copy.name == f"{STEP}/common.pt"] == [True]


def test_places_are_told_apart_and_absence_is_a_note(root: Path, tmp_path: Path) -> None:
    report = look(tmp_path / "nothing", root)
    assert only(report).place == 1
    assert {copy.place for copy in only(report).copies} == {1}
    assert report.trackers == {"1:latest_checkpointed_iteration.txt": "2"}
    assert report.notes == (f"{tmp_path / 'nothing'}: not there on this node",)
    (tmp_path / "empty").mkdir()
    assert look(tmp_path / "empty").notes == (f"{tmp_path / 'empty'}: empty",)


def test_a_place_that_cannot_be_listed_is_an_error_only_if_it_is_the_first(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(EnvironmentFailedError, match="file: cannot be listed: Not a directory"):
        look(file)
    report = look(root, file)
    assert report.notes == (f"{file}: cannot be listed: Not a directory",)
    assert only(report).copies
    with pytest.raises(UsageError):
        look(root, "nosuchscheme://x")
    with pytest.raises(UnsupportedError):
        look(root, "https://x")


def test_a_url_is_a_place(root: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(str(root), "/survey-test", recursive=True)
    try:
        there, here = look("memory://survey-test", "memory://survey-test-absent"), only(look(root))
    finally:
        store.rm("/survey-test", recursive=True)
    assert {(c.name, c.path, c.size_bytes, c.blake3) for c in only(there).copies} == {
        (c.name, c.path, c.size_bytes, c.blake3) for c in here.copies
    }
    assert only(there).step == here.step
    assert only(there).expected == here.expected
    assert there.notes == ("memory://survey-test-absent: not there on this node",)


def test_non_persistent_steps_belong_to_the_place(root: Path) -> None:
    shutil.copytree(root / STEP, root / "non_persistent" / "iter_0000003")
    (root / "non_persistent" / "latest_checkpointed_iteration.txt").write_text("3")
    report = look(root)
    assert [found.step.number for found in report.found] == ["3", "2"]
    copy = next(copy for copy in report.found[0].copies if copy.name.endswith(".metadata"))
    assert (copy.path, copy.name) == ("non_persistent/iter_0000003/.metadata", "iter_0000003/.metadata")
    assert report.trackers["0:non_persistent/latest_checkpointed_iteration.txt"] == "3"


@pytest.mark.parametrize("step", ["2", "0000002", "iter_0000002"])
def test_one_step_only(root: Path, step: str) -> None:
    shutil.copytree(root / STEP, root / "iter_0000003")
    shutil.copytree(root / STEP, root / "release")
    assert [found.step.number for found in look(root).found] == ["3", "2", "release"]
    assert only(look(root, step=step)).step.number == "2"
    assert only(look(root, step="release")).step.number == "release"
    report = look(root, step="4")
    assert report.found == ()
    assert report.notes == (f"{root}: no step 4 in it; it has 3, 2, release",)
    with pytest.raises(UsageError, match="'newest' is no step"):
        look(root, step="newest")


def test_a_step_given_as_a_place_is_told(root: Path) -> None:
    (note,) = look(root / STEP).notes
    assert note.endswith(f"is it a step itself? Then give the directory above, {root}")


def test_many_steps_are_looked_at_newest_first_and_the_rest_is_told(tmp_path: Path) -> None:
    for number in range(1, MOST_STEPS + 4):
        (tmp_path / f"iter_{number:07d}").mkdir()
        (tmp_path / f"iter_{number:07d}" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    report = look(tmp_path)
    looked = [found.step.iteration for found in report.found]
    assert looked == [*range(MOST_STEPS + 3, 3, -1), 1]  # and the one that the tracker names
    assert report.notes == (f"{tmp_path}: 2 older steps were not looked at (3, 2); --step looks at one",)


def test_trackers_of_megatron_and_bridge(root: Path) -> None:
    torch.save({"step": torch.tensor(2), "do_train": torch.tensor(False)}, root / "latest_train_state.pt")
    assert look(root).trackers["0:latest_train_state.pt"] == "2"
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert look(root).trackers["0:latest_checkpointed_iteration.txt"] == "release"


@pytest.mark.parametrize(
    ("tracker", "data", "told"),
    [
        ("latest_checkpointed_iteration.txt", b"", "'' is no step"),
        ("latest_checkpointed_iteration.txt", b"9" * 5000, "is no step"),
        ("latest_checkpointed_iteration.txt", b"\xff\xfe", "not text"),
        ("latest_train_state.pt", b"PK", "too few for a zip"),
        ("latest_train_state.pt", pickle.dumps(os.getcwd), "end-of-directory mark is missing"),
    ],
)
def test_trackers_that_say_nothing(root: Path, tracker: str, data: bytes, told: str) -> None:
    (root / tracker).write_bytes(data)
    report = look(root)
    assert report.trackers[f"0:{tracker}"] == "unreadable"
    (note,) = report.notes
    assert note.startswith(str(root / tracker))
    assert told in note
    assert only(report).copies


def test_a_tracker_that_is_no_plain_file_is_not_waited_for(root: Path, tmp_path: Path) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    os.mkfifo(tracker)
    assert look(root).trackers == {"0:latest_checkpointed_iteration.txt": "unreadable"}
    tracker.unlink()
    (tmp_path / "elsewhere").write_text("2")
    tracker.symlink_to(tmp_path / "elsewhere")
    assert look(root).trackers == {"0:latest_checkpointed_iteration.txt": "unreadable"}


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("__3_0.distcp", b"", "0 bytes"),
        ("metadata.json", b"", "0 bytes"),
        ("metadata.json", b'{"sharded_', "not JSON"),
        (".metadata", b"", "0 bytes"),
        (".metadata", b"\x80\x04}", "not a whole pickle"),
        (".metadata", pickle.dumps({}), "not the Metadata"),
        (".metadata.tmp", b"x", "a temporary name"),
        ("__9_0.distcp.partial-1f", b"x", "a temporary name"),
        (".__9_0.distcp.Ab3dEf", b"x", "a temporary name"),
        (".nfs000000000123", b"x", "a temporary name"),
    ],
)
def test_half_written_files_are_told_and_left_out(root: Path, name: str, data: bytes, told: str) -> None:
    (root / STEP / name).write_bytes(data)
    found = only(look(root))
    (problem,) = found.problems
    assert problem.startswith(str(root / STEP / name))
    assert told in problem
    assert name not in names(found)
    assert bool(found.step.save) is bool(found.expected) is (name != ".metadata")
    assert len(found.copies) >= 6


def test_a_short_data_file_is_told_and_kept(root: Path) -> None:
    os.truncate(root / STEP / "__3_0.distcp", 100)
    found = only(look(root))
    assert [copy.size_bytes for copy in found.copies if copy.name.endswith("__3_0.distcp")] == [100]
    (problem,) = found.problems
    assert problem.startswith(f"{root / STEP / '__3_0.distcp'}: cut short: 100 bytes, the index needs ")


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", ".", "", "a//b", "a\0b", ".."])
def test_an_index_that_names_files_outside_is_refused_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / STEP).mkdir()
    (tmp_path / STEP / ".metadata").write_bytes(index_of({"__0_0.distcp": 10, name: 10}))
    (tmp_path / STEP / "__0_0.distcp").write_bytes(bytes(10))
    found = only(look(tmp_path))
    (problem,) = found.problems
    assert "is no name inside its directory" in problem
    assert names(found) == {"__0_0.distcp"}
    assert found.step.save == ""
    assert not found.expected


def test_an_index_that_would_run_code_is_refused(root: Path) -> None:
    (root / STEP / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    (problem,) = only(look(root)).problems
    assert "nothing was run" in problem


def test_symlinks_stay_inside(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.move(root / STEP / "__3_0.distcp", outside / "secret")
    (root / STEP / "__3_0.distcp").symlink_to(outside / "secret")
    (root / STEP / "gone").symlink_to(root / STEP / "nothing")
    (root / STEP / "inside").symlink_to(root / STEP / "metadata.json")
    (root / "iter_0000007").symlink_to(outside)
    (root / "iter_0000001").symlink_to(root / STEP)
    seven, two, one = look(root).found
    assert seven.copies == ()
    assert "a symlink that leads out" in seven.problems[0]
    assert names(two).isdisjoint({"__3_0.distcp", "gone"})
    assert "inside" in names(two)
    assert len(two.problems) == 2
    assert "leaves the directory" in two.problems[0]
    assert len(one.copies) == len(two.copies)


def test_small_files_are_digested_and_others_are_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = root / STEP
    nested = {"__0_0.distcp": 10}
    (step / "modelopt_state").mkdir()
    (step / "modelopt_state" / ".metadata").write_bytes(index_of(nested))
    (step / "modelopt_state" / "__0_0.distcp").write_bytes(bytes(10))
    (step / "modelopt_state" / "empty").touch()
    (step / "__9_0.distcp").write_bytes(bytes(10))  # of nobody's index
    (step / "train_state.pt").write_bytes(b"x")
    monkeypatch.setattr("ckptguard.view.step_survey.MOST_DIGESTED_BYTES", 64 << 10)
    (step / "large").write_bytes(bytes((64 << 10) + 1))
    found = only(look(root))
    undigested = {copy.name.removeprefix(f"{STEP}/") for copy in found.copies if not copy.blake3}
    assert undigested == {*(f"__{rank}_0.distcp" for rank in (0, 1, 2, 3, 9)), "large"}
    assert found.step.save == blake3((step / ".metadata").read_bytes()).hexdigest()
    # Every rank reads a checkpoint inside the step, so far as anyone knows.
    assert found.expected[f"{STEP}/modelopt_state/__0_0.distcp"] == 10
    assert f"{STEP}/modelopt_state/__0_0.distcp" in found.common


def test_a_pipe_is_not_opened(root: Path) -> None:
    os.mkfifo(root / STEP / "pipe")
    (problem,) = only(look(root)).problems
    assert problem == f"{root / STEP / 'pipe'}: not a plain file"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda step: (step / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "says 'zarr'"),
        (lambda step: (step / "model.safetensors").touch(), "a Hugging Face snapshot"),
    ],
)
def test_other_formats_are_named(root: Path, change: object, told: str) -> None:
    (root / STEP / ".metadata").unlink()
    change(root / STEP)  # type: ignore[operator]
    found = only(look(root))
    assert found.copies == ()
    assert told in found.problems[0]


def test_the_legacy_format_is_named() -> None:
    found = only(look(LEGACY))
    assert found.step.number == "4"
    assert found.copies == ()
    assert "legacy torch format: every rank reads only its own mp_rank_* file" in found.problems[0]


def test_unfinished_and_empty_steps_are_told(root: Path) -> None:
    (root / "iter_0000005").mkdir()
    (root / "iter_0000004.partial-1f").mkdir()
    report = look(root)
    assert report.found[0].problems == (f"{root / 'iter_0000005'}: an empty directory",)
    assert report.notes == (f"{root / 'iter_0000004.partial-1f'}: a write that has not ended, left out",)


def test_local_checkpoints_and_global_ones_below_one_root(root: Path) -> None:
    local_file(root, "0", "iter_0000020_0_local.pt")
    local_file(root, "0", "iter_0000020_1_local.pt")  # a replica
    local_file(root, "0", "iter_0000010_0_local.pt")
    local_file(root, "job/1", "iter_0000020_1_local.pt", b"of a job")
    report = look(root)
    told = [(found.step.kind, found.step.number, found.step.save) for found in report.found]
    assert told[:2] == [("local", "20", ""), ("local", "20", "job")]
    assert told[2] == ("local", "10", "")
    assert told[3][:2] == ("global", "2")
    assert {(copy.path, copy.name) for copy in report.found[0].copies} == {
        ("0/iter_0000020_0_local.pt", "0/iter_0000020_0_local.pt"),
        ("0/iter_0000020_1_local.pt", "1/iter_0000020_1_local.pt"),
    }
    (copy,) = report.found[1].copies
    assert (copy.name, copy.size_bytes, copy.blake3) == ("job/1/iter_0000020_1_local.pt", 8, "")
    assert [found.step.number for found in look(root, step="20").found] == ["20", "20"]


def test_local_files_that_are_not_whole(tmp_path: Path) -> None:
    local_file(tmp_path, "0", "iter_0000020_0_local.pt", b"")
    local_file(tmp_path, "0", "iter_0000020_1_local.dirty.pt")
    local_file(tmp_path, "0", "iter_0000010_0_local.pt")
    (tmp_path / "0" / "iter_0000020_2_local.pt").symlink_to("/etc/hostname")
    (tmp_path / "1").symlink_to("/etc")
    report = look(tmp_path)
    newest, older = report.found
    assert newest.copies == ()
    assert len(newest.problems) == 3
    assert any("iter_0000020_0_local.pt: 0 bytes" in problem for problem in newest.problems)
    assert any("half-written" in problem for problem in newest.problems)
    assert any("a symlink that leaves" in problem for problem in newest.problems)
    assert len(older.copies) == 1
    assert report.notes == (f"{tmp_path / '1'}: leads out of {tmp_path}: give the directory itself with --source",)


class Late:
    """Does something a little later, beside the survey."""

    def __init__(self, action: object) -> None:
        self._thread = threading.Timer(0.2, action)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._thread.join()


def test_a_file_that_a_network_file_system_does_not_show_yet_is_waited_for(root: Path, tmp_path: Path) -> None:
    hidden, file = tmp_path / "hidden", root / STEP / "__3_0.distcp"
    file.rename(hidden)
    with Late(lambda: hidden.rename(file)):
        report = look(root, wait=10, kind="nfs4")
    (note,) = report.notes
    assert re.fullmatch(rf"{root}: waited \d+\.\d s for {STEP}/__3_0\.distcp on nfs4", note)
    assert "__3_0.distcp" in names(only(report))
    assert not only(report).problems


def test_a_step_that_the_tracker_names_is_waited_for(root: Path) -> None:
    (root / STEP).rename(root / "hidden")
    with Late(lambda: (root / "hidden").rename(root / STEP)):
        report = look(root, wait=10, kind="lustre")
    assert len(only(report).copies) == 7
    assert f"for {STEP} on lustre" in report.notes[0]


@pytest.mark.parametrize("name", ["__3_0.distcp", ".metadata", "metadata.json", "integrity.json"])
def test_a_file_that_is_still_short_is_waited_for(root: Path, name: str) -> None:
    file = root / STEP / name
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if name != "integrity.json" else b"")
    with Late(lambda: file.write_bytes(data)):
        report = look(root, wait=10, kind="fuse.juicefs")
    assert not only(report).problems
    assert f"{STEP}/{name} on fuse.juicefs" in report.notes[0]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "fuseblk", "tmpfs", ""])
def test_a_local_disk_is_not_waited_for(root: Path, kind: str) -> None:
    (root / STEP / "__3_0.distcp").unlink()
    began = time.monotonic()
    report = look(root, wait=10, kind=kind)
    assert not report.notes
    assert time.monotonic() - began < 5


def test_waiting_ends_and_is_told(root: Path) -> None:
    (root / STEP / "__3_0.distcp").unlink()
    shutil.copytree(root / STEP, root / "iter_0000001")  # an old step: what it lacks will not come
    began = time.monotonic()
    report = look(root, root, wait=0.3, kind="nfs")
    (note,) = report.notes  # all waits together take no longer
    file = rf"{STEP}/__3_0\.distcp"
    assert re.fullmatch(rf"{root}: waited 0\.\d s for {file} on nfs: {file} did not appear", note)
    assert 0.3 <= time.monotonic() - began < 5
    os.truncate(root / STEP / "__2_0.distcp", 5)
    os.utime(root / STEP / "__2_0.distcp", (1, 1))
    assert "__2_0" not in look(root, wait=0.1, kind="nfs").notes[0]  # short for years


def test_files_that_change_while_they_are_listed_never_raise(root: Path) -> None:
    """Somebody removes and rewrites files all the while."""
    stop, files = threading.Event(), {path: path.read_bytes() for path in (root / STEP).iterdir()}

    def disturb() -> None:
        while not stop.is_set():
            for path, data in files.items():
                path.unlink(missing_ok=True)
                path.write_bytes(data)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(60):
            look(root)
    finally:
        stop.set()
        thread.join()
    assert len(only(look(root)).copies) == 7


def test_ten_thousand_files_take_no_time(tmp_path: Path) -> None:
    """16 nodes with 625 files each; the index is read once, no data file is opened."""
    files = {f"__{number}_0.distcp": 100 for number in range(10_000)}
    for node in range(16):
        step = tmp_path / str(node) / "ckpt" / STEP
        step.mkdir(parents=True)
        for name in list(files)[node * 625 : (node + 1) * 625]:
            (step / name).write_bytes(bytes(100))
    (tmp_path / "0" / "ckpt" / STEP / ".metadata").write_bytes(index_of(files))
    began = time.process_time()
    reports = [look(tmp_path / str(node) / "ckpt", node=node) for node in range(16)]
    assert time.process_time() - began < 2.5
    assert sum(len(only(report).copies) for report in reports) == 10_001
    assert len(only(reports[0]).expected) == 10_000
