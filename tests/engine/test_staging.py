"""The staging directory: who may have it, what its journal survives, and how it becomes the target."""

from __future__ import annotations

import os

import pytest
from write_cases import LAST, Source, expected, plan, run, tree

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.engine import writing
from ckptguard.engine.staging import Staging
from ckptguard.engine.write_journal import NAME

PLAN = plan()


def begun(dst, of=PLAN):
    """A staging directory with all files of the plan, not yet committed."""
    with Staging.open(dst, of.identity, what="a test") as staging:
        writing.write(of, staging, Source(of))
        return staging.path


def repeated(dst, of=PLAN):
    """Paths of the files that a second run writes, which must then be right."""
    source = Source(of)
    run(dst, of, source)
    assert tree(dst) == {**expected(of), **LAST}
    return sorted({f"iter_0000000/__{key // 100}_0.distcp" for key, _, _ in source.calls})


@pytest.mark.parametrize("make", [lambda dst: None, lambda dst: dst.mkdir()])
def test_it_becomes_the_target_with_nothing_left_beside_it(tmp_path, make):
    dst = tmp_path / "deep" / "dst"
    dst.parent.mkdir()
    make(dst)
    run(dst, PLAN, Source(PLAN))
    assert tree(dst) == {**expected(PLAN), **LAST}
    assert os.listdir(dst.parent) == ["dst"]


def test_directories_above_the_target_are_made(tmp_path):
    run(tmp_path / "a" / "b", PLAN, Source(PLAN))
    assert tree(tmp_path / "a" / "b") == {**expected(PLAN), **LAST}


def test_a_link_to_an_empty_directory_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "dst").symlink_to(tmp_path / "real")
    run(tmp_path / "dst", PLAN, Source(PLAN))
    assert tree(tmp_path / "real") == {**expected(PLAN), **LAST}


def test_a_target_that_is_there_is_refused(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for dst in (tmp_path / "full", tmp_path / "full" / "x"):
        with pytest.raises(UsageError, match="is there already"):
            Staging.open(dst, "i", what="a test")
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: path.name == "mount")
    with pytest.raises(UsageError, match="is a mount point"):
        Staging.open(tmp_path / "mount", "i", what="a test")
    assert sorted(os.listdir(tmp_path)) == ["full", "mount"]


def test_a_target_that_appears_during_the_run_is_left_alone(tmp_path):
    dst = tmp_path / "dst"
    begun(dst)
    with Staging.open(dst, PLAN.identity, what="a test") as staging:
        dst.mkdir()
        (dst / "x").touch()
        with pytest.raises(UsageError, match="is there already"):
            staging.commit(LAST)
        assert (staging.path / NAME).exists()
    assert os.listdir(dst) == ["x"]


def test_leftovers_of_other_arguments_are_named_and_refused(tmp_path):
    dst = tmp_path / "dst"
    left = begun(dst)
    with pytest.raises(UsageError, match=f"{left}: left by a test, which was started with other arguments"):
        Staging.open(dst, "another identity", what="another test")
    Staging.open(tmp_path / "dst2", "another identity", what="another test").close()
    assert left.exists()


def test_a_journal_of_another_identity_or_version_is_refused(tmp_path):
    dst = tmp_path / "dst"
    left = begun(dst)
    other = plan(seed=1)
    with Staging.open(tmp_path / "dst2", other.identity, what="a test") as staging:
        (left / NAME).write_bytes((staging.path / NAME).read_bytes())
    with pytest.raises(UsageError, match="started with other arguments"):
        Staging.open(dst, PLAN.identity, what="a test")


def test_two_processes_do_not_share_it(tmp_path, monkeypatch):
    dst = tmp_path / "dst"
    with Staging.open(dst, "i", what="a test"), pytest.raises(UsageError, match="another process is writing there"):
        Staging.open(dst, "i", what="a test")
    Staging.open(dst, "i", what="a test").close()

    def no_locks(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(EnvironmentFailedError, match="cannot be locked"):
        Staging.open(dst, "i", what="a test")


def test_a_journal_that_was_finished_while_waiting_for_it_is_not_used(tmp_path, monkeypatch):
    dst = tmp_path / "dst"

    def removed_meanwhile(handle, how):
        next(tmp_path.glob("dst.partial-*/*")).unlink()

    monkeypatch.setattr("fcntl.flock", removed_meanwhile)
    with pytest.raises(UsageError, match="another process"):
        Staging.open(dst, "i", what="a test")


def test_finished_files_are_not_written_again(tmp_path):
    begun(tmp_path / "dst")
    assert repeated(tmp_path / "dst") == []


def test_a_journal_cut_anywhere_loses_only_what_it_lost(tmp_path):
    whole = (begun(tmp_path / "dst") / NAME).read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + len(PLAN.files)
    order = [line.split(b'"file":"')[1].split(b'"')[0].decode() for line in lines[1:]]
    for cut in [
        0,
        5,
        len(lines[0]) - 1,
        len(lines[0]),
        len(whole) // 2,
        len(whole) - len(lines[-1]) + 3,
        len(whole) - 1,
    ]:
        dst = tmp_path / f"dst{cut}"
        left = begun(dst)
        (left / NAME).write_bytes(whole[:cut])
        kept = order[: max(0, whole[:cut].count(b"\n") - 1)]
        assert repeated(dst) == sorted(file.path for file in PLAN.files[1:] if file.path not in kept)


def test_a_damaged_journal_line_is_not_believed(tmp_path):
    dst = tmp_path / "dst"
    path = begun(dst) / NAME
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    assert len(repeated(dst)) <= 1


def test_a_finished_file_that_changed_is_written_again(tmp_path):
    dst = tmp_path / "dst"
    left = begun(dst) / PLAN.files[1].path
    data = bytearray(left.read_bytes())
    data[len(data) // 2] ^= 1
    left.write_bytes(data)
    assert repeated(dst) == [PLAN.files[1].path]


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: os.truncate(path, 10)])
def test_a_finished_file_that_is_gone_or_short_is_written_again(tmp_path, spoil):
    dst = tmp_path / "dst"
    spoil(begun(dst) / PLAN.files[2].path)
    assert repeated(dst) == [PLAN.files[2].path]


def test_what_is_in_no_journal_is_removed(tmp_path):
    dst = tmp_path / "dst"
    left = begun(dst)
    (left / "foreign" / "deep").mkdir(parents=True)
    (left / "foreign" / "deep" / "x").touch()
    (left / "iter_0000000" / "metadata.json").write_text("{}")
    with Staging.open(dst, PLAN.identity, what="a test") as staging:
        staging.resume({file.path: file.size_bytes for file in PLAN.files})
    assert sorted(tree(left)) == sorted([NAME, *expected(PLAN)])
    assert not (left / "foreign").exists()
    assert repeated(dst) == []


def test_markers_come_last_and_in_order(tmp_path, monkeypatch):
    """At every moment before the rename, what is missing is what makes the whole readable."""
    dst, seen = tmp_path / "dst", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(os.readlink(f"/proc/self/fd/{handle}")) or real(handle))
    run(dst, PLAN, Source(PLAN))
    names = [path.split("dst.partial-")[1].partition("/")[2] for path in seen if "dst.partial-" in path]
    last = [names.index(name) for name in LAST]
    assert last == sorted(last)
    assert all(names.index(file.path) < last[0] for file in PLAN.files)
    assert seen[-1] == str(tmp_path)


def test_a_failed_rename_keeps_everything(tmp_path, monkeypatch):
    dst = tmp_path / "dst"

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(EnvironmentFailedError, match="dst: cannot be written: No space left"):
            run(dst, PLAN, Source(PLAN))
    assert repeated(dst) == [file.path for file in PLAN.files[1:]]
