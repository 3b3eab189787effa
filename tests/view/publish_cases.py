"""A small view in the making, and processes that die between two system calls while they work on it."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckptguard.view.publishing import Site, Version
from ckptguard.view.records import read_record
from ckptguard.view.values import Agreement, Digest, Step

STEP = Step("global", "20", "ab")
# All calls by which this package changes anything. A process may die before each.
CALLS = ("open", "pwrite", "fchmod", "fsync", "ftruncate", "link", "symlink")
CALLS += ("mkdir", "chmod", "rename", "replace", "unlink", "rmdir", "close")
KILLED, WRONG = 9, 1


def files_of(step: Step = STEP, *, bridge: bool = False) -> dict[str, bytes]:
    """Content of a step's files, by name."""
    names = ["0/iter_0000020_0_local.pt", "1/iter_0000020_1_local.pt"]
    if step.kind == "global":
        names = [f"{step.folder}/{name}" for name in (".metadata", "metadata.json", "__0_0.distcp", "energon/state.pt")]
        names += [f"{step.folder}/train_state.pt"] if bridge else []
    return {name: f"{step.number} {name}".encode() for name in names}


def agreement_on(files: Mapping[str, bytes], step: Step = STEP, *, agreed: str = "1f3a", node: int = 1) -> Agreement:
    """What two nodes agreed on, one of which has the files."""
    digests = {name: Digest(len(data), blake3(data).hexdigest()) for name, data in files.items()}
    origins = {node: dict.fromkeys(files, "linked from /ckpt")}
    return Agreement(agreed, step, 2, ("a", "b"), "2026-01-02T03:04:05+00:00", "all files", (), digests, origins)


def stage(site: Site, files: Mapping[str, bytes]) -> list[str]:
    """Puts what is not there yet into the staging directory. Returns what was there."""
    kept = []
    for name, data in files.items():
        path = site.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            assert path.read_bytes() == data
            kept.append(name)
        else:
            path.write_bytes(data)
    return kept


def finished(
    site: Site, number: str = "20", agreed: str = "1f3a", *, kind: Any = "global", bridge: bool = False
) -> Version:
    """A version that is there and not published."""
    step = Step(kind, number, "ab")
    files = files_of(step, bridge=bridge)
    site.recover()
    stage(site, files)
    return site.finish(agreement_on(files, step, agreed=agreed), 1)


def confirmed(site: Site, number: str, agreed: str) -> Version:
    """A version that was current at some time."""
    with site.hold():
        version = finished(site, number, agreed)
        version.publish()
        version.confirm()
    return version


def tree(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def whole(path: Path) -> None:
    """Finds that a version has all its files, as its record and its trackers have it."""
    step = read_record(path).agreement.step
    there = tree(path)
    assert there.pop("latest_checkpointed_iteration.txt") == step.number.encode()
    assert set(there) == {*files_of(step), "ckptguard-view.json"}
    assert all(there[name] == data for name, data in files_of(step).items())


def current_whole(site: Site) -> str:
    """Name of the current version, which is found to be whole and read-only, as all others are whole; "" if there is none."""
    for name in site.names():
        whole(site.versions / name)
    if not os.path.lexists(site.view):
        return ""
    current = site.current()
    assert current is not None
    assert site.view.resolve() == current.path
    folders = [current.path, *filter(Path.is_dir, current.path.rglob("*"))]
    assert not any(folder.stat().st_mode & 0o222 for folder in folders)
    return current.name


def start(work: Callable[[], Any]) -> int:
    """Begins something in a forked process; its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests in this process
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  # whatever it is, the child must not go on as a second test run
            traceback.print_exc()
            os._exit(WRONG)
        os._exit(0)
    return child


def in_child(work: Callable[[], Any]) -> int:
    """Runs something in a forked process; its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(start(work), 0)[1])


def killed_before(call: int, work: Callable[[], Any]) -> bool:
    """Runs something in a process that is gone before its n-th system call, from 0; False if it ended before."""
    left = call

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **named: Any) -> Any:
            nonlocal left
            if left == 0:
                os._exit(KILLED)
            left -= 1
            return real(*args, **named)

        return one

    def dying() -> None:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        work()

    status = in_child(dying)
    assert status in (0, KILLED)
    return status == KILLED


def as_nobody(root: Path, work: Callable[[], Any]) -> int:
    """Runs something in a process whose user may do nothing but what modes allow; the directory becomes that user's."""

    def unprivileged() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    if os.getuid() == 0:
        os.chown(root, 65534, 65534)
    return in_child(unprivileged)
