"""Starts a command and leaves nothing of it behind: run as a file of its own, with nothing but the standard library.

    python -I -S keeper.py CONTROL GRACE_SECONDS COMMAND...

It becomes the parent of every orphan among the command's descendants (PR_SET_CHILD_SUBREAPER of Linux), whatever session or
process group they moved to, so that all of them can be found and none escapes. It ends the command when CONTROL, the reading
end of a pipe, comes to its end: when its starter closes the other end, or is gone. Descendants that outlive the command are
ended too. Its exit code is the command's, with 128 added to the number of a signal, as shells do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_SECONDS = 0.02
_NOT_STARTED = 127


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def descendants() -> list[int]:
    """Processes below this one, zombies left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
        except OSError:  # gone meanwhile
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _signal_all(number: int) -> bool:
    """Whether there was anyone to signal."""
    below = descendants()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(below)


def _reap(main: int) -> int | None:
    """Takes in all that ended; the wait status of the command, if it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        status = ended if pid == main else status


def _end_all(main: int, grace_seconds: float) -> int | None:
    """Asks every descendant to end, then makes it; the status of the command, if it had not ended before."""
    status, deadline = None, time.monotonic() + grace_seconds
    if _signal_all(signal.SIGTERM):
        while descendants() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            status = ended if (ended := _reap(main)) is not None else status
    while _signal_all(signal.SIGKILL):
        time.sleep(_POLL_SECONDS)
        status = ended if (ended := _reap(main)) is not None else status
    return ended if (ended := _reap(main)) is not None else status


def main(control: int, grace_seconds: float, command: list[str]) -> int:
    """Runs the command to its end, or to that of ``control``; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever wants an end closes the pipe
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # should the keeper itself be killed; torchrun then ends its ranks

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)  # noqa: S603 - as told
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        return _NOT_STARTED
    status = None
    with open(control, "rb", buffering=0) as pipe:  # a descriptor
        poll = select.poll()
        poll.register(pipe, select.POLLIN | select.POLLHUP)
        while status is None and not poll.poll(_POLL_SECONDS * 1e3):
            status = _reap(child.pid)
    later = _end_all(child.pid, grace_seconds)
    status = later if status is None else status
    child.returncode = 0  # it is reaped: subprocess need not wait for it
    if status is None:
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
