"""Files that a network file system may not show yet: which file systems those are, and a bounded wait.

Such a file system remembers for a while what a directory held and that a name was not there, so a file that another node has
just written can be missing or short here (nfs(5): ``acdirmax``, ``lookupcache``; up to a minute by default). Opening a file
and listing its directory make the client ask again; stat alone may be answered from memory.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ckptguard.core.wording import some

RECENT_SECONDS = 120.0
_MOUNTS = Path("/proc/self/mountinfo")
# fmt: off
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "daos", "gfs2", "glusterfs", "gpfs", "juicefs", "lustre", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs",
})
# fmt: on
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_MOST_OPENED = 64
_MOST_NAMED = 3

FileSystem = Callable[[Path], str]


def file_system_of(path: Path) -> str:
    """The type of the file system that a local path is on, as the kernel names it (``ext4``, ``nfs4``); "" if unknown.

    Source: proc(5), ``/proc/pid/mountinfo``: the mount point is field 5, with octal escapes; the type follows `` - ``.
    """
    real = os.path.realpath(path)
    best, kind = -1, ""
    with suppress(OSError):
        for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
            before, _, after = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
            inside = real == point or real.startswith(f"{point.rstrip('/')}/")
            if inside and len(point) >= best:  # of two mounts on one point the later hides the earlier
                best, kind = len(point), after.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether files on such a file system come from other machines. What FUSE serves usually does."""
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def is_recent(path: Path) -> bool:
    """Whether a local file was changed lately, by its own clock, which may also run ahead of this node's."""
    with suppress(OSError):
        return abs(time.time() - path.stat().st_mtime) < RECENT_SECONDS
    return True  # what cannot be asked now was listed a moment ago


class Patience:
    """The time that may be spent on waiting, all waits together.

    Args:
        seconds: How long.
        file_system: Tells the type of the file system that a path is on.
    """

    def __init__(self, seconds: float, file_system: FileSystem = file_system_of) -> None:
        self._left = seconds
        self._file_system = file_system

    def until[T](self, root: Path, look: Callable[[], T], doubtful: Callable[[T], Sequence[str]]) -> tuple[T, str]:
        """Looks, and looks again while something is in doubt that a network file system may come to show.

        Args:
            root: A local directory.
            look: Lists and reads what is there now.
            doubtful: What is in doubt, as paths relative to ``root``.

        Returns:
            What the last look showed, and a sentence about the wait; "" if there was none.
        """
        seen = look()
        missing = doubtful(seen)
        if not missing or self._left <= 0 or not is_network(kind := self._file_system(root)):
            return seen, ""
        awaited, began, pause = missing, time.monotonic(), _FIRST_PAUSE_SECONDS
        while missing and (left := began + self._left - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            for name in missing[:_MOST_OPENED]:
                _open(root / name)
            seen = look()
            missing = doubtful(seen)
        waited = time.monotonic() - began
        self._left -= waited
        end = f": {some(missing, _MOST_NAMED)} did not appear" if missing else ""
        return seen, f"{root}: waited {waited:.1f} s for {some(awaited, _MOST_NAMED)} on {kind}{end}"


def _open(path: Path) -> None:
    """Opens and closes: close-to-open file systems look at the server then. A pipe is not waited for."""
    with suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
