"""A view is absent or whole at every instant; what was not confirmed is taken back; what is not needed goes away."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from publish_cases import (
    agreement_on,
    as_nobody,
    confirmed,
    current_whole,
    files_of,
    finished,
    killed_before,
    stage,
    start,
    tree,
)

from ckptguard.core.errors import CkptguardError, EnvironmentFailedError, UsageError
from ckptguard.view.pruning import prune, views
from ckptguard.view.publishing import Site, Version
from ckptguard.view.records import read_record
from ckptguard.view.values import Step


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "view")


@pytest.fixture
def held(site: Site) -> Iterator[Site]:
    """While this process prepares there."""
    with site.hold():
        yield site


def test_a_published_version_is_whole_read_only_and_named_by_a_relative_link(site: Site) -> None:
    with site.hold():
        assert site.recover() == ()
        version = finished(site)
        assert not os.path.lexists(site.view)
        version.publish()
        version.confirm()
    assert os.readlink(site.view) == "view.d/0000020-1f3a"
    assert current_whole(site) == "0000020-1f3a"
    assert version.publication().previous == ""
    assert version.publication().published <= version.publication().confirmed
    assert read_record(site.view).node == 1
    moved = site.view.parent.rename(site.view.parent.with_name("moved"))
    assert (moved / "view" / "iter_0000020" / "metadata.json").exists()


def test_files_of_the_users_own_are_left_as_they_are(site: Site, tmp_path: Path) -> None:
    """Staged files are hard links of them, even one that stands where a tracker is written."""
    own = tmp_path / "own"
    files = {**files_of(), "latest_checkpointed_iteration.txt": b"10"}
    for name, data in files.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(data)
        (own / name).chmod(0o640)
    with site.hold():
        site.recover()
        for name in files:
            (site.staging / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(own / name, site.staging / name)
        site.finish(agreement_on(files), 1).publish()
    assert (site.view / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert tree(own) == files
    assert {stat.S_IMODE((own / name).stat().st_mode) for name in files} == {0o640}
    assert not (site.view / "latest_checkpointed_iteration.txt").stat().st_mode & 0o222


@pytest.mark.parametrize(
    ("step", "bridge", "trackers"),
    [
        (Step("global", "20"), False, {"latest_checkpointed_iteration.txt": b"20"}),
        (
            Step("global", "20"), True,
            {"latest_checkpointed_iteration.txt": b"20", "latest_train_state.pt": b"20 iter_0000020/train_state.pt"},
        ),
        (Step("global", "release"), False, {"latest_checkpointed_iteration.txt": b"release"}),
        (Step("global", "release"), True, {"latest_checkpointed_iteration.txt": b"release"}),
        (Step("local", "20"), False, {}),
    ],
)  # fmt: skip
def test_trackers_are_those_that_the_loaders_follow(
    held: Site, step: Step, bridge: bool, trackers: dict[str, bytes]
) -> None:
    version = finished(held, step.number, kind=step.kind, bridge=bridge)
    there = tree(version.path)
    del there["ckptguard-view.json"]
    assert there == {**files_of(step, bridge=bridge), **trackers}
    assert version.name == f"{'0000020' if step.number == '20' else 'release'}-1f3a"


def test_what_is_not_named_for_the_node_is_left_out(held: Site) -> None:
    held.recover()
    files = files_of()
    stage(held, {**files, "iter_0000010/__0_0.distcp": b"x", "iter_0000020/__1_0.distcp.part": b"x"})
    (held.staging / "iter_0000020" / "link").symlink_to(held.staging / "iter_0000010")
    other = {**files, "iter_0000020/__1_0.distcp": b"on the other node"}
    held.finish(replace(agreement_on(other), origins={0: dict.fromkeys(other, ""), 1: dict.fromkeys(files, "")}), 1)
    assert set(tree(held.versions / "0000020-1f3a")) == {
        *files, "ckptguard-view.json", "latest_checkpointed_iteration.txt"
    }  # fmt: skip
    assert not (held.versions / "0000020-1f3a" / "iter_0000010").exists()


def test_local_checkpoints_are_saved_where_they_are_loaded_from(held: Site) -> None:
    version = finished(held, "20", kind="local")
    version.publish()
    version.confirm()
    assert os.stat(version.path).st_mode & 0o200
    later = version.path / "0" / "iter_0000030_0_local.pt"
    later.parent.mkdir(exist_ok=True)
    later.write_bytes(b"saved by the run")
    newer = finished(held, "40", "2f3a")
    newer.publish()
    newer.confirm()
    assert [view.saved_later for view in views(held.view)] == [0, 1]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"longer than it was, by far")])
def test_a_staged_file_that_changed_is_told(held: Site, spoil: Callable[[Path], Any]) -> None:
    held.recover()
    stage(held, files_of())
    spoil(held.staging / "iter_0000020" / "__0_0.distcp")
    with pytest.raises(EnvironmentFailedError, match=r"__0_0\.distcp: was staged with 28 bytes and (is gone|has 26)"):
        held.finish(agreement_on({**files_of(), "iter_0000020/__0_0.distcp": b"x" * 28}), 1)


def test_withdrawing_brings_the_previous_version_back_and_keeps_the_files(site: Site) -> None:
    confirmed(site, "10", "aaaa")
    with site.hold():
        version = finished(site)
        version.publish()
        assert version.publication().previous == "0000010-aaaa"
        for _ in range(2):
            version.withdraw()
            assert current_whole(site) == "0000010-aaaa"
            assert site.names() == ("0000010-aaaa",)
        assert site.recover() == ()
        assert stage(site, files_of()) == list(files_of())
        version = site.finish(agreement_on(files_of()), 1)
        version.publish()
        version.confirm()
    assert current_whole(site) == "0000020-1f3a"


def test_without_a_version_before_it_a_withdrawn_view_vanishes(held: Site) -> None:
    version = finished(held)
    version.withdraw()
    version = finished(held)
    version.publish()
    version.withdraw()
    version.withdraw()
    assert not os.path.lexists(held.view)
    assert set(os.listdir(held.versions)) == {".lock", ".staging"}


def test_an_earlier_version_that_was_not_confirmed_does_not_come_back(site: Site) -> None:
    with site.hold():
        finished(site, "10", "aaaa").publish()
        (site.versions / "0000010-aaaa.json").write_text("no JSON")
        os.rename(site.versions / "0000010-aaaa", site.versions / "0000011-aaaa")  # a staging directory that is new
        version = finished(site)
        version.publish()
        version.withdraw()
    assert not os.path.lexists(site.view)


def test_what_an_earlier_prepare_did_not_confirm_is_taken_back(site: Site) -> None:
    confirmed(site, "10", "aaaa")
    with site.hold():
        finished(site).publish()
    assert [(v.path.name, v.current, v.confirmed) for v in views(site.view)] == [
        ("0000020-1f3a", True, False), ("0000010-aaaa", False, True)
    ]  # fmt: skip
    with site.hold():
        (told,) = site.recover()
        assert told.startswith(f"{site.versions / '0000020-1f3a'}: an earlier prepare ended before all nodes had it")
        assert current_whole(site) == "0000010-aaaa"
        assert stage(site, files_of()) == list(files_of())


# What stands at the path


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Path.mkdir, "view: is a directory; a view is a symbolic link that ckptguard makes"),
        (Path.touch, "view: is a file; "),
        (
            lambda path: path.symlink_to("elsewhere/0000020-1f3a"),
            "is a symbolic link to elsewhere/0000020-1f3a, which ckpt",
        ),
        (
            lambda path: path.symlink_to("view.d/mine"),
            "is a symbolic link to view.d/mine, which ckptguard did not make",
        ),
        (lambda path: path.with_name("view.d").touch(), r"view\.d: is a file; the versions"),
    ],
)
def test_what_ckptguard_did_not_make_is_refused(tmp_path: Path, make: Callable[[Path], Any], told: str) -> None:
    make(tmp_path / "view")
    before = sorted(os.listdir(tmp_path))
    for work in (Site, views, prune):
        with pytest.raises(UsageError, match=told):
            work(tmp_path / "view")
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_put_there_while_files_are_staged_is_refused_too(held: Site) -> None:
    version = finished(held)
    held.view.mkdir()
    with pytest.raises(UsageError, match="view: is a directory"):
        version.publish()
    assert held.view.is_dir()


def test_a_path_that_cannot_be_a_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no name for a view"):
        Site(Path("/"))
    (tmp_path / "file").touch()
    with pytest.raises(CkptguardError, match="Not a directory"):
        Site(tmp_path / "file" / "view")


def test_a_view_inside_a_place_and_a_place_inside_a_view_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    site = Site(Path("ckpt/view"))
    confirmed(site, "20", "1f3a")
    site.refuse_places([str(tmp_path / "ckpt" / "run"), str(tmp_path / "ckpt" / "view.d2"), "memory://bucket/ckpt"])
    (tmp_path / "alias").symlink_to("ckpt")
    for place in (tmp_path / "ckpt", tmp_path / "alias", Path()):
        with pytest.raises(UsageError, match="the view would stand inside"):
            site.refuse_places(["ckpt/run", str(place)])
    for place in ("ckpt/view", "ckpt/view.d", "alias/view.d/0000020-1f3a/iter_0000020"):
        with pytest.raises(UsageError, match=f"{place}: stands inside"):
            site.refuse_places([place])


# One prepare at a time, several nodes


def test_the_second_of_two_prepares_is_told_who_is_at_work(site: Site) -> None:
    ready, told = os.pipe()

    def prepare() -> None:
        with site.hold():
            os.write(told, b"x")
            signal.pause()

    child = start(prepare)
    try:
        assert os.read(ready, 1) == b"x"
        holder = f"process {child} on {socket.gethostname()} .* is preparing or pruning {site.view}"
        with pytest.raises(EnvironmentFailedError, match=holder), site.hold():
            pass
        with pytest.raises(EnvironmentFailedError, match=holder):
            prune(site.view)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
    with site.hold(), pytest.raises(EnvironmentFailedError, match=f"process {os.getpid()} on"), site.hold():
        pass
    (site.versions / ".lock").write_bytes(b"")
    with site.hold():
        (site.versions / ".lock").write_bytes(b"")
        with pytest.raises(EnvironmentFailedError, match="another process is preparing"), site.hold():
            pass


def test_a_file_system_without_locks_is_named(site: Site, monkeypatch: Any) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(EnvironmentFailedError, match=r"\.lock: cannot be locked: Function not"), site.hold():
        pass


def test_nodes_that_share_the_directory_see_each_other(site: Site) -> None:
    for node in (3, 0):
        site.put_probe("run1", node)
    site.put_probe("run", 7)
    site.put_probe("run1-0", 5)
    assert site.probes("run1") == (0, 3)
    assert site.probes("run") == (7,)
    for _ in range(2):
        site.remove_probe("run1", 3)
    assert site.probes("run1") == (0,)
    prune(site.view)
    assert os.listdir(site.versions) == [".lock"]


def test_free_space_is_known_before_anything_is_made(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert 0 < Site(tmp_path / "not" / "yet" / "view").free_bytes() <= found.f_blocks * found.f_frsize
    assert not (tmp_path / "not").exists()


def test_a_full_disk_is_told_with_the_path(held: Site, monkeypatch: Any) -> None:
    version = finished(held)
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(EnvironmentFailedError, match=r"cannot be written.*No space left"):
        version.publish()
    assert not os.path.lexists(held.view)


def _full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


# Which versions there are, and pruning


def test_versions_are_listed_the_newest_first(site: Site) -> None:
    assert views(site.view) == ()
    assert not site.versions.exists()
    for number, name in (("20", "bbbb"), ("10", "aaaa")):
        confirmed(site, number, name)
    newest, older = views(site.view)
    assert (newest.path.name, newest.current, newest.confirmed) == ("0000010-aaaa", True, True)
    assert (older.path.name, older.current, older.confirmed) == ("0000020-bbbb", False, True)
    assert newest.step == Step("global", "10", "ab")
    assert newest.made == "2026-01-02T03:04:05+00:00"
    assert newest.own_bytes == newest.size_bytes == sum(map(len, tree(site.view).values()))
    (site.versions / "0000020-bbbb" / "ckptguard-view.json").unlink()
    _, older = views(site.view)
    assert older.step is None
    assert "ckptguard-view.json: not there" in older.problem


@pytest.mark.parametrize(("keep", "left"), [(1, ["c"]), (2, ["c", "b"]), (9, ["c", "b", "a"])])
def test_pruning_keeps_the_current_one_and_the_newest_others(site: Site, keep: int, left: list[str]) -> None:
    for number, letter in (("30", "a"), ("10", "b"), ("20", "c")):
        confirmed(site, number, letter * 4)
    before = views(site.view)
    would = prune(site.view, keep, dry_run=True)
    assert views(site.view) == before
    assert prune(site.view, keep) == would
    assert [v.path.name[-1] for v in would] == [letter for letter in "cba" if letter not in left]
    assert [v.path.name[-1] for v in views(site.view)] == left
    assert current_whole(site) == "0000020-cccc"
    assert prune(site.view, keep) == ()
    assert len(os.listdir(site.versions)) == 1 + 2 * len(left)


def test_pruning_takes_an_unconfirmed_view_and_what_was_staged(site: Site) -> None:
    confirmed(site, "10", "aaaa")
    with site.hold():
        finished(site).publish()
        site.staging.mkdir()
        stage(site, {"iter_0000030/x": b"12345"})
    site.put_probe("run", 0)
    would = prune(site.view, dry_run=True)
    assert current_whole(site) == "0000020-1f3a"
    assert [(v.path.name, v.size_bytes) for v in would][1:] == [(".staging", 5)]
    assert would[0].path.name == "0000020-1f3a"
    assert prune(site.view) == would
    assert current_whole(site) == "0000010-aaaa"
    assert sorted(os.listdir(site.versions)) == [".lock", "0000010-aaaa", "0000010-aaaa.json"]


def test_pruning_where_there_is_nothing_makes_nothing(tmp_path: Path) -> None:
    assert prune(tmp_path / "view") == ()
    with pytest.raises(UsageError, match="keep 0"):
        prune(tmp_path / "view", 0)
    assert os.listdir(tmp_path) == []


# Without the rights of root, and dying at every call


@pytest.fixture
def anywhere() -> Iterator[Path]:
    """A directory that other users can get to."""
    root = Path(tempfile.mkdtemp())
    yield root
    shutil.rmtree(root)


def test_all_of_it_works_for_a_user_whom_modes_bind(anywhere: Path) -> None:
    def work() -> None:
        site = Site(anywhere / "view")
        confirmed(site, "10", "aaaa")
        with pytest.raises(PermissionError):
            (site.view / "iter_0000010" / "new").touch()
        with pytest.raises(PermissionError):
            (site.view / "latest_checkpointed_iteration.txt").open("a")
        with site.hold():
            version = finished(site)
            version.publish()
            version.withdraw()
            assert stage(site, {**files_of(), "iter_0000020/new": b""}) == list(files_of())
        confirmed(site, "20", "1f3a")
        assert len(prune(site.view)) == 1
        assert current_whole(site) == "0000020-1f3a"
        assert not (site.versions / "0000010-aaaa").exists()

    assert as_nobody(anywhere, work) == 0


NEW = "0000020-1f3a"


def _begin(site: Site) -> None:
    with site.hold():
        site.recover()
        stage(site, files_of())


def _make(site: Site) -> None:
    with site.hold():
        finished(site)


def _publish(site: Site) -> None:
    with site.hold():
        finished(site).publish()


def _current(site: Site) -> Version:
    version = site.current()
    assert version is not None
    return version


WORK: dict[str, tuple[Callable[[Site], Any], Callable[[Site], Any]]] = {
    "publish": (_begin, _publish),
    "confirm": (_publish, lambda site: _current(site).confirm()),
    "withdraw": (_publish, lambda site: _current(site).withdraw()),
    "recover": (_publish, _begin),
    "prune": (_publish, lambda site: prune(site.view)),
}


@pytest.mark.parametrize("before", ["", "0000010-aaaa"])
@pytest.mark.parametrize("what", WORK)
def test_a_process_killed_at_any_call_leaves_a_view_whole_or_absent(
    tmp_path: Path, monkeypatch: Any, what: str, before: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what a dead process wrote is not lost
    prepared, work = WORK[what]
    seen, call = set(), 0
    while True:
        site = Site(tmp_path / str(call) / "view")
        if before and what == "prune":
            confirmed(site, "05", "eeee")  # to be removed
        if before:
            confirmed(site, "10", "aaaa")
        prepared(site)
        killed = killed_before(call, lambda site=site: work(site))
        seen.add(now := current_whole(site))
        assert now in (before, NEW)
        if not killed:
            break
        _goes_on(site, before, confirmed_now=what == "confirm" and now == NEW)
        shutil.rmtree(site.versions.parent)
        call += 1
    assert call > 5, "nothing was interrupted"
    assert seen == ({NEW} if what == "confirm" else {before, NEW})


def _goes_on(site: Site, before: str, *, confirmed_now: bool) -> None:
    """The next prepare takes back what is not confirmed, finds the files again, and publishes; pruning leaves nothing over."""
    with site.hold():
        site.recover()
        current = current_whole(site)
        assert current == before or (confirmed_now and current == NEW)
    if current != NEW:
        confirmed(site, "20", "1f3a")
    assert current_whole(site) == NEW
    prune(site.view)
    assert sorted(os.listdir(site.versions)) == [".lock", NEW, f"{NEW}.json"]
    assert sorted(os.listdir(site.view.parent)) == ["view", "view.d"]
