"""What an arm printed: where the user's own error is, among the reports of launchers and the echoes of other ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SHOWN_LINES = 40
_READ_BYTES = 64 << 20
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# torchrun's log lines and its own traceback (torch/distributed/run.py, 2.14), srun's, Open MPI's and prterun's.
_LAUNCHER_LINE = re.compile(r"[WEI]\d{4} .*torch/distributed/|srun: |slurmstepd: |-{20,}$|mpirun |prterun ")
_LAUNCHER_ERROR = re.compile(r"ChildFailedError|torch/distributed/(run|launcher|elastic)|SignalException")
# What other ranks say once one has failed, or when they are told to end.
_ECHO = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|closed by (peer|remote)|DistNetworkError|remote process exited"
    r"|KeyboardInterrupt|watchdog|aborted"
)
_ERROR_LINE = re.compile(r"(\w*[Ee]rror|ERROR|fatal|FATAL)\b ?:|command not found|No such file or directory")
_KILLED_RANK = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # the first that torchrun saw


@dataclass(frozen=True, slots=True)
class Said:
    """The part of a log that says why.

    Attributes:
        error: The error in one line; None if none is seen.
        lines: What to show of the log.
        killed: ``(signal, local rank)`` of the process that torchrun saw die of one, where no error of a script is seen.
    """

    error: str | None
    lines: tuple[str, ...]
    killed: tuple[int, int] | None = None


def read_log(path: Path) -> str:
    """What an arm printed, its last 64 MiB; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def why(log: str) -> Said:
    """The first traceback that is no launcher's and no echo; without one, the last lines."""
    lines = [line.rstrip() for line in log.splitlines()]
    blocks = [block for block in _tracebacks(lines) if not any(_LAUNCHER_ERROR.search(line) for line in block)]
    causes = [block for block in blocks if not _ECHO.search(_error_of(block))]
    if causes:
        return Said(_error_of(causes[0]), _shortened(causes[0]))
    match = _KILLED_RANK.search(log)
    killed = (int(match[1]), int(match[2])) if match else None
    own = [line for line in _before_report(lines) if line and not _LAUNCHER_LINE.match(line)]
    if blocks and not killed:
        return Said(_error_of(blocks[0]), _shortened(blocks[0]))
    named = next((line for line in reversed(own[-_SHOWN_LINES:]) if _ERROR_LINE.search(line)), None)
    return Said(named, tuple(own[-_SHOWN_LINES:]), killed)


def signal_words(number: int) -> str:
    """A signal's name, with what it usually means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (is the memory full?)" if number == signal.SIGKILL else name


def _before_report(lines: Sequence[str]) -> Sequence[str]:
    """Lines before the traceback with which a launcher reports a failed child."""
    for at, line in enumerate(lines):
        if line.startswith(_TRACEBACK) and any(_LAUNCHER_ERROR.search(later) for later in lines[at : at + 6]):
            return lines[:at]
    return lines


def _tracebacks(lines: Sequence[str]) -> list[list[str]]:
    """Every traceback with the ones it is chained to, without the prefix that torch gives a rank's lines."""
    blocks: list[list[str]] = []
    chained: dict[str, bool] = {}
    last: dict[str, list[str]] = {}
    for at, line in enumerate(lines):
        begin = line.find(_TRACEBACK)
        prefix = line[:begin]
        if begin < 0 or (prefix and not re.fullmatch(r"\S*\[?rank ?\d+\]?:? ?|\[\S+\]:? ?", prefix)):
            continue
        block, is_chained = _traceback(lines, at, prefix)
        if chained.get(prefix):
            last[prefix] += block
        else:
            blocks.append(block)
            last[prefix] = block
        chained[prefix] = is_chained
    return blocks


def _traceback(lines: Sequence[str], begin: int, prefix: str) -> tuple[list[str], bool]:
    """The lines of one traceback, and whether another one follows that it is chained to."""
    block = [lines[begin][len(prefix) :]]
    for line in lines[begin + 1 :]:
        if not line.startswith(prefix.rstrip()):
            if prefix:
                continue  # another rank's, in between
            break
        text = line[len(prefix) :]
        if text.startswith(_CHAINED):
            return [*block, text], True
        if _ends(block):
            if not text:
                continue
            break
        if text or len(block) > 1:
            block.append(text)
    return block, False


def _ends(block: Sequence[str]) -> bool:
    """Whether the traceback's last line, which names the error, was reached."""
    return len(block) > 1 and bool(block[-1]) and not block[-1].startswith((" ", "\t"))


def _error_of(block: Sequence[str]) -> str:
    return next((line for line in reversed(block) if line and not line.startswith((" ", "\t"))), block[-1])


def _shortened(lines: Sequence[str]) -> tuple[str, ...]:
    if len(lines) <= _SHOWN_LINES:
        return tuple(lines)
    return (*lines[:3], f"... {len(lines) - _SHOWN_LINES} lines left out ...", *lines[3 - _SHOWN_LINES :])
