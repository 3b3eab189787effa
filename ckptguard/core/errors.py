"""Everything ckptguard raises on purpose.

::

    CkptguardError                      exit code
    ├── UsageError                      2    wrong arguments, or arguments that contradict each other
    ├── DamagedError                    4    damaged, incomplete or unreadable input; carries all problems
    │   ├── NotFoundError               4    nothing there (also a FileNotFoundError)
    │   ├── UnknownFormatError          4    no format accepts the path; says why for each
    │   └── UnsafePickleError           4    a pickle names something outside the allow-list
    ├── UnsupportedError                5    understood, and not supported
    └── EnvironmentFailedError          6    the machine, a peer or the network failed, not the checkpoint

Exit code 0 is success, 1 a bug in ckptguard, 3 "proved different" (a result, not an error) and 130 an interrupt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import ClassVar

from ckptguard.core.problems import Problem


class ExitCode(IntEnum):
    """What the process says to a script; docs/exit-codes.md is the contract."""

    OK = 0
    BUG = 1
    USAGE = 2
    DIFFERENT = 3
    DAMAGED = 4
    UNSUPPORTED = 5
    ENVIRONMENT = 6
    INTERRUPTED = 130


class CkptguardError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: What was found, where, and what was expected.
        next_step: What the user can do about it, as an imperative sentence.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}\n{self.next_step}" if self.next_step else self.message


class UsageError(CkptguardError):
    """The arguments are wrong or contradict each other."""

    exit_code = ExitCode.USAGE


class DamagedError(CkptguardError):
    """The input is damaged, incomplete or cannot be read; ``problems`` holds every one that was found."""

    exit_code = ExitCode.DAMAGED

    def __init__(self, message: str, *, next_step: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message, next_step=next_step)
        self.problems = tuple(problems)


class NotFoundError(DamagedError, FileNotFoundError):
    """A path that was named does not exist."""


class UnknownFormatError(DamagedError):
    """No format accepts the path. ``reasons`` maps each format tried to why it is not that."""

    def __init__(self, message: str, *, reasons: Mapping[str, str], next_step: str = "") -> None:
        super().__init__(message, next_step=next_step)
        self.reasons = dict(reasons)

    def __str__(self) -> str:
        lines = [self.message, *(f"  not {name}: {reason}" for name, reason in self.reasons.items())]
        return "\n".join([*lines, self.next_step] if self.next_step else lines)


class UnsafePickleError(DamagedError):
    """A pickle names a class or function that no checkpoint format needs; nothing of it was run."""


class UnsupportedError(CkptguardError):
    """The input is understood, and what was asked of it is not supported."""

    exit_code = ExitCode.UNSUPPORTED


class EnvironmentFailedError(CkptguardError):
    """The machine, a peer or the network failed: disk full, time-out, no permission."""

    exit_code = ExitCode.ENVIRONMENT
