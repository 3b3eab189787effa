"""Runs an arm: starts its command, follows it, ends it in time, and finds out whether it did what it had to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from ckptguard.core.errors import EnvironmentFailedError
from ckptguard.resume import keeper
from ckptguard.resume.arm_lines import ArmLine
from ckptguard.resume.arm_logs import read_log, why
from ckptguard.resume.arm_problems import ended_problem, over_problem, stopped_problem
from ckptguard.resume.results import ArmRun
from ckptguard.resume.streams import first_stream, read_streams

LOG = "log.txt"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0  # torchrun and srun end their ranks when they are asked to; some save first
_KEEPER_SECONDS = 60.0  # a keeper that does not come back is stuck in the kernel


class Kept:
    """A command of which nothing is left once it is stopped, nor once this process is gone. See ``keeper.py``."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], log: Path, grace_seconds: float) -> None:
        reading, self._control = os.pipe()
        arguments = [sys.executable, "-I", "-S", keeper.__file__, str(reading), str(grace_seconds), *command]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603 - the user's own line
                    arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=environment, pass_fds=(reading,), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            os.close(self._control)
            raise EnvironmentFailedError(f"{log}: the arm cannot be started: {error}") from error
        finally:
            os.close(reading)
        self._grace_seconds, self._open = grace_seconds, True

    def code(self, within_seconds: float) -> int | None:
        """Exit code of the command, if it ends within that time."""
        try:
            return self._process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Ends the command and all that it started; returns when they are gone."""
        if self._open:
            self._open = False
            os.close(self._control)
        try:
            self._process.wait(self._grace_seconds + _KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            raise EnvironmentFailedError(
                f"processes of the arm cannot be ended (keeper: process {self._process.pid})",
                next_step="They are stuck in the kernel, most likely on a file system or a device.",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def run_arm(
    line: ArmLine,
    folder: Path,
    *,
    timeout_seconds: float,
    quiet_seconds: float | None = None,
    grace_seconds: float = _GRACE_SECONDS,
    on_progress: Callable[[int], None] = lambda step: None,
) -> ArmRun:
    """Runs an arm to its end, or until it takes too long or does what it should not.

    Args:
        line: What to run.
        folder: Where it records and prints; the order file stands in it already.
        timeout_seconds: How long it may run.
        quiet_seconds: How long rank 0 may record and everyone print nothing; None for ever.
        grace_seconds: How long processes that are asked to end may take.
        on_progress: Called with the last finished step of rank 0 whenever it changes.

    Raises:
        EnvironmentFailedError: It could not be started, or not be ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if line.role == "save" and line.framework == "torch" and line.checkpoints is not None:
        Path(line.checkpoints).mkdir(parents=True, exist_ok=True)  # Megatron makes its own; a plain loop may expect one
    log = folder / LOG
    began = time.monotonic()
    with Kept(line.command, os.environ | dict(line.environment), log, grace_seconds) as kept:
        code, stopped = _follow(kept, line, folder, began, timeout_seconds, quiet_seconds, on_progress)
    seconds = time.monotonic() - began
    streams, text = read_streams(folder), read_log(log)
    said = why(text)
    if stopped is not None:
        problem: str | None = stopped_problem(streams, said, stopped)
    else:
        assert code is not None
        problem = ended_problem(line, streams, said, code, text)
    return ArmRun(
        name=line.name,
        purpose=line.purpose,
        command=line.command,
        environment=line.environment,
        folder=str(folder),
        log=str(log),
        exit_code=code,
        seconds=seconds,
        problem=problem,
        last_lines=said.lines if problem else (),
    )


def _follow(
    kept: Kept,
    line: ArmLine,
    folder: Path,
    began: float,
    timeout_seconds: float,
    quiet_seconds: float | None,
    on_progress: Callable[[int], None],
) -> tuple[int | None, str | None]:
    """Waits for an arm's end: its exit code, or why it has to be stopped."""
    stream, log = first_stream(folder), folder / LOG
    told, printed_bytes, heard = None, 0, began
    while True:
        code = kept.code(_POLL_SECONDS)
        news = stream.follow()
        if stream.step is not None and stream.step != told:
            told = stream.step
            on_progress(told)
        if code is not None:
            return code, None
        if told is not None and told > line.end:
            return None, over_problem(line, told)
        now = time.monotonic()
        if now - began > timeout_seconds:
            return None, f"it did not end within {timeout_seconds:g} s and was stopped"
        with suppress(OSError):
            news, printed_bytes = news or log.stat().st_size != printed_bytes, log.stat().st_size
        heard = now if news else heard
        if quiet_seconds is not None and now - heard > quiet_seconds:
            return None, f"it neither recorded nor printed anything for {quiet_seconds:g} s and was stopped"
