"""How the arms of verify-resume get on: a line per arm when it is over, and a bar of steps while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptguard.resume.arm_lines import ArmLine
from ckptguard.resume.results import ArmRun
from ckptguard.resume.session import Listener

if TYPE_CHECKING:
    from rich.progress import Progress


class Following(Listener):
    """Listens to a verification and tells of it on stderr."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, visible=False)
        self._start = 0

    def begins(self, line: ArmLine) -> None:
        """The arm's steps as a bar; one that only loads has none."""
        self._start = line.start
        total = line.end - line.start or None
        self._progress.reset(self._task, description=line.name, total=total, visible=True)

    def step(self, step: int) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=max(0, step - self._start))

    def ended(self, run: ArmRun) -> None:
        """A line that stays."""
        self._progress.update(self._task, visible=False)
        how = "done" if run.problem is None else run.problem
        self._progress.console.print(f"  {run.name}: {how}, {run.seconds:.1f} s", highlight=False, markup=False)

    def says(self, sentence: str) -> None:
        """A line of evidence, as soon as it is known."""
        self._progress.console.print(f"  > {sentence}", highlight=False, markup=False)


@contextmanager
def following(*, wanted: bool = True) -> Iterator[Listener]:
    """A listener that shows progress, or a silent one where nobody wants it.

    Lines are printed wherever stderr goes, since arms can take hours; the bar is drawn on terminals only.
    """
    if not wanted:
        yield Listener()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield Following(progress)
