"""The user's launch line, started on this node from a view: its own flags say where it loads from, and it takes our place."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.megatron.launch_line import Framework, LaunchLine, command_of, framework_of, understand
from ckptguard.megatron.run_flags import FLAGS
from ckptguard.view.values import Step

PLACEHOLDER = "{view}"


@dataclass(frozen=True, slots=True)
class Training:
    """A launch line that can be started from a view.

    Attributes:
        line: As understood.
        framework: Who trains; None where the line itself says with ``{view}`` where the view goes.
    """

    line: LaunchLine
    framework: Framework | None

    @property
    def step(self) -> int | None:
        """The step that the line itself asks for: ``--ckpt-step``, ``checkpoint.ckpt_step``."""
        flags = FLAGS.get(self.framework or "")
        return flags.start(self.line.arguments)[1] if flags else None


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started.

    Attributes:
        words: The command.
        added: What it has more than the user's line.
        notes: What people should know, in sentences.
    """

    words: tuple[str, ...]
    added: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def training_of(words: Sequence[str], framework: str | None) -> Training | None:
    """The launch line, if there is one, with all that would keep it from starting found out before anything is done.

    Args:
        words: What stands after ``--``; may be empty.
        framework: Who trains, where the line does not show it.

    Raises:
        UsageError: There is no such program, or it cannot be seen how it is told where to load from.
    """
    if not words:
        return None
    if shutil.which(words[0]) is None:
        raise UsageError(f"{words[0]}: there is no such command on this node", next_step="Put the launch line right.")
    line = understand(words)
    if any(PLACEHOLDER in word for word in words):
        return Training(line, framework_of(line, framework) if framework or line.framework else None)
    try:
        found = framework_of(line, framework)
    except UsageError as error:
        step = f"{error.next_step} Or write {PLACEHOLDER} where the view's path has to go."
        raise UsageError(error.message, next_step=step) from error
    if found not in FLAGS:
        raise UsageError(
            f"how {line.script or line.wrapper} is told where to load from is not known",
            next_step=f"Write {PLACEHOLDER} where the view's path has to go.",
        )
    return Training(line, found)


def launch_of(training: Training, view: Path, step: Step) -> Launch:
    """The command that loads a step from a view.

    Args:
        training: As of ``training_of``.
        view: The view's path.
        step: What it holds.
    """
    line = training.line
    folder = str(view / step.save if step.kind == "local" else view)  # the manager is made without a session
    if any(PLACEHOLDER in word for word in line.words):
        return Launch(tuple(word.replace(PLACEHOLDER, folder) for word in line.words))
    assert training.framework is not None
    flags = FLAGS[training.framework]
    notes = []
    if step.kind == "local":
        added = flags.loading_local(folder)
    else:
        added = flags.loading(line.arguments, folder, step.iteration if step.number.isdigit() else None)
        before = flags.start(line.arguments)[0]
        if before not in (None, folder):
            notes.append(f"the line loads from {before}; it loads from {folder} instead")
    return Launch(command_of(line, added, {}), added, tuple(notes))


def run(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes the command: its signals, output and exit code are the user's own.

    Args:
        words: The command.
        environment: Its variables: those that this process was started with.

    Raises:
        EnvironmentFailedError: It cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what is ignored stays ignored
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(words[0], list(words), dict(environment))  # noqa: S606 - the user's own line
    except OSError as error:
        raise EnvironmentFailedError(f"{words[0]}: cannot be started: {error.strerror}") from error
